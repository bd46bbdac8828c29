package ccl

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/accept"
	"github.com/lockstep-ccl/lockstep/record"
)

// process is what the communicators of one recorder share.
type process struct {
	rec     *record.Writer
	lastEnd atomic.Int64 // when the last operation on any of them ended
	users   int          // guarded by sweeper.mu
	said    sync.Map     // what once has been asked for
}

// once reports whether something has not been said yet: communicators of the same ranks
// find the same.
func (p *process) once(what any) bool {
	_, was := p.said.LoadOrStore(what, true)
	return !was
}

// sweeper is the one goroutine of the program that finds operations which
// nobody waits for and hands them to their communicator's worker. It looks often
// while it finds some, rarely when callers wait for what they call, and keeps the
// recorders' clocks anchored.
var sweeper = struct {
	mu        sync.Mutex
	processes map[*record.Writer]*process
	comms     map[*Comm]struct{}
	stop      chan struct{}
	asleep    atomic.Bool
	alarm     chan struct{}
}{
	processes: map[*record.Writer]*process{},
	comms:     map[*Comm]struct{}{},
	alarm:     make(chan struct{}, 1),
}

const (
	sweepMin = 50 * time.Microsecond
	sweepMax = 2 * time.Millisecond
	// sweepIdle is after how long without any call the sweeper goes to sleep.
	sweepIdle   = 100 * time.Millisecond
	anchorEvery = 5 * time.Second
	// sweepWatch is how often it looks all the same while bytes are outstanding:
	// the pipeline must not take what was consumed for what is stuck.
	sweepWatch = 20 * time.Millisecond
)

// processOf is the process of a recorder (nil: of none); release must follow.
func processOf(rec *record.Writer) *process {
	sweeper.mu.Lock()
	defer sweeper.mu.Unlock()
	p := sweeper.processes[rec]
	if p == nil {
		p = &process{rec: rec}
		sweeper.processes[rec] = p
	}
	p.users++
	return p
}

func (p *process) release() {
	sweeper.mu.Lock()
	defer sweeper.mu.Unlock()
	if p.users--; p.users == 0 {
		p.rec.Refused(accept.Total().Refused)
		delete(sweeper.processes, p.rec)
	}
}

func (p *process) add(c *Comm) {
	sweeper.mu.Lock()
	defer sweeper.mu.Unlock()
	sweeper.comms[c] = struct{}{}
	if sweeper.stop == nil {
		sweeper.stop = make(chan struct{})
		sweeper.asleep.Store(false)
		go sweep(sweeper.stop)
	}
}

func (p *process) remove(c *Comm) {
	sweeper.mu.Lock()
	defer sweeper.mu.Unlock()
	delete(sweeper.comms, c)
	if len(sweeper.comms) == 0 && sweeper.stop != nil {
		close(sweeper.stop)
		sweeper.stop = nil
	}
}

// bulk is from how many bytes an operation is handed to the worker at once, if
// the caller has not been seen to wait for its operations.
const bulk = 256 << 10

// nudge follows every call: somebody must notice the operation.
func (p *process) nudge(c *Comm, bytes uint64) {
	if bytes >= bulk && c.executor.unattended.Load() {
		c.executor.wake()
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
	var comms []*Comm
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
		comms = listComms(comms[:0])
		sum, found, watching := uint64(0), false, false
		for _, c := range comms {
			tail := c.queue.tail.Load()
			sum += tail
			switch {
			case tail == c.queue.finished.Load():
				watching = c.observe(tail) || watching
			case c.executor.role.Load() == 0:
				found = true
				c.executor.unattended.Store(true)
				c.executor.wake()
			}
		}
		clear(comms)
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
			if sweeper.asleep.Store(true); callsOf(comms) != calls {
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

// observe looks at the transports of a communicator that has not been called since
// the last sweep, so that completions between operations are noticed within
// sweepMax and not at the next operation: windows measure the network, not the
// program's steps. Without a recorder, too: a peer that connects again for bytes
// on their way to it must find somebody who takes its sockets over.
func (c *Comm) observe(tail uint64) (due bool) {
	quiet := c.swept == tail
	c.swept = tail
	if quiet && c.executor.role.CompareAndSwap(0, 1) {
		due = c.mesh.Look()
		c.executor.release()
	}
	return due
}

func listComms(dst []*Comm) []*Comm {
	sweeper.mu.Lock()
	defer sweeper.mu.Unlock()
	for c := range sweeper.comms {
		dst = append(dst, c)
	}
	return dst
}

func callsOf(buf []*Comm) (sum uint64) {
	for _, c := range listComms(buf[:0]) {
		sum += c.queue.tail.Load()
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

// wake hands the queue to the worker.
func (x *executor) wake() {
	select {
	case x.kick <- struct{}{}:
	default:
	}
}

// work is the communicator's worker: it runs what is in the queue when told to.
func (c *Comm) work() {
	defer c.watching.Done()
	for {
		select {
		case <-c.closed:
			return
		case <-c.executor.kick:
			// A failure is for the Wait of the operation's stream to report.
			_ = c.drive(background, c.queue.tail.Load())
		}
	}
}
