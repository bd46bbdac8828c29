package transport

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// wires is a network between two links: each set of sockets is a pair of relays, which
// deliver what they are told to, and lose what they hold when they are cut.
type wires struct {
	t      testing.TB
	ends   [2]*tcpLink
	number uint32
	sets   []*wireSet
}

type wireSet struct {
	fds  [2][]int // the middle of each socket, at either end
	held [2][][]byte
	cut  bool
}

func newWires(t testing.TB, window int) *wires {
	w := &wires{t: t}
	for rank := range 2 {
		m := &Mesh{cfg: Config{Rank: rank, Size: 2, Window: window, Outage: time.Hour, Err: func() error { return nil }}, infos: make([]peerInfo, 2)}
		m.cfg.Bounds.setDefaults()
		m.waiter.init(m)
		m.net = &network{m: m, wakeFD: -1, again: func(remote, int, uint32) {}}
		var err error
		if m.net.ep, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
			t.Fatal(err)
		}
		w.ends[rank] = &tcpLink{m: m, n: m.net, peer: 1 - rank}
		m.open = []pipeline{w.ends[rank]}
		m.net.links = map[int]remote{1 - rank: w.ends[rank]}
		m.net.ready = make([]unix.EpollEvent, 16)
	}
	return w
}

func (w *wires) close() {
	for _, l := range w.ends {
		l.close()
		unix.Close(l.n.ep)
	}
	for _, s := range w.sets {
		s.shut()
	}
}

// connect makes a new set, which each end takes over when it is given it.
func (w *wires) connect(sockets int) {
	s := new(wireSet)
	w.number++
	var fds [2][]int
	for range sockets {
		for end := range 2 {
			p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				w.t.Fatal(err)
			}
			unix.SetsockoptInt(p[0], unix.SOL_SOCKET, unix.SO_SNDBUF, 8<<10) // partial writes
			fds[end] = append(fds[end], p[0])
			s.fds[end] = append(s.fds[end], p[1])
			s.held[end] = append(s.held[end], nil)
		}
	}
	w.sets = append(w.sets, s)
	for end, l := range w.ends {
		l.mu.Lock()
		l.whole = w.number
		closeAll(l.next)
		l.next = fds[end]
		l.mu.Unlock()
		l.up.Store(true)
	}
}

// give has an end learn of its newest set.
func (w *wires) give(end int) { w.ends[end].fresh.Store(true) }

// carry moves up to n bytes over a socket of a set, from an end to the other.
func (s *wireSet) carry(from, i, n int) {
	if s.cut {
		return
	}
	b := make([]byte, n)
	if k, _ := unix.Read(s.fds[from][i], b); k > 0 {
		s.held[from][i] = append(s.held[from][i], b[:k]...)
	}
	s.deliver(from, i, n)
}

// deliver hands over up to n of the bytes that were read before.
func (s *wireSet) deliver(from, i, n int) {
	if s.cut {
		return
	}
	if q := s.held[from][i]; len(q) > 0 {
		if k, err := unix.Write(s.fds[1-from][i], q[:min(n, len(q))]); err == nil {
			s.held[from][i] = q[k:]
		}
	}
}

func (s *wireSet) shut() {
	if !s.cut {
		s.cut = true
		for _, fds := range s.fds {
			closeAll(fds)
		}
	}
}

// talker sends and receives the pattern of a stream on one end.
type talker struct {
	l          *tcpLink
	end        int
	messages   int
	length     func(*rand.Rand) int
	sizes, in  *rand.Rand // of the messages sent, and of the other end's
	out        []byte
	keep       bool
	sent, need int
	sentAt     uint64
	got        int
	gotAt      uint64
	lines      [2]uint32
	kept       [][2][]byte // what TrySendKept took, and what it was
}

func newTalker(l *tcpLink, end, messages int, seed uint64) *talker {
	return &talker{l: l, end: end, messages: messages, length: length, sizes: rand.New(rand.NewPCG(seed, uint64(end))), in: rand.New(rand.NewPCG(seed, uint64(1-end)))}
}

func length(r *rand.Rand) int {
	switch r.IntN(4) {
	case 0:
		return 1 + r.IntN(40<<10)
	case 1:
		return 64 * (1 + r.IntN(200))
	}
	return 1 + r.IntN(300)
}

// large is what makes up for more than the window, and is kept by reference.
func large(r *rand.Rand) int {
	if r.IntN(4) == 0 {
		return 1 + r.IntN(300)
	}
	return 64<<10 + r.IntN(336<<10)
}

func (a *talker) done() bool {
	return a.sent == a.messages && len(a.out) == 0 && a.got == a.messages && a.need == 0 && a.lines == [2]uint32{uint32(a.messages), uint32(a.messages)}
}

// turn does what an executor does when it looks at a link.
func (a *talker) turn(dice *rand.Rand) error {
	l := a.l
	l.socks0()
	if len(a.out) == 0 && a.sent < a.messages {
		if a.keep && dice.IntN(2) == 0 { // an operation ends: its memory is the caller's again
			l.m.Settled()
			for _, b := range a.kept {
				if !bytes.Equal(b[0], b[1]) {
					return errors.New("bytes of the caller's changed")
				}
				clear(b[0])
			}
			a.kept = nil
		}
		l.AlignSend()
		a.out = make([]byte, a.length(a.sizes))
		fill(a.out, a.end, 1-a.end, a.sentAt)
		if a.keep = dice.IntN(2) == 0; a.keep {
			a.kept = append(a.kept, [2][]byte{a.out, slices.Clone(a.out)})
		}
		a.sentAt += uint64(len(a.out))
		a.sent++
	}
	if len(a.out) > 0 {
		send := l.TrySend
		if a.keep {
			send = l.TrySendKept
		}
		n, err := send(a.out)
		if err != nil {
			return err
		}
		if !a.keep {
			clear(a.out[:n]) // the caller may
		}
		a.out = a.out[n:]
	}
	if a.need == 0 && a.got < a.messages {
		l.AlignRecv()
		a.need = a.length(a.in)
		a.got++
	}
	if a.need > 0 {
		var b []byte
		var err error
		peek := a.got%2 == 0
		if peek {
			if b, err = l.Peek(); len(b) > a.need {
				b = b[:a.need]
			}
			if len(b) < a.need && len(b)%lineSize != 0 {
				return fmt.Errorf("a piece of %d bytes of %d", len(b), a.need)
			}
		} else {
			b = make([]byte, min(a.need, 1+dice.IntN(20<<10)))
			n := 0
			n, err = l.TryRecv(b)
			b = b[:n]
		}
		if err != nil {
			return err
		}
		for i := range b {
			if b[i] != pattern(1-a.end, a.end, a.gotAt+uint64(i)) {
				return fmt.Errorf("end %d: wrong byte %d", a.end, a.gotAt+uint64(i))
			}
		}
		a.gotAt += uint64(len(b))
		a.need -= len(b)
		if peek {
			l.Advance(len(b))
		}
	}
	var line [LinePayload]byte
	if a.lines[0] < uint32(a.messages) {
		n := int(a.lines[0]) % LinePayload
		fill(line[:n], a.end, 1-a.end, uint64(a.lines[0]))
		ok, err := l.TryWriteLine(line[:n], a.lines[0])
		if err != nil {
			return err
		}
		if ok {
			a.lines[0]++
		}
	}
	if a.lines[1] < uint32(a.messages) {
		n, tag, ok, err := l.TryReadLine(line[:])
		if err != nil {
			return err
		}
		if ok {
			if tag != a.lines[1] || n != int(tag)%LinePayload {
				return fmt.Errorf("line %d of %d bytes, want %d", tag, n, a.lines[1])
			}
			for i := range n {
				if line[i] != pattern(1-a.end, a.end, uint64(tag)+uint64(i)) {
					return fmt.Errorf("wrong line %d", tag)
				}
			}
			a.lines[1]++
		}
	}
	l.refresh(record.Now())
	return nil
}

// TestCutsLoseNothing: sockets that are cut after any byte, and sets of sockets of which
// one end takes over another than the other end, at any time, neither lose nor repeat a
// byte or a line.
func TestCutsLoseNothing(t *testing.T) {
	cuts, resent := 0, uint64(0)
	defer func() { t.Logf("%d sets of sockets were cut, %d bytes sent again", cuts, resent) }()
	check := func(rt *rapid.T, window, most int, length func(*rand.Rand) int) {
		seed := rapid.Uint64().Draw(rt, "seed")
		messages := rapid.IntRange(1, most).Draw(rt, "messages")
		sockets := rapid.IntRange(1, 3).Draw(rt, "sockets")
		odds := rapid.IntRange(30, 600).Draw(rt, "turns between cuts")
		splits := rapid.Bool().Draw(rt, "split by rate")
		dice := rand.New(rand.NewPCG(seed, 7))
		w := newWires(t, window)
		defer w.close()
		var ends [2]*talker
		for e := range ends {
			ends[e] = newTalker(w.ends[e], e, messages, seed)
			ends[e].length = length
		}
		w.connect(sockets)
		w.give(0)
		w.give(1)
		frozen := -1 // nothing comes over this socket for a while
		for turn := 0; !ends[0].done() || !ends[1].done(); turn++ {
			if turn > 400_000 {
				rt.Fatalf("no end: %d and %d of %d messages have come", ends[0].got, ends[1].got, messages)
			}
			for _, l := range w.ends {
				if l.splits = splits; splits && dice.IntN(10) == 0 {
					for _, s := range l.mine() {
						s.rate = float64(1+dice.IntN(20)) / 1000
					}
				}
			}
			if dice.IntN(50) == 0 {
				frozen = dice.IntN(3*sockets) - sockets
			}
			for _, l := range w.ends {
				for i, s := range l.socks {
					if dice.IntN(20) == 0 {
						s.late = i == frozen || dice.IntN(4) == 0
						s.retold = s.retold && s.late
					}
				}
				l.passOver()
			}
			// What any of the sets holds may still arrive.
			for range 1 + dice.IntN(8) {
				s := w.sets[max(0, len(w.sets)-1-dice.IntN(2))]
				if i := dice.IntN(sockets); i != frozen {
					s.carry(dice.IntN(2), i, 1+dice.IntN(30<<10))
				}
			}
			switch {
			case dice.IntN(odds) == 0 && turn < 100_000:
				cuts++
				if dice.IntN(3) > 0 {
					w.sets[len(w.sets)-1].shut()
				}
				w.connect(sockets)
				if dice.IntN(3) > 0 {
					w.give(dice.IntN(2))
				}
			case dice.IntN(20) == 0: // both hear of the newest one in the end
				for e, l := range w.ends {
					if l.number != w.number {
						w.give(e)
					}
				}
			}
			e := dice.IntN(2)
			if err := ends[e].turn(dice); err != nil {
				rt.Fatalf("turn %d, set %d: %v", turn, w.number, err)
			}
		}
		for _, l := range w.ends {
			resent += l.resent
		}
		for len(w.sets) > 1 {
			w.sets[0].shut()
			w.sets = w.sets[1:]
		}
	}
	rapid.Check(t, func(rt *rapid.T) {
		// One in ten is large: it takes as long as the others together.
		if rapid.IntRange(0, 9).Draw(rt, "large") == 9 {
			check(rt, 256<<10, 4, large)
			return
		}
		check(rt, 64<<10, 40, length)
	})
}

// FuzzResume gives a link that waits for the peer's resume frame arbitrary ones, and
// what follows: it ends, or goes on with what it keeps.
func FuzzResume(f *testing.F) {
	l := &tcpLink{m: &Mesh{cfg: Config{Window: 64 << 10}}}
	h := l.header(frameResume, 0, 1000, 1)
	f.Add(h[:])
	h = l.header(frameResume, 0, 1<<40, 9)
	f.Add(h[:])
	f.Fuzz(func(t *testing.T, in []byte) {
		l, fd := bareLink(t)
		sent := make([]byte, 5000)
		if n, err := l.TrySend(sent); n != len(sent) || err != nil {
			t.Fatal(n, err)
		}
		l.AlignSend()
		if ok, err := l.TryWriteLine(sent[:9], 1); !ok || err != nil {
			t.Fatal(err)
		}
		l.awaits, l.lost = true, errSilent
		if _, err := unix.Write(fd, in); err != nil {
			return
		}
		for range 3 {
			l.socks0()
			if _, err := l.TryRecv(sent); err != nil {
				if l.socks != nil && errors.Is(err, ErrCorrupt) {
					t.Fatal("a corrupt connection is open")
				}
				return
			}
		}
		if l.acked > l.sent || slices.ContainsFunc(l.again, func(g span) bool { return g.hi > l.sent }) {
			t.Fatalf("sends %v again, %d to %d are kept", l.again, l.acked, l.sent)
		}
	})
}

// BenchmarkRetain is what keeping bytes to send again costs: a piece sent over TCP on
// loopback by reference, and with a copy; and the copy alone.
func BenchmarkRetain(b *testing.B) {
	const size = 128 << 10
	b.Run("the copy", func(b *testing.B) {
		w := newWires(b, 2<<20)
		defer w.close()
		l, buf, at := w.ends[0], make([]byte, size), uint64(0)
		b.SetBytes(size)
		for b.Loop() {
			l.store(at, buf)
			at += size
		}
	})
	for _, how := range []string{"reference", "copy"} {
		b.Run(how, func(b *testing.B) {
			ln, err := net.Listen("tcp4", "127.0.0.1:0")
			if err != nil {
				b.Fatal(err)
			}
			defer ln.Close()
			done := make(chan struct{})
			go func() {
				defer close(done)
				if c, err := ln.Accept(); err == nil {
					io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{c}, make([]byte, size))
					c.Close()
				}
			}()
			conn, err := net.Dial("tcp4", ln.Addr().String())
			if err != nil {
				b.Fatal(err)
			}
			fd, err := detach(conn)
			conn.Close()
			if err != nil {
				b.Fatal(err)
			}
			w := newWires(b, 2<<20)
			defer w.close()
			l := w.ends[0]
			l.socks = []*socket{{fd: fd, readable: true, writable: true}}
			l.up.Store(true)
			send := l.TrySendKept
			if how == "copy" {
				send = l.TrySend
			}
			buf := make([]byte, size)
			b.SetBytes(size)
			for b.Loop() {
				for left := buf; len(left) > 0; {
					s := l.socks[0]
					s.writable = true
					if err := s.flush(); err != nil {
						b.Fatal(err)
					}
					n, err := send(left)
					if err != nil {
						b.Fatal(err)
					}
					if left = left[n:]; n == 0 {
						runtime.Gosched()
					}
				}
				l.acked = l.sent // the receiver has them
				l.release()
			}
			l.close()
			<-done
		})
	}
}
