package process

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// world is a job of several hosts in virtual time: the coordinator's group and the hosts' followers are the
// real ones, what is between them, below them and against them is simulated.
type world struct {
	t    *rapid.T
	rng  *rand.Rand
	o    groupOptions
	now  time.Time
	disk []byte
	g    *group // nil: killed
	back time.Time
	ids  int

	hosts map[string]*simHost
	began map[uint64]bool
	done  map[string]int // action → attempt
}

type simHost struct {
	name, holder, boot string
	follower
	alive    bool
	back     time.Time
	lastDisk uint64
	cut      bool
	procs    uint64    // generation of the processes that are really there
	dying    time.Time // when they will be gone
	exits    []string  // of its ranks
	ghost    uint64    // generation of what another supervisor of this name still has, that nobody hears
	gone     time.Time // when its lease ends
	meets    int

	conn         int
	toC          []timed[Report]
	toH          []timed[Order]
	readC, readH time.Time // when either end last heard the other
	reported     time.Time
}

type timed[T any] struct {
	at time.Time
	v  T
}

func newWorld(t *rapid.T, seed uint64) *world {
	w := &world{t: t, rng: rand.New(rand.NewPCG(seed, 1)), now: time.Unix(1e9, 0), hosts: map[string]*simHost{}, began: map[uint64]bool{}, done: map[string]int{}}
	w.o = groupOptions{Hosts: 3, Local: 2, Lease: 10 * time.Second, Margin: 4 * time.Second, Grace: 2 * time.Second, Join: time.Hour, MaxRestarts: 1 << 20}
	if w.rng.IntN(2) == 0 {
		w.o.Hold = 3 * time.Second
	}
	w.save(newGroup(w.o, newBooks("j", -1, 0, 0), w.now))
	for i := range 5 {
		n := fmt.Sprint("n", i)
		w.hosts[n] = &simHost{name: n, holder: fmt.Sprint("a", i), boot: "b0", alive: true}
	}
	return w
}

// save is what the shell does: on disk, or nobody hears.
func (w *world) save(g *group) {
	w.g = g
	if !g.dirty {
		return
	}
	b, err := json.Marshal(&g.b)
	if err != nil {
		w.t.Fatal(err)
	}
	if _, err := decodeBooks(b); err != nil {
		w.t.Fatalf("books that cannot be read again: %v\n%s", err, b)
	}
	w.disk, g.dirty = b, false
}

func (w *world) delay() time.Time {
	return w.now.Add(time.Duration(w.rng.IntN(400)) * time.Millisecond)
}

// step is 100 ms.
func (w *world) step() {
	w.now = w.now.Add(100 * time.Millisecond)
	if w.g == nil && !w.now.Before(w.back) {
		b, err := decodeBooks(w.disk)
		if err != nil {
			w.t.Fatal(err)
		}
		w.save(newGroup(w.o, b, w.now))
	}
	for _, n := range slices.Sorted(maps.Keys(w.hosts)) {
		w.host(w.hosts[n])
	}
	if w.g != nil {
		w.g.tick(w.now)
		w.save(w.g)
		if g := w.g; g.b.Phase == phaseRun && !w.began[g.b.Generation] {
			w.began[g.b.Generation] = true
			nodes := map[string]bool{}
			for _, p := range g.b.Hosts {
				nodes[p.Node] = true
			}
			if len(nodes) != w.o.Hosts {
				w.t.Fatalf("attempt %d on %v", g.b.Attempt, g.b.Hosts)
			}
		}
	}
	gens := map[uint64][]string{}
	for _, h := range w.hosts {
		if h.procs != 0 {
			gens[h.procs] = append(gens[h.procs], h.name)
		}
		if h.ghost != 0 && w.now.Before(h.gone) {
			gens[h.ghost] = append(gens[h.ghost], h.name+"'s former supervisor")
		}
	}
	if len(gens) > 1 {
		w.t.Fatalf("at %v two attempts have processes: %v", w.now.Unix(), gens)
	}
}

func (w *world) hangUp(h *simHost) {
	if w.g != nil {
		w.g.gone(h.conn)
	}
	h.conn, h.toC, h.toH = 0, nil, nil
}

func (w *world) host(h *simHost) {
	if h.procs != 0 && !h.dying.IsZero() && !w.now.Before(h.dying) {
		h.procs, h.holds, h.exits, h.dying = 0, 0, nil, time.Time{}
	}
	if !h.alive {
		if w.now.Before(h.back) {
			return
		}
		h.alive, h.follower = true, follower{last: h.lastDisk}
	}
	if h.conn == 0 && !h.cut && w.g != nil && w.rng.IntN(4) == 0 {
		w.ids++
		h.conn, h.readC, h.readH, h.reported = w.ids, w.now, w.now, time.Time{}
		h.connected()
	}
	if h.conn != 0 && (w.now.Sub(h.readH) > w.o.Lease || w.now.Sub(h.readC) > w.o.Lease) {
		w.hangUp(h)
	}
	if h.conn != 0 && (w.now.Sub(h.reported) > w.o.Lease/5 || w.rng.IntN(3) == 0) {
		h.meets++
		r := Report{Job: "j", Node: h.name, Holder: h.holder, Boot: h.boot, Local: w.o.Local, Meet: map[string]string{"MASTER_PORT": fmt.Sprint(h.meets)}}
		for i, x := range h.exits {
			state := "running"
			if x != "" {
				state = "exited"
			}
			r.Ranks = append(r.Ranks, RankStatus{Rank: i, State: state, Exit: x})
		}
		h.report(w.now, &r)
		if err := r.check(); err != nil {
			w.t.Fatal(err)
		}
		h.reported = w.now
		h.toC = append(h.toC, timed[Report]{w.delay(), r})
	}
	for !h.cut && w.g != nil && len(h.toC) > 0 && !w.now.Before(h.toC[0].at) {
		if err := w.g.report(w.now, h.conn, h.toC[0].v); err == nil {
			w.g.tick(w.now)
			w.save(w.g)
			h.toH = append(h.toH, timed[Order]{w.delay(), w.g.order(w.now, h.name)})
		} else {
			w.hangUp(h)
			break
		}
		h.toC, h.readC = h.toC[1:], w.now
	}
	for !h.cut && len(h.toH) > 0 && !w.now.Before(h.toH[0].at) {
		if err := h.receive(h.toH[0].v); err != nil {
			w.t.Fatalf("host %s: %v", h.name, err)
		}
		h.toH, h.readH = h.toH[1:], w.now
	}
	switch do := h.next(w.now); {
	case !h.dying.IsZero():
	case do == doStart:
		h.last, h.lastDisk, h.holds, h.procs = h.want.Generation, h.want.Generation, h.want.Generation, h.want.Generation
		h.exits = make([]string, w.o.Local)
	case do == doStop:
		h.dying = w.now.Add(time.Duration(w.rng.IntN(int(h.want.Grace))))
	case do == doKill:
		h.dying = w.now.Add(100 * time.Millisecond)
	}
}

// fault does something to somebody.
func (w *world) fault() {
	h := w.hosts[fmt.Sprint("n", w.rng.IntN(len(w.hosts)))]
	if w.g != nil && len(w.g.b.Hosts) > 0 && w.rng.IntN(2) == 0 {
		h = w.hosts[w.g.b.Hosts[w.rng.IntN(len(w.g.b.Hosts))].Node]
	}
	switch w.rng.IntN(10) {
	case 0: // the coordinator is killed
		w.g, w.back = nil, w.now.Add(time.Duration(w.rng.IntN(20_000))*time.Millisecond)
		for _, o := range w.hosts {
			w.hangUp(o)
		}
	case 1, 2, 3: // a supervisor is killed, and its ranks with it; or the machine; or its directory is lost
		w.hangUp(h)
		h.alive, h.back, h.procs, h.exits, h.dying = false, w.now.Add(time.Duration(w.rng.IntN(30_000))*time.Millisecond), 0, nil, time.Time{}
		switch w.rng.IntN(6) {
		case 0:
			h.boot += "0"
		case 1:
			w.ids++
			h.holder, h.lastDisk = fmt.Sprint("c", w.ids), 0
		}
	case 4, 5: // at either end it may be noticed at once
		if h.cut = !h.cut; h.cut && w.rng.IntN(2) == 0 {
			w.hangUp(h)
		}
	case 9: // another supervisor takes the name, perhaps on another machine, and the first one is heard no more
		if h.procs != 0 && h.dying.IsZero() && !w.now.Before(h.gone) {
			h.ghost, h.gone = h.procs, h.until.Add(200*time.Millisecond)
			w.ids++
			w.hangUp(h)
			h.holder, h.lastDisk, h.follower, h.procs, h.exits = fmt.Sprint("c", w.ids), 0, follower{}, 0, nil
			if w.rng.IntN(2) == 0 {
				h.boot += "1"
			}
		}
	case 6: // a rank fails
		if len(h.exits) > 0 {
			h.exits[w.rng.IntN(len(h.exits))] = "exit status 7"
		}
	case 7, 8: // the remediator asks, perhaps again
		if w.g == nil || w.g.b.Phase == phaseDone || w.g.b.Phase == phaseFailed {
			return
		}
		r := RestartRequest{Action: fmt.Sprint("act", w.rng.IntN(30))}
		if w.rng.IntN(2) == 0 {
			a := w.g.b.Attempt
			r.Attempt = &a
		}
		if w.rng.IntN(2) == 0 {
			r.Exclude = []int{w.rng.IntN(w.o.Hosts * w.o.Local)}
		}
		reply, answered := w.g.request(w.now, r)
		w.save(w.g)
		if answered && !reply.At.IsZero() {
			if was, ok := w.done[r.Action]; ok && was != reply.Attempt {
				w.t.Fatalf("action %s led to attempt %d, and now to %d", r.Action, was, reply.Attempt)
			}
			w.done[r.Action] = reply.Attempt
		}
	}
}

func (w *world) runs() bool {
	if w.g == nil || w.g.b.Phase != phaseRun {
		return false
	}
	for _, p := range w.g.b.Hosts {
		if w.hosts[p.Node].procs != w.g.b.Generation {
			return false
		}
	}
	return true
}

// TestGroup: whatever is killed or cut off, and whenever, no two attempts have processes at the same
// time, an action is carried out once, and when it is over the job runs.
func TestGroup(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t, rapid.Uint64().Draw(t, "seed"))
		every := rapid.IntRange(5, 300).Draw(t, "steps between faults")
		for range rapid.IntRange(0, 40).Draw(t, "faults") {
			for range 1 + w.rng.IntN(every) {
				w.step()
			}
			for begun := len(w.began); w.rng.IntN(3) == 0 && len(w.began) == begun; { // while orders are under way
				for i := 0; i < 200 && len(w.began) == begun; i++ {
					w.step()
				}
				break
			}
			w.fault()
		}
		for _, h := range w.hosts {
			h.cut = false
		}
		for i := 0; !w.runs(); i++ {
			if i > 1500 { // 150 s: the last fault's absence, a lease, its margin and a hold, with room
				t.Fatalf("the job does not run: %+v, hosts %+v", w.g, w.hosts)
			}
			w.step()
		}
		if w.g.b.Phase != phaseRun {
			t.Fatal(w.g.b.Why)
		}
		before := len(w.began)
		for range 600 { // and goes on
			w.step()
		}
		if len(w.began) > before+1 {
			t.Errorf("%d attempts began though nothing happened any more", len(w.began)-before)
		}
	})
}
