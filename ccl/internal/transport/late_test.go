package transport

import (
	"encoding/binary"
	"net"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
	"github.com/lockstep-ccl/lockstep/windowmon"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// metered is a bare link with a recorder.
func metered(t *testing.T) (l *tcpLink, peer int) {
	l, peer = bareLink(t)
	w, err := record.Create(record.Options{Dir: t.TempDir(), Identity: record.Identity{Job: "j"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	l.m.cfg.Recorder = w
	l.m.cfg.Comm, _ = w.AddComm(record.CommEntry{ID: 1, Name: "test", Size: 2})
	l.opened = true
	l.meter.open(l.m, record.ConnEntry{Peer: 1, Transport: record.TransportTCP})
	return l, peer
}

// nobodyTells is a credit of an older peer.
const nobodyTells = -1

// TestLateReceiver: of what a receiver says that its host has long had, nothing is the network's,
// however long it took; of what it says to have taken at once all is, as where it does not say.
func TestLateReceiver(t *testing.T) {
	l, peer := metered(t)
	piece, scratch := make([]byte, 8<<10), make([]byte, 64<<10)
	turn := func(wait time.Duration, late int64) {
		t.Helper()
		l.socks0()
		if n, err := l.TrySend(piece); n != len(piece) || err != nil {
			t.Fatalf("%d bytes sent: %v", n, err)
		}
		for left := len(piece) + frameSize; left > 0; {
			n, err := unix.Read(peer, scratch)
			if err != nil {
				t.Fatal(err)
			}
			left -= n
		}
		time.Sleep(wait)
		var credit [frameSize]byte
		credit[0] = frameCredit
		if late != nobodyTells {
			binary.LittleEndian.PutUint16(credit[2:], packLate(late))
		}
		binary.LittleEndian.PutUint64(credit[16:], l.sent)
		if _, err := unix.Write(peer, credit[:]); err != nil {
			t.Fatal(err)
		}
		l.socks0()
		if _, err := l.receive(nil, 0); err != nil || l.acked != l.sent {
			t.Fatalf("%d of %d bytes acknowledged: %v", l.acked, l.sent, err)
		}
	}
	for range 200 {
		turn(0, 0)
	}
	window := func(late int64) windowmon.Window {
		closed := l.meter.mon.Windows()
		for l.meter.mon.Windows() < closed+2 { // the second one begins after what came before
			turn(time.Millisecond, late)
		}
		return l.meter.mon.Last()
	}
	if w := window(1 << 50); w.Cause == windowmon.Network || w.Network != 0 || w.Held == 0 {
		t.Errorf("the receiver's host had it all the time: %+v", w)
	}
	for _, late := range []int64{0, nobodyTells} {
		if w := window(late); w.Held != 0 || w.Network+w.Stalled == 0 {
			t.Errorf("the receiver took it at once, or does not say (%d): %+v", late, w)
		}
	}
}

// TestSentAgain: what a receiver says of bytes that this kernel has sent again, and of those under way by
// then, is not believed; of later ones it is.
func TestSentAgain(t *testing.T) {
	l, _ := metered(t) // its socket is none of TCP's: it sends nothing again
	told := packLate(int64(time.Second))
	if got := l.lateness(told, 0); !got.Told || got.Receiver != unpackLate(told) {
		t.Errorf("nothing was sent again: %+v", got)
	}
	l.again++ // since then the count has changed
	l.askedAgain -= away
	l.sent = 100
	for l.acked = 50; l.acked <= 100; l.acked += 50 {
		if got := l.lateness(told, 0); got.Told || got.Receiver != 0 {
			t.Errorf("%d of 100 bytes acknowledged: %+v", l.acked, got)
		}
		if small := packLate(away / 2); !l.lateness(small, 0).Told {
			t.Error("a lateness too small to matter")
		}
	}
	if l.sent, l.acked = 200, 101; !l.lateness(told, 0).Told {
		t.Error("what was sent since then is doubted, too")
	}
}

// TestKernelStamps: a credit tells of the time that bytes lay in this host, unread.
func TestKernelStamps(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	dialled, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer dialled.Close()
	accepted, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	f, err := accepted.(*net.TCPConn).File()
	accepted.Close()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	l, _ := metered(t)
	s := &socket{fd: int(f.Fd()), readable: true, writable: true, looked: &l.m.looked}
	if s.stamped = stampArrivals(s.fd); !s.stamped {
		t.Skip("this kernel stamps nothing")
	}
	if err := unix.SetNonblock(s.fd, true); err != nil {
		t.Fatal(err)
	}
	l.socks = append(l.socks, s)
	const n, lain = 8 << 10, 20 * time.Millisecond
	b := make([]byte, n)
	for deadline := time.Now().Add(patience); ; {
		h := l.header(frameData, n, l.got, 0)
		clear(h[16:]) // the peer has consumed nothing
		before := record.Now()
		if _, err := dialled.Write(append(h[:], b...)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(lain)
		for got := 0; got < n; {
			l.socks0()
			k, err := l.TryRecv(b[got:])
			if got += k; err != nil || time.Now().After(deadline) {
				t.Fatalf("%d bytes of %d received: %v", got, n, err)
			}
		}
		h = l.header(frameCredit, 0, 0, 0)
		told := binary.LittleEndian.Uint16(h[2:])
		if told == 0 { // a kernel that has stamped nothing so far begins a little later
			continue
		}
		if late, most := unpackLate(told), record.Now()-before; late < int64(lain)/2 || late > most {
			t.Errorf("bytes that lay here for %v to %v were here for %v, says the credit", lain, time.Duration(most), time.Duration(late))
		}
		return
	}
}

func TestPackLate(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ns := rapid.OneOf(rapid.Int64Range(-10, 5e6), rapid.Int64Range(0, 1<<51)).Draw(t, "ns")
		v := packLate(ns)
		got, want := unpackLate(v), max(ns, 0)
		if v == 0 || got > want || got < want-1000-want/1000 {
			t.Fatalf("%d ns is %#x, %d ns", ns, v, got)
		}
	})
	if unpackLate(0) != 0 || unpackLate(1<<16-1) <= 0 {
		t.Error("the ends of the range")
	}
}

// TestArrivals: a position's time is that at which its last byte came, but for what counts as one.
func TestArrivals(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var a arrivals
		var came []int64 // by byte
		got, at, full := 0, int64(1), false
		for range rapid.IntRange(1, 100).Draw(t, "events") {
			at += rapid.Int64Range(0, 3*mergeNs).Draw(t, "wait")
			if rapid.Bool().Draw(t, "arrive") {
				for range rapid.IntRange(1, 5).Draw(t, "bytes") {
					came = append(came, at)
				}
				a.upTo(uint64(len(came)), at)
				full = full || int(a.n) == len(a.marks)
				continue
			}
			got += rapid.IntRange(0, len(came)-got).Draw(t, "taken")
			if got == 0 {
				continue
			}
			// Of bytes that came after the marks were all in use, the time may be a later one's.
			full = full && a.n > 0
			if of := a.of(uint64(got)); of < came[got-1]-mergeNs || of > at || of > came[got-1] && !full {
				t.Fatalf("byte %d came at %d, not %d", got, came[got-1], of)
			}
		}
	})
}

// TestCame: of what came with more, while its rank did not look, the stamp is too late.
func TestCame(t *testing.T) {
	looked := int64(1000)
	for _, tt := range []struct {
		stamp  int64
		filled bool
		rest   int
		want   int64
	}{
		{1000 + away, false, 0, 1000 + away}, // all there was
		{1000 + away, true, 0, 1000},
		{1000 + away, false, 1, 1000},
		{999 + away, true, 1, 999 + away}, // it was looking
		{500, true, 1, 500},               // there before it looked
		{0, true, 1, 0},
	} {
		s := &socket{stamp: tt.stamp, filled: tt.filled, inHi: tt.rest, looked: &looked}
		if got := s.came(); got != tt.want {
			t.Errorf("%+v: came at %d", tt, got)
		}
	}
}

// TestStampOf: control messages that are none of ours are no stamps.
func TestStampOf(t *testing.T) {
	ctl := make([]byte, 32)
	for n := range ctl {
		if got := stampOf(ctl[:n]); got != 0 {
			t.Errorf("%d zero bytes are a stamp: %d", n, got)
		}
	}
	binary.LittleEndian.PutUint32(ctl[8:], unix.SOL_SOCKET)
	binary.LittleEndian.PutUint32(ctl[12:], unix.SO_TIMESTAMPNS)
	followClock(record.Now())
	real := time.Now()
	binary.LittleEndian.PutUint64(ctl[16:], uint64(real.Unix()))
	binary.LittleEndian.PutUint64(ctl[24:], uint64(real.Nanosecond()))
	if got, now := stampOf(ctl), record.Now(); got > now+int64(time.Second) || got < now-int64(time.Minute) {
		t.Errorf("now is %d, not %d", now, got)
	}
}
