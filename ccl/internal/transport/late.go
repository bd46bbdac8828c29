package transport

import (
	"encoding/binary"
	"math/bits"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/record"
	"github.com/lockstep-ccl/lockstep/windowmon"
	"golang.org/x/sys/unix"
)

// Whose time it is between a post and its credit. A receiver that has no core, or computes,
// leaves bytes in its host's socket, and its sender cannot tell that from a slow network. So
// the kernel stamps what arrives (SO_TIMESTAMPNS), before anything is scheduled, and each credit
// says how long ago the last of what it acknowledges had come. The sender has the same of the
// credit itself. What is left is the network's, both ways.
//
// Stamps come with reads that happen anyway. Where there are none (another kernel, an older
// peer) credits say nothing, and the sender asks its kernel now and then (whoHasIt).

// stampArrivals asks the kernel for the times at which bytes come.
func stampArrivals(fd int) bool {
	followClock(record.Now())
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1) == nil
}

// readv reads into s.iov, and notes when the last of it had come.
func (s *socket) readv(count uintptr) (uintptr, unix.Errno) {
	if !s.stamped {
		n, _, errno := unix.RawSyscall(unix.SYS_READV, uintptr(s.fd), uintptr(unsafe.Pointer(&s.iov[0])), count)
		return n, errno
	}
	s.rmsg = unix.Msghdr{Iov: &s.iov[0], Iovlen: uint64(count), Control: &s.ctl[0], Controllen: uint64(len(s.ctl))}
	n, _, errno := unix.RawSyscall(unix.SYS_RECVMSG, uintptr(s.fd), uintptr(unsafe.Pointer(&s.rmsg)), 0)
	if errno == 0 && n > 0 {
		s.stamp = stampOf(s.ctl[:min(s.rmsg.Controllen, uint64(len(s.ctl)))])
		s.filled = uint64(n) == s.iov[0].Len+s.iov[1].Len*uint64(count-1)
	}
	return n, errno
}

// stampOf is the time in a control message, by CLOCK_MONOTONIC; 0 for none.
func stampOf(ctl []byte) int64 {
	le := binary.LittleEndian
	if len(ctl) < unix.SizeofCmsghdr+16 || le.Uint32(ctl[8:]) != unix.SOL_SOCKET || le.Uint32(ctl[12:]) != unix.SO_TIMESTAMPNS {
		return 0
	}
	real := int64(le.Uint64(ctl[unix.SizeofCmsghdr:]))*int64(time.Second) + int64(le.Uint64(ctl[unix.SizeofCmsghdr+8:]))
	return max(real-realOffset.Load(), 1)
}

// realOffset is CLOCK_REALTIME less CLOCK_MONOTONIC. Both go at one rate; somebody may set the first.
var realOffset, realAt atomic.Int64

const offsetFor = int64(100 * time.Millisecond)

// followClock finds out whether somebody has set the clock.
func followClock(now int64) {
	if at := realAt.Load(); at != 0 && now-at < offsetFor {
		return
	}
	best := int64(0)
	for try := 0; try < 3; try++ {
		from := record.Now()
		real := time.Now().UnixNano()
		took := record.Now() - from
		if try == 0 || took < best {
			best = took
			realOffset.Store(real - from - took/2)
		}
		if took < 2000 {
			break
		}
	}
	realAt.Store(now)
}

// came is when what was just taken from the last read had come, 0 when nobody knows. The kernel joins
// what comes while nobody reads, and stamps all of it with the time of the last of it. So where
// there is more, and this rank did not look for a while, for it computed or had no core, what it
// takes is taken to have come when it looked last.
func (s *socket) came() int64 {
	if (s.filled || s.inLo < s.inHi) && s.stamp-*s.looked >= away {
		return *s.looked
	}
	return s.stamp
}

// away is how long a rank may not look and is still looking.
const away = int64(200 * time.Microsecond)

// arrivals are when the bytes of a stream came that this rank has not acknowledged yet.
type arrivals struct {
	marks    [16]arrival // by position and time, ascending; when all are in use the last one's time is too late
	head, n  uint8
	last     int64 // when the last of all that is there without a gap came
	lastLine int64 // likewise a line
}

type arrival struct {
	pos uint64
	at  int64
}

// mergeNs is the time in which arrivals are one, as of the first.
const mergeNs = 10e3

func (a *arrivals) line(at int64) { a.lastLine = at }

// upTo notes that all before a position is there, since the last piece of it came at a time. What is
// before that in the stream came no later, but by a clock that somebody has set since.
func (a *arrivals) upTo(pos uint64, at int64) {
	if at == 0 || at > a.last || a.last-at > int64(time.Second) {
		a.last = at
	}
	if a.last == 0 {
		return
	}
	if a.n > 0 {
		switch y := &a.marks[(a.head+a.n-1)%uint8(len(a.marks))]; {
		case a.last-y.at < mergeNs:
			y.pos = pos
			return
		case int(a.n) == len(a.marks):
			*y = arrival{pos, a.last}
			return
		}
	}
	a.marks[(a.head+a.n)%uint8(len(a.marks))] = arrival{pos, a.last}
	a.n++
}

// of returns when the byte before a position came, 0 when nobody knows.
func (a *arrivals) of(pos uint64) int64 {
	for a.n > 0 {
		if m := &a.marks[a.head]; m.pos >= pos {
			return m.at
		}
		a.head = (a.head + 1) % uint8(len(a.marks))
		a.n--
	}
	return 0
}

// late is what a credit up to a position says: 0 that nobody knows, else how long ago what it
// acknowledges had come: of bytes, which are most, or of lines only.
func (a *arrivals) late(pos uint64, lines bool) uint16 {
	at := a.of(pos)
	if lines {
		at = a.lastLine
	}
	if at == 0 {
		return 0
	}
	return packLate(record.Now() - at)
}

// packLate is a time in 16 bits: 1 and 11 bits of microseconds, above 2 ms fewer of them, rounded
// down; never 0.
func packLate(ns int64) uint16 {
	us := uint64(max(ns, 0))/1000 + 1
	shift := max(bits.Len64(us)-lateBits, 0)
	if shift > 31 {
		return 1<<16 - 1
	}
	return uint16(shift)<<lateBits | uint16(us>>shift)
}

const lateBits = 11

func unpackLate(v uint16) int64 {
	us := uint64(v&(1<<lateBits-1)) << (v >> lateBits)
	return int64(max(us, 1)-1) * 1000
}

// lateness is what a credit says, and when it came to this host.
func (l *tcpLink) lateness(told uint16, came int64) (x windowmon.Late) {
	now := record.Now()
	if came != 0 {
		x.Sender = now - came
	}
	if told == 0 {
		return x
	}
	if x.Receiver = unpackLate(told); x.Receiver >= away && l.sentAgain(now) {
		return windowmon.Late{Sender: x.Sender}
	}
	x.Told = true
	return x
}

// sentAgain reports whether this host's kernel has sent anything again of what the peer has acknowledged last. A
// peer's kernel stamps what it gets beyond a gap when it comes, and not when the gap is filled:
// the network's time to fill it would be the receiver's.
func (l *tcpLink) sentAgain(now int64) bool {
	if now-l.askedAgain >= away {
		l.askedAgain = now
		n := uint32(0)
		for _, s := range l.socks {
			if info, err := unix.GetsockoptTCPInfo(s.fd, unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
				n += info.Total_retrans
			}
		}
		if n != l.again {
			l.again, l.doubtful = n, l.posted()+1
		}
	}
	return l.completed() < l.doubtful
}

const (
	// askHost is how long a credit may take before the kernel is asked who has the bytes.
	askHost = int64(4 * time.Millisecond)
	// ackWithin is how long a living host keeps an acknowledgement back, and more, beside the way there and back.
	ackWithin = int64(60 * time.Millisecond)
)

// whoHasIt tells the monitor of bytes that the peer has long not acknowledged whether the peer's
// host has them. The kernel there acknowledges what it has, by itself, at the latest some 40 ms
// after it came.
func (l *tcpLink) whoHasIt(now int64) {
	if !l.meter.on || !l.meter.due() || now-l.asked < askHost {
		return
	}
	age := l.meter.mon.Age(now)
	if age < askHost {
		return
	}
	l.asked = now
	if l.lost != nil || l.catching || l.gate.held() > 0 {
		l.meter.mon.OnItsWay(true)
		return
	}
	there, under := len(l.socks) > 0, false
	for _, s := range l.socks {
		left, err := unix.IoctlGetInt(s.fd, unix.SIOCOUTQ)
		if err == nil && left == 0 && len(s.out) == 0 {
			continue
		}
		info, err := unix.GetsockoptTCPInfo(s.fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		if err != nil {
			return
		}
		there = there && info.Snd_wnd < info.Snd_mss // no room there, as nobody reads
		under = under || underWay(info, left, age)
	}
	if there {
		l.meter.mon.Arrived(now)
	} else {
		l.meter.mon.OnItsWay(under)
	}
}

// underWay reports whether the peer's host lacks some of left bytes, of which the oldest may be so old:
// it would have acknowledged them by now, they were sent again, or this kernel keeps some though
// there is room for them.
func underWay(info *unix.TCPInfo, left int, age int64) bool {
	room := int64(info.Snd_wnd) - int64(left) + int64(info.Notsent_bytes)
	return age >= ackWithin+2*int64(info.Min_rtt)*1000 || info.Retransmits > 0 ||
		info.Notsent_bytes > 0 && room >= int64(info.Snd_mss)
}

// meterable reports whether anybody asks how late what comes is.
func (l *tcpLink) meterable() bool { return l.m.cfg.Recorder != nil }
