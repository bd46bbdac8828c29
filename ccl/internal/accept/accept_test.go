package accept

import (
	"io"
	"net"
	"runtime"
	"sync/atomic"
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
	d := New(ln, o)
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
		Strangers: room, Hello: 4, Member: func(b []byte) bool { return b[0] == 'm' },
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
	mine, mime := dial(t, addr, "127.0.0.1"), dial(t, addr, "127.0.0.1")
	mine.Write([]byte("mine"))
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
	if _, err := io.ReadFull(mine, b[:]); err != nil {
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
	d, _ := open(t, Options{Strangers: 1, Hello: 4, Member: func(b []byte) bool { return b[0] == 'm' }})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	come := func(says string) *Conn {
		dial(t, ln.Addr().String(), "127.0.0.1").Write([]byte(says))
		conn, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		c := &Conn{Conn: conn, door: d, addr: source(conn), since: time.Now().Add(time.Hour)}
		t.Cleanup(func() { conn.Close() })
		if says != "" {
			eventually(t, "heard", func() bool {
				raw, err := conn.(*net.TCPConn).SyscallConn()
				n := 0
				if err == nil {
					err = raw.Control(func(fd uintptr) { n, _, _ = unix.Recvfrom(int(fd), make([]byte, 4), unix.MSG_PEEK|unix.MSG_DONTWAIT) })
				}
				return err == nil && n == len(says)
			})
		}
		return c
	}
	for _, tt := range []struct {
		says string
		in   *class
	}{{"", &d.strangers}, {"", nil}, {"m", nil}, {"what", nil}, {"mine", &d.expected}, {"mine", &d.expected}} {
		c := come(tt.says)
		if got := d.enter(c); got != (tt.in != nil) || c.in != tt.in {
			t.Errorf("%q: entered %v, among %p, want %p", tt.says, got, c.in, tt.in)
		}
	}
	if c := d.Counts(); c.Accepted != 6 || c.Refused[Crowded] != 3 {
		t.Errorf("%+v", c)
	}
}
