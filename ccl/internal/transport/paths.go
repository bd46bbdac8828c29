package transport

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/lockstep-ccl/lockstep/internal/accept"
	"github.com/lockstep-ccl/lockstep/record"
	"golang.org/x/sys/unix"
)

// How connections get their paths. Switches choose a path by a hash of addresses and ports,
// so who chooses the source port chooses the path. Where both ends have a plan, each dials
// half of the sockets, which carry what it sends: a sender knows the ports of its own host
// only. Who begins an attempt dials the first half; who is greeted by that dials the second.
// A connection whose second half does not come is made again without one.
//
// A lane over RDMA is a queue pair at each end, which has its own source port: each end asks for
// those of its own, and no other has to have a plan.

// Paths gives the sockets of TCP connections between nodes, and the queue pairs of RDMA over
// RoCE v2, their source ports. It may be shared by communicators, and called from any goroutine.
type Paths interface {
	// Open begins a connection. move has it go over to other ports, which Ports is asked
	// for: it may be called from any goroutine until Path.Close, and does not block.
	Open(conn PathConn, move func()) Path
}

// Path is one connection's.
type Path interface {
	// Ports returns the source ports for the lanes that this end dials next, as far as
	// known by the end of ctx: what is missing, or 0, is left to the kernel.
	Ports(ctx context.Context, lanes int) []uint16
	// Seen tells how the lanes that this end dialled fare, several times a second while
	// the rank waits. It must not block, nor keep the slice.
	Seen(lanes []LaneState)
	Close()
}

// PathConn is a connection as a plan knows it.
type PathConn struct {
	Comm       uint64
	Name       string // of the communicator
	Rank, Peer int
	Local      netip.Addr // invalid: the kernel's choice
	Remote     netip.AddrPort
	// RoCE: lanes are queue pairs, whose packets are UDP from ports of 49152 and above. A port
	// may serve several at once, and again at any time.
	RoCE bool
}

// LaneState is what this end's kernel knows of a lane; its NIC, of a queue pair.
type LaneState struct {
	Port  uint16 // source port; of a queue pair that moves, the one that it moves to
	Acked uint64 // bytes
	// Segments that the kernel has sent, and those of them that were lost, as far as it knows: sent again,
	// but not those that had come. They wrap. A NIC does not tell of which lane.
	Segments, Lost uint32
	Speed          uint64 // bytes a second while there was a backlog, of late; 0: not known
	// Stalled: bytes are unacknowledged and were sent again; of a queue pair, nothing
	// has been acknowledged for a while.
	Stalled bool
}

const (
	// moveFor bounds an attempt to move.
	moveFor = 10 * time.Second
	// stalledAfter is for how long nothing may be acknowledged on a planned lane.
	stalledAfter = int64(100 * time.Millisecond)
	// lookLanes takes lookPath's place where a link has several lanes, or a plan.
	lookLanes = 50 * time.Millisecond

	// In a greeting's total.
	halvesFlag = 1 << 15 // the second half is the greeted one's to dial
	moveFlag   = 1 << 14 // the former set of sockets is sound
)

// planned reports whether both ends of a connection have a plan.
func (n *network) planned(rank int) bool {
	return n.m.cfg.Paths != nil && n.m.infos[rank].Paths && !n.m.overRDMA(rank)
}

// pathOf is the plan of a connection, nil where there is none.
func (n *network) pathOf(l remote, rank int) Path {
	if !n.planned(rank) {
		return nil
	}
	t := l.connecting()
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.path != nil || t.over.Load() {
		return t.path
	}
	to, err := netip.ParseAddrPort(n.m.infos[rank].Addr)
	if err != nil {
		return nil
	}
	local, _ := netip.ParseAddr(n.m.cfg.Host)
	t.path = n.m.cfg.Paths.Open(PathConn{
		Comm: n.m.cfg.ID, Name: n.m.cfg.Name, Rank: n.m.cfg.Rank, Peer: rank, Local: local.Unmap(),
		Remote: netip.AddrPortFrom(to.Addr().Unmap(), to.Port()),
	}, func() { n.move(l, rank) })
	return t.path
}

// ports asks the plan for source ports, 0 where the kernel is to choose.
func (n *network) ports(ctx context.Context, l remote, rank, lanes int) []uint16 {
	ports := make([]uint16, lanes)
	if p := n.pathOf(l, rank); p != nil {
		ctx, cancel := context.WithTimeout(ctx, n.m.cfg.Bounds.Ports)
		copy(ports, p.Ports(ctx, lanes))
		cancel()
	}
	return ports
}

// dialFrom opens one TCP connection, from the port that is given if that can be.
func (n *network) dialFrom(ctx context.Context, rank int, port uint16) (net.Conn, error) {
	addr := n.m.infos[rank].Addr
	if port != 0 {
		d := net.Dialer{KeepAlive: -1, LocalAddr: &net.TCPAddr{IP: net.ParseIP(n.m.cfg.Host), Port: int(port)}, Control: reuse}
		d.SetMultipathTCP(false)
		planning, cancel := context.WithTimeout(ctx, n.m.cfg.Bounds.Dial)
		conn, err := d.DialContext(planning, "tcp", addr)
		cancel()
		if err == nil || ctx.Err() != nil || errors.Is(err, syscall.ECONNREFUSED) {
			return conn, err
		}
		n.m.cfg.Log.Debug("a connection goes on without its planned port", "rank", n.m.cfg.Rank, "peer", rank, "port", port, "err", err)
	}
	return accept.Dial(ctx, &net.Dialer{KeepAlive: -1}, addr)
}

// reuse lets a port be taken that has a connection to elsewhere, or one that is over.
func reuse(_, _ string, c syscall.RawConn) (err error) {
	return errors.Join(c.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	}), err)
}

// move has a connection go over to the plan's ports while its sockets are sound. Who
// fails in that goes on over those.
func (n *network) move(l remote, rank int) {
	t := l.connecting()
	t.mu.Lock()
	number := t.whole
	idle := number > 0 && t.settled && !t.seeking && !t.over.Load() && !t.fresh.Load()
	if idle {
		t.moving = true
	}
	t.mu.Unlock()
	if !idle {
		return
	}
	n.seek(l, rank, number)
	time.AfterFunc(moveFor, func() {
		t.mu.Lock()
		given := t.moving && t.lost == number
		t.mu.Unlock()
		if given {
			n.forget(l)
		}
	})
}

// back dials this end's half of the sockets of a peer's attempt.
func (n *network) back(l remote, g dataGreeting) {
	t := l.connecting()
	ports := n.ports(n.m.ctx, l, g.src, g.total-g.total/2)
	each(n.m.ctx, len(ports), func(ctx context.Context, i int) answer {
		b := dataGreeting{src: g.dst, dst: g.src, index: g.total/2 + i, total: g.total, attempt: g.attempt, number: g.number, halves: true, move: g.move}
		for wait := time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
			t.mu.Lock()
			wanted := t.attempt == g.attempt && t.whole < g.number && ctx.Err() == nil && n.m.cfg.Err() == nil
			t.mu.Unlock()
			if !wanted {
				return answer{status: replyStale}
			}
			fd, status, theirs, err := n.greet(ctx, b, ports[i])
			if err == nil && status == replyOK {
				n.add(l, b, fd)
			}
			if err == nil {
				return answer{status: status, theirs: theirs} // it has gone on without, unless it is taken
			}
			n.pause(wait)
		}
	})
}

// answer begins back, once an attempt.
func (n *network) answer(l remote, g dataGreeting) {
	t := l.connecting()
	t.mu.Lock()
	defer t.mu.Unlock()
	if !g.halves || g.index >= g.total/2 || t.halved == g.attempt || t.attempt != g.attempt {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return
	}
	t.halved = g.attempt
	n.wg.Go(func() { n.back(l, g) })
}

// awaitHalf waits until the peer has dialled its half. When that does not come, this
// connection does without for a while.
func (n *network) awaitHalf(ctx context.Context, t *connector, number uint32) {
	ctx, cancel := context.WithTimeout(ctx, n.m.cfg.Bounds.Half)
	defer cancel()
	for wait := 100 * time.Microsecond; ; wait = min(2*wait, 10*time.Millisecond) {
		t.mu.Lock()
		done := t.whole >= number || t.number != number
		if !done && ctx.Err() != nil {
			t.plain = record.Now()
		}
		t.mu.Unlock()
		if done || ctx.Err() != nil {
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
}

// survey tells the plan how the lanes of this end fare.
func (l *tcpLink) survey() {
	l.mu.Lock()
	p := l.path
	l.mu.Unlock()
	if p == nil {
		return
	}
	l.lanes = l.lanes[:0]
	for _, s := range l.mine() {
		l.lanes = append(l.lanes, LaneState{Port: s.port, Acked: s.path.acked, Segments: s.path.segments, Lost: s.path.lost, Speed: uint64(1e9 * s.rate), Stalled: s.stalled || s.silent || s.broken})
	}
	p.Seen(l.lanes)
}

// lookEvery is how often a rank that waits asks its kernel how its sockets fare.
func (l *tcpLink) lookEvery() int64 {
	if l.hi-l.lo > 1 || l.hi-l.lo < len(l.socks) {
		return int64(lookLanes)
	}
	return lookPath
}

// stalls notes whether a lane's bytes are neither acknowledged nor merely late.
func (s *socket) stalls(info *unix.TCPInfo, now int64) {
	s.stalled = info.Unacked > 0 && info.Retransmits > 0 && s.owed > 0 && now-s.owed >= stalledAfter
}

// mine is the sockets that carry what this end sends.
func (l *tcpLink) mine() []*socket { return l.socks[min(l.lo, len(l.socks)):min(l.hi, len(l.socks))] }

// localPort is a socket's source port.
func localPort(fd int) uint16 {
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return 0
	}
	switch a := sa.(type) {
	case *unix.SockaddrInet4:
		return uint16(a.Port)
	case *unix.SockaddrInet6:
		return uint16(a.Port)
	}
	return 0
}
