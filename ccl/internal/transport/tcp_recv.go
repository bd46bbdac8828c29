package transport

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/record"
	"golang.org/x/sys/unix"
)

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
				_ = l.fatal(err)
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
	if l.catching() {
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
	if s.pos < l.front {
		more, err = l.skip(s, int(min(uint64(left), l.front-s.pos)))
		return 0, more, err
	}
	to := direct
	switch straight := s.pos == l.front && l.front == l.got; {
	case direct == nil:
		to = l.place(s.pos)
	case !straight:
		return 0, false, nil // stays in the kernel until its turn, or refresh's, if that is behind it
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
		// What has come already, some or all of it, has come over a late lane, or was sent again for one.
		if end := l.got + uint64(l.m.cfg.Window); n == 0 || n > maxChunk || at > end || at+uint64(n) > end || pad >= lineSize || pad > at {
			return bad("data outside the window")
		}
		if len(l.gaps) >= maxGaps {
			return bad("too many gaps")
		}
		s.pos, s.end, s.shown = at, at+uint64(n), at
		l.arrived(at-pad, at)
	case frameLine:
		if n > LinePayload || at > l.linesIn || at == l.linesIn && l.linesIn-l.linesGot >= lineSlots {
			return bad("line out of order")
		}
		if at < l.linesIn {
			break // it has come over another socket
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
