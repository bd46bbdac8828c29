package process

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lockstep-ccl/lockstep/internal/statedir"
)

// coordinator is the shell of a group: connections, disk, hook, control socket.
type coordinator struct {
	launcher  // for the hook
	h         *HostOptions
	admission *admission

	mu    sync.Mutex
	g     *group
	conns int
	peers map[int]*peer
	state time.Time // since when the phase is what it is
	moved chan struct{}
	saved bool // what the group has decided is on disk

	unwritten string // why it is not, "" while it is
	joined    uint64 // connections of supervisors that were let in

	writing atomic.Int64 // since when it is being written, in Unix time; 0: it is not
	last    atomic.Pointer[CoordinatorStats]
}

// peer is a connection to a host's supervisor.
type peer struct {
	net.Conn
	node string
	say  chan struct{}
	told uint64 // revision last said
	last uint64 // report last answered
}

func newCoordinator(h *HostOptions, dir *statedir.Dir, local int) (*coordinator, error) {
	c := &coordinator{launcher: launcher{o: h.Options, dir: dir}, h: h, peers: map[int]*peer{}, moved: make(chan struct{}), state: time.Now()}
	b, err := readBooks(dir, h.Job)
	if err != nil {
		return nil, err
	}
	if b.Phase == phaseDone || b.Phase == phaseFailed {
		b = newBooks(h.Job, b.Attempt, b.Generation, b.Rev)
	} else if b.Attempt >= 0 {
		h.Logger.Info("going on with a run whose coordinator has ended", "job", h.Job, "attempt", b.Attempt, "phase", b.Phase)
	}
	if c.admission, err = newAdmission(h); err != nil {
		return nil, err
	}
	c.g = newGroup(groupOptions{
		Hosts: h.Hosts, Local: local, Lease: h.Lease, Margin: h.Grace + max(leastMargin, h.Lease/4), Grace: h.Grace, Hold: h.Hold, Join: h.Join,
		MaxRestarts: h.MaxRestarts, Hook: len(h.OnRestart) > 0,
	}, b, time.Now())
	return c, nil
}

// readBooks reads what a former coordinator of the directory has written. Books that cannot be read are no
// reason to count attempts anew: somebody has to look.
func readBooks(dir *statedir.Dir, job string) (books, error) {
	raw, err := dir.ReadFile(booksFile, maxBooks)
	if errors.Is(err, os.ErrNotExist) {
		return newBooks(job, -1, 0, 0), nil
	}
	var b books
	if err == nil {
		b, err = decodeBooks(raw)
	}
	if err == nil && b.Job != job {
		err = fmt.Errorf("they are of job %.80q", b.Job)
	}
	if err != nil {
		return books{}, fmt.Errorf("run: the coordinator's books, %s: %w (when no process of the job is left on any host, remove the file: attempts are counted anew)", dir.Join(booksFile), err)
	}
	return b, nil
}

func decodeBooks(raw []byte) (books, error) {
	var b books
	d := json.NewDecoder(bytes.NewReader(raw))
	d.DisallowUnknownFields()
	if err := d.Decode(&b); err != nil {
		return b, err
	}
	switch {
	case b.Version != booksVersion:
		return b, fmt.Errorf("version %d, this program writes %d", b.Version, booksVersion)
	case !slices.Contains([]phase{phaseGather, phaseRun, phaseDone, phaseFailed}, b.Phase) || !hexID.MatchString(b.Run) || b.Attempt < -1 || b.Attempt > maxAttempt || b.Actions == nil:
		return b, errors.New("they cannot be a coordinator's")
	case b.Phase == phaseRun && (len(b.Hosts) == 0 || b.Generation == 0 || b.Token == ""):
		return b, errors.New("an attempt without hosts or token")
	}
	return b, nil
}

// run coordinates until the job has ended, and all hosts that are heard have heard of it.
func (c *coordinator) run(ctx context.Context) error {
	defer c.admission.Close()
	if c.h.Control {
		stop, err := serveControl(c.dir.Join("control.sock"), c.status, c.restart)
		if err != nil {
			return err
		}
		defer stop()
	}
	serving, hangUp := context.WithCancel(context.Background())
	var all sync.WaitGroup
	all.Go(func() { c.accept(serving, &all) })
	defer func() {
		hangUp()
		c.admission.Close()
		all.Wait()
	}()
	tick := time.NewTicker(max(time.Millisecond, min(c.h.Lease/20, 100*time.Millisecond)))
	defer tick.Stop()
	done := ctx.Done()
	var ended time.Time
	for {
		select {
		case <-tick.C:
		case <-done:
			done = nil
			c.change(func(g *group, now time.Time) {
				if g.b.Phase != phaseDone && g.b.Phase != phaseFailed {
					g.enter(now, phaseFailed, "the coordinator was told to end")
				}
			})
		}
		c.change(func(g *group, now time.Time) { g.tick(now) })
		c.mu.Lock()
		hook := c.g.hook == hookRuns
		over := c.saved && (c.g.b.Phase == phaseDone || c.g.b.Phase == phaseFailed)
		why, attempt := c.g.b.Why, c.g.b.Attempt
		known := c.known(ctx.Err() == nil && (ended.IsZero() || time.Since(ended) < comeBack))
		c.mu.Unlock()
		if hook {
			err := c.hook(ctx, attempt+1)
			c.change(func(g *group, now time.Time) { g.hooked(now, err) })
		}
		if !over {
			continue
		}
		if ended.IsZero() {
			ended = time.Now()
		}
		if !known && time.Since(ended) < c.g.o.Lease+c.g.o.Margin {
			continue
		}
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case why != "":
			return fmt.Errorf("run: %s", why)
		}
		return nil
	}
}

// comeBack is how long the end waits for hosts that ran the last attempt and whose connection broke: they
// would look for the coordinator for long.
const comeBack = 5 * time.Second

// known reports whether all hosts that are heard have done what the end takes, and, when absent ones
// are waited for, those that ran the last attempt.
func (c *coordinator) known(absent bool) bool {
	for node, h := range c.g.hosts {
		ran := slices.ContainsFunc(c.g.b.Hosts, func(p place) bool { return p.Node == node })
		if (ran && absent || h.conn != 0) && (h.Rev < c.g.b.Rev || h.Holds != 0) && !h.Leaving {
			return false
		}
	}
	return true
}

// change lets f change the group, writes the books, and only then has the hosts hear of it.
func (c *coordinator) change(f func(g *group, now time.Time)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	was, rev := c.g.b.Phase, c.g.b.Rev
	f(c.g, time.Now())
	if c.g.dirty {
		c.saved = false
		raw, err := json.Marshal(&c.g.b)
		if err == nil {
			c.writing.Store(time.Now().UnixNano())
			err = c.dir.Replace(booksFile, append(raw, '\n'))
			c.writing.Store(0)
		}
		if err != nil {
			c.unwritten = err.Error()
			c.h.Logger.Error("cannot write the coordinator's books: nobody hears of what was decided until that succeeds, and hosts that hear nothing end their ranks",
				"job", c.h.Job, "err", err)
			return
		}
		c.g.dirty, c.saved, c.unwritten = false, true, ""
		close(c.moved)
		c.moved = make(chan struct{})
		for _, p := range c.peers {
			nudge(p.say)
		}
	}
	if c.g.b.Rev != rev {
		c.state = time.Now()
		c.tell(was)
	}
}

// tell says what has come about.
func (c *coordinator) tell(was phase) {
	b := &c.g.b
	kind := map[phase]string{phaseRun: "started", phaseDone: "done", phaseFailed: "failed", phaseGather: "restarting"}[b.Phase]
	e := Event{At: time.Now(), Kind: kind, Attempt: b.Attempt, Rank: -1, Detail: b.Why}
	if b.Phase == phaseGather {
		e.Attempt++
	}
	if b.Phase == phaseRun {
		var names []string
		for _, p := range b.Hosts {
			names = append(names, p.Node)
		}
		e.Detail = fmt.Sprintf("on %s", strings.Join(names, ", "))
	}
	c.h.Logger.Info("job "+kind+" (coordinator)", "job", c.h.Job, "attempt", e.Attempt, "detail", e.Detail, "before", was)
	if c.h.OnEvent != nil {
		c.h.OnEvent(e)
	}
}

// orders answers reports, and says at once what is new.
func (c *coordinator) orders(id int, p *peer, hungUp <-chan struct{}) {
	for {
		select {
		case <-p.say:
		case <-hungUp:
			return
		}
		c.mu.Lock()
		h := c.g.hosts[p.node]
		if !c.saved || h == nil || h.conn != id || h.Seq == p.last && c.g.b.Rev == p.told {
			c.mu.Unlock()
			continue
		}
		o := c.g.order(time.Now(), p.node)
		p.told, p.last = o.Rev, o.Seq
		c.mu.Unlock()
		_ = p.SetWriteDeadline(time.Now().Add(c.h.Lease))
		if writeMessage(p, o) != nil {
			p.Close()
			return
		}
	}
}

// restart is the control socket's: it answers when the next attempt has begun.
func (c *coordinator) restart(ctx context.Context, r RestartRequest) (reply RestartReply, err error) {
	for {
		answered, ended := false, ""
		c.change(func(g *group, now time.Time) {
			switch g.b.Phase {
			case phaseDone:
				ended = "all ranks have ended well"
			case phaseFailed:
				ended = g.b.Why
			default:
				reply, answered = g.request(now, r)
				answered = answered && !g.dirty
			}
		})
		c.mu.Lock()
		moved := c.moved
		saved := c.saved
		c.mu.Unlock()
		switch {
		case ended != "":
			return RestartReply{}, fmt.Errorf("%w: %s", errEnded, ended)
		case answered && saved:
			return reply, nil
		}
		select {
		case <-moved:
		case <-time.After(100 * time.Millisecond): // it may have moved in between
		case <-ctx.Done():
			return RestartReply{}, ctx.Err()
		}
	}
}

// status is the control socket's.
func (c *coordinator) status() Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	g, now := c.g, time.Now()
	b := &g.b
	s := Status{Job: c.h.Job, Attempt: b.Attempt, Since: c.state, Spares: []int{}, Excluded: []int{}, Out: slices.Clone(b.Excluded), Why: b.Why, Ranks: []RankStatus{}}
	s.State = map[phase]string{phaseRun: "running", phaseDone: "done", phaseFailed: "failed", phaseGather: "restarting"}[b.Phase]
	if b.Phase == phaseGather && len(b.Hosts) == 0 {
		s.State = "starting"
	} else if b.Phase == phaseRun && g.failed != nil {
		s.State, s.Why = "holding", g.failed.why
	}
	on := map[string]bool{}
	for i, p := range b.Hosts {
		on[p.Node] = true
		h := g.hosts[p.Node]
		if h != nil && h.Holds == b.Generation && len(h.Ranks) == g.o.Local {
			s.Ranks = append(s.Ranks, h.Ranks...)
			continue
		}
		for l := range g.o.Local { // what is known: the place
			s.Ranks = append(s.Ranks, RankStatus{Rank: i*g.o.Local + l, Slot: l, Node: p.Node, Unit: p.Node, State: "unknown"})
		}
	}
	for n, h := range g.hosts {
		if h.conn != 0 {
			s.Heard = append(s.Heard, n)
		}
		if !on[n] && h.conn != 0 && now.Sub(h.heard) < g.o.Lease && !slices.Contains(b.Excluded, n) {
			s.Standby = append(s.Standby, n)
		}
	}
	slices.Sort(s.Standby)
	slices.Sort(s.Heard)
	s.Units = max(g.o.Hosts, len(b.Hosts)) + len(s.Standby)
	for _, n := range b.Excluded {
		if !on[n] {
			s.Units++
		}
	}
	return s
}
