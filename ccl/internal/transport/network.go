package transport

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/internal/accept"
	"github.com/lockstep-ccl/lockstep/record"
	"golang.org/x/sys/unix"
)

// network is what a mesh has for ranks of other nodes: a listener, connections
// by peer, and an epoll instance that knows all their sockets. Goroutines dial,
// accept and authenticate; then the bare sockets are the executor's alone.
//
// Either side may dial first, and both may at once: the lower rank's attempt
// then stands, the higher one's is answered with busy.
type network struct {
	m      *Mesh
	nonce  [16]byte
	ln     net.Listener
	accept *accept.Acceptor // nil before start
	wg     sync.WaitGroup

	ep       int
	wakeFD   int // written to wake this rank out of epoll_wait
	wakeRead int // read end of wakeFD when it is a pipe of our own, else -1
	ready    []unix.EpollEvent
	up       atomic.Int32                            // links whose sockets are polled
	again    func(l remote, rank int, number uint32) // looks for other sockets; nil: there are none

	mu     sync.Mutex
	closed bool
	links  map[int]remote
	conns  map[net.Conn]struct{} // that this rank has dialled, in their handshake
	heard  accept.Seen           // greetings that were proved
}

// remote is a Link to a rank of another node.
type remote interface {
	pipeline
	connecting() *connector
	// guard puts the link behind a gate when faults may be injected.
	guard()
	// open brings the link up with its authenticated sockets, from any goroutine,
	// with the connector's lock held.
	open(fds []int) error
	// event notes what the kernel tells of a socket that the network watches.
	event(i int, events uint32)
	// finish moves a closing link on; true when the peer's host has what was sent,
	// or nobody wants it.
	finish() bool
	close()
}

// connector is how the sockets of two ranks come together, and do so again when they have
// failed; shared by the goroutines that connect. Attempts are numbered, so that both ends
// know which is the later one.
type connector struct {
	mu      sync.Mutex
	attempt [16]byte // zero: nobody has begun
	number  uint32   // of the attempt
	dialing bool     // it is ours
	pending []int    // its sockets so far, -1 where missing
	theirs  int64    // when the peer's attempt last got on, 0 when there is none
	whole   uint32   // the number of the last attempt that has all its sockets, 0 for none
	next    []int    // the sockets of that, which the executor has yet to take over

	plain      int64     // when the peer last dialled no half of the sockets, 0: always has
	halved     [16]byte  // the attempt of which this end dials a half, or has
	from, to   int       // which of next this end has dialled
	skipped    []skipped // sound sets that were never taken over: the peer may have
	nextNumber uint32    // of next
	chosen     bool      // next takes the place of sockets that are sound
	path       Path      // the plan's, nil for none or not yet
	moving     bool      // what is sought is only a better path
	between    bool      // what is sought takes the place of a set that the peer withdrew
	settled    bool      // both ends have taken over the last set

	lost      uint32 // the set that has failed
	ended     bool   // the peer's host has ended a socket of it: it knows of no such connection
	seeking   bool   // another is wanted
	searching bool   // a goroutine looks for it
	dial      func() // ends its attempt to connect, nil when there is none
	tries     int    // that it has made
	last      error
	waiting   int           // connections that only the peer's kernel has answered
	silent    time.Duration // how long nothing had come from the peer's host when the attempt began
	since     int64         // when the attempt to connect began

	up     atomic.Bool // there is, or was, a set of sockets
	fresh  atomic.Bool // next is there
	over   atomic.Bool // this end has given the link up
	broken atomic.Pointer[error]
}

func (t *connector) connecting() *connector { return t }

// fail breaks the link, from any goroutine.
func (t *connector) fail(err error) { t.broken.CompareAndSwap(nil, &err) }

// skipped is a set of sockets that another had replaced before this end took it over.
type skipped struct {
	number uint32
	fds    []int
}

// dropSkipped closes those before a set that the peer has taken over.
func (t *connector) dropSkipped(before uint32) {
	t.skipped = slices.DeleteFunc(t.skipped, func(s skipped) bool {
		if s.number < before {
			closeAll(s.fds)
		}
		return s.number < before
	})
}

// discard closes the sockets of an attempt that another has replaced.
func (t *connector) discard() {
	closeAll(t.pending)
	t.pending = nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// add gives a link one authenticated socket; the last one brings it up.
func (n *network) add(l remote, g dataGreeting, fd int) {
	t := l.connecting()
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.attempt != g.attempt || t.whole >= g.number {
		unix.Close(fd)
		return
	}
	if t.pending == nil {
		t.pending = slices.Repeat([]int{-1}, g.total)
	}
	if g.index >= len(t.pending) {
		unix.Close(fd)
		return
	}
	if old := t.pending[g.index]; old >= 0 {
		unix.Close(old) // its dialler has not heard of it, and dialled again
	}
	t.pending[g.index] = fd
	if !t.dialing {
		t.theirs = record.Now()
	}
	if slices.Contains(t.pending, -1) {
		return
	}
	t.from, t.to = 0, g.total
	if g.halves { // the first half is whose attempt it is
		if t.from, t.to = 0, g.total/2; !t.dialing {
			t.from, t.to = g.total/2, g.total
		}
	}
	t.chosen, t.moving, t.between, t.settled = g.move, false, false, g.number == 1
	t.whole, t.dialing, t.theirs = g.number, false, 0
	if err := l.open(t.pending); err != nil {
		t.fail(err)
	}
	t.pending = nil
	t.up.Store(true)
	n.m.Wake()
}

// listen opens this rank's data listener.
func listen(m *Mesh, nonce [16]byte) (*network, error) {
	if len(m.cfg.Key) == 0 {
		return nil, errors.New("no key for data connections")
	}
	ln, err := accept.Listen(net.JoinHostPort(m.cfg.Host, "0"))
	if err != nil {
		return nil, fmt.Errorf("listen for data connections: %w", err)
	}
	n := &network{
		m: m, nonce: nonce, ln: ln, ep: -1, wakeFD: -1, wakeRead: -1,
		links: make(map[int]remote), conns: make(map[net.Conn]struct{}),
	}
	n.again = n.seek
	return n, nil
}

func (n *network) addr() string { return n.ln.Addr().String() }

// start makes the network ready to be slept on. wakeFD is the FIFO that local
// peers write to, -1 when there are none.
func (n *network) start(wakeFD int) error {
	var err error
	if n.ep, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return fmt.Errorf("epoll: %w", err)
	}
	listenTo := wakeFD
	if n.wakeFD = wakeFD; wakeFD < 0 {
		var p [2]int
		if err := unix.Pipe2(p[:], unix.O_NONBLOCK|unix.O_CLOEXEC); err != nil {
			return fmt.Errorf("pipe: %w", err)
		}
		n.wakeRead, n.wakeFD, listenTo = p[0], p[1], p[0]
	}
	n.ready = make([]unix.EpollEvent, 64)
	if err := n.watch(listenTo, unix.EPOLLIN, wakeEvent, listenTo); err != nil {
		return err
	}
	n.accept, err = accept.New(n.ln.(*net.TCPListener), accept.Options{MaxUnauthenticated: 1024, Serve: n.serve, PeekSize: dataHello, Inspect: n.inspect})
	return err
}

// In place of a peer's rank.
const (
	wakeEvent = -1 // somebody wrote to wakeFD
	rdmaEvent = -2 // an armed completion queue has something
)

// watch adds a descriptor to the epoll instance; events report who and which.
func (n *network) watch(fd int, events uint32, who, which int) error {
	ev := unix.EpollEvent{Events: events | unix.EPOLLET, Fd: int32(who), Pad: int32(which)}
	if err := unix.EpollCtl(n.ep, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
		return fmt.Errorf("epoll: watch: %w", err)
	}
	return nil
}

// poll takes note of what the kernel has to tell of the sockets, waiting up to
// d for it. Edges are remembered in the sockets until a call would block.
func (n *network) poll(d time.Duration) {
	var count int
	if d == 0 {
		if n == nil || n.up.Load() == 0 {
			return
		}
		r, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(n.ep), uintptr(unsafe.Pointer(&n.ready[0])), uintptr(len(n.ready)), 0, 0, 0)
		if errno != 0 {
			return
		}
		count = int(r)
	} else {
		var err error
		ms := (d + time.Millisecond - 1) / time.Millisecond
		if count, err = unix.EpollWait(n.ep, n.ready, int(min(ms, 1<<30))); err != nil {
			return // EINTR
		}
	}
	if count > 0 {
		n.m.progressed = true // nobody has looked at these sockets since
	}
	for _, ev := range n.ready[:count] {
		switch ev.Fd {
		case wakeEvent:
			var b [512]byte
			_, _ = unix.Read(int(ev.Pad), b[:])
		case rdmaEvent:
			n.m.rdma.worker.Drain()
		default:
			if l := n.peer(int(ev.Fd)); l.connecting().up.Load() {
				l.event(int(ev.Pad), ev.Events)
			}
		}
	}
}

// peer is the connection to a rank, which may only be coming up.
func (n *network) peer(rank int) remote {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := n.links[rank]
	if l == nil {
		if n.m.overRDMA(rank) {
			l = newRDMALink(n, rank)
		} else {
			l = &tcpLink{m: n.m, n: n, peer: rank}
		}
		n.links[rank] = l
	}
	return l
}

// sockets is how many a connection to a rank has when this one dials.
func (n *network) sockets(rank int) int {
	if n.m.overRDMA(rank) {
		return 1
	}
	if n.planned(rank) {
		return 2 * min(cmp.Or(n.m.cfg.Sockets, maxSockets/2), maxSockets/2)
	}
	return cmp.Or(n.m.cfg.Sockets, 2)
}

func (n *network) magic(rank int) string {
	if n.m.overRDMA(rank) {
		return controlMagic
	}
	return dataMagic
}

// link is the executor's: it wants the connection, now or later.
func (n *network) link(rank int) (pipeline, error) {
	l := n.peer(rank)
	l.guard()
	t := l.connecting()
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.up.Load() || t.attempt != ([16]byte{}) {
		return l, nil
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return nil, ErrClosed
	}
	attempt := newNonce()
	t.attempt, t.number, t.dialing = attempt, 1, true
	n.wg.Go(func() {
		if err := n.dial(l, rank, attempt); err != nil {
			t.fail(fmt.Errorf("connect to rank %d at %s: %w", rank, n.m.infos[rank].Addr, err))
			n.m.Wake()
		}
	})
	return l, nil
}

func (n *network) close() {
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		return
	}
	n.closed = true
	for c := range n.conns {
		c.Close()
	}
	n.mu.Unlock()
	if n.ln.Close(); n.accept != nil {
		n.accept.Close()
	}
	n.m.stop()
	n.wg.Wait()
	for _, l := range n.links {
		l.close()
		if p := l.connecting().path; p != nil {
			p.Close()
		}
	}
	for _, fd := range []int{n.ep, n.wakeRead} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	if n.wakeRead >= 0 {
		unix.Close(n.wakeFD)
	}
}

// lingerFor bounds how long closing waits for peers' hosts to take the last bytes.
const lingerFor = time.Second

// linger lets the last bytes arrive, unless nobody wants them. Time in which a path is down, or
// the kernel retransmits, does not count, up to Config.Outage.
func (n *network) linger() {
	last := time.Now()
	for left, away := lingerFor, n.m.cfg.Outage; n.m.cfg.Err() == nil && left > 0 && away > 0; {
		done, lost := true, false
		n.mu.Lock()
		links := slices.Collect(maps.Values(n.links))
		n.mu.Unlock()
		for _, l := range links {
			if l.connecting().up.Load() {
				done = l.finish() && done
			}
			t, ok := l.(*tcpLink)
			lost = lost || ok && t.err == nil && (t.lost != nil || t.unanswered())
		}
		if done {
			return
		}
		time.Sleep(100 * time.Microsecond)
		now := time.Now()
		if lost {
			away -= now.Sub(last)
		} else {
			left -= now.Sub(last)
		}
		last = now
	}
}

// hold keeps a connection that was dialled, in its handshake closable; false when it is too late.
func (n *network) hold(c net.Conn) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		c.Close()
		return false
	}
	n.conns[c] = struct{}{}
	return true
}

func (n *network) release(c net.Conn) {
	n.mu.Lock()
	delete(n.conns, c)
	n.mu.Unlock()
	c.Close()
}

// detach gives a non-blocking descriptor of a connection's socket, which the
// Go runtime knows nothing of. There is no TCP_USER_TIMEOUT, since that would take a
// stopped peer, whose window is shut, for a dead one (package rdma sets its own for the
// socket beside it).
func detach(conn net.Conn) (int, error) {
	raw, err := conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		return -1, err
	}
	fd, dupErr := -1, error(nil)
	err = raw.Control(func(p uintptr) {
		keepPath(int(p))
		fd, dupErr = unix.FcntlInt(p, unix.F_DUPFD_CLOEXEC, 0)
	})
	return fd, errors.Join(err, dupErr)
}
