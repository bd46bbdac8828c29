package crowd

import (
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/internal/accept"
)

// patience is what no healthy run needs.
const patience = 2 * time.Minute

const request = "GET / HTTP/1.0\r\n\r\n"

// server accepts all that come, and keeps them.
type server struct {
	*Listener
	t    *testing.T
	came chan net.Conn
}

func serve(t *testing.T, most int, oldest bool, first time.Duration) *server {
	ln, err := accept.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l, err := limit(ln, most, oldest, first)
	if err != nil {
		t.Fatal(err)
	}
	s := &server{Listener: l, t: t, came: make(chan net.Conn, 1000)}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			c, err := l.Accept()
			if err != nil {
				if !errors.Is(err, net.ErrClosed) {
					t.Error(err)
				}
				return
			}
			s.came <- c
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-ended
		close(s.came)
		for c := range s.came {
			c.Close()
		}
	})
	return s
}

// dial connects from an address, and says something.
func (s *server) dial(from, says string) net.Conn {
	s.t.Helper()
	d := net.Dialer{Timeout: patience, LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	c, err := d.Dial("tcp", s.Addr().String())
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	if _, err := c.Write([]byte(says)); err != nil {
		s.t.Fatal(err)
	}
	return c
}

// open reports whether the other end has not hung up.
func open(c net.Conn) bool {
	c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	_, err := c.Read(make([]byte, 1))
	return errors.Is(err, os.ErrDeadlineExceeded)
}

// hangsUp waits until the other end does.
func hangsUp(c net.Conn) bool {
	_, err := c.Read(make([]byte, 1))
	return err != nil && !errors.Is(err, os.ErrDeadlineExceeded)
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not in time: " + what)
		}
	}
}

// TestLimit: one address's flood costs that address its own, the oldest or the youngest of them.
func TestLimit(t *testing.T) {
	for _, oldest := range []bool{true, false} {
		s := serve(t, 8, oldest, patience)
		come := func(from string) net.Conn {
			n := uint64(len(s.came)) + s.HungUp()
			c := s.dial(from, request)
			eventually(t, "let in, or hung up on", func() bool { return uint64(len(s.came))+s.HungUp() > n })
			return c
		}
		honest := come("127.0.0.1")
		var flood []net.Conn
		for range 30 {
			flood = append(flood, come("127.0.0.9"))
		}
		late := come("127.0.0.2")
		if !open(honest) || !open(late) {
			t.Errorf("oldest %v: the flood has kept others out", oldest)
		}
		left := 0
		for _, c := range flood {
			if open(c) {
				left++
			}
		}
		if left != 6 || open(flood[0]) == oldest || open(flood[len(flood)-1]) != oldest {
			t.Errorf("oldest %v: %d of the flood are open", oldest, left)
		}
		if n := s.HungUp(); n != uint64(len(flood)-left) {
			t.Errorf("oldest %v: %d of %d are counted as hung up on", oldest, n, len(flood)-left)
		}
	}
}

// TestPlacesReturn: who closes a connection, twice even, gives one place back.
func TestPlacesReturn(t *testing.T) {
	s := serve(t, 2, false, patience)
	for i := range 10 {
		s.dial("127.0.0.1", request)
		s.dial("127.0.0.1", request)
		a, b := <-s.came, <-s.came
		if !hangsUp(s.dial("127.0.0.1", request)) {
			t.Fatalf("round %d: a third is let in", i)
		}
		a.Close()
		a.Close()
		b.Close()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.n != 0 || len(s.of) != 0 {
		t.Errorf("%d are held, of %d addresses", s.n, len(s.of))
	}
}

// TestAWholeMessageFirst: who says nothing, or too little, is not handed on, and goes in the end.
func TestAWholeMessageFirst(t *testing.T) {
	hello := "\x16\x03\x01\x00\x05hello"
	s := serve(t, 100, false, 300*time.Millisecond)
	var wait []net.Conn
	for _, says := range []string{"", "G", request[:len(request)-1], "PRI * HTTP/2.0\r\n", hello[:1], hello[:5], hello[:9]} {
		wait = append(wait, s.dial("127.0.0.1", says))
	}
	for _, c := range wait {
		if !hangsUp(c) {
			t.Error("who has not said a whole message stays")
		}
	}
	if n := s.Silent(); n != uint64(len(wait)) || len(s.came) != 0 || s.HungUp() != 0 {
		t.Errorf("%d are counted, %d were handed on", n, len(s.came))
	}
	long := make([]byte, peekSize)
	long[0] = 'G' // of a request that goes on
	for _, says := range []string{request, "GET /\n\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", hello, hello + "more", "\x16G", "\x16\x03garbage", "\x00\x00\x01{", string(long)} {
		s.dial("127.0.0.1", says)
		b := make([]byte, len(says))
		if _, err := io.ReadFull(<-s.came, b); err != nil || string(b) != says {
			t.Errorf("%.20q, %v: was %.20q", b, err, says)
		}
	}
}
