package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/lockstep-ccl/lockstep/bench/zoo"
)

// run is one job with one fault.
type run struct {
	c     *cluster
	f     *fault
	rand  *rand.Rand // what the run is: victim, moment
	noise *rand.Rand // what varies within a fault

	losses  [][]zoo.Loss // by rank
	offsets []int64
	seen    map[string]*sighting
	last    string // of the timeline
	log     *os.File
	t0      time.Time // of the injection

	before, after map[[2]int]uint64 // bytes, apart seconds from each other
	apart         time.Duration

	stop    chan struct{} // of what goes on in the background
	waiting sync.WaitGroup
}

// incident is as the master's API has it.
type incident struct {
	ID       string `json:"id"`
	Class    string `json:"class"`
	Level    string `json:"level"`
	Culprits []struct {
		Name   string `json:"name"`
		Reason string `json:"reason,omitempty"`
	} `json:"culprits"`
	Evidence  []string   `json:"evidence"`
	Confirmed *time.Time `json:"confirmed,omitempty"`
	Closed    *time.Time `json:"closed,omitempty"`
}

func (in *incident) names() (names []string) {
	for _, c := range in.Culprits {
		names = append(names, c.Name)
	}
	return names
}

// sighting is an incident as it was seen over time.
type sighting struct {
	in        incident // at last
	first     time.Time
	confirmed time.Time // zero: not
	atFirst   []string  // culprits
	atConfirm []string
	class     string // when it was confirmed, or at last
}

const (
	pollEvery  = 60 * time.Millisecond
	settle     = 1500 * time.Millisecond
	settleMore = 3 * time.Second // after a wrong verdict, to see what follows
	startLimit = 25 * time.Second
)

func (r *run) background(fn func(done <-chan struct{})) {
	r.waiting.Go(func() { fn(r.stop) })
}

// do runs it. The error is the zoo's own trouble, not the job's.
func (r *run) do(ctx context.Context, res *result) error {
	r.stop = make(chan struct{})
	r.seen = map[string]*sighting{}
	n := r.c.job.Ranks
	r.losses, r.offsets = make([][]zoo.Loss, n), make([]int64, n)
	var err error
	if r.log, err = os.Create(filepath.Join(r.c.dir, "timeline.jsonl")); err != nil {
		return err
	}
	defer r.log.Close()
	r.t0 = time.Now()
	if err := r.c.start(ctx); err != nil {
		return err
	}
	defer r.waiting.Wait()
	defer close(r.stop)
	if err := r.warmUp(ctx); err != nil {
		return err
	}
	warmed := r.seen
	res.Watched = time.Since(r.started()).Seconds()
	r.seen = map[string]*sighting{}
	for id, s := range warmed {
		res.early(s)
		r.seen[id] = s
	}
	r.t0 = time.Now()
	t, err := r.f.inject(ctx, r)
	if err != nil {
		return fmt.Errorf("inject %s: %w", r.f.name, err)
	}
	res.Truth = t.text
	if err := r.follow(ctx, t); err != nil {
		return err
	}
	r.readLosses()
	r.score(res, t)
	return nil
}

// started is when the first step ended.
func (r *run) started() time.Time {
	if len(r.losses[0]) == 0 {
		return time.Now()
	}
	return time.Unix(0, r.losses[0][0].At)
}

// warmUp waits until all ranks make steps, and have for a while that ends at a random moment.
func (r *run) warmUp(ctx context.Context) error {
	extra := time.Duration(r.rand.Float64() * float64(time.Second))
	deadline := time.Now().Add(startLimit)
	for {
		if err := r.look(ctx); err != nil {
			return err
		}
		r.readLosses()
		least := slices.MinFunc(r.losses, func(a, b []zoo.Loss) int { return len(a) - len(b) })
		if len(least) > 0 {
			warm := max(r.f.warm, 8*r.c.job.Step) + extra
			if r.apart == 0 && time.Since(r.started()) > warm-time.Second {
				r.before, r.apart = r.c.wire.bytes(), 1
				r.t0 = time.Now()
			}
			if time.Since(r.started()) > warm && len(least) >= 8 {
				r.after, r.apart = r.c.wire.bytes(), max(time.Since(r.t0), time.Millisecond)
				return nil
			}
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the job made %d steps within %v", len(least), startLimit)
		}
	}
}

// follow looks at the master until it has said what counts, or it is late.
func (r *run) follow(ctx context.Context, t *truth) error {
	undone := t.undo == nil
	var decided time.Time
	for {
		if err := r.look(ctx); err != nil {
			return err
		}
		since := time.Since(r.t0)
		if !undone && since > t.last {
			undone = true
			if err := t.undo(); err != nil {
				return err
			}
		}
		if since > r.f.limit {
			return nil
		}
		if r.f.want == nothing || r.f.want == goesOn {
			continue
		}
		wait := settle
		right, second := len(t.also) == 0, false
		for _, s := range r.seen {
			if s.confirmed.Before(r.t0) {
				continue
			}
			if decided.IsZero() {
				decided = time.Now()
			}
			switch {
			case t.right(r.f, s):
				right = true
			case len(t.also) > 0 && slices.Contains(t.also, s.top()):
				second = true
			default:
				wait = settleMore
			}
		}
		if len(t.also) > 0 && !(right && second) {
			continue
		}
		if !decided.IsZero() && time.Since(decided) > wait {
			return nil
		}
	}
}

// look asks the master once, after a while. A master that does not answer is one that restarts.
func (r *run) look(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(pollEvery):
	}
	b, err := r.c.status(ctx)
	if err != nil {
		return nil //nolint:nilerr // the next look is soon
	}
	var st struct {
		Health string          `json:"health"`
		Step   uint64          `json:"step"`
		Ranks  json.RawMessage `json:"ranks"`
		Agents []struct {
			Node  string `json:"node"`
			State string `json:"state"`
		} `json:"agents"`
		Open   []incident `json:"open_incidents"`
		Closed []incident `json:"closed_incidents"`
	}
	if err := json.Unmarshal(b, &st); err != nil {
		return fmt.Errorf("the master's status: %w", err)
	}
	now := time.Now()
	for _, in := range slices.Concat(st.Open, st.Closed) {
		r.sight(in, now)
	}
	line, err := json.Marshal(map[string]any{"health": st.Health, "ranks": st.Ranks, "agents": st.Agents, "open": st.Open, "closed": st.Closed})
	if err != nil {
		return err
	}
	if s := string(line); s != r.last {
		r.last = s
		fmt.Fprintf(r.log, "{\"t\":%.2f,\"status\":%s}\n", now.Sub(r.t0).Seconds(), s)
	}
	return nil
}

func (r *run) sight(in incident, now time.Time) {
	s := r.seen[in.ID]
	if s == nil {
		s = r.sighted(in, now)
		r.seen[in.ID] = s
	}
	s.update(in, now)
}

func (r *run) sighted(in incident, now time.Time) *sighting {
	return &sighting{in: in, class: in.Class, first: now, atFirst: in.names()}
}

func (s *sighting) update(in incident, now time.Time) {
	s.in = in
	if s.confirmed.IsZero() {
		s.class = in.Class
		if in.Confirmed != nil {
			s.confirmed, s.atConfirm = now, in.names()
		}
	}
}

func (s *sighting) top() string {
	if len(s.in.Culprits) == 0 {
		return ""
	}
	return s.in.Culprits[0].Name
}

func (r *run) readLosses() {
	for k := range r.losses {
		more, next, err := zoo.ReadLosses(zoo.LossLog(filepath.Join(r.c.dir, "job"), k), r.offsets[k])
		if err == nil {
			r.losses[k], r.offsets[k] = append(r.losses[k], more...), next
		}
	}
}

// path is one way between two ranks of different nodes, and the bytes that went it while the run watched.
type path struct {
	a, b int
	n    uint64
}

// paths are those between ranks of different nodes on which much goes.
func (r *run) paths() (paths []path) {
	most := uint64(0)
	for a, pa := range r.c.ranks {
		for b, pb := range r.c.ranks {
			if r.c.job.Node(a) == r.c.job.Node(b) {
				continue
			}
			key := [2]int{pa.index, pb.index}
			n := r.after[key] - r.before[key]
			paths, most = append(paths, path{a, b, n}), max(most, n)
		}
	}
	return slices.DeleteFunc(paths, func(p path) bool { return p.n*5 < most || p.n == 0 })
}

// pair picks one of these paths, and says how many bytes/s go it.
func (r *run) pair() (a, b int, rate float64, err error) {
	paths := r.paths()
	if len(paths) == 0 {
		return 0, 0, 0, fmt.Errorf("no two ranks of different nodes talk to each other")
	}
	p := paths[r.rand.IntN(len(paths))]
	return p.a, p.b, float64(p.n) / r.apart.Seconds(), nil
}

// only are the two ends of all that crosses a node's edge, where these are one rank and one peer: then
// nobody can tell the node's links from the path between them.
func (r *run) only(node int) (a, b int, ok bool) {
	for _, p := range r.paths() {
		switch x, y := r.c.job.Node(p.a) == node, r.c.job.Node(p.b) == node; {
		case !x && !y:
		case ok && (min(p.a, p.b) != min(a, b) || max(p.a, p.b) != max(a, b)):
			return 0, 0, false
		default:
			a, b, ok = p.a, p.b, true
		}
	}
	return a, b, ok
}

// nodeRate is what enters or leaves a node, in bytes/s.
func (r *run) nodeRate(n int) float64 {
	var in, out uint64
	for key, v := range r.after {
		v -= r.before[key]
		from, to := r.c.wire.ports[key[0]].node, r.c.wire.ports[key[1]].node
		if from != to && from == n {
			out += v
		}
		if from != to && to == n {
			in += v
		}
	}
	return float64(max(in, out)) / r.apart.Seconds()
}
