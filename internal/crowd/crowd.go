// Package crowd bounds the connections of a listener that anybody reaches, so that who holds
// many costs neither memory nor descriptors, nor keeps out those of another address.
package crowd

import (
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
)

// Limit bounds a listener to most connections at a time. When there are as many, a newcomer
// takes the place of one of the address that has most: of the oldest when oldest says so, as
// fits short requests, else of the youngest, as fits streams that are to last. Then
// whose address has most is hung up on.
func Limit(l net.Listener, most int, oldest bool) *Listener {
	return &Listener{Listener: l, most: most, oldest: oldest, of: map[netip.Addr][]*conn{}}
}

// Listener is a bounded listener.
type Listener struct {
	net.Listener
	most   int
	oldest bool
	hungUp atomic.Uint64

	mu sync.Mutex
	n  int
	of map[netip.Addr][]*conn // oldest first
}

// HungUp returns how many connections were hung up on because there were too many.
func (l *Listener) HungUp() uint64 { return l.hungUp.Load() }

type conn struct {
	net.Conn
	l    *Listener
	from netip.Addr
}

// Accept implements net.Listener.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		raw, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		c := &conn{raw, l, network(raw.RemoteAddr())}
		out := l.enter(c)
		if out != nil {
			l.hungUp.Add(1)
			_ = out.Conn.Close() // whose it is finds it closed
		}
		if out != c {
			return c, nil
		}
	}
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

// Close implements net.Conn.
func (c *conn) Close() error {
	c.l.mu.Lock()
	c.l.drop(c)
	c.l.mu.Unlock()
	return c.Conn.Close()
}

// network is whose a connection is: an IPv4 address, or a /64, of which one host has all.
func network(a net.Addr) netip.Addr {
	t, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	ip, _ := netip.AddrFromSlice(t.IP)
	ip = ip.Unmap()
	if p, err := ip.WithZone("").Prefix(64); ip.Is6() && err == nil {
		return p.Addr()
	}
	return ip
}
