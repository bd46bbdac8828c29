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

// orders is what a warden is to answer.
type orders struct {
	id      uint64
	ended   uint32
	later   int  // processes of the same attempts that are left alone, since they began after the order
	settled bool // the agent has looked for long enough to say that there are no others
}

// warden ends processes and watches them go, one a job. It has a goroutine of its own, since
// its system calls may block.
type warden struct {
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
	wardenEvery = 50 * time.Millisecond
	familyEvery = time.Second
	maxFamily   = 4096
)

func newWarden(job string, log *slog.Logger) *warden {
	return &warden{job: job, log: log.With("job", job), held: map[pidStart]*held{}, count: collector.AgentFences{Job: job}}
}

func (w *warden) start(ctx context.Context) {
	ctx, w.cancel = context.WithCancel(ctx)
	w.over.Go(func() {
		t := time.NewTicker(wardenEvery)
		defer t.Stop()
		var family time.Time
		for {
			select {
			case <-ctx.Done():
				for _, h := range w.held {
					unix.Close(h.fd)
				}
				return
			case <-t.C:
			}
			if w.pass(time.Since(family) >= familyEvery) {
				family = time.Now()
			}
		}
	})
}

func (w *warden) stop() {
	w.cancel()
	w.over.Wait()
}

// set says which processes are to end.
func (w *warden) set(list []suspect, o orders) {
	w.mu.Lock()
	w.list, w.orders = list, o
	w.mu.Unlock()
}

// answer says who is to hear of an order.
func (w *warden) answer(to *stream, id uint64) {
	w.mu.Lock()
	w.fresh = w.fresh || w.toID != id
	w.to, w.toID, w.said = to, id, nil
	w.mu.Unlock()
}

func (w *warden) expired() {
	w.mu.Lock()
	w.count.Leases++
	w.mu.Unlock()
}

func (w *warden) counts() collector.AgentFences {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.count
}

// pass opens the processes that must end, ends them, and reports what has become of them. With
// family it also looks for what ranks have started, if there are ranks: a second after an order
// came all of them may have ended.
func (w *warden) pass(family bool) (looked bool) {
	w.mu.Lock()
	list, o, fresh := w.list, w.orders, w.fresh
	w.fresh = false
	w.mu.Unlock()
	for key, h := range w.held {
		if fresh && h.fate >= ended {
			delete(w.held, key)
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
		w.take(s, &why)
	}
	if looked = family && len(list) > 0; looked {
		w.relatives(list)
	}
	now := time.Now()
	r := &wire.FenceResult{Id: o.id, Ended: o.ended, Living: uint32(unseen + o.later)}
	if o.later > 0 {
		why = append(why, fmt.Sprintf("%d processes of the attempt began after the order, and are left alone", o.later))
	}
	for key, h := range w.held {
		w.treat(key, h, now)
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
		if s.pid != 0 && s.ordered && w.held[pidStart{s.pid, s.start}] == nil {
			r.Living++
		}
	}
	slices.Sort(why)
	r.Detail = strings.Join(slices.Compact(why), "; ")
	r.Detail = strings.ToValidUTF8(r.Detail[:min(len(r.Detail), 500)], "")
	if r.Living > 0 || o.settled {
		w.say(r)
	}
	w.let(list)
	return looked
}

// say sends a result to the master unless it has that already.
func (w *warden) say(r *wire.FenceResult) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.to == nil || w.toID != r.Id || r.Id == 0 {
		return
	}
	if s := w.said; s != nil && s.Living == r.Living && s.Ended == r.Ended && s.Stopped == r.Stopped && s.Killed == r.Killed && s.Spared == r.Spared && s.Detail == r.Detail {
		return
	}
	select {
	case w.to.fenced <- r:
		w.said = r
	default: // its queue is full: the next pass tries again
	}
}

// take opens a suspect's process, once it has made sure that it is the one meant.
func (w *warden) take(s *suspect, why *[]string) {
	key := pidStart{s.pid, s.start}
	if h := w.held[key]; h != nil {
		h.ordered = h.ordered || s.ordered
		return
	}
	h, err := hold(key, s.path, s.probe)
	if err != nil {
		*why = append(*why, fmt.Sprintf("%s: %v", s.name, err))
		return
	}
	h.name, h.terms, h.ordered, h.latest, h.rank = s.name, s.terms, s.ordered, s.latest, true
	w.held[key] = h
}

// relatives opens what the ranks have started: their children, and processes with the attempt's
// token and node, which no others have.
func (w *warden) relatives(list []suspect) {
	roots, tokens := map[int]*suspect{}, map[string]*suspect{}
	for i := range list {
		s := &list[i]
		h := w.held[pidStart{s.pid, s.start}]
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
		if w.held[key] != nil || len(w.held) >= maxFamily || roots[pid] != nil {
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
			if root := w.held[pidStart{of.pid, of.start}]; root != nil {
				h.due = root.due // who is found later has no grace of its own
			}
			w.held[key] = h
		}
	}
}

// treat has a process end.
func (w *warden) treat(key pidStart, h *held, now time.Time) {
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
		w.tell(key, h)
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
			w.tell(key, h)
		}
		return
	}
	switch {
	case h.termAt.IsZero():
		h.termAt, h.due = now, h.killDue(now)
		w.log.Warn("stopping a process", "process", key.pid, "what", h.name, "grace", h.terms.grace)
		w.signal(key, h, unix.SIGTERM)
		w.signal(key, h, unix.SIGCONT) // one that is stopped cannot act on it
	case !now.Before(h.due) && now.Sub(h.killAt) >= time.Second:
		if h.killAt.IsZero() {
			w.log.Warn("killing a process", "process", key.pid, "what", h.name)
		} else if h.fate != failed {
			h.trouble = "is killed and does not end: in uninterruptible sleep?"
		}
		h.killAt = now
		w.signal(key, h, unix.SIGKILL)
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

func (w *warden) signal(key pidStart, h *held, sig unix.Signal) {
	err := unix.PidfdSendSignal(h.fd, sig, nil, 0)
	if err == nil || errors.Is(err, unix.ESRCH) || h.fate == failed {
		return
	}
	h.fate, h.trouble = failed, fmt.Sprintf("cannot be told to end: %v", err)
	w.tell(key, h)
}

// tell counts and logs what has become of a process.
func (w *warden) tell(key pidStart, h *held) {
	w.mu.Lock()
	switch h.fate {
	case spared:
		w.count.Spared++
	case failed:
		w.count.Failed++
	case stopped:
		w.count.Stopped++
	case killed:
		w.count.Killed++
	}
	w.mu.Unlock()
	log := w.log.With("process", key.pid, "what", h.name)
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
func (w *warden) let(list []suspect) {
	wanted := false
	for i := range list {
		wanted = wanted || list[i].pid != 0
	}
	if wanted {
		return
	}
	for key, h := range w.held {
		if h.rank && h.fate < ended && h.termAt.IsZero() {
			unix.Close(h.fd)
			delete(w.held, key)
		}
	}
}
