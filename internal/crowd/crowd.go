// Package crowd bounds the connections of a listener that anybody reaches, so that who holds
// many costs neither memory nor descriptors, nor keeps out those of another address.
//
// In: a listener, of a protocol in which who connects speaks first: HTTP, TLS, gRPC. Out: connections
// whose first message is there. What they wait in until then is package accept's, which see.
package crowd

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lockstep-ccl/lockstep/internal/accept"
)

const (
	// firstWithin bounds the wait for a connection's first message.
	firstWithin = 5 * time.Second
	// firstMost is how much of that message is looked at.
	firstMost = 4096
	// waiting is how many connections a listener has at least beyond those that it holds: those that have not said
	// anything, and those whose turn it is not yet, each.
	waiting = 1024
	// answering is how many connections are answered for the first time at once: a TLS handshake costs most of what
	// a stranger can have this process do. One that is not answered within a moment waits for its other end, as a rule.
	answering = 64
	moment    = 100 * time.Millisecond
)

// Limit bounds a listener of TCP to most connections at a time. When there are as many, a newcomer
// takes the place of one of the address that has most: of the oldest when oldest says so, as
// fits short requests, else of the youngest, as fits streams that are to last. Then
// whose address has most is hung up on. Close the Listener, not l.
func Limit(l net.Listener, most int, oldest bool) (*Listener, error) {
	return limit(l, most, oldest, firstWithin)
}

func limit(ln net.Listener, most int, oldest bool, first time.Duration) (*Listener, error) {
	tcp, ok := ln.(*net.TCPListener)
	if !ok {
		return nil, fmt.Errorf("bound the connections of %s: a listener of TCP is needed, not %T", ln.Addr(), ln)
	}
	l := &Listener{at: ln.Addr(), most: most, oldest: oldest, ready: make(chan net.Conn), closed: make(chan struct{}), of: map[netip.Addr][]*conn{}}
	var err error
	l.door, err = accept.New(tcp, accept.Options{
		Strangers: max(waiting, most), Slots: answering, First: first, Others: true, Apart: true,
		Hello: firstMost, Look: spoken, Serve: l.serve,
	})
	if err != nil {
		return nil, fmt.Errorf("bound the connections: %w", err)
	}
	return l, nil
}

// Listener is a bounded listener.
type Listener struct {
	at     net.Addr
	door   *accept.Door
	most   int
	oldest bool
	hungUp atomic.Uint64
	ready  chan net.Conn
	once   sync.Once
	closed chan struct{}

	mu sync.Mutex
	n  int
	of map[netip.Addr][]*conn // oldest first
}

// HungUp returns how many connections were hung up on because there were too many.
func (l *Listener) HungUp() uint64 {
	return l.hungUp.Load() + l.door.Counts().Refused[accept.Crowded]
}

// Silent returns how many connections were hung up on because they had not said anything in time.
func (l *Listener) Silent() uint64 { return l.door.Counts().Refused[accept.Silent] }

// Addr implements net.Listener.
func (l *Listener) Addr() net.Addr { return l.at }

// Close implements net.Listener.
func (l *Listener) Close() error {
	l.once.Do(func() { close(l.closed) })
	l.door.Close()
	return nil
}

// Accept implements net.Listener.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.ready:
		return c, nil
	case <-l.closed:
		return nil, &net.OpError{Op: "accept", Net: "tcp", Addr: l.at, Err: net.ErrClosed}
	}
}

// spoken looks for a whole first message, so that who sends one byte now and then costs no more than
// who is silent. What it is worth is the server's to say.
func spoken(b []byte) accept.Verdict {
	whole := true
	switch is := b[0]; {
	case len(b) >= firstMost:
	case is == 0x16: // a record of TLS, which has a version and a length
		other := len(b) > 1 && b[1] != 3 || len(b) > 2 && b[2] > 4
		whole = other || len(b) >= 5 && len(b)-5 >= int(b[3])<<8|int(b[4])
	case 'A' <= is && is <= 'Z': // a request's head, or HTTP/2's preface
		whole = bytes.Contains(b, []byte("\n\r\n")) || bytes.Contains(b, []byte("\n\n"))
	}
	if whole {
		return accept.Member
	}
	return accept.More
}

// serve hands a connection on, and returns when it has been answered.
func (l *Listener) serve(a *accept.Conn) {
	if !a.Keep() {
		return
	}
	c := &conn{Conn: a.Conn, l: l, from: a.Source(), answered: make(chan struct{})}
	out := l.enter(c)
	if out != nil {
		l.hungUp.Add(1)
		_ = out.Conn.Close() // whose it is finds it closed
	}
	if out == c {
		return
	}
	select {
	case l.ready <- c:
	case <-l.closed:
		_ = c.Close() // nobody has it
		return
	}
	t := time.NewTimer(moment)
	defer t.Stop()
	select {
	case <-c.answered:
	case <-t.C:
	case <-l.closed:
	}
}

type conn struct {
	net.Conn
	l        *Listener
	from     netip.Addr
	once     sync.Once
	answered chan struct{} // closed when something was written, or the connection was closed
}

// Write implements net.Conn.
func (c *conn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.once.Do(c.answer)
	return n, err
}

func (c *conn) answer() { close(c.answered) }

// Close implements net.Conn.
func (c *conn) Close() error {
	c.l.mu.Lock()
	c.l.drop(c)
	c.l.mu.Unlock()
	c.once.Do(c.answer)
	return c.Conn.Close()
}

// enter lets a connection in, and returns which is to go for that: itself, or none.
func (l *Listener) enter(c *conn) (out *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.n >= l.most {
		mine := l.of[c.from]
		most := mine
		for _, held := range l.of {
			if len(held) > len(most) {
				most = held
			}
		}
		own := len(mine)+1 >= len(most) // with this one
		switch {
		case l.oldest && own && len(mine) > 0:
			out = mine[0]
		case l.oldest:
			out = most[0]
		case own:
			return c
		default:
			out = most[len(most)-1]
		}
		l.drop(out)
	}
	l.n++
	l.of[c.from] = append(l.of[c.from], c)
	return out
}

// drop takes a connection off the list, once. The lock is held.
func (l *Listener) drop(c *conn) {
	held := l.of[c.from]
	i := slices.Index(held, c)
	if i < 0 {
		return
	}
	l.n--
	if l.of[c.from] = slices.Delete(held, i, i+1); len(held) == 1 {
		delete(l.of, c.from)
	}
}
