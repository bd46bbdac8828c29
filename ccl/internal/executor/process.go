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
	said    sync.Map     // arguments of Once
}

// Once returns true on the first call with what. So a warning that applies to the process is logged
// once, not once per communicator.
func (p *Process) Once(what any) bool {
	_, was := p.said.LoadOrStore(what, true)
	return !was
}

// sweeper is one goroutine of the process. It finds operations that no goroutine waits for and wakes
// their communicator's worker. It looks often while it finds some, and rarely while callers wait for
// their operations. It also anchors the recorders' clocks.
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
	// The sweeper goes to sleep after sweepIdle without a call.
	sweepIdle   = 100 * time.Millisecond
	anchorEvery = 5 * time.Second
	// While bytes are outstanding it looks every sweepWatch even so. Otherwise the pipeline would
	// see consumed bytes as stuck.
	sweepWatch = 20 * time.Millisecond
)

// ProcessOf returns the Process of recorder rec, which is nil if recording is off. The caller must
// call Release.
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

// Release ends one use of p.
func (p *Process) Release() {
	sweeper.mu.Lock()
	defer sweeper.mu.Unlock()
	if p.users--; p.users == 0 {
		p.rec.Refused(accept.Total().Refused)
		delete(sweeper.processes, p.rec)
	}
}

// add makes the sweeper look after q.
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

// remove ends what add began.
func (p *Process) remove(q *queue) {
	sweeper.mu.Lock()
	defer sweeper.mu.Unlock()
	delete(sweeper.queues, q)
	if len(sweeper.queues) == 0 && sweeper.stop != nil {
		close(sweeper.stop)
		sweeper.stop = nil
	}
}

// bulk is the size in bytes from which an operation wakes the worker at once. If its caller does not
// wait, the sweeper would start it up to sweepMax later. If its caller waits, the wake-up is lost in
// the operation's own time: of 256 KiB and more, neither latency nor CPU time change measurably.
const bulk = 256 << 10

// nudge makes sure that the worker or the sweeper notices an operation that was put in the queue.
func (q *queue) nudge(bytes uint64) {
	if bytes >= bulk {
		q.role.wake()
	}
	if sweeper.asleep.Load() && sweeper.asleep.CompareAndSwap(true, false) {
		select {
		case sweeper.alarm <- struct{}{}:
		default:
		}
	}
}

// sweep runs the sweeper until stop is closed.
func sweep(stop chan struct{}) {
	period := sweepMin
	timer := time.NewTimer(period)
	defer timer.Stop()
	var queues []*queue
	var calls uint64 // sum of all queues' tails at the last sweep
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
			// A call before this store did not see it and set no alarm, so look once more.
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

// observe looks at the transports of a communicator that has had no call since the last sweep. So
// completions between operations are noticed within sweepMax, and windows measure the network
// rather than the program's steps. It also runs without a recorder, because a peer that reconnects
// needs someone to accept its sockets. It reports whether bytes are outstanding.
func (q *queue) observe(tail uint64) (due bool) {
	quiet := q.swept == tail
	q.swept = tail
	if quiet && q.role.take() {
		due = q.run.look()
		q.role.release()
	}
	return due
}

// listQueues appends the queues of all communicators to dst.
func listQueues(dst []*queue) []*queue {
	sweeper.mu.Lock()
	defer sweeper.mu.Unlock()
	for q := range sweeper.queues {
		dst = append(dst, q)
	}
	return dst
}

// callsOf returns the sum of all queues' tails. It uses the memory of buf.
func callsOf(buf []*queue) (sum uint64) {
	for _, q := range listQueues(buf[:0]) {
		sum += q.tail.Load()
	}
	return sum
}

// anchorAll anchors the clock of every recorder and updates its count of refused connections.
func anchorAll() {
	sweeper.mu.Lock()
	defer sweeper.mu.Unlock()
	for rec := range sweeper.processes {
		rec.Anchor() // rec may be nil
		rec.Refused(accept.Total().Refused)
	}
}
