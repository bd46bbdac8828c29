package transport

import (
	"encoding/binary"
	"errors"
	"fmt"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/rdma"
	"github.com/lockstep-ccl/lockstep/record"
	"golang.org/x/sys/unix"
)

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
	if l.catching() && !l.catchUp() {
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
			if l.catching() {
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
		s, n := l.lane(n, min(len(b), l.credit()))
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
		l.carried(s, n)
		l.track(s, l.sent-l.pad, l.sent+uint64(n))
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
	socks := l.mine()
	if n <= smallSend {
		for _, s := range socks {
			if l.takes(s) {
				return s
			}
		}
		return nil
	}
	for range socks {
		s := socks[l.turn%len(socks)]
		l.turn++
		if l.takes(s) {
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
	s.wrote += uint64(size)
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
		if l.passes && s.late {
			continue // others have carried it
		}
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
	// All lines go over one socket: that keeps their order.
	if len(l.socks) == 0 {
		return false, l.err
	}
	s := l.socks[l.lineSocket]
	if l.catching() {
		l.catchUp()
	}
	if l.awaits || l.resendLine < l.linesSent || !s.usable() {
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
		l.resendLine = l.linesSent
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
		if !l.takes(s) {
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

// mark implements zeroCopy: from here on the link has copies of what TrySendKept took.
func (l *tcpLink) mark() uint64 {
	l.own()
	return 0
}

func (l *tcpLink) markConsumed(uint64) bool { return true }
func (l *tcpLink) acknowledge()             {}
