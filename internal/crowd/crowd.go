// Package crowd bounds the connections of a listener that anyone may reach. A client with many
// connections then exhausts neither memory nor descriptors, and does not keep out other addresses.
//
// In: a listener of a protocol in which the client sends first (HTTP, TLS, gRPC). Out: connections
// whose first message has arrived. Until then package accept holds them.
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
	// peekSize is how much of that message is inspected.
	peekSize = 4096
	// A listener may have at least pending connections whose first message has not arrived, and as
	// many that are queued, beside those that it has accepted.
	pending = 1024
	// handshakes is how many connections may wait for their first answer at a time. A TLS handshake
	// is the most expensive thing that an unauthenticated client can ask for. A connection that has
	// no answer after answerWithin usually waits for its client, and no longer counts.
	handshakes   = 64
	answerWithin = 100 * time.Millisecond
)

// Limit bounds a TCP listener to most connections at a time. If there are as many, a new connection
// replaces one of the address that has the most. With oldest that is its oldest one, which suits short
// requests. Otherwise it is its youngest one, which suits long streams; a new connection is then refused
// if its own address has the most. The caller must close the Listener, which closes l.
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
	l.accept, err = accept.New(tcp, accept.Options{
		MaxUnauthenticated: max(pending, most), MaxServed: handshakes, FirstTimeout: first, FilterSYNs: true, Uncounted: true,
		PeekSize: peekSize, Inspect: inspect, Serve: l.serve,
	})
	if err != nil {
		return nil, fmt.Errorf("bound the connections: %w", err)
	}
	return l, nil
}

// Listener is a bounded listener.
type Listener struct {
	at     net.Addr
	accept *accept.Acceptor
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

// HungUp returns how many connections were closed because there were too many.
func (l *Listener) HungUp() uint64 {
	return l.hungUp.Load() + l.accept.Counts().Refused[accept.Crowded]
}

// Silent returns how many connections were closed because they had sent nothing in time.
func (l *Listener) Silent() uint64 { return l.accept.Counts().Refused[accept.Silent] }

// Addr implements net.Listener.
func (l *Listener) Addr() net.Addr { return l.at }

// Close implements net.Listener.
func (l *Listener) Close() error {
	l.once.Do(func() { close(l.closed) })
	l.accept.Close()
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

// inspect waits for a whole first message. So a client that sends a byte now and then gains nothing over
// a silent one. The server judges the message itself.
func inspect(b []byte) accept.Inspection {
	whole := true
	switch is := b[0]; {
	case len(b) >= peekSize:
	case is == 0x16: // a TLS record, which has a version and a length
		other := len(b) > 1 && b[1] != 3 || len(b) > 2 && b[2] > 4
		whole = other || len(b) >= 5 && len(b)-5 >= int(b[3])<<8|int(b[4])
	case 'A' <= is && is <= 'Z': // the header of a request, or the preface of HTTP/2
		whole = bytes.Contains(b, []byte("\n\r\n")) || bytes.Contains(b, []byte("\n\n"))
	}
	if whole {
		return accept.Plausible
	}
	return accept.Incomplete
}

// serve passes a connection to Accept. It returns when the connection has its first answer.
func (l *Listener) serve(a *accept.Conn) {
	if !a.Keep() {
		return
	}
	c := &conn{Conn: a.Conn, l: l, from: a.Source(), answered: make(chan struct{})}
	out := l.enter(c)
	if out != nil {
		l.hungUp.Add(1)
		_ = out.Conn.Close() // its owner notices
	}
	if out == c {
		return
	}
	select {
	case l.ready <- c:
	case <-l.closed:
		_ = c.Close() // no caller of Accept has it
		return
	}
	t := time.NewTimer(answerWithin)
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

// enter adds a connection, and returns the one to close for that. It may be c itself, or nil.
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

// drop removes a connection, if it was not removed before. l.mu is held.
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
