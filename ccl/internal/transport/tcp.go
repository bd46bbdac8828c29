package transport

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/netip"

	"github.com/lockstep-ccl/lockstep/record"
	"golang.org/x/sys/unix"
)

// A frame on a data socket is a 32-byte header and, for data, its bytes:
//
//	0  kind       4  length     8  stream position of the first byte, or line number
//	1  padding before it that the sender skipped (AlignSend)
//	16 bytes consumed by the frame's sender (credit)
//	24 lines consumed by the frame's sender (credit), modulo 2^32
//	28 tag of a line
//
// A fourth kind says where to go on (resume.go). Every frame carries credit; data of one
// stream goes over several sockets in whatever order, and its position says where it belongs.
const (
	frameSize = 32

	frameData   = 1
	frameLine   = 2
	frameCredit = 3
	frameResume = 4

	// maxChunk is the most bytes in a data frame: how large messages are striped.
	maxChunk = 128 << 10
	// smallSend goes over the first socket, in one piece with its header.
	smallSend = 4 << 10
	// readAhead is how much is read to see a header and what follows it.
	readAhead = 4 << 10
	// directFrom is how large a receive must be to bypass the ring.
	directFrom = 4 << 10
	// peekEnough is what Peek reads at a time, so that reducing it overlaps with
	// the arrival of more.
	peekEnough = 64 << 10
	// wantLine asks receive for a line.
	wantLine = -1
	// maxGaps bounds the pieces beyond the first gap: each gap is a large frame
	// on its way over another socket.
	maxGaps = 4096
)

// tcpLink is a Link over TCP.
type tcpLink struct {
	m    *Mesh
	n    *network
	peer int
	gate *gate // nil without fault injection

	connector

	// The executor's, once up.
	opened bool
	socks  []*socket
	turn   int     // socket for the next large chunk
	splits bool    // messages are split over the sockets by their rates
	last   *socket // that took a frame then
	run    int     // and how many bytes since it was another
	lo, hi int     // socks that carry what this end sends
	lanes  []LaneState
	former []*socket // sound, and replaced here: the peer may not have left them
	meter  meter

	sent, acked           uint64 // tx stream: taken from the caller, consumed by the receiver
	pad                   uint64 // skipped since the last frame
	linesSent, linesAcked uint64 // a credit carries the low 32 bits

	ring       []byte // rx stream between got and front, and beyond; made at first use
	got, front uint64 // consumed; arrived without a gap
	told       uint64 // got, as the peer was last told
	gaps       []span // arrived beyond front, ascending
	lines      [lineSlots]lineIn
	linesGot   uint64 // consumed
	linesIn    uint64 // arrived
	linesTold  uint64
	err        error
	creditDue  bool // giveCredit found no socket
	misses     int  // receives that found no socket readable
	wants      int64

	// Of outages; see resume.go and outage.go.
	kept       retained
	number     uint32 // of the set of sockets
	lost       error  // why there is no path, nil while there is one
	looked     int64
	rtt        rttMean
	half       int64  // since when a socket has ended, and others have not
	awaits     bool   // for the peer to say where it goes on
	unsure     bool   // the set took the place of sound sockets, and the peer may not have it
	again      []span // of the stream, to be sent again
	resendLine uint64 // as are lines from this one on

	// Of late lanes; see reinject.go.
	passes     bool   // some are late, and others not
	lineSocket int    // that lines go over
	waste      []byte // where bytes go that have come already

	withdrawnAt int64 // when the peer withdrew such a set, 0 when it has not

	resumes, resent, retransmitted uint64 // bytes, by this link and by its former sockets' kernel
	toldResumes, toldResent        uint64
}

type span struct{ lo, hi uint64 }

// lineIn is a line that has arrived.
type lineIn struct {
	payload [LinePayload]byte
	n, tag  uint32
}

// socket is one of a link's sockets.
type socket struct {
	fd                 int
	readable, writable bool  // as far as edges and calls have told
	hungUp             bool  // read on to its end
	over               bool  // nothing more can be read
	broken             bool  // nothing more can be written
	ended              bool  // closing: the end is on its way
	unread             error // closing: why what the peer has still sent cannot be read
	stalled            bool
	late, retold       bool   // see reinject.go; and the peer was told again what had been consumed
	port               uint16 // source port
	path
	pace

	in         [readAhead]byte
	inLo, inHi int
	pos, end   uint64 // of the data frame being read; none when equal
	shown      uint64 // up to where its bytes count as arrived

	out     []byte // what a partial write has left
	wrote   uint64 // bytes of frames, with that
	flights []flight
	landed  int // flights before it are acknowledged
	scratch [frameSize + smallSend]byte

	// What the kernel reads, where the garbage collector sees it.
	iov [2]unix.Iovec
	msg unix.Msghdr
	hdr [frameSize]byte
}

// open has the executor take over the sockets of a finished attempt.
func (l *tcpLink) open(fds []int) error {
	if l.chosen && l.next != nil && len(l.skipped) < maxSockets {
		l.skipped = append(l.skipped, skipped{l.nextNumber, l.next})
	} else {
		closeAll(l.next)
	}
	l.next, l.nextNumber = fds, l.whole
	l.fresh.Store(true)
	return nil
}

func (l *tcpLink) guard() { l.gate = l.m.newGate(l, l.peer) }

// ready reports whether the link can be used; an error when it never will.
func (l *tcpLink) ready() (bool, error) {
	if l.err != nil {
		return false, l.err
	}
	if l.fresh.Load() {
		l.adopt()
	}
	if !l.opened {
		if e := l.broken.Load(); e != nil {
			return false, l.fatal(*e)
		}
		if len(l.socks) == 0 {
			return false, l.err
		}
		l.opened = true
		l.meter.open(l.m, l.entry())
	}
	return true, nil
}

// entry is the link's identity: its first socket's number, and the addresses and ports of
// both ends as the kernel has them (those that ss(8) shows), of that socket.
func (l *tcpLink) entry() record.ConnEntry {
	var st unix.Stat_t
	fd := l.socks[0].fd
	_ = unix.Fstat(fd, &st)
	own, peer := l.m.infos[l.m.cfg.Rank].Addr, l.m.infos[l.peer].Addr
	e := record.ConnEntry{Peer: int32(l.peer), Transport: l.Kind(), ID: st.Ino}
	if sa, err := unix.Getsockname(fd); err == nil {
		if a := addrPort(sa); a.IsValid() {
			own, e.Address = a.String(), a.Addr().As16()
		}
	}
	if sa, err := unix.Getpeername(fd); err == nil {
		if a := addrPort(sa); a.IsValid() {
			peer = a.String()
		}
	}
	e.Name = fmt.Sprintf("tcp %s->%s", own, peer)
	return e
}

// addrPort is an internet socket's address; not valid for another one's.
func addrPort(sa unix.Sockaddr) netip.AddrPort {
	switch a := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr).Unmap(), uint16(a.Port))
	}
	return netip.AddrPort{}
}

// fatal breaks the link. What had arrived by then can still be received.
func (l *tcpLink) fatal(err error) error {
	if l.err == nil {
		for _, s := range l.socks {
			s.readable, s.hungUp = true, true
		}
		l.err = fmt.Errorf("TCP with rank %d: %w", l.peer, err)
		if l.over.Store(true); l.lost == nil {
			l.meter.link(record.LinkDown)
		}
	}
	return l.err
}

// event notes an edge. A writable socket sends what it still has.
func (l *tcpLink) event(which int, events uint32) {
	i := which & 15
	if i >= len(l.socks) || eventOf(i, l.number) != which {
		return // cut meanwhile, or replaced
	}
	s := l.socks[i]
	if events&^uint32(unix.EPOLLOUT) != 0 {
		s.readable = true
	}
	if events&(unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
		s.hungUp = true
	}
	if events&unix.EPOLLOUT != 0 && !s.broken {
		s.writable = true
		if err := s.flush(); err != nil {
			l.failed(s, err)
		}
	}
}

// failed notes that a socket is broken. What had arrived by then can still be received,
// if no other socket takes its place.
func (l *tcpLink) failed(s *socket, err error) {
	s.broken, s.writable = true, false
	s.readable, s.hungUp = true, true
	l.lose(err)
}

// finish moves a closing link on: it sends what was taken from the caller and
// then its end, and reports whether the peer's host has all of it. Closing
// earlier, or with unread bytes, would reset the connection and destroy them.
func (l *tcpLink) finish() bool {
	if l.err != nil {
		return true
	}
	owing := l.owing()
	if owing {
		l.watch(record.Now())
	}
	if l.fresh.Load() || owing && (l.lost != nil || l.catching()) { // the peer waits for a word over a fresh set
		l.refresh(record.Now())
		return l.err != nil
	}
	if l.got != l.told || l.linesGot != l.linesTold {
		l.giveCredit() // so that the peer does not connect again for what has come
	}
	done, whole := true, true
	var broken *socket
	var why error
	for _, s := range l.socks {
		left, err := l.end(s)
		if !owing && l.passes && s.late {
			left = 0 // other lanes have carried it, and it was consumed
		}
		if done = done && left == 0; err == nil {
			continue
		}
		if whole = false; broken == nil && !errors.Is(err, ErrCorrupt) {
			broken, why = s, err
		}
	}
	if broken != nil && l.owing() {
		l.failed(broken, why) // its bytes take another path
		return l.err != nil
	}
	if done && whole {
		l.over.Store(true)
	}
	return done
}

// owing reports whether a closing link's peer has not said that it has all. Its word may have come over any socket
// before it closed the others, so all that has arrived is taken in first.
func (l *tcpLink) owing() bool {
	for _, s := range l.socks {
		if l.completed() >= l.posted() {
			return false
		}
		_ = l.takeIn(s)
	}
	return l.completed() < l.posted()
}

// takeIn takes in what a closing socket has received; its end is no error. The kernel tells an error once only.
func (l *tcpLink) takeIn(s *socket) error {
	for more := !s.over && !s.broken && s.unread == nil; more; {
		s.readable = true
		var err error
		if _, more, err = l.step(s, nil); err != nil {
			if s.over = errors.Is(err, io.EOF) && s.pos == s.end && s.inLo == s.inHi; !s.over {
				s.unread, more = err, false
			}
		}
	}
	return s.unread
}

// end moves a closing socket on, and returns how many bytes the peer's host has yet to take.
func (l *tcpLink) end(s *socket) (left int, err error) {
	if s.broken {
		return 0, errClosed
	}
	s.writable = true
	lost := s.flush() // what had arrived by then is read all the same
	if lost == nil && len(s.out) == 0 && !s.ended {
		s.ended = true
		lost = unix.Shutdown(s.fd, unix.SHUT_WR)
	}
	if err := cmp.Or(lost, l.takeIn(s)); err != nil {
		return 0, err
	}
	if e, err := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_ERROR); err == nil && e != 0 {
		return 0, unix.Errno(e)
	}
	if left, _ = unix.IoctlGetInt(s.fd, unix.SIOCOUTQ); left > 0 {
		if info, err := unix.GetsockoptTCPInfo(s.fd, unix.IPPROTO_TCP, unix.TCP_INFO); err == nil && info.State == tcpClosed {
			return 0, errClosed // and its error was told before: nobody takes these any more
		}
	}
	return left + len(s.out), nil
}

func (l *tcpLink) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.discard()
	for _, s := range l.socks {
		unix.Close(s.fd)
	}
	l.socks = nil
	l.leave()
	l.dropSkipped(^uint32(0))
	closeAll(l.next)
	l.next = nil
	l.up.Store(false)
}

// PrefetchLine has nothing to do: lines arrive by system call.
func (l *tcpLink) PrefetchLine() {}

func (l *tcpLink) WantRecv(since int64) {
	l.wants = since
	l.meter.want(since)
}

func (l *tcpLink) posted() uint64 {
	return l.sent + l.linesSent*lineSize + uint64(l.gate.held())
}
func (l *tcpLink) completed() uint64 { return l.acked + l.linesAcked*lineSize }
func (l *tcpLink) received() uint64  { return l.got + l.linesGot*lineSize }

func (l *tcpLink) Flush(now int64) {
	if !l.opened {
		return
	}
	if l.got-l.told >= stampFrom {
		l.giveCredit() // the sender's last completion of a large message
	}
	l.meter.flush(now, l.posted(), l.completed(), l.received())
}

func (l *tcpLink) refresh(now int64) bool {
	if ok, _ := l.ready(); !ok {
		if l.opened { // broken: what is known of it is still to be told
			l.meter.idle(now, l.posted(), l.completed(), l.received())
		}
		return l.gate.held() > 0
	}
	_, _ = l.receive(nil, 0)
	if l.got != l.told || l.linesGot != l.linesTold {
		l.giveCredit()
	}
	l.watch(now)
	l.meter.idle(now, l.posted(), l.completed(), l.received())
	return l.completed() < l.posted()
}

func (l *tcpLink) look() {
	if l.opened && l.meter.due() {
		_, _ = l.receive(nil, 0)
	}
}

func (l *tcpLink) holds() bool { return l.gate.holds() }
func (l *tcpLink) due() bool {
	return l.opened && (l.fresh.Load() || l.completed() < l.posted() || l.got != l.told || l.linesGot != l.linesTold)
}

func (l *tcpLink) pump(now int64) int64 {
	if l.gate == nil {
		return 0
	}
	return l.gate.pump(now)
}

func (l *tcpLink) room() int {
	if l.opened {
		_, _ = l.receive(nil, 0)
	}
	return l.credit()
}

// drop cuts the connection, as a reset in the network would.
func (l *tcpLink) drop() {
	if l.err == nil {
		_ = l.fatal(ErrDropped)
		l.cut()
	}
}

// cut resets all sockets.
func (l *tcpLink) cut() {
	for _, s := range l.socks {
		_ = unix.SetsockoptLinger(s.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		unix.Close(s.fd)
	}
	l.socks = nil
	l.leave()
}
