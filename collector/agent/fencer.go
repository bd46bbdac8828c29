package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/wire"
)

// suspect is a rank's process that is to end.
type suspect struct {
	pid     int // as this /proc has it; 0: it is not to be seen here
	start   uint64
	path    string // of its recorder
	probe   bool   // which this node's probes keep, not the process
	terms   terms
	ordered bool      // by a master; else its lease is over
	latest  time.Time // when it must be killed by its lease, whatever grace is left; zero: then there is none
	name    string
}

// orders is what a fencer is to answer.
type orders struct {
	id      uint64
	ended   uint32
	later   int  // processes of the same attempts that are left alone, since they began after the order
	settled bool // the agent has looked for long enough to say that there are no others
}

// fencer ends processes and watches them go, one a job. It has a goroutine of its own, since
// its system calls may block.
type fencer struct {
	job    string
	log    *slog.Logger
	cancel context.CancelFunc
	over   sync.WaitGroup

	mu     sync.Mutex
	list   []suspect
	orders orders
	to     *stream
	toID   uint64
	fresh  bool              // an order that is another one has come: what others came to is not told again
	said   *wire.FenceResult // on this stream
	count  collector.AgentFences

	held map[pidStart]*held // its goroutine's
}

const (
	fencerEvery = 50 * time.Millisecond
	familyEvery = time.Second
	maxFamily   = 4096
)

func newFencer(job string, log *slog.Logger) *fencer {
	return &fencer{job: job, log: log.With("job", job), held: map[pidStart]*held{}, count: collector.AgentFences{Job: job}}
}

func (f *fencer) start(ctx context.Context) {
	ctx, f.cancel = context.WithCancel(ctx)
	f.over.Go(func() {
		t := time.NewTicker(fencerEvery)
		defer t.Stop()
		var family time.Time
		for {
			select {
			case <-ctx.Done():
				for _, h := range f.held {
					unix.Close(h.fd)
				}
				return
			case <-t.C:
			}
			if f.pass(time.Since(family) >= familyEvery) {
				family = time.Now()
			}
		}
	})
}

func (f *fencer) stop() {
	f.cancel()
	f.over.Wait()
}

// set says which processes are to end.
func (f *fencer) set(list []suspect, o orders) {
	f.mu.Lock()
	f.list, f.orders = list, o
	f.mu.Unlock()
}

// answer says who is to hear of an order.
func (f *fencer) answer(to *stream, id uint64) {
	f.mu.Lock()
	f.fresh = f.fresh || f.toID != id
	f.to, f.toID, f.said = to, id, nil
	f.mu.Unlock()
}

func (f *fencer) expired() {
	f.mu.Lock()
	f.count.Leases++
	f.mu.Unlock()
}

func (f *fencer) counts() collector.AgentFences {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.count
}

// pass opens the processes that must end, ends them, and reports what has become of them. With
// family it also looks for what ranks have started, if there are ranks: a second after an order
// came all of them may have ended.
func (f *fencer) pass(family bool) (looked bool) {
	f.mu.Lock()
	list, o, fresh := f.list, f.orders, f.fresh
	f.fresh = false
	f.mu.Unlock()
	for key, h := range f.held {
		if fresh && h.fate >= ended {
			delete(f.held, key)
		}
	}
	unseen := 0
	var why []string
	for i := range list {
		s := &list[i]
		if s.pid == 0 {
			if s.ordered {
				unseen++
			}
			why = append(why, s.name+" is in no process that this agent sees")
			continue
		}
		f.take(s, &why)
	}
	if looked = family && len(list) > 0; looked {
		f.relatives(list)
	}
	now := time.Now()
	r := &wire.FenceResult{Id: o.id, Ended: o.ended, Living: uint32(unseen + o.later)}
	if o.later > 0 {
		why = append(why, fmt.Sprintf("%d processes of the attempt began after the order, and are left alone", o.later))
	}
	for key, h := range f.held {
		f.treat(key, h, now)
		if !h.ordered {
			continue
		}
		switch h.fate {
		case ended:
			r.Ended++
		case stopped:
			r.Stopped++
		case killed:
			r.Killed++
		default:
			r.Living++
			if h.fate == spared {
				r.Spared++
			}
			if h.trouble != "" {
				why = append(why, fmt.Sprintf("%s (process %d) %s", h.name, key.pid, h.trouble))
			}
		}
	}
	// An error of take is about a process that lives.
	for i := range list {
		s := &list[i]
		if s.pid != 0 && s.ordered && f.held[pidStart{s.pid, s.start}] == nil {
			r.Living++
		}
	}
	slices.Sort(why)
	r.Detail = strings.Join(slices.Compact(why), "; ")
	r.Detail = strings.ToValidUTF8(r.Detail[:min(len(r.Detail), 500)], "")
	if r.Living > 0 || o.settled {
		f.say(r)
	}
	f.let(list)
	return looked
}

// say sends a result to the master unless it has that already.
func (f *fencer) say(r *wire.FenceResult) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.to == nil || f.toID != r.Id || r.Id == 0 {
		return
	}
	if s := f.said; s != nil && s.Living == r.Living && s.Ended == r.Ended && s.Stopped == r.Stopped && s.Killed == r.Killed && s.Spared == r.Spared && s.Detail == r.Detail {
		return
	}
	select {
	case f.to.fenced <- r:
		f.said = r
	default: // its queue is full: the next pass tries again
	}
}

// take opens a suspect's process, once it has made sure that it is the one meant.
func (f *fencer) take(s *suspect, why *[]string) {
	key := pidStart{s.pid, s.start}
	if h := f.held[key]; h != nil {
		h.ordered = h.ordered || s.ordered
		return
	}
	h, err := hold(key, s.path, s.probe)
	if err != nil {
		*why = append(*why, fmt.Sprintf("%s: %v", s.name, err))
		return
	}
	h.name, h.terms, h.ordered, h.latest, h.rank = s.name, s.terms, s.ordered, s.latest, true
	f.held[key] = h
}

// relatives opens what the ranks have started: their children, and processes with the attempt's
// token and node, which no others have.
func (f *fencer) relatives(list []suspect) {
	roots, tokens := map[int]*suspect{}, map[string]*suspect{}
	for i := range list {
		s := &list[i]
		h := f.held[pidStart{s.pid, s.start}]
		if !s.terms.stop || h == nil {
			continue
		}
		roots[s.pid] = s
		if s.terms.token != "" {
			tokens[s.terms.token] = s
		}
	}
	if len(roots) == 0 {
		return
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return
	}
	type one struct {
		parent int
		start  uint64
	}
	all := map[int]one{}
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil && pid > 1 && pid != os.Getpid() {
			if start, parent, err := startOf(pid); err == nil {
				all[pid] = one{parent, start}
			}
		}
	}
	for pid, p := range all {
		key := pidStart{pid, p.start}
		if f.held[key] != nil || len(f.held) >= maxFamily || roots[pid] != nil {
			continue
		}
		var of *suspect
		for at, n := p.parent, 0; at > 1 && n < 64; at, n = all[at].parent, n+1 {
			if s := roots[at]; s != nil && all[at].start == s.start {
				of = s
				break
			}
		}
		if of == nil && len(tokens) > 0 {
			if env, err := environ(pid); err == nil {
				// Of several logical nodes on one host each has its own.
				if of = tokens[lookup(env, fenceTokenEnv)]; of != nil && lookup(env, "LOCKSTEP_NODE") != of.terms.node {
					of = nil
				}
				clear(env)
			}
		}
		if of == nil {
			continue
		}
		h, err := hold(key, of.path, of.probe)
		if err == nil && of.probe && h.fd >= 0 && (of.terms.user < 0 || userOf(pid) != of.terms.user) {
			unix.Close(h.fd) // a probe's recorder does not say whose it may be
			continue
		}
		if err == nil {
			h.name, h.terms, h.ordered, h.latest = "a process of "+of.name, of.terms, of.ordered, of.latest
			if root := f.held[pidStart{of.pid, of.start}]; root != nil {
				h.due = root.due // who is found later has no grace of its own
			}
			f.held[key] = h
		}
	}
}

// treat has a process end.
func (f *fencer) treat(key pidStart, h *held, now time.Time) {
	if h.fate >= ended {
		return
	}
	if gone(h.fd) {
		switch {
		case !h.killAt.IsZero():
			h.fate = killed
		case !h.termAt.IsZero():
			h.fate = stopped
		default:
			h.fate = ended
		}
		f.tell(key, h)
		unix.Close(h.fd)
		h.fd = -1
		return
	}
	if !h.terms.stop {
		if h.fate != spared {
			h.fate, h.trouble = spared, "lives, and its environment does not say LOCKSTEP_FENCE=stop"
			switch {
			case h.terms.bad != "":
				h.trouble = "lives: " + h.terms.bad
			case !h.terms.known:
				h.trouble = "lives, and its environment cannot be read"
			}
			f.tell(key, h)
		}
		return
	}
	switch {
	case h.termAt.IsZero():
		h.termAt, h.due = now, h.killDue(now)
		f.log.Warn("stopping a process", "process", key.pid, "what", h.name, "grace", h.terms.grace)
		f.signal(key, h, unix.SIGTERM)
		f.signal(key, h, unix.SIGCONT) // one that is stopped cannot act on it
	case !now.Before(h.due) && now.Sub(h.killAt) >= time.Second:
		if h.killAt.IsZero() {
			f.log.Warn("killing a process", "process", key.pid, "what", h.name)
		} else if h.fate != failed {
			h.trouble = "is killed and does not end: in uninterruptible sleep?"
		}
		h.killAt = now
		f.signal(key, h, unix.SIGKILL)
	}
}

// killDue is when a process that is asked to end now is killed.
func (h *held) killDue(now time.Time) time.Time {
	due := h.due
	if due.IsZero() {
		due = now.Add(h.terms.grace)
	}
	if !h.latest.IsZero() && h.latest.Before(due) {
		due = h.latest
	}
	return due
}

func (f *fencer) signal(key pidStart, h *held, sig unix.Signal) {
	err := unix.PidfdSendSignal(h.fd, sig, nil, 0)
	if err == nil || errors.Is(err, unix.ESRCH) || h.fate == failed {
		return
	}
	h.fate, h.trouble = failed, fmt.Sprintf("cannot be told to end: %v", err)
	f.tell(key, h)
}

// tell counts and logs what has become of a process.
func (f *fencer) tell(key pidStart, h *held) {
	f.mu.Lock()
	switch h.fate {
	case spared:
		f.count.Spared++
	case failed:
		f.count.Failed++
	case stopped:
		f.count.Stopped++
	case killed:
		f.count.Killed++
	}
	f.mu.Unlock()
	log := f.log.With("process", key.pid, "what", h.name)
	switch h.fate {
	case spared:
		log.Warn("a process of a fenced attempt is left alone", "why", h.trouble)
	case failed:
		log.Error("a process of a fenced attempt cannot be stopped", "why", h.trouble)
	case stopped, killed:
		log.Warn("a process of a fenced attempt has ended", "killed", h.fate == killed)
	}
}

// let closes processes that live and need not end any more: another order stands, or the master
// was heard again before they were asked.
func (f *fencer) let(list []suspect) {
	wanted := false
	for i := range list {
		wanted = wanted || list[i].pid != 0
	}
	if wanted {
		return
	}
	for key, h := range f.held {
		if h.rank && h.fate < ended && h.termAt.IsZero() {
			unix.Close(h.fd)
			delete(f.held, key)
		}
	}
}
