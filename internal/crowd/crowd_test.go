package crowd

import (
	"net"
	"testing"
)

// fake is a connection that knows where it is from, and whether it is open.
type fake struct {
	net.Conn
	from   string
	closed bool
}

func (f *fake) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.ParseIP(f.from), Port: 1} }
func (f *fake) Close() error         { f.closed = true; return nil }

// queue is a listener whose connections are there already.
type queue struct {
	net.Listener
	all []*fake
}

func (q *queue) Accept() (net.Conn, error) {
	if len(q.all) == 0 {
		return nil, net.ErrClosed
	}
	c := q.all[0]
	q.all = q.all[1:]
	return c, nil
}

// TestLimit: one address's flood costs that address its own, the oldest or the youngest of them.
func TestLimit(t *testing.T) {
	for _, oldest := range []bool{true, false} {
		honest, late := &fake{from: "10.0.0.1"}, &fake{from: "10.0.0.2"}
		q := &queue{all: []*fake{honest}}
		for range 100 { // one host, by two of its addresses
			q.all = append(q.all, &fake{from: "fd00::1"}, &fake{from: "fd00::2"})
		}
		flood := q.all[1:]
		q.all = append(q.all, late)
		l := Limit(q, 8, oldest)
		accepted := map[string]int{}
		for {
			c, err := l.Accept()
			if err != nil {
				break
			}
			accepted[c.RemoteAddr().(*net.TCPAddr).IP.String()]++
			if c.RemoteAddr().String() == late.RemoteAddr().String() {
				break
			}
		}
		if honest.closed || late.closed || accepted[late.from] != 1 {
			t.Errorf("oldest %v: the flood has kept others out: %v", oldest, accepted)
		}
		open := 0
		for _, f := range flood {
			if !f.closed {
				open++
			}
		}
		if open != 6 || flood[0].closed != oldest || flood[len(flood)-1].closed == oldest {
			t.Errorf("oldest %v: %d of the flood are open", oldest, open)
		}
		if l.HungUp() != uint64(len(flood)-open) {
			t.Errorf("oldest %v: %d of %d are counted as hung up on", oldest, l.HungUp(), len(flood)-open)
		}
	}
}

// TestPlacesReturn: who closes a connection, twice even, gives one place back.
func TestPlacesReturn(t *testing.T) {
	q := &queue{}
	l := Limit(q, 2, false)
	for i := range 10 {
		q.all = []*fake{{from: "10.0.0.1"}, {from: "10.0.0.1"}, {from: "10.0.0.1"}}
		third := q.all[2]
		a, err1 := l.Accept()
		b, err2 := l.Accept()
		if err1 != nil || err2 != nil {
			t.Fatalf("round %d: %v, %v", i, err1, err2)
		}
		if _, err := l.Accept(); err == nil || !third.closed {
			t.Fatalf("round %d: a third is let in", i)
		}
		a.Close()
		a.Close()
		b.Close()
	}
	if l.n != 0 || len(l.of) != 0 {
		t.Errorf("%d are held, of %d addresses", l.n, len(l.of))
	}
}
