package transport

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// network is what a mesh has for ranks of other nodes: a listener, connections
// by peer, and an epoll instance that knows all their sockets. Goroutines dial,
// accept and authenticate; then the bare sockets are the executor's alone.
//
// Either side may dial first, and both may at once: the lower rank's attempt
// then stands, the higher one's is answered with busy.
type network struct {
	m     *mesh
	nonce [16]byte
	ln    net.Listener
	slots chan struct{}
	wg    sync.WaitGroup

	ep    int
	bell  int // written to wake this rank out of epoll_wait
	ring  int // read end of bell when it is a pipe of our own, else -1
	ready []unix.EpollEvent
	up    atomic.Int32 // links whose sockets are polled

	mu     sync.Mutex
	closed bool
	links  map[int]remote
	conns  map[net.Conn]struct{} // in their handshake
}

// remote is a Link to a rank of another node.
type remote interface {
	pipeline
	meet() *meeting
	// guard puts the link behind a gate when faults may be injected.
	guard()
	// open brings the link up with its authenticated sockets, from any goroutine,
	// with the meeting's lock held.
	open(fds []int) error
	// event notes what the kernel tells of a socket that the network watches.
	event(i int, events uint32)
	// finish moves a closing link on; true when the peer's host has what was sent,
	// or nobody wants it.
	finish() bool
	close()
}

// meeting is how the sockets of two ranks come together, shared by the
// goroutines that connect.
type meeting struct {
	mu      sync.Mutex
	attempt [16]byte // zero: nobody has begun
	dialing bool     // the attempt is ours
	pending []int    // its sockets so far, -1 where missing
	up      atomic.Bool
	broken  atomic.Pointer[error]
}

func (t *meeting) meet() *meeting { return t }

// fail breaks the link, from any goroutine.
func (t *meeting) fail(err error) { t.broken.CompareAndSwap(nil, &err) }

// discard closes the sockets of an attempt that another has replaced.
func (t *meeting) discard() {
	for _, fd := range t.pending {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	t.pending = nil
}

// add gives a link one authenticated socket; the last one brings it up.
func (n *network) add(l remote, g dataGreeting, fd int) {
	t := l.meet()
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.attempt != g.attempt || t.up.Load() {
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
	if slices.Contains(t.pending, -1) {
		return
	}
	if err := l.open(t.pending); err != nil {
		t.fail(err)
	}
	t.pending = nil
	t.up.Store(true)
	n.m.Wake()
}

const (
	dataMagic        = "LKSTEPda"
	controlMagic     = "LKSTEPrc" // of a socket beside RDMA
	dataHello        = 8 + 8 + 4 + 4 + 2 + 2 + 16 + sha256.Size
	dataReply        = 1 + sha256.Size
	dataTimeout      = 5 * time.Second
	maxDataHandshake = 64

	replyOK   = 1
	replyBusy = 2 // the peer's own attempt stands
)

// listen opens this rank's data listener.
func listen(m *mesh, nonce [16]byte) (*network, error) {
	if len(m.cfg.Key) == 0 {
		return nil, errors.New("no key for data connections")
	}
	ln, err := net.Listen("tcp", net.JoinHostPort(m.cfg.Host, "0"))
	if err != nil {
		return nil, fmt.Errorf("listen for data connections: %w", err)
	}
	n := &network{
		m: m, nonce: nonce, ln: ln, slots: make(chan struct{}, maxDataHandshake), ep: -1, bell: -1, ring: -1,
		links: make(map[int]remote), conns: make(map[net.Conn]struct{}),
	}
	return n, nil
}

func (n *network) addr() string { return n.ln.Addr().String() }

// start makes the network ready to be slept on. bell is the FIFO that local
// peers ring, -1 when there are none.
func (n *network) start(bell int) error {
	var err error
	if n.ep, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return fmt.Errorf("epoll: %w", err)
	}
	listenTo := bell
	if n.bell = bell; bell < 0 {
		var p [2]int
		if err := unix.Pipe2(p[:], unix.O_NONBLOCK|unix.O_CLOEXEC); err != nil {
			return fmt.Errorf("pipe: %w", err)
		}
		n.ring, n.bell, listenTo = p[0], p[1], p[0]
	}
	n.ready = make([]unix.EpollEvent, 64)
	if err := n.watch(listenTo, unix.EPOLLIN, bellEvent, listenTo); err != nil {
		return err
	}
	n.wg.Add(1)
	go n.accept()
	return nil
}

// In place of a peer's rank.
const (
	bellEvent = -1 // the bell rang
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
		case bellEvent:
			var b [512]byte
			unix.Read(int(ev.Pad), b[:])
		case rdmaEvent:
			n.m.rdma.worker.Drain()
		default:
			if l := n.peer(int(ev.Fd)); l.meet().up.Load() {
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
	return n.m.cfg.Sockets
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
	t := l.meet()
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
	t.attempt, t.dialing = newNonce(), true
	n.wg.Go(func() {
		if err := n.dial(l, rank); err != nil {
			t.fail(fmt.Errorf("connect to rank %d at %s: %w", rank, n.m.cards[rank].Addr, err))
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
	n.ln.Close()
	n.m.stop()
	n.wg.Wait()
	n.linger()
	for _, l := range n.links {
		l.close()
	}
	for _, fd := range []int{n.ep, n.ring} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	if n.ring >= 0 {
		unix.Close(n.bell)
	}
}

// lingerFor bounds how long closing waits for peers' hosts to take the last bytes.
const lingerFor = time.Second

// linger lets the last bytes arrive, unless nobody wants them.
func (n *network) linger() {
	for deadline := time.Now().Add(lingerFor); n.m.cfg.Err() == nil && time.Now().Before(deadline); {
		done := true
		for _, l := range n.links {
			if l.meet().up.Load() {
				done = l.finish() && done
			}
		}
		if done {
			return
		}
		time.Sleep(100 * time.Microsecond)
	}
}

// hold keeps a connection in its handshake closable; false when it is too late.
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

// hello is the first thing on each data socket, from the side that dialled.
type dataGreeting struct {
	src, dst     int
	index, total int
	attempt      [16]byte
}

func (n *network) encode(g dataGreeting) []byte {
	b := append(make([]byte, 0, dataHello), n.magic(g.dst)...)
	b = binary.LittleEndian.AppendUint64(b, n.m.cfg.ID)
	b = binary.LittleEndian.AppendUint32(b, uint32(g.src))
	b = binary.LittleEndian.AppendUint32(b, uint32(g.dst))
	b = binary.LittleEndian.AppendUint16(b, uint16(g.index))
	b = binary.LittleEndian.AppendUint16(b, uint16(g.total))
	b = append(b, g.attempt[:]...)
	return append(b, n.prove("hello", n.m.cards[g.dst].Nonce, b)...)
}

// prove is knowledge of the communicator's key, for one listener and one message.
func (n *network) prove(what string, nonce [16]byte, msg []byte) []byte {
	h := hmac.New(sha256.New, n.m.cfg.Key)
	io.WriteString(h, what)
	h.Write(nonce[:])
	h.Write(msg)
	return h.Sum(nil)
}

func (n *network) decode(b []byte) (g dataGreeting, err error) {
	le := binary.LittleEndian
	body, proof := b[:dataHello-sha256.Size], b[dataHello-sha256.Size:]
	if !hmac.Equal(proof, n.prove("hello", n.nonce, body)) {
		return g, errors.New("not a member of this communicator")
	}
	g = dataGreeting{src: int(le.Uint32(b[16:])), dst: int(le.Uint32(b[20:])), index: int(le.Uint16(b[24:])), total: int(le.Uint16(b[26:])), attempt: [16]byte(b[28:44])}
	if le.Uint64(b[8:]) != n.m.cfg.ID || g.dst != n.m.cfg.Rank || g.src >= n.m.cfg.Size || g.src == g.dst || g.total < 1 || g.total > maxSockets || g.index >= g.total || string(b[:8]) != n.magic(g.src) {
		return g, fmt.Errorf("%w: greeting from rank %d to rank %d, socket %d of %d", ErrCorrupt, g.src, g.dst, g.index, g.total)
	}
	return g, nil
}

const maxSockets = 16

func (n *network) accept() {
	defer n.wg.Done()
	for {
		conn, err := n.ln.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			time.Sleep(10 * time.Millisecond) // out of descriptors: others may give some back
			continue
		}
		select {
		case n.slots <- struct{}{}:
		case <-n.m.ctx.Done():
			conn.Close()
			return
		}
		n.wg.Go(func() {
			defer func() { <-n.slots }()
			if n.hold(conn) {
				n.welcome(conn)
				n.release(conn)
			}
		})
	}
}

// welcome authenticates one accepted connection and gives its socket to its link.
func (n *network) welcome(conn net.Conn) {
	conn.SetDeadline(time.Now().Add(dataTimeout))
	var b [dataHello]byte
	if _, err := io.ReadFull(conn, b[:]); err != nil {
		return
	}
	g, err := n.decode(b[:])
	if err != nil {
		return
	}
	l := n.peer(g.src)
	t := l.meet()
	t.mu.Lock()
	status := byte(replyOK)
	switch {
	case t.up.Load(), t.dialing && n.m.cfg.Rank < g.src:
		status = replyBusy
	case t.attempt != g.attempt:
		t.discard()
		t.attempt, t.dialing = g.attempt, false
	}
	if status == replyOK && len(t.pending) > 0 && len(t.pending) != g.total {
		status = replyBusy
	}
	var fd int
	if status == replyOK {
		if fd, err = detach(conn); err != nil {
			t.mu.Unlock()
			return
		}
	}
	t.mu.Unlock()
	reply := append([]byte{status}, n.prove("reply", n.nonce, append(b[:], status))...)
	if _, err := conn.Write(reply); err != nil || status != replyOK {
		if status == replyOK {
			unix.Close(fd)
		}
		return
	}
	n.add(l, g, fd)
}

// dial connects all sockets to a peer, unless the peer's own attempt stands.
func (n *network) dial(l remote, rank int) error {
	t := l.meet()
	t.mu.Lock()
	attempt := t.attempt
	t.mu.Unlock()
	for i := range n.sockets(rank) {
		g := dataGreeting{src: n.m.cfg.Rank, dst: rank, index: i, total: n.sockets(rank), attempt: attempt}
		fd, status, err := n.greet(g)
		for wait := time.Millisecond; err != nil; wait = min(2*wait, 100*time.Millisecond) {
			// Whoever is gone refuses; all else may pass.
			if n.m.ctx.Err() != nil || n.m.cfg.Err() != nil || errors.Is(err, syscall.ECONNREFUSED) {
				return err
			}
			select {
			case <-n.m.ctx.Done():
			case <-time.After(wait/2 + rand.N(wait)):
			}
			fd, status, err = n.greet(g)
		}
		if status == replyBusy {
			t.mu.Lock()
			if t.attempt == attempt && !t.up.Load() {
				t.dialing = false
			}
			t.mu.Unlock()
			return nil
		}
		n.add(l, g, fd)
	}
	return nil
}

// greet opens one socket.
func (n *network) greet(g dataGreeting) (fd int, status byte, err error) {
	ctx, cancel := context.WithTimeout(n.m.ctx, dataTimeout)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", n.m.cards[g.dst].Addr)
	if err != nil {
		return 0, 0, err
	}
	if !n.hold(conn) {
		return 0, 0, ErrClosed
	}
	defer n.release(conn)
	conn.SetDeadline(time.Now().Add(dataTimeout))
	hello := n.encode(g)
	if _, err := conn.Write(hello); err != nil {
		return 0, 0, err
	}
	// A peer that is stopped answers when it goes on; closing ends the wait.
	conn.SetDeadline(time.Time{})
	var b [dataReply]byte
	if _, err := io.ReadFull(conn, b[:]); err != nil {
		return 0, 0, err
	}
	if !hmac.Equal(b[1:], n.prove("reply", n.m.cards[g.dst].Nonce, append(hello, b[0]))) {
		return 0, 0, fmt.Errorf("%w: it does not know the communicator's key", ErrCorrupt)
	}
	if b[0] != replyOK {
		return 0, replyBusy, nil
	}
	fd, err = detach(conn)
	return fd, replyOK, err
}

// detach gives a non-blocking descriptor of a connection's socket, which the
// Go runtime knows nothing of. Keepalive notices a dead host (package rdma sets its own
// for the socket beside it); there is no TCP_USER_TIMEOUT, since that would take a stopped peer, whose window is shut, for a dead one.
func detach(conn net.Conn) (int, error) {
	tcp := conn.(*net.TCPConn)
	tcp.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: time.Second, Interval: time.Second, Count: 2})
	raw, err := tcp.SyscallConn()
	if err != nil {
		return -1, err
	}
	fd, dupErr := -1, error(nil)
	err = raw.Control(func(p uintptr) { fd, dupErr = unix.FcntlInt(p, unix.F_DUPFD_CLOEXEC, 0) })
	return fd, errors.Join(err, dupErr)
}
