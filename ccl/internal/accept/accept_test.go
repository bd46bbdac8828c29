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

	"github.com/lockstep-ccl/lockstep/ccl/internal/accept/acceptest"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is what no healthy run needs.
const patience = 2 * time.Minute

func open(t testing.TB, o Options) (*Door, string) {
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

// mine looks for messages of four bytes, of which members' begin with m.
func mine(b []byte) Verdict {
	switch {
	case len(b) < 4:
		return More
	case b[0] == 'm':
		return Member
	}
	return Stranger
}

// waits serves until the connection ends.
func waits(c *Conn) { _, _ = io.Copy(io.Discard, c) }

func TestTheOldestOfTheMostGoes(t *testing.T) {
	d, addr := open(t, Options{Strangers: 4, PerAddr: 3, Serve: waits})
	come := func(from string) net.Conn {
		time.Sleep(grace) // those before have had their time
		n := d.Counts().Accepted
		c := dial(t, addr, from)
		eventually(t, "accepted", func() bool { return d.Counts().Accepted > n })
		return c
	}
	a1, a2, a3 := come("127.0.0.1"), come("127.0.0.1"), come("127.0.0.1")
	come("127.0.0.1") // over its cap
	if !hangsUp(a1) {
		t.Error("the oldest of an address over its cap is still there")
	}
	come("127.0.0.2") // the door is full now
	come("127.0.0.3")
	if !hangsUp(a2) {
		t.Error("the oldest of the address that has most is still there")
	}
	_ = a3
	if c := d.Counts(); c.Refused[Crowded] != 2 || c.AllRefused() != 2 || c.Accepted != 6 {
		t.Errorf("%+v", c)
	}
}

// Who is known stays, and does not take a stranger's place.
func TestTheKnownStay(t *testing.T) {
	var known atomic.Int32
	d, addr := open(t, Options{Strangers: 2, PerAddr: 2, Serve: func(c *Conn) {
		var b [1]byte
		if _, err := io.ReadFull(c, b[:]); err == nil {
			c.Known()
			c.Known()
			known.Add(1)
			_, _ = io.Copy(c, c)
		}
	}})
	member := dial(t, addr, "127.0.0.1")
	member.Write([]byte{1})
	eventually(t, "known", func() bool { return known.Load() == 1 })
	for range 10 { // those for whom there is no room are reset at once
		if c, err := net.Dial("tcp", addr); err == nil {
			defer c.Close()
		}
	}
	eventually(t, "crowded", func() bool { return d.Counts().Refused[Crowded] == 8 })
	member.Write([]byte{2})
	var b [1]byte
	if _, err := io.ReadFull(member, b[:]); err != nil || b[0] != 2 {
		t.Errorf("a known connection was pushed out: %v", err)
	}
}

// What is kept is the door's no more, and what is not ends with it.
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
		t.Error("a stranger outlives the door")
	}
	server.Write([]byte{7})
	var got [1]byte
	if _, err := io.ReadFull(a, got[:]); err != nil || got[0] != 7 {
		t.Errorf("kept connection: %v", err)
	}
}

// TestFloodIsBounded: goroutines and connections stay within the caps however many come.
func TestFloodIsBounded(t *testing.T) {
	const room = 64
	var inside, most atomic.Int64
	before := runtime.NumGoroutine()
	d, addr := open(t, Options{Strangers: room, Serve: func(c *Conn) {
		for n := inside.Add(1); n > most.Load(); {
			most.Store(n)
		}
		waits(c)
		inside.Add(-1)
	}})
	f := acceptest.Start(t, addr, 400, acceptest.Silent, acceptest.Says([]byte("x")), acceptest.Drips(make([]byte, 100)))
	eventually(t, "refused", func() bool { return d.Counts().Refused[Crowded] > 500 })
	// One that is pushed out takes a moment to end.
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

// Who has said what a member would is pushed out by no stranger before it is read; a replay gets
// no more by it.
func TestTheExpectedStay(t *testing.T) {
	const room = 8
	read := make(chan struct{})
	d, addr := open(t, Options{
		Strangers: room, Hello: 4, Look: mine,
		Serve: func(c *Conn) {
			<-read // as late as can be
			var b [4]byte
			if _, err := io.ReadFull(c, b[:]); err != nil {
				return
			}
			switch string(b[:]) {
			case "mine":
				c.Known()
				_, _ = c.Write(b[:])
			case "mime": // said before by another
				c.Refuse(Replayed)
			}
			waits(c)
		},
	})
	member, mime := dial(t, addr, "127.0.0.1"), dial(t, addr, "127.0.0.1")
	member.Write([]byte("mine"))
	mime.Write([]byte("mime"))
	crowd := func(n uint64) {
		for range n {
			if c, err := net.Dial("tcp", addr); err == nil { // else reset at once
				defer c.Close()
				_, _ = c.Write([]byte("what"))
			}
		}
	}
	crowd(50)
	time.Sleep(2 * grace)
	crowd(50)
	close(read)
	var b [4]byte
	if _, err := io.ReadFull(member, b[:]); err != nil {
		t.Errorf("a member was pushed out: %v", err)
	}
	eventually(t, "replayed", func() bool { return d.Counts().Refused[Replayed] == 1 })
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.expected.order.Len() != 0 || d.known.order.Len() != 1 {
		t.Errorf("%d are expected, %d known", d.expected.order.Len(), d.known.order.Len())
	}
}

// While all strangers have only just come, a newcomer gets in by what it has said, or not at all; it
// waits for nobody.
func TestWhoGetsInAmongTheYoung(t *testing.T) {
	d, _ := open(t, Options{Strangers: 1, Hello: 4, Look: mine, Serve: waits})
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
		c := &Conn{door: d, since: time.Now().Add(ago)}
		if c.fd, err = detach(conn); err != nil {
			t.Fatal(err)
		}
		eventually(t, "heard", func() bool {
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
		{"", time.Hour, &d.strangers}, {"", 0, nil}, {"m", 0, nil}, {"what", 0, nil},
		{"mine", 0, &d.expected}, {"mine", 0, &d.expected},
	} {
		c := come(tt.says, tt.ago)
		d.came(c)
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

// detach gives a descriptor of a connection's socket.
func detach(conn net.Conn) (fd int, err error) {
	f, err := conn.(*net.TCPConn).File()
	if err != nil {
		return -1, err
	}
	defer f.Close()
	return unix.Dup(int(f.Fd()))
}

// Who waits costs no goroutine, gets in when all of its message is there, in whatever pieces, and goes
// when it has said nothing for too long.
func TestLobby(t *testing.T) {
	served := make(chan string, 10)
	d, addr := open(t, Options{Hello: 4, Look: mine, Serve: func(c *Conn) {
		b := make([]byte, 4)
		n, _ := io.ReadFull(c, b)
		served <- string(b[:n])
	}})
	first := func(d *Door, is time.Duration) {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.lobby.first = is
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
	d.lobby.ep.SetReadDeadline(time.Now()) // the door looks
	for _, c := range silent {
		if !hangsUp(c) {
			t.Fatal("a silent stranger stays")
		}
	}
	first(d, patience)
	dial(t, addr, "127.0.0.1").Close() // only looks whether somebody listens
	dial(t, addr, "127.0.0.1").Write([]byte("what"))
	if s := <-served; s != "what" {
		t.Errorf("served with %q", s)
	}
	if c := d.Counts(); c.Refused[Silent] != 50 || c.AllRefused() != 50 || c.Accepted != 53 {
		t.Errorf("%+v", c)
	}
}

// The kernel's queue is short while there is no room, and long again later.
func TestTheQueueOfAFloodIsShort(t *testing.T) {
	d, addr := open(t, Options{Strangers: 1, Hello: 4, Look: mine, Serve: waits})
	long := d.lobby.long
	length := func() int {
		n, err := queueOf(d.ln)
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
			return d.Counts().Refused[Crowded] > n && length() == min(shortQueue, long)
		})
		eventually(t, "a long queue", func() bool { return length() == long })
	}
}

// TestDial: who finds the queue full does not wait for the kernel to try again.
func TestDial(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ln, addr := l.(*net.TCPListener), l.Addr().String()
	if err := setQueue(ln, 0); err != nil {
		t.Fatal(err)
	}
	dial(t, addr, "127.0.0.1") // it is full with one
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
	eventually(t, "more attempts than go abreast", func() bool { return tries.Load() > abreast+1 })
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
