package transport

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"testing"

	"golang.org/x/sys/unix"
)

// bareLink is a link over one socket whose other end is ours.
func bareLink(t testing.TB) (*tcpLink, int) {
	l, fds := bareSockets(t, 1)
	return l, fds[0]
}

func bareSockets(t testing.TB, n int) (*tcpLink, []int) {
	m := &Mesh{cfg: Config{Size: 2, Window: 64 << 10, Err: func() error { return nil }}, infos: make([]peerInfo, 2)}
	m.cfg.Bounds.setDefaults()
	m.waiter.init(m)
	m.net = &network{m: m, wakeFD: -1}
	l := &tcpLink{m: m, n: m.net, peer: 1}
	var ours []int
	for range n {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		l.socks = append(l.socks, &socket{fd: pair[0], readable: true, writable: true})
		ours = append(ours, pair[1])
	}
	l.hi = n
	l.up.Store(true)
	t.Cleanup(func() {
		l.close()
		for _, fd := range ours {
			unix.Close(fd)
		}
	})
	return l, ours
}

// A peer that closes ends its sockets one by one: what comes over the others is
// received first.
func TestSocketsEndOneByOne(t *testing.T) {
	l, fds := bareSockets(t, 2)
	end := func(fd int) {
		t.Helper()
		if err := unix.Shutdown(fd, unix.SHUT_WR); err != nil {
			t.Fatal(err)
		}
		l.socks0()
	}
	const size = 8 << 10
	buf := make([]byte, size)
	end(fds[0])
	for range 2 {
		if n, err := l.TryRecv(buf); n != 0 || err != nil {
			t.Fatalf("one socket of two has ended: %d bytes, %v", n, err)
		}
	}
	want := bytes.Repeat([]byte{1, 2, 3, 4}, size/4)
	h := l.header(frameData, size, 0, 0)
	if n, err := unix.Write(fds[1], append(h[:], want...)); n != frameSize+size || err != nil {
		t.Fatal(n, err)
	}
	end(fds[1])
	if n, err := l.TryRecv(buf); n != size || err != nil || !bytes.Equal(buf, want) {
		t.Fatalf("%d bytes of %d, %v", n, size, err)
	}
	l.socks0()
	if n, err := l.TryRecv(buf); n != 0 || !errors.Is(err, io.EOF) {
		t.Fatalf("all sockets have ended: %d bytes, %v", n, err)
	}
}

// A socket that ends within a frame ends the link at once: its peer died.
func TestSocketEndsWithinAFrame(t *testing.T) {
	for _, sent := range []int{1, frameSize - 1, frameSize, frameSize + 99} {
		t.Run(fmt.Sprint(sent), func(t *testing.T) {
			l, fds := bareSockets(t, 2)
			h := l.header(frameData, 100, 0, 0)
			if _, err := unix.Write(fds[1], append(h[:], make([]byte, 100)...)[:sent]); err != nil {
				t.Fatal(err)
			}
			if err := unix.Shutdown(fds[1], unix.SHUT_WR); err != nil {
				t.Fatal(err)
			}
			var err error
			var buf [100]byte
			for i := 0; i < 10 && err == nil; i++ {
				l.socks0()
				_, err = l.TryRecv(buf[:])
			}
			if !errors.Is(err, io.EOF) {
				t.Fatalf("error is %v", err)
			}
		})
	}
}

// A reducer reads whole elements from Peek's pieces, however little of a frame
// has arrived, and whatever was received before it.
func TestPiecesOfTheNextMessageAreWhole(t *testing.T) {
	l, fds := bareSockets(t, 2)
	const first, second = 8 << 10, 20000
	send := func(fd int, b []byte) {
		t.Helper()
		if n, err := unix.Write(fd, b); n != len(b) || err != nil {
			t.Fatal(n, err)
		}
		l.socks0()
	}
	h := l.header(frameData, second, first, 0)
	send(fds[1], append(h[:], make([]byte, 9999)...)) // the second message's beginning overtakes the first one
	if b, err := l.Peek(); len(b) > 0 || err != nil {
		t.Fatalf("%d bytes, %v", len(b), err)
	}
	buf := make([]byte, first)
	if n, err := l.TryRecv(buf); n != 0 || err != nil {
		t.Fatal(n, err)
	}
	h = l.header(frameData, first, 0, 0)
	send(fds[0], append(h[:], make([]byte, first)...))
	if n, err := l.TryRecv(buf); n != first || err != nil {
		t.Fatal(n, err)
	}
	l.AlignRecv()
	if b, err := l.Peek(); len(b) == 0 || len(b)%lineSize != 0 || err != nil {
		t.Errorf("a piece of %d bytes, %v", len(b), err)
	}
}

func TestGarbageEndsTheConnection(t *testing.T) {
	frame := func(change func(h []byte)) []byte {
		h := make([]byte, frameSize)
		h[0] = frameData
		binary.LittleEndian.PutUint32(h[4:], 100)
		change(h)
		return append(h, make([]byte, 200)...)
	}
	le := binary.LittleEndian
	for name, b := range map[string][]byte{
		"kind":           frame(func(h []byte) { h[0] = 77 }),
		"no bytes":       frame(func(h []byte) { le.PutUint32(h[4:], 0) }),
		"too many bytes": frame(func(h []byte) { le.PutUint32(h[4:], 1<<31) }),
		"beyond window":  frame(func(h []byte) { le.PutUint64(h[8:], 64<<10) }),
		"far beyond":     frame(func(h []byte) { le.PutUint64(h[8:], 1<<63) }),
		"wraps":          frame(func(h []byte) { le.PutUint64(h[8:], ^uint64(0)-10) }),
		"padding":        frame(func(h []byte) { h[1] = 200 }),
		"credit":         frame(func(h []byte) { le.PutUint64(h[16:], 1<<20) }),
		"line credit":    frame(func(h []byte) { le.PutUint32(h[24:], 1) }),
		"long line":      frame(func(h []byte) { h[0] = frameLine }),
		"line order":     frame(func(h []byte) { h[0] = frameLine; le.PutUint32(h[4:], 8); le.PutUint64(h[8:], 5) }),
		"no kind":        append(frame(func(h []byte) { le.PutUint32(h[4:], 200) }), frame(func(h []byte) {})...),
	} {
		t.Run(name, func(t *testing.T) {
			l, fd := bareLink(t)
			if _, err := unix.Write(fd, b); err != nil {
				t.Fatal(err)
			}
			var err error
			var buf [300]byte
			for i := 0; i < 10 && err == nil; i++ {
				_, err = l.TryRecv(buf[:])
			}
			if !errors.Is(err, ErrCorrupt) {
				t.Fatalf("error is %v", err)
			}
			if n, err := unix.Read(fd, buf[:]); n > 0 || err == nil && n != 0 || errors.Is(err, unix.EAGAIN) {
				t.Errorf("the connection is open: %d, %v", n, err)
			}
			if _, err := l.TrySend(buf[:]); !errors.Is(err, ErrCorrupt) {
				t.Errorf("send: %v", err)
			}
		})
	}
}

// FuzzFrames gives a link arbitrary bytes, and uses it in every way.
func FuzzFrames(f *testing.F) {
	l := &tcpLink{m: &Mesh{cfg: Config{Window: 64 << 10}}}
	data := l.header(frameData, 100, 0, 0)
	line := l.header(frameLine, 8, 0, 7)
	credit := l.header(frameCredit, 0, 0, 0)
	f.Add(append(data[:], make([]byte, 100)...), byte(0))
	f.Add(append(line[:], make([]byte, 8)...), byte(1))
	f.Add(append(credit[:], append(data[:], make([]byte, 100)...)...), byte(2))
	later := l.header(frameData, 64, 4096, 0)
	f.Add(append(later[:], append(make([]byte, 64), data[:]...)...), byte(3))
	f.Fuzz(func(t *testing.T, in []byte, use byte) {
		l, fd := bareLink(t)
		buf := make([]byte, 8<<10)
		var front uint64
		for len(in) > 0 {
			n, err := unix.Write(fd, in[:min(len(in), 1+int(use)*7)])
			if err != nil {
				n = 0
			}
			in = in[n:]
			l.socks0()
			b, err := l.Peek()
			if err == nil && use&1 == 0 {
				l.Advance(len(b) / 2)
			}
			got, err2 := l.TryRecv(buf[:1+int(use)*32])
			_, _, _, err3 := l.TryReadLine(buf)
			if use&2 != 0 {
				l.AlignRecv()
			}
			if l.front < l.got || l.front < front || got > len(buf) || uint64(len(b)) > uint64(l.m.cfg.Window) {
				t.Fatalf("at %d, arrived %d, before %d", l.got, l.front, front)
			}
			front = l.front
			if err != nil || err2 != nil || err3 != nil {
				return
			}
		}
	})
}

// socks0 makes the sockets look readable, since no epoll instance does.
func (l *tcpLink) socks0() {
	for _, s := range l.socks {
		s.readable, s.writable = true, true
	}
}

// TestManyLines: the totals that the monitor sees go on where the 32 bits of a line's
// number on the wire begin anew.
func TestManyLines(t *testing.T) {
	goroutines(t, apart, 2, nil, func(m *Mesh, rank, _ int) error {
		l, err := m.Link(1 - rank)
		if err != nil {
			return err
		}
		const before, lines = 1<<32 - 50, 100
		tcp := l.(*tcpLink)
		tcp.linesSent, tcp.linesAcked = before, before
		tcp.linesGot, tcp.linesIn, tcp.linesTold = before, before, before
		var b [LinePayload]byte
		for i := range lines {
			if rank == 0 {
				err = writeLine(m, l, []byte{byte(i)}, uint32(i))
			} else if n, tag, e := readLine(m, l, b[:]); e != nil || n != 1 || int(b[0]) != i || int(tag) != i {
				return fmt.Errorf("line %d: %d bytes %v, tag %d: %w", i, n, b[0], tag, e)
			}
			if err != nil {
				return err
			}
		}
		u := wait(m)
		for rank == 0 && tcp.completed() < tcp.posted() {
			tcp.refresh(0)
			if err := u.again(); err != nil {
				return err
			}
		}
		const total = (before + lines) * lineSize
		if moved := [2]uint64{tcp.posted(), tcp.received()}[rank]; moved != total {
			return fmt.Errorf("%d bytes in all, want %d", moved, uint64(total))
		}
		if rank == 1 {
			tcp.refresh(0) // the last credit
		}
		return nil
	})
}
