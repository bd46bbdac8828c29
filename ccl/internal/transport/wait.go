package transport

import (
	"runtime"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/record"
	"golang.org/x/sys/unix"
)

//go:linkname procyield runtime.procyield
func procyield(cycles uint32)

// doorbell is the word that a rank sleeps on and its peers wake it by, alone in its cache line.
type doorbell struct {
	state atomic.Uint32
	_     [lineSize - 4]byte
}

const (
	awake   = 0
	asleep  = 1 // or about to: in futex(2) on the word
	polling = 2 // or about to: in epoll_wait(2), a write to its wakeFD ends that
)

// wake wakes the rank that sleeps on d; at most one of several callers has to
// make the system call.
func (d *doorbell) wake(wakeFD int) {
	switch d.state.Swap(awake) {
	case asleep:
		_, _, _ = unix.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&d.state)), futexWake, 1, 0, 0, 0)
	case polling:
		var b [1]byte
		_, _, _ = unix.RawSyscall(unix.SYS_WRITE, uintptr(wakeFD), uintptr(unsafe.Pointer(&b[0])), 1) // a full pipe wakes as well
	}
}

const (
	futexWait = 0 // of a word that processes share
	futexWake = 1
)

const (
	// Polls before the first yield: many when cores are free (25 µs or so), few
	// when each poll keeps somebody from working.
	minSpin = 0
	maxSpin = 1000
	// A yield that comes back sooner had nobody to yield to.
	lonelyYield = 900 // ns
	// Polls between two looks.
	lookEvery = 4
	// Waits between two looks at the clock of a rank that is busy.
	liveEvery = 64
	// How long a rank yields before it sleeps. Waking it costs tens of µs, and more
	// where others compute: it has to get the core back from them. So it outlasts
	// a time slice of theirs (3 ms or so), at the end of which all may go on.
	yieldFor = int64(5 * time.Millisecond)
)

// waiter is how a rank waits: it polls, then yields, then sleeps. Nothing is
// measured in advance; a yield's own duration tells whether others want the core.
type waiter struct {
	m          *Mesh
	doorbell   *doorbell
	own        *doorbell // the doorbell when there is no segment
	progressed bool      // a link moved bytes since the last Wait
	armed      bool      // the doorbell says asleep; the caller has looked again since
	goroutines bool      // some members are goroutines of this process
	idle       int       // Waits without progress
	waits      uint64    // of them ever, those that did not only poll counted for many
	turns      uint      // Waits ever
	live       int64     // when the monitors last heard that this rank runs
	spin       int       // how many of them only poll
	since      int64     // first yield of this idleness, 0 before it
	last       int64     // last yield
}

func (w *waiter) init(m *Mesh) {
	w.m, w.spin = m, maxSpin
	w.own = new(doorbell)
	w.doorbell = w.own
	if m.seg != nil {
		w.doorbell = m.seg.doorbells[m.seg.me]
	}
}

// Wait returns when any link of this rank may have made progress, when Wake was called, or
// after d. It spins for a short, adaptive time first, and yields or sleeps when there are
// more local ranks than cores. polled means that it did neither, and took next to no time.
// It must only be called after looking at everything that is waited for: that
// look, after the doorbell says asleep, is what makes sleeping safe.
func (m *Mesh) Wait(d time.Duration) (polled bool) { return m.wait(d) }

func (w *waiter) wait(d time.Duration) (polled bool) {
	if w.turns++; w.turns%liveEvery == 0 {
		w.runs(record.Now())
	}
	if w.progressed {
		w.progressed = false
		w.endIdle()
		w.pumpGates()
		return true
	}
	w.idle++
	w.waits++
	if w.since == 0 && w.idle <= w.spin {
		if w.idle%lookEvery == 0 {
			w.look()
		}
		procyield(1)
		return true
	}
	w.waits += paceWaits // what follows takes long
	now := record.Now()
	if w.since == 0 {
		w.since, w.last = now, now
		yielding.Add(1)
	} else if took := now - w.last; took > lonelyYield {
		w.spin = max(minSpin, w.spin/2)
	} else {
		w.spin = min(maxSpin, 2*w.spin+1)
	}
	w.last = now
	if now-w.since < yieldFor {
		w.runs(now)
		w.look()
		w.overdue(now)
		w.yield()
		return false
	}
	if w.m.cfg.Err() != nil {
		return false
	}
	more := w.refresh(now)
	due := w.pumpGates()
	switch {
	case w.progressed:
		// The caller has not looked at that yet.
	case !w.armed:
		w.arm()
	default:
		if more {
			d = min(d, idleRefresh)
		}
		if due > 0 {
			d = min(d, time.Duration(due-now))
		}
		if d > 0 {
			yielding.Add(-1)
			w.sleep(d)
			yielding.Add(1)
		} else {
			w.look() // the caller sleeps by itself
		}
		w.rouse()
	}
	return false
}

// Look notices what was consumed, and tells; for the time between operations. It reports
// whether there was, and may still be, something to notice. The monitors know by it that
// somebody looked, too: a
// completion that nobody has looked for is not the network's delay.
func (m *Mesh) Look() (due bool) {
	if !slices.ContainsFunc(m.open, pipeline.due) {
		return false
	}
	m.look()
	now := record.Now()
	for _, l := range m.open {
		if l.due() {
			l.refresh(now)
		}
	}
	return true
}

// look collects what costs a little to look for: edges of sockets, completions
// that the monitor waits for, bytes that a fault holds back.
func (w *waiter) look() {
	w.m.net.poll(0)
	if w.m.rdma != nil && w.m.rdma.worker.Poll() {
		w.progressed = true
	}
	for _, l := range w.m.open {
		l.look()
	}
	w.pumpGates()
}

// overdue has the monitors of RDMA's paths, whose completions need no program at the other end,
// tell of what is late while nothing completes. Those of others tell when they are refreshed.
func (w *waiter) overdue(now int64) {
	if w.m.rdma == nil {
		return
	}
	for _, l := range w.m.open {
		if l, ok := l.(*rdmaLink); ok {
			l.overdue(now)
		}
	}
}

func (w *waiter) endIdle() {
	w.idle = 0
	if w.since != 0 {
		w.since = 0
		yielding.Add(-1)
		w.rouse()
	}
}

// yield lets others run on this core; and, when every processor of the Go
// scheduler may be taken by a rank that waits, goroutines of this process.
func (w *waiter) yield() {
	if w.goroutines || int(yielding.Load()) >= maxProcs {
		runtime.Gosched()
	}
	_, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
}

// yielding is how many ranks of this process are at it.
var yielding atomic.Int32

var maxProcs = runtime.GOMAXPROCS(0)

func (w *waiter) arm() {
	w.armed = true
	state := uint32(asleep)
	if w.m.net != nil {
		state = polling
	}
	w.doorbell.state.Swap(state)
	if w.m.rdma != nil && w.m.rdma.worker.Arm() {
		w.progressed = true // the caller has not looked at that yet
	}
}

func (w *waiter) rouse() {
	if w.armed {
		w.armed = false
		w.doorbell.state.Store(awake)
	}
}

func (w *waiter) sleep(d time.Duration) {
	if w.m.net != nil {
		w.m.net.poll(d)
		return
	}
	ts := unix.NsecToTimespec(int64(d))
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&w.doorbell.state)), futexWait, asleep, uintptr(unsafe.Pointer(&ts)), 0, 0)
}

// runs lets all links' monitors know that this rank runs, now and then. While bytes
// move on some, nothing else tells that those outstanding on another are late because of
// its network, and not because nobody looked.
func (w *waiter) runs(now int64) {
	if now-w.live >= int64(idleRefresh) {
		w.refresh(now)
	}
}

// refresh publishes every link's live words; it reports whether bytes are outstanding.
func (w *waiter) refresh(now int64) bool {
	w.live = now
	outstanding := false
	for _, l := range w.m.open {
		outstanding = l.refresh(now) || outstanding
	}
	return outstanding
}

// pumpGates moves what faults have held back; 0, or when to do it again.
func (w *waiter) pumpGates() int64 {
	if w.m.cfg.Faults == nil {
		return 0
	}
	due := int64(0)
	now := record.Now()
	for _, l := range w.m.open {
		if t := l.pump(now); t > 0 && (due == 0 || t < due) {
			due = t
		}
	}
	return due
}

func (m *Mesh) Wake() {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if m.closed || m.doorbell.state.Load() == awake {
		return
	}
	wakeFD := -1
	if m.net != nil {
		wakeFD = m.net.wakeFD
	}
	m.doorbell.wake(wakeFD)
}
