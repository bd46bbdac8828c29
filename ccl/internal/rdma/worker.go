package rdma

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/nic"
	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
	"golang.org/x/sys/unix"
)

// ErrClosed is the error of a connection whose own side closed it.
var ErrClosed = errors.New("RDMA closed")

// Worker is what one rank of one communicator has of RDMA: completion queues,
// and the connections that use them. One lock guards all of it, for the length
// of one call; whoever holds it may poll for all connections.
type Worker struct {
	opt  Options
	wake func() // the executor has something to look at
	ep   int    // epoll instance of all channels

	mu     sync.Mutex
	nics   []*nicQueues
	conns  []*Conn
	slots  []*queuePair // by the number in their work requests' ids
	wc     [64]verbs.Completion
	polls  uint
	timer  *time.Timer
	ticks  bool // the timer is set
	dirty  bool // a connection is
	closed bool

	needs   []*Region    // that devices have to have
	retired []*queuePair // that could not be destroyed
	leaked  bool         // that was told

	news struct { // of devices, for the goroutine that takes the lock for it
		sync.Mutex
		list []notice
		busy bool
	}
}

// notice is what a device has to say: that it is lost, or what of a port, queue pair
// or completion queue.
type notice struct {
	dev  *device
	what verbs.EventType
	id   uint32
}

// nicQueues are a worker's completion queues on one device.
type nicQueues struct {
	dev     *device
	calls   calls
	channel *verbs.CompletionChannel // nil while the kernel does not make one
	cqs     []*cq
	active  int // queue pairs that carry a lane
}

// cq is a completion queue and the entries of it that queue pairs may still fill.
type cq struct {
	*verbs.CQ
	free int
}

// cqDepth is the entries of a completion queue; when queue pairs may fill them,
// the next one is made.
const cqDepth = 16 << 10

// NewWorker prepares RDMA for one rank of a communicator. wake tells the
// goroutine that uses the connections to look at them; it may be called from
// any goroutine, with the worker's lock held, once there is a connection.
func NewWorker(opt Options, wake func()) (*Worker, error) {
	if err := opt.SetDefaults(); err != nil {
		return nil, err
	}
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll: %w", err)
	}
	return &Worker{opt: opt, wake: wake, ep: ep}, nil
}

// Options are the worker's, defaults filled in.
func (w *Worker) Options() Options { return w.opt }

// FD is readable when an armed queue has a completion; Drain ends that.
func (w *Worker) FD() int { return w.ep }

// Open makes sure that a port's device can be used.
func (w *Worker) Open(p *nic.Port) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, err := w.nic(p.Device)
	return err
}

// nic is the worker's part of a device.
func (w *Worker) nic(name string) (*nicQueues, error) {
	if w.closed {
		return nil, ErrClosed
	}
	if n := w.opened(name); n != nil {
		return n, nil
	}
	for i, n := range w.nics {
		if n.dev.name == name && n.channel == nil {
			if what := n.calls.stalled.Load(); what != nil {
				return nil, fmt.Errorf("%s: %w (%s)", name, errStalled, *what)
			}
			w.nics = slices.Delete(w.nics, i, i+1)
			n.dev.release()
			break
		}
	}
	d, err := openDevice(name, w.opt.Log)
	if err != nil {
		return nil, err
	}
	n := &nicQueues{dev: d}
	n.channel, err = call(&n.calls, "make a completion channel", d.ctx.NewCompletionChannel, func(ch *verbs.CompletionChannel, err error) {
		if err == nil {
			_ = ch.Close()
		}
	})
	if errors.Is(err, errStalled) {
		w.nics = append(w.nics, n) // not tried again before it returns
		return nil, err
	}
	if err != nil {
		d.release()
		return nil, err
	}
	ev := unix.EpollEvent{Events: unix.EPOLLIN}
	if err := unix.EpollCtl(w.ep, unix.EPOLL_CTL_ADD, n.channel.FD(), &ev); err != nil {
		n.channel.Close()
		d.release()
		return nil, fmt.Errorf("epoll: watch the completions of %s: %w", name, err)
	}
	d.subscribe(w, 1)
	w.nics = append(w.nics, n)
	return n, nil
}

// opened is nic where that is open, nil where it is not: to look for a device that
// was removed takes longer than a send.
func (w *Worker) opened(name string) *nicQueues {
	for _, n := range w.nics {
		if n.dev.name == name && n.channel != nil && n.dev.usable() == nil {
			return n
		}
	}
	return nil
}

// queue finds a completion queue with room for n entries.
func (n *nicQueues) queue(want int) (*cq, error) {
	for _, q := range n.cqs {
		if q.free >= want {
			q.free -= want
			return q, nil
		}
	}
	depth := cqDepth
	if most := n.dev.attr.MaxCQE; most > 0 {
		depth = min(depth, most)
	}
	q, err := call(&n.calls, "make a completion queue", func() (*verbs.CQ, error) { return n.dev.ctx.NewCQ(max(depth, want), n.channel) }, func(q *verbs.CQ, err error) {
		if err == nil {
			_ = q.Close()
		}
	})
	if err != nil {
		return nil, err
	}
	c := &cq{CQ: q, free: max(depth, want) - want}
	n.cqs = append(n.cqs, c)
	return c, nil
}

// register registers a connection's memory.
func (n *nicQueues) register(mem []byte) (*verbs.MR, error) {
	return call(&n.calls, "register a connection's memory", func() (*verbs.MR, error) {
		return n.dev.pd.Register(uintptr(unsafe.Pointer(unsafe.SliceData(mem))), len(mem), verbs.LocalWrite|verbs.RemoteWrite)
	}, func(r *verbs.MR, err error) {
		if err == nil {
			_ = r.Close()
		}
	})
}

// deregister ends that; false when it cannot be, and the memory has to stay.
func (n *nicQueues) deregister(w *Worker, r *verbs.MR) bool {
	err := n.calls.do("deregister a connection's memory", r.Close)
	if err == nil || n.dev.usable() != nil {
		return true
	}
	w.leaks("memory of a connection kept: it cannot be deregistered", n.dev.name, err)
	return false
}

// leaks tells, once, that something stays behind until the process ends.
func (w *Worker) leaks(what, device string, err error) {
	if !w.leaked {
		w.leaked = true
		w.opt.Log.Warn("RDMA: "+what, "device", device, "err", err)
	}
}

// ended destroys what is left of a connection's queue pairs, and reports whether none
// writes to its memory any more.
func (w *Worker) ended(c *Conn) bool {
	quiet := true
	w.retired = slices.DeleteFunc(w.retired, func(q *queuePair) bool {
		if q.c != c || q.close() == nil {
			return q.c == c
		}
		quiet = quiet && q.quiet()
		return false
	})
	return quiet
}

// Poll takes in completions, of all connections. It reports whether there were any.
func (w *Worker) Poll() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.poll(false)
}

// idlePolls is how seldom queues are polled that carry nothing: backups'.
const idlePolls = 64

func (w *Worker) poll(all bool) bool {
	found := false
	w.polls++
	for _, n := range w.nics {
		if !all && n.active == 0 && w.polls%idlePolls != 0 {
			continue
		}
		for _, q := range n.cqs {
			for {
				k, err := q.Poll(w.wc[:])
				if err != nil {
					w.lost(n.dev, err)
					break
				}
				for i := range w.wc[:k] {
					w.complete(&w.wc[i])
				}
				found = found || k > 0
				if k < len(w.wc) {
					break
				}
			}
		}
	}
	if found || w.dirty { // an error is news, too, and nothing else may come
		found = true
		w.work()
	}
	return found
}

// complete takes in one completion.
func (w *Worker) complete(wc *verbs.Completion) {
	slot := wc.ID >> slotShift
	if slot >= uint64(len(w.slots)) {
		return
	}
	// What a queue pair leaves behind completes nothing of its successor's.
	if q := w.slots[slot]; q != nil && q.qp.Num() == wc.QP {
		q.complete(wc)
	}
}

// work does what followed from what happened, until nothing more does.
func (w *Worker) work() {
	for w.dirty {
		w.dirty = false
		for _, c := range w.conns {
			if c.dirty {
				c.work()
			}
		}
	}
}

// Arm asks for an event at the next completion, and takes in what came before.
// It reports whether there was anything.
func (w *Worker) Arm() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, n := range w.nics {
		for _, q := range n.cqs {
			if err := q.Arm(); err != nil {
				w.lost(n.dev, err)
			}
		}
	}
	return w.poll(true)
}

// Drain takes the events of all channels.
func (w *Worker) Drain() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, n := range w.nics {
		if n.channel != nil {
			_, _ = n.channel.Drain() // one that is lost has none
		}
	}
}

// ---- what devices tell ----

// tell takes note of a notice without waiting for the worker's lock.
func (w *Worker) tell(n notice) {
	w.news.Lock()
	defer w.news.Unlock()
	if slices.Contains(w.news.list, n) {
		return
	}
	w.news.list = append(w.news.list, n)
	if !w.news.busy {
		w.news.busy = true
		go w.listen()
	}
}

// listen takes in notices until there are no more.
func (w *Worker) listen() {
	for {
		w.news.Lock()
		list := w.news.list
		w.news.list = nil
		w.news.busy = len(list) > 0
		w.news.Unlock()
		if len(list) == 0 {
			return
		}
		w.mu.Lock()
		for _, n := range list {
			w.take(n)
		}
		w.heard()
		w.mu.Unlock()
	}
}

// take breaks the queue pairs that a notice is about.
func (w *Worker) take(n notice) {
	d := n.dev
	switch n.what {
	case verbs.EventDeviceFatal:
		w.lost(d, d.usable())
	case verbs.EventPortError:
		w.each(func(q *queuePair) bool { return q.nic.dev == d && q.port == int(n.id) }, fmt.Errorf("port %s/%d is down", d.name, n.id))
	case verbs.EventCQError:
		w.each(func(q *queuePair) bool { return q.nic.dev == d && q.cq.ID() == n.id }, fmt.Errorf("completion queue %d of %s is in error", n.id, d.name))
	default:
		w.each(func(q *queuePair) bool { return q.nic.dev == d && q.qp.Num() == n.id }, fmt.Errorf("queue pair %d of %s is in error", n.id, d.name))
	}
}

// heard does what follows from an event. Before the first connection, and after
// Close, there may be nobody yet, or no more, whom wake could wake.
func (w *Worker) heard() {
	w.work()
	if len(w.conns) > 0 {
		w.wake()
	}
}

// lost gives up all queue pairs of a device. Nothing more completes there.
func (w *Worker) lost(d *device, why error) {
	w.each(func(q *queuePair) bool { return q.nic.dev == d }, why)
}

// each breaks the queue pairs that match.
func (w *Worker) each(match func(*queuePair) bool, why error) {
	for _, q := range w.slots {
		if q != nil && match(q) {
			q.fail(why)
		}
	}
}

// ---- time ----

const (
	tickSoon = 10 * time.Millisecond  // while a lane has no path
	tickLate = 100 * time.Millisecond // while one has no backup
)

// tick looks after connections that are not as they should be.
func (w *Worker) tick() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ticks = false
	if w.closed {
		return
	}
	if w.poll(true) {
		w.wake()
	}
	now := time.Now()
	for _, c := range w.conns {
		c.tick(now)
	}
	w.work()
	w.schedule()
}

// schedule sets the timer when a connection needs it.
func (w *Worker) schedule() {
	if w.ticks || w.closed {
		return
	}
	d := time.Duration(0)
	for _, c := range w.conns {
		if t := c.needsTick(); t > 0 && (d == 0 || t < d) {
			d = t
		}
	}
	if d == 0 {
		return
	}
	w.ticks = true
	if w.timer == nil {
		w.timer = time.AfterFunc(d, w.tick)
	} else {
		w.timer.Reset(d)
	}
}

// Close ends all connections and gives the devices back. Nobody may use the
// connections any more.
func (w *Worker) Close() {
	w.mu.Lock()
	if w.closed {
		w.mu.Unlock()
		return
	}
	w.closed = true
	if w.timer != nil {
		w.timer.Stop()
	}
	conns := w.conns
	w.mu.Unlock()
	for _, c := range conns {
		c.hangUp() // waits for its goroutine, which may want the lock
	}
	for _, n := range w.nics {
		if n.channel != nil {
			n.dev.subscribe(w, -1)
		}
	}
	w.mu.Lock()
	for _, c := range conns {
		c.free()
	}
	for _, n := range w.nics {
		for _, q := range n.cqs {
			_ = n.calls.do("close a completion queue", q.Close)
		}
		if n.channel != nil {
			_ = n.calls.do("close a completion channel", n.channel.Close)
		}
	}
	nics := w.nics
	w.nics, w.slots, w.conns, w.retired = nil, nil, nil, nil
	unix.Close(w.ep)
	w.mu.Unlock()
	for _, n := range nics {
		n.dev.release()
	}
}
