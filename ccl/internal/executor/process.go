package executor

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/lockstep-ccl/lockstep/internal/accept"
	"github.com/lockstep-ccl/lockstep/record"
)

// Process is what the communicators of one recorder share.
type Process struct {
	rec     *record.Writer
	lastEnd atomic.Int64 // when the last operation on any of them ended
	users   int          // guarded by sweeper.mu
	said    sync.Map     // what Once has been asked for
}

// Once reports whether something has not been said yet: communicators of the same ranks
// find the same.
func (p *Process) Once(what any) bool {
	_, was := p.said.LoadOrStore(what, true)
	return !was
}

// sweeper is the one goroutine of the program that finds operations which
// nobody waits for and hands them to their communicator's worker. It looks often
// while it finds some, rarely when callers wait for what they call, and keeps the
// recorders' clocks anchored.
var sweeper = struct {
	mu        sync.Mutex
	processes map[*record.Writer]*Process
	queues    map[*queue]struct{}
	stop      chan struct{}
	asleep    atomic.Bool
	alarm     chan struct{}
}{
	processes: map[*record.Writer]*Process{},
	queues:    map[*queue]struct{}{},
	alarm:     make(chan struct{}, 1),
}

const (
	sweepMin = 50 * time.Microsecond
	sweepMax = 2 * time.Millisecond
	// sweepIdle is after how long without any call the sweeper goes to sleep.
	sweepIdle   = 100 * time.Millisecond
	anchorEvery = 5 * time.Second
	// sweepWatch is how often it looks even so while bytes are outstanding: the pipeline must
	// not take consumed bytes for stuck ones.
	sweepWatch = 20 * time.Millisecond
)

// ProcessOf is the process of a recorder (nil: of none); Release must follow.
func ProcessOf(rec *record.Writer) *Process {
	sweeper.mu.Lock()
	defer sweeper.mu.Unlock()
	p := sweeper.processes[rec]
	if p == nil {
		p = &Process{rec: rec}
		sweeper.processes[rec] = p
	}
	p.users++
	return p
}

// Release ends one use of it.
func (p *Process) Release() {
	sweeper.mu.Lock()
	defer sweeper.mu.Unlock()
	if p.users--; p.users == 0 {
		p.rec.Refused(accept.Total().Refused)
		delete(sweeper.processes, p.rec)
	}
}

func (p *Process) add(q *queue) {
	sweeper.mu.Lock()
	defer sweeper.mu.Unlock()
	sweeper.queues[q] = struct{}{}
	if sweeper.stop == nil {
		sweeper.stop = make(chan struct{})
		sweeper.asleep.Store(false)
		go sweep(sweeper.stop)
	}
}

func (p *Process) remove(q *queue) {
	sweeper.mu.Lock()
	defer sweeper.mu.Unlock()
	delete(sweeper.queues, q)
	if len(sweeper.queues) == 0 && sweeper.stop != nil {
		close(sweeper.stop)
		sweeper.stop = nil
	}
}

// bulk is the size from which an operation goes to the worker at once, unless the caller has
// been seen to wait for its operations.
const bulk = 256 << 10

// nudge follows every call: somebody must notice the operation.
func (q *queue) nudge(bytes uint64) {
	if bytes >= bulk && q.role.unattended.Load() {
		q.role.wake()
	}
	if sweeper.asleep.Load() && sweeper.asleep.CompareAndSwap(true, false) {
		select {
		case sweeper.alarm <- struct{}{}:
		default:
		}
	}
}

func sweep(stop chan struct{}) {
	period := sweepMin
	timer := time.NewTimer(period)
	defer timer.Stop()
	var queues []*queue
	var calls uint64 // sum of all queues' tails when last looked at
	active, anchored := record.Now(), int64(0)
	for {
		select {
		case <-stop:
			return
		case <-sweeper.alarm:
			active, period = record.Now(), sweepMin
		case <-timer.C:
		}
		now := record.Now()
		if now-anchored > int64(anchorEvery)/2 {
			anchored = now
			anchorAll()
		}
		queues = listQueues(queues[:0])
		sum, found, watching := uint64(0), false, false
		for _, q := range queues {
			tail := q.tail.Load()
			sum += tail
			switch {
			case tail == q.finished.Load():
				watching = q.observe(tail) || watching
			case q.role.held.Load() == 0:
				found = true
				q.role.unattended.Store(true)
				q.role.wake()
			}
		}
		clear(queues)
		switch {
		case found:
			period = sweepMin
		default:
			period = min(2*period, sweepMax)
		}
		if sum != calls {
			calls, active = sum, now
		} else if !found && now-active > int64(sweepIdle) {
			// A call that came before this store has not seen it: look once more.
			if sweeper.asleep.Store(true); callsOf(queues) != calls {
				sweeper.asleep.Store(false)
			} else {
				period = anchorEvery / 2
				if watching {
					period = sweepWatch
				}
			}
		}
		timer.Reset(period)
	}
}

// observe looks at the transports of a communicator that has had no call since the last sweep.
// Completions between operations are noticed within sweepMax, not at the next operation, so
// windows measure the network and not the program's steps. It also runs without a recorder: a
// peer that reconnects needs somebody to take its sockets over.
func (q *queue) observe(tail uint64) (due bool) {
	quiet := q.swept == tail
	q.swept = tail
	if quiet && q.role.take() {
		due = q.run.look()
		q.role.release()
	}
	return due
}

func listQueues(dst []*queue) []*queue {
	sweeper.mu.Lock()
	defer sweeper.mu.Unlock()
	for q := range sweeper.queues {
		dst = append(dst, q)
	}
	return dst
}

func callsOf(buf []*queue) (sum uint64) {
	for _, q := range listQueues(buf[:0]) {
		sum += q.tail.Load()
	}
	return sum
}

func anchorAll() {
	sweeper.mu.Lock()
	defer sweeper.mu.Unlock()
	for rec := range sweeper.processes {
		rec.Anchor() // nil is no-op
		rec.Refused(accept.Total().Refused)
	}
}
