package transport

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/rdma"
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
// A fourth kind says where to go on (resume.go). // Every frame carries credit; data of one stream goes over several sockets in
// whatever order, and its position says where it belongs.
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
	m    *mesh
	n    *network
	peer int
	gate *gate // nil without fault injection

	meeting

	// The executor's, once up.
	opened bool
	socks  []*socket
	turn   int // socket for the next large chunk
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
	heard      int64  // when the peer's host last answered, while there is none
	looked     int64
	half       int64  // since when a socket has ended, and others have not
	awaits     bool   // for the peer to say where it goes on
	catching   bool   // not all of that has been sent again
	resend     uint64 // the next byte to send again
	resendLine uint64

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
	readable, writable bool // as far as edges and calls have told
	hungUp             bool // read on to its end
	over               bool // nothing more can be read
	broken             bool // nothing more can be written
	ended              bool // closing: the end is on its way
	path

	in         [readAhead]byte
	inLo, inHi int
	pos, end   uint64 // of the data frame being read; none when equal
	shown      uint64 // up to where its bytes count as arrived

	out     []byte // what a partial write has left
	scratch [frameSize + smallSend]byte

	// What the kernel reads, where the garbage collector sees it.
	iov [2]unix.Iovec
	msg unix.Msghdr
	hdr [frameSize]byte
}

// ---- connecting ----

// open has the executor take over the sockets of a finished attempt.
func (l *tcpLink) open(fds []int) error {
	closeAll(l.next)
	l.next = fds
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
		var st unix.Stat_t
		unix.Fstat(l.socks[0].fd, &st)
		l.meter.open(l.m, l.peer, l.Kind(), 0, st.Ino, fmt.Sprintf("tcp %s->%s", l.m.cards[l.m.cfg.Rank].Addr, l.m.cards[l.peer].Addr))
	}
	return true, nil
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
	owing := l.completed() < l.posted()
	if owing && (l.fresh.Load() || l.lost != nil || l.catching) {
		l.refresh(record.Now())
		return l.err != nil
	}
	if l.got != l.told || l.linesGot != l.linesTold {
		l.giveCredit() // so that the peer does not connect again for what has come
	}
	done, whole := true, true
	for _, s := range l.socks {
		left, err := l.end(s)
		if done = done && left == 0; err == nil {
			continue
		}
		if whole = false; l.completed() < l.posted() && !errors.Is(err, ErrCorrupt) {
			l.failed(s, err) // its bytes take another path
			return l.err != nil
		}
	}
	if done && whole {
		l.over.Store(true)
	}
	return done
}

// end moves a closing socket on, and returns how many bytes the peer's host has yet to take.
func (l *tcpLink) end(s *socket) (left int, err error) {
	if s.broken {
		return 0, errClosed
	}
	s.writable = true
	if err := s.flush(); err != nil {
		return 0, err
	}
	if len(s.out) == 0 && !s.ended {
		s.ended = true
		if err := unix.Shutdown(s.fd, unix.SHUT_WR); err != nil {
			return 0, err
		}
	}
	for more := !s.over; more; {
		s.readable = true
		if _, more, err = l.step(s, nil); err != nil {
			if s.over = errors.Is(err, io.EOF) && s.pos == s.end && s.inLo == s.inHi; !s.over {
				return 0, err
			}
		}
	}
	if e, err := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_ERROR); err == nil && e != 0 {
		return 0, unix.Errno(e)
	}
	left, _ = unix.IoctlGetInt(s.fd, unix.SIOCOUTQ)
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
	closeAll(l.next)
	l.next = nil
	l.up.Store(false)
}

// ---- sending ----

func (l *tcpLink) Peer() int              { return l.peer }
func (l *tcpLink) Kind() record.Transport { return record.TransportTCP }

func (l *tcpLink) TrySend(b []byte) (int, error) {
	if l.gate != nil {
		return l.gate.send(b)
	}
	return l.push(b)
}

// TrySendKept refers to large pieces until the operation ends; the kernel's copy may be lost.
func (l *tcpLink) TrySendKept(b []byte) (int, error) {
	if l.gate != nil {
		return l.gate.send(b)
	}
	return l.post(b, len(b) >= rdma.KeptFrom)
}

func (l *tcpLink) credit() int { return l.m.cfg.Window - int(l.sent-l.acked) }

func (l *tcpLink) push(b []byte) (int, error) { return l.post(b, false) }

// post sends bytes; stay says that the caller leaves them as they are.
func (l *tcpLink) post(b []byte, stay bool) (int, error) {
	if ok, err := l.ready(); !ok {
		return 0, err
	}
	if l.catching && !l.catchUp() {
		return 0, l.err
	}
	total := 0
	for len(b) > 0 {
		n := min(len(b), maxChunk)
		room := l.credit()
		if n > room {
			if _, err := l.receive(nil, 0); err != nil {
				return total, err
			}
			if l.catching {
				break
			}
			if room = l.credit(); n > room {
				// Keep pieces aligned, so that the receiver can reduce them in place.
				n = max(0, int((l.sent+uint64(room))&^(lineSize-1)-l.sent))
				if n > room {
					n = 0
				}
			}
			if n == 0 {
				l.noCredit()
				break
			}
		}
		s := l.free(n)
		if s == nil {
			break // the network is what is slow
		}
		ok, err := l.write(s, l.header(frameData, n, l.sent, 0), b[:n])
		if err != nil {
			return total, err
		}
		if !ok {
			continue
		}
		l.retain(l.sent, b[:n:n], l.pad, stay)
		l.pad = 0
		l.sent += uint64(n)
		b = b[n:]
		total += n
		l.meter.post(n, l.posted())
	}
	if total > 0 {
		l.meter.unblock()
		l.m.progressed = true
	}
	return total, nil
}

// free finds a socket that owes nothing and may take bytes; the first one for few of them.
func (l *tcpLink) free(n int) *socket {
	if n <= smallSend {
		for _, s := range l.socks {
			if s.usable() {
				return s
			}
		}
		return nil
	}
	for range l.socks {
		s := l.socks[l.turn%len(l.socks)]
		l.turn++
		if s.usable() {
			return s
		}
	}
	return nil
}

func (l *tcpLink) header(kind byte, n int, at uint64, tag uint32) (h [frameSize]byte) {
	h[0], h[1] = kind, byte(l.pad)
	binary.LittleEndian.PutUint32(h[4:], uint32(n))
	binary.LittleEndian.PutUint64(h[8:], at)
	binary.LittleEndian.PutUint64(h[16:], l.got)
	binary.LittleEndian.PutUint32(h[24:], uint32(l.linesGot))
	binary.LittleEndian.PutUint32(h[28:], tag)
	return h
}

// write sends one frame over a free socket; false when it takes nothing. What
// it takes only in part is kept, so that the other sockets can go on.
func (l *tcpLink) write(s *socket, h [frameSize]byte, b []byte) (bool, error) {
	var n uintptr
	var errno unix.Errno
	size := frameSize + len(b)
	if size <= len(s.scratch) {
		copy(s.scratch[:], h[:])
		copy(s.scratch[frameSize:], b)
		n, _, errno = unix.RawSyscall6(unix.SYS_SENDTO, uintptr(s.fd), uintptr(unsafe.Pointer(&s.scratch[0])), uintptr(size), unix.MSG_NOSIGNAL, 0, 0)
	} else {
		s.hdr = h
		s.iov = [2]unix.Iovec{{Base: &s.hdr[0], Len: frameSize}, {Base: &b[0], Len: uint64(len(b))}}
		s.msg.Iov, s.msg.Iovlen = &s.iov[0], 2
		n, _, errno = unix.RawSyscall(unix.SYS_SENDMSG, uintptr(s.fd), uintptr(unsafe.Pointer(&s.msg)), unix.MSG_NOSIGNAL)
	}
	switch errno {
	case 0:
	case unix.EAGAIN, unix.ENOBUFS:
		s.writable = false
		return false, nil
	case unix.EINTR:
		return false, nil
	default:
		l.failed(s, fmt.Errorf("send: %w", errno))
		return false, l.err
	}
	if int(n) < size {
		s.writable = false
		if int(n) < frameSize {
			s.out = append(s.out[:0], h[n:]...)
			n = frameSize
		}
		s.out = append(s.out, b[int(n)-frameSize:]...)
	}
	l.told, l.linesTold, l.creditDue = l.got, l.linesGot, false
	return true, nil
}

// flush sends what a partial write has left.
func (s *socket) flush() error {
	for len(s.out) > 0 && s.writable {
		n, err := unix.SendmsgN(s.fd, s.out, nil, nil, unix.MSG_NOSIGNAL)
		switch {
		case err == nil:
			s.out = s.out[:copy(s.out, s.out[n:])]
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOBUFS):
			s.writable = false
		case !errors.Is(err, unix.EINTR):
			return fmt.Errorf("send: %w", err)
		}
	}
	return nil
}

// noCredit tells the monitor that the receiver is what is slow, when it is:
// when its host has all that was sent, or has no room for it either.
func (l *tcpLink) noCredit() {
	if !l.meter.on || l.meter.blocked || l.lost != nil {
		return
	}
	for _, s := range l.socks {
		if len(s.out) == 0 {
			if left, err := unix.IoctlGetInt(s.fd, unix.SIOCOUTQ); err == nil && left == 0 {
				continue
			}
		}
		info, err := unix.GetsockoptTCPInfo(s.fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		if err != nil || info.Snd_wnd >= info.Snd_mss {
			return // on its way
		}
	}
	l.meter.block()
}

func (l *tcpLink) TryWriteLine(b []byte, tag uint32) (bool, error) {
	if l.gate != nil {
		return l.gate.sendLine(b, tag)
	}
	return l.pushLine(b, tag)
}

func (l *tcpLink) pushLine(b []byte, tag uint32) (bool, error) {
	if ok, err := l.ready(); !ok {
		return false, err
	}
	if l.linesSent-l.linesAcked >= lineSlots {
		if _, err := l.receive(nil, 0); err != nil {
			return false, err
		}
		if l.linesSent-l.linesAcked >= lineSlots {
			l.noCredit()
			return false, nil
		}
	}
	// All lines go over the first socket: that keeps their order.
	if len(l.socks) == 0 {
		return false, l.err
	}
	s := l.socks[0]
	if l.catching && !l.catchUp() || !s.usable() {
		return false, l.err
	}
	pad := l.pad
	l.pad = 0
	h := l.header(frameLine, len(b), l.linesSent, tag)
	l.pad = pad
	ok, err := l.write(s, h, b)
	if ok {
		ln := &l.kept.lines[l.linesSent%lineSlots]
		ln.n, ln.tag = uint32(copy(ln.payload[:], b)), tag
		l.linesSent++
		l.meter.unblock()
		l.m.progressed = true
	}
	return ok, err
}

func (l *tcpLink) AlignSend() {
	if l.gate != nil {
		l.gate.align()
		return
	}
	l.alignSend()
}

func (l *tcpLink) alignSend() {
	up := (l.sent + lineSize - 1) &^ (lineSize - 1)
	l.pad += up - l.sent
	l.sent = up
}

// giveCredit tells the peer what was consumed, when no data does.
func (l *tcpLink) giveCredit() {
	l.creditDue = true
	for _, s := range l.socks {
		if !s.usable() {
			continue
		}
		pad := l.pad
		l.pad = 0
		h := l.header(frameCredit, 0, 0, 0)
		l.pad = pad
		if ok, err := l.write(s, h, nil); ok || err != nil {
			return
		}
	}
}

// ---- receiving ----

func (l *tcpLink) TryRecv(b []byte) (int, error) {
	total := 0
	for {
		for l.front > l.got && total < len(b) {
			n := copy(b[total:], l.piece())
			l.consume(n)
			total += n
		}
		if total == len(b) {
			return total, nil
		}
		n, err := l.receive(b[total:], len(b)-total)
		if total += n; n == 0 && l.front == l.got {
			if total > 0 {
				err = nil
			}
			return total, err
		}
	}
}

func (l *tcpLink) Peek() ([]byte, error) {
	if l.front-l.got < peekEnough {
		if _, err := l.receive(nil, peekEnough); err != nil && l.front == l.got {
			return nil, err
		}
		if l.front == l.got {
			return nil, nil
		}
	}
	return l.piece(), nil
}

// piece is what has arrived, up to the ring's end. Padding arrives without bytes,
// so there may be no ring yet.
func (l *tcpLink) piece() []byte {
	p := l.place(l.got)
	return p[:min(l.front-l.got, uint64(len(p)))]
}

func (l *tcpLink) Advance(n int) { l.consume(n) }

func (l *tcpLink) consume(n int) {
	l.got += uint64(n)
	l.consumed()
}

// consumed gives credit back in quarters of the window; less goes with the
// next frame, with Flush, or when the rank has time.
func (l *tcpLink) consumed() {
	l.m.progressed = true
	if l.got-l.told >= uint64(l.m.cfg.Window/4) {
		l.giveCredit()
	}
}

func (l *tcpLink) AlignRecv() {
	l.got = (l.got + lineSize - 1) &^ (lineSize - 1)
	if l.front < l.got {
		l.arrived(l.front, l.got)
	}
}

func (l *tcpLink) TryReadLine(b []byte) (int, uint32, bool, error) {
	if l.linesGot == l.linesIn {
		if _, err := l.receive(nil, wantLine); l.linesGot == l.linesIn {
			return 0, 0, false, err
		}
	}
	ln := &l.lines[l.linesGot%lineSlots]
	n := copy(b, ln.payload[:ln.n])
	l.linesGot++
	if l.linesGot-l.linesTold >= lineSlots/2 {
		l.giveCredit()
	}
	l.m.progressed = true
	return n, ln.tag, true, nil
}

// receive reads from the sockets in turn until want bytes wait at front (0: all
// there is; wantLine: until a line is there), or there is no more. Bytes that
// come next in the stream go straight into direct, when it is large; n says how
// many did, and they are consumed.
func (l *tcpLink) receive(direct []byte, want int) (n int, err error) {
	if !l.opened || l.fresh.Load() {
		if ok, err := l.ready(); !ok {
			return 0, err
		}
	}
	if len(direct) < directFrom {
		direct = nil
	} else {
		want = len(direct)
		for _, s := range l.socks {
			// What Peek would hold back to the next boundary; not of messages behind
			// this one, for which Peek may be what comes next.
			if s.pos <= l.got+uint64(want) {
				l.show(s, s.pos)
			}
		}
	}
	quiet := true
	for moved := true; moved; {
		moved = false
		for _, s := range l.socks {
			if s.over || s.inLo == s.inHi && !s.readable {
				continue
			}
			quiet = quiet && !s.readable
			var into []byte
			if direct != nil {
				into = direct[n:]
			}
			k, more, err := l.step(s, into)
			if err != nil && l.outlives(s, err) {
				continue
			}
			if errors.Is(err, ErrCorrupt) {
				l.fatal(err)
				l.cut()
				return n, l.err
			}
			if err != nil {
				l.failed(s, err)
				s.over = true
				continue // other sockets may still have bytes
			}
			n += k
			if more {
				moved, l.m.progressed = true, true
			}
			switch {
			case want > 0 && l.front-l.got+uint64(n) >= uint64(want):
				return n, nil
			case want == wantLine && l.linesIn != l.linesGot:
				return n, nil
			case direct != nil && l.front != l.got:
				return n, nil // bytes in the ring come first
			}
		}
	}
	if quiet {
		// The caller may never come to Wait, where edges are collected.
		if l.misses++; l.misses%16 == 0 {
			l.n.poll(0)
		}
	}
	if l.catching {
		l.catchUp()
	}
	if l.creditDue {
		l.giveCredit()
	}
	return n, l.err
}

// outlives notes a socket's end, and reports whether the link goes on: a peer that
// closes ends each socket when that one has sent everything, others may have more
// to come (finish). Within a frame, or by a reset, only a peer that broke ends.
func (l *tcpLink) outlives(s *socket, err error) bool {
	if !errors.Is(err, io.EOF) || s.pos < s.end || s.inLo < s.inHi {
		return false
	}
	if s.over = true; l.half == 0 {
		l.half = record.Now()
	}
	return slices.ContainsFunc(l.socks, func(s *socket) bool { return !s.over })
}

// step does one thing on a socket: takes in a frame's header, or some of its
// bytes, n of them into direct. more is false when the socket has nothing for now.
func (l *tcpLink) step(s *socket, direct []byte) (n int, more bool, err error) {
	if s.pos == s.end {
		more, err = l.head(s)
		return 0, more, err
	}
	left := int(s.end - s.pos)
	to := direct
	switch straight := s.pos == l.front && l.front == l.got; {
	case direct == nil:
		to = l.place(s.pos)
	case !straight:
		return 0, false, nil // stays in the kernel until its turn
	}
	to = to[:min(len(to), left)]
	var k int
	if s.inLo < s.inHi {
		k = copy(to, s.in[s.inLo:s.inHi])
		s.inLo += k
	} else {
		s.inLo, s.inHi = 0, 0
		ahead := s.in[:]
		if len(to) < left {
			ahead = nil
		}
		if k, err = s.read(to, ahead); err != nil || k == 0 {
			return 0, false, err
		}
		if k > len(to) {
			s.inHi = k - len(to)
			k = len(to)
		}
	}
	s.pos += uint64(k)
	if direct != nil {
		l.got += uint64(k)
		l.show(s, s.pos)
		l.consumed()
		return k, true, nil
	}
	if s.pos == s.end {
		l.show(s, s.end)
	} else {
		l.show(s, s.pos&^(lineSize-1))
	}
	return 0, true, nil
}

// head takes in a header, and the payload of a line with it; false when they
// are not all there.
func (l *tcpLink) head(s *socket) (bool, error) {
	for {
		b := s.in[s.inLo:s.inHi]
		need := frameSize
		if len(b) >= need && b[0] == frameLine {
			need += int(min(binary.LittleEndian.Uint32(b[4:]), LinePayload))
		}
		if len(b) >= need {
			s.inLo += need
			return true, l.begin(s, b[:need])
		}
		if !s.readable {
			return false, nil
		}
		s.inHi = copy(s.in[:], b)
		s.inLo = 0
		k, err := s.read(s.in[s.inHi:], nil)
		if err != nil {
			return false, err
		}
		s.inHi += k
	}
}

// read reads into a and, when that is full, into b. It forgets readability when
// the socket is dry, 0 and nil then; io.EOF when the peer closed it.
func (s *socket) read(a, b []byte) (int, error) {
	s.iov[0].Base, s.iov[0].Len = &a[0], uint64(len(a))
	count := uintptr(1)
	if len(b) > 0 {
		s.iov[1].Base, s.iov[1].Len = &b[0], uint64(len(b))
		count = 2
	}
	n, _, errno := unix.RawSyscall(unix.SYS_READV, uintptr(s.fd), uintptr(unsafe.Pointer(&s.iov[0])), count)
	switch errno {
	case 0:
		if n == 0 {
			s.readable = false
			return 0, fmt.Errorf("receive: closed by the peer: %w", io.EOF)
		}
		if int(n) < len(a)+len(b) && !s.hungUp {
			s.readable = false // epoll(7): a short read has drained it
		}
		return int(n), nil
	case unix.EINTR:
		return 0, nil
	case unix.EAGAIN:
		s.readable = false
		return 0, nil
	}
	s.readable = false
	return 0, fmt.Errorf("receive: %w", errno)
}

// begin takes in a header.
func (l *tcpLink) begin(s *socket, h []byte) error {
	le := binary.LittleEndian
	kind, pad, n, at := h[0], uint64(h[1]), le.Uint32(h[4:]), le.Uint64(h[8:])
	bad := func(what string) error {
		return fmt.Errorf("%w: %s: frame kind %d, %d bytes at %d, padding %d; here %d consumed, %d arrived", ErrCorrupt, what, kind, n, at, pad, l.got, l.front)
	}
	if err := l.credited(le.Uint64(h[16:]), le.Uint32(h[24:])); err != nil {
		return err
	}
	switch kind {
	case frameData:
		if n == 0 || n > maxChunk || at < l.front || at-l.got > uint64(l.m.cfg.Window) || at+uint64(n)-l.got > uint64(l.m.cfg.Window) || pad >= lineSize || pad > at {
			return bad("data outside the window")
		}
		for _, g := range l.gaps {
			if at < g.hi && g.lo < at+uint64(n) {
				return bad("data twice")
			}
		}
		if len(l.gaps) >= maxGaps {
			return bad("too many gaps")
		}
		s.pos, s.end, s.shown = at, at+uint64(n), at
		l.arrived(at-pad, at)
	case frameLine:
		if n > LinePayload || at != l.linesIn || l.linesIn-l.linesGot >= lineSlots {
			return bad("line out of order")
		}
		ln := &l.lines[l.linesIn%lineSlots]
		ln.n, ln.tag = n, le.Uint32(h[28:])
		copy(ln.payload[:], h[frameSize:])
		l.linesIn++
	case frameCredit:
		if n != 0 {
			return bad("credit with bytes")
		}
	case frameResume:
		if n != 0 {
			return bad("where to go on, with bytes")
		}
		return l.resumed(s, at, le.Uint32(h[28:]))
	default:
		return bad("unknown kind")
	}
	return nil
}

// credited takes in what the peer has consumed. Frames of different sockets
// may bring it out of order.
func (l *tcpLink) credited(got uint64, lines uint32) error {
	if int64(got-l.sent) >= lineSize || int32(lines-uint32(l.linesSent)) > 0 {
		return fmt.Errorf("%w: the peer consumed %d bytes and %d lines of %d and %d", ErrCorrupt, got, lines, l.sent, l.linesSent)
	}
	if got = min(got, l.sent); got > l.acked {
		l.acked = got
		l.release()
		l.m.progressed = true
	}
	if more := int32(lines - uint32(l.linesAcked)); more > 0 {
		l.linesAcked += uint64(more)
		l.m.progressed = true
	}
	l.meter.complete(l.completed())
	return nil
}

// place is the ring from a stream position on, up to the ring's end.
func (l *tcpLink) place(pos uint64) []byte {
	if l.ring == nil {
		l.ring = make([]byte, l.m.cfg.Window)
	}
	return l.ring[pos&uint64(len(l.ring)-1):]
}

// show lets a data frame's bytes count as arrived up to a position.
func (l *tcpLink) show(s *socket, to uint64) {
	if to > s.shown {
		l.arrived(s.shown, to)
		s.shown = to
	}
}

// arrived adds a piece of the stream to what is there.
func (l *tcpLink) arrived(lo, hi uint64) {
	if lo = max(lo, l.front); lo >= hi {
		return
	}
	if lo > l.front {
		i := len(l.gaps)
		for i > 0 && l.gaps[i-1].lo > lo {
			i--
		}
		if i > 0 && l.gaps[i-1].hi >= lo {
			i--
			l.gaps[i].hi = max(l.gaps[i].hi, hi)
		} else {
			l.gaps = slices.Insert(l.gaps, i, span{lo, hi})
		}
		for i+1 < len(l.gaps) && l.gaps[i+1].lo <= l.gaps[i].hi {
			l.gaps[i].hi = max(l.gaps[i].hi, l.gaps[i+1].hi)
			l.gaps = slices.Delete(l.gaps, i+1, i+2)
		}
		return
	}
	l.front = hi
	for len(l.gaps) > 0 && l.gaps[0].lo <= l.front {
		l.front = max(l.front, l.gaps[0].hi)
		l.gaps = slices.Delete(l.gaps, 0, 1)
	}
}

// ---- what the mesh asks ----

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
	l.receive(nil, 0)
	if l.got != l.told || l.linesGot != l.linesTold {
		l.giveCredit()
	}
	l.watch(now)
	l.meter.idle(now, l.posted(), l.completed(), l.received())
	return l.completed() < l.posted()
}

func (l *tcpLink) look() {
	if l.opened && l.meter.due() {
		l.receive(nil, 0)
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
		l.receive(nil, 0)
	}
	return l.credit()
}

// drop cuts the connection, as a reset in the network would.
func (l *tcpLink) drop() {
	if l.err == nil {
		l.fatal(ErrDropped)
		l.cut()
	}
}

// cut resets all sockets.
func (l *tcpLink) cut() {
	for _, s := range l.socks {
		unix.SetsockoptLinger(s.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		unix.Close(s.fd)
	}
	l.socks = nil
}
