package accept

import (
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/internal/accept/acceptest"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is longer than any healthy run takes.
const patience = 2 * time.Minute

func open(t testing.TB, o Options) (*Acceptor, string) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d, err := New(ln.(*net.TCPListener), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	return d, ln.Addr().String()
}

func dial(t testing.TB, addr, from string) net.Conn {
	d := net.Dialer{Timeout: patience, LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	c, err := d.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(patience))
	t.Cleanup(func() { c.Close() })
	return c
}

func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not in time: " + what)
		}
	}
}

// hangsUp reports whether the other end closes the connection.
func hangsUp(c net.Conn) bool {
	_, err := c.Read(make([]byte, 1))
	e, ok := err.(net.Error)
	return err != nil && (!ok || !e.Timeout())
}

// mine inspects messages of four bytes. Members' messages begin with m.
func mine(b []byte) Inspection {
	switch {
	case len(b) < 4:
		return Incomplete
	case b[0] == 'm':
		return Plausible
	}
	return Invalid
}

// waits is a Serve that returns when the connection ends.
func waits(c *Conn) { _, _ = io.Copy(io.Discard, c) }

// TestKeep: Close ends connections that were not kept, and no others.
func TestKeep(t *testing.T) {
	kept := make(chan net.Conn, 2)
	d, addr := open(t, Options{Serve: func(c *Conn) {
		var b [1]byte
		if _, err := io.ReadFull(c, b[:]); err == nil && c.Keep() {
			kept <- c.Conn
		}
	}})
	a, b := dial(t, addr, "127.0.0.1"), dial(t, addr, "127.0.0.1")
	a.Write([]byte{1})
	server := <-kept
	defer server.Close()
	eventually(t, "both", func() bool { return d.Counts().Accepted == 2 })
	d.Close()
	if !hangsUp(b) {
		t.Error("an unauthenticated connection outlives the Acceptor")
	}
	server.Write([]byte{7})
	var got [1]byte
	if _, err := io.ReadFull(a, got[:]); err != nil || got[0] != 7 {
		t.Errorf("kept connection: %v", err)
	}
}

// TestFloodIsBounded: goroutines and connections stay within the bounds in a flood.
func TestFloodIsBounded(t *testing.T) {
	const room = 64
	var inside, most atomic.Int64
	before := runtime.NumGoroutine()
	d, addr := open(t, Options{MaxUnauthenticated: room, Serve: func(c *Conn) {
		for n := inside.Add(1); n > most.Load(); {
			most.Store(n)
		}
		waits(c)
		inside.Add(-1)
	}})
	f := acceptest.Start(t, addr, 400, acceptest.Silent, acceptest.Says([]byte("x")), acceptest.Drips(make([]byte, 100)))
	eventually(t, "refused", func() bool { return d.Counts().Refused[Crowded] > 500 })
	// An evicted connection takes a moment to end.
	if n := most.Load(); n > 4*room {
		t.Errorf("%d connections were served at a time, the cap is %d", n, room)
	}
	eventually(t, "few goroutines", func() bool { return runtime.NumGoroutine() < before+room+20 })
	f.Stop()
	d.Close()
	if n := inside.Load(); n != 0 {
		t.Errorf("%d are still served", n)
	}
}

func TestSeen(t *testing.T) {
	var s Seen
	nonce := func(i int) (n [32]byte) { n[0], n[1] = byte(i), byte(i>>8); return n }
	for i := range seenMax + 10 {
		if !s.Add(nonce(i)) {
			t.Fatalf("%d is new", i)
		}
	}
	for i := 10; i < seenMax+10; i++ {
		if s.Add(nonce(i)) {
			t.Fatalf("%d is not new", i)
		}
	}
	if len(s.has) != seenMax || len(s.ring) != seenMax {
		t.Errorf("%d and %d are kept", len(s.has), len(s.ring))
	}
}

// TestAdmissionWithinGrace: while all connections are within their grace, a new one is admitted only
// by its first message. It does not block.
func TestAdmissionWithinGrace(t *testing.T) {
	d, _ := open(t, Options{MaxUnauthenticated: 1, PeekSize: 4, Inspect: mine, Serve: waits})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	come := func(says string, ago time.Duration) *Conn {
		dial(t, ln.Addr().String(), "127.0.0.1").Write([]byte(says))
		conn, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		c := &Conn{acceptor: d, since: time.Now().Add(ago)}
		if c.fd, err = detach(conn); err != nil {
			t.Fatal(err)
		}
		eventually(t, "received", func() bool {
			n, _, err := unix.Recvfrom(c.fd, make([]byte, 4), unix.MSG_PEEK|unix.MSG_DONTWAIT)
			return says == "" || err == nil && n == len(says)
		})
		return c
	}
	for _, tt := range []struct {
		says string
		ago  time.Duration
		in   *class
	}{
		{"", time.Hour, &d.unauthenticated}, {"", 0, nil}, {"m", 0, nil}, {"what", 0, nil},
		{"mine", 0, &d.plausible}, {"mine", 0, &d.plausible},
	} {
		c := come(tt.says, tt.ago)
		d.accepted(c)
		d.mu.Lock()
		if c.in != tt.in {
			t.Errorf("%q: among %p, want %p", tt.says, c.in, tt.in)
		}
		d.mu.Unlock()
	}
	if c := d.Counts(); c.Accepted != 6 || c.Refused[Crowded] != 3 {
		t.Errorf("%+v", c)
	}
}

// detach returns a descriptor of a connection's socket.
func detach(conn net.Conn) (fd int, err error) {
	f, err := conn.(*net.TCPConn).File()
	if err != nil {
		return -1, err
	}
	defer f.Close()
	return unix.Dup(int(f.Fd()))
}

// TestPending: a pending connection costs no goroutine. It is served when its whole message has
// arrived, in whatever pieces, and is closed when that takes too long.
func TestPending(t *testing.T) {
	served := make(chan string, 10)
	d, addr := open(t, Options{PeekSize: 4, Inspect: mine, Serve: func(c *Conn) {
		b := make([]byte, 4)
		n, _ := io.ReadFull(c, b)
		served <- string(b[:n])
	}})
	first := func(d *Acceptor, is time.Duration) {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.pending.timeout = is
	}
	first(d, patience)
	before := runtime.NumGoroutine()
	var silent []net.Conn
	for range 50 {
		silent = append(silent, dial(t, addr, "127.0.0.1"))
	}
	c := dial(t, addr, "127.0.0.1")
	for i, b := range []byte("mine") {
		eventually(t, "accepted", func() bool { return d.Counts().Accepted == 51 })
		if n := runtime.NumGoroutine(); n > before || len(served) > 0 {
			t.Errorf("after %d bytes: %d goroutines more, %d served", i, n-before, len(served))
		}
		c.Write([]byte{b})
	}
	if s := <-served; s != "mine" {
		t.Errorf("served with %q", s)
	}
	first(d, 0)
	d.pending.ep.SetReadDeadline(time.Now()) // expire runs
	for _, c := range silent {
		if !hangsUp(c) {
			t.Fatal("a silent connection stays")
		}
	}
	first(d, patience)
	dial(t, addr, "127.0.0.1").Close() // a port check
	dial(t, addr, "127.0.0.1").Write([]byte("what"))
	if s := <-served; s != "what" {
		t.Errorf("served with %q", s)
	}
	if c := d.Counts(); c.Refused[Silent] != 50 || c.AllRefused() != 50 || c.Accepted != 53 {
		t.Errorf("%+v", c)
	}
}

// TestBacklogIsShortInAFlood: the backlog is short while there is no room, and long again later.
func TestBacklogIsShortInAFlood(t *testing.T) {
	d, addr := open(t, Options{MaxUnauthenticated: 1, PeekSize: 4, Inspect: mine, Serve: waits})
	long := d.pending.backlog
	length := func() int {
		n, _, err := backlogOf(d.ln)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	for range 2 {
		n := d.Counts().Refused[Crowded]
		eventually(t, "a short queue", func() bool {
			if c, err := net.Dial("tcp", addr); err == nil { // else reset at once
				t.Cleanup(func() { c.Close() })
			}
			return d.Counts().Refused[Crowded] > n && length() == min(shortBacklog, long)
		})
		eventually(t, "a long queue", func() bool { return length() == long })
	}
}

// TestDial: Dial does not wait for the kernel to repeat a SYN when the backlog is full.
func TestDial(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ln, addr := l.(*net.TCPListener), l.Addr().String()
	if err := setBacklog(ln, 0); err != nil {
		t.Fatal(err)
	}
	dial(t, addr, "127.0.0.1") // one fills it
	var tries atomic.Int64
	count := &net.Dialer{Timeout: patience, Control: func(string, string, syscall.RawConn) error {
		tries.Add(1)
		return nil
	}}
	ended := make(chan error)
	go func() {
		c, err := Dial(t.Context(), count, addr)
		if err == nil {
			c.Close()
		}
		ended <- err
	}()
	eventually(t, "more attempts than go maxAttempts", func() bool { return tries.Load() > maxAttempts+1 })
	for done := false; !done; {
		select {
		case err := <-ended:
			if done = true; err != nil {
				t.Error(err)
			}
		default:
			ln.SetDeadline(time.Now().Add(time.Millisecond))
			if c, err := ln.Accept(); err == nil {
				c.Close()
			}
		}
	}
	ln.Close()
	if c, err := Dial(t.Context(), &net.Dialer{}, addr); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("a closed port: %v, %v", c, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if c, err := Dial(ctx, &net.Dialer{}, addr); err == nil {
		t.Errorf("%v in a context that has ended", c)
	}
}

// TestStaleEvent: an event of a connection that has ended does not end another one with its descriptor.
func TestStaleEvent(t *testing.T) {
	d, addr := open(t, Options{FirstTimeout: patience, PeekSize: 4, Inspect: mine, Serve: waits})
	c := dial(t, addr, "127.0.0.1")
	var in *Conn
	eventually(t, "pending", func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		if e := d.pending.waiting.Front(); e != nil {
			in = e.Value.(*Conn)
		}
		return in != nil
	})
	d.readable(unix.EpollEvent{Fd: int32(in.fd), Pad: in.gen - 1, Events: unix.EPOLLHUP | unix.EPOLLRDHUP})
	d.mu.Lock()
	stays := in.pending != nil
	d.mu.Unlock()
	if !stays {
		t.Error("closed by another connection's event")
	}
	c.Close()
}
