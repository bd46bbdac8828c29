package accept

import (
	"container/list"
	"errors"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

const (
	// FirstTimeout bounds the wait for a connection's first message, which its other end
	// sends without waiting for anything.
	FirstTimeout = 2 * time.Second
	// grace is how long a stranger stays at least. Newcomers wait for that, in the
	// kernel's queue: some ten thousand a second get in.
	grace = 25 * time.Millisecond
	// retry is the pause after a failure to accept, as without descriptors.
	retry = 10 * time.Millisecond
	// relief is how many strangers go when there are no descriptors.
	relief = 16
)

// Reason is why a connection was refused.
type Reason = record.Refusal

const (
	Silent   = record.RefusedSilent
	Garbage  = record.RefusedGarbage
	Unproved = record.RefusedUnproved
	Replayed = record.RefusedReplayed
	Crowded  = record.RefusedCrowded
	reasons  = record.NumRefusals
)

// Counts are of one Door, or of all that the process ever had.
type Counts struct {
	Accepted uint64
	Refused  [reasons]uint64 // by Reason
}

// AllRefused is the sum.
func (c Counts) AllRefused() (n uint64) {
	for _, v := range c.Refused {
		n += v
	}
	return n
}

var total struct {
	accepted atomic.Uint64
	refused  [reasons]atomic.Uint64
}

// Total counts for the whole process.
func Total() (c Counts) {
	c.Accepted = total.accepted.Load()
	for i := range c.Refused {
		c.Refused[i] = total.refused[i].Load()
	}
	return c
}

// Options of a Door.
type Options struct {
	Strangers int // at a time; 512
	PerAddr   int // of them, of one address (IPv6: of one /64); half of Strangers
	Known     int // in their handshake at a time; 8192
	// Serve authenticates a connection. It takes it over with Keep, or leaves it to be
	// closed when Serve returns. It must end soon after the connection is closed, by Close
	// as well.
	Serve func(*Conn)
}

// Door is a listener that strangers may reach. Safe for concurrent use.
type Door struct {
	ln    net.Listener
	serve func(*Conn)
	wg    sync.WaitGroup

	mu               sync.Mutex
	closed           bool
	strangers, known class
	counts           Counts
}

// class is a set of connections in the order in which they came.
type class struct {
	max, perAddr int
	order        list.List // of *Conn
	byAddr       map[netip.Addr]int
}

// Conn is a connection in its handshake.
type Conn struct {
	net.Conn
	door  *Door // nil for none
	addr  netip.Addr
	since time.Time

	// door.mu
	in   *class // nil when it is none of the door's any more
	at   *list.Element
	kept bool
	told bool // counted as refused
}

// New begins to accept. Close the Door, not ln.
func New(ln net.Listener, o Options) *Door {
	if o.Strangers <= 0 {
		o.Strangers = 512
	}
	if o.PerAddr <= 0 {
		o.PerAddr = max(1, o.Strangers/2)
	}
	if o.Known <= 0 {
		o.Known = 8192
	}
	d := &Door{
		ln: ln, serve: o.Serve,
		strangers: class{max: o.Strangers, perAddr: o.PerAddr, byAddr: map[netip.Addr]int{}},
		known:     class{max: o.Known, perAddr: o.Known, byAddr: map[netip.Addr]int{}},
	}
	d.wg.Go(d.accept)
	return d
}

// Bare is a connection that came through no door.
func Bare(conn net.Conn) *Conn { return &Conn{Conn: conn} }

// Close closes the listener and every connection that is not kept, and returns when Serve
// has ended for each.
func (d *Door) Close() {
	d.mu.Lock()
	d.closed = true
	for _, c := range []*class{&d.strangers, &d.known} {
		for e := c.order.Front(); e != nil; e = e.Next() {
			e.Value.(*Conn).Close()
		}
	}
	d.mu.Unlock()
	d.ln.Close()
	d.wg.Wait()
}

// Counts are this door's.
func (d *Door) Counts() Counts {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.counts
}

func (d *Door) accept() {
	for {
		conn, err := d.ln.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			d.relieve() // out of descriptors, as a rule
			time.Sleep(retry)
			continue
		}
		total.accepted.Add(1)
		c := &Conn{Conn: conn, door: d, addr: source(conn), since: time.Now()}
		if !d.enter(c) {
			conn.Close()
			continue
		}
		d.wg.Go(func() {
			d.serve(c)
			d.leave(c)
		})
	}
}

// source is whose connections count together.
func source(conn net.Conn) netip.Addr {
	at, ok := conn.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	addr := at.AddrPort().Addr().Unmap()
	if addr.Is6() {
		if p, err := addr.Prefix(64); err == nil {
			return p.Addr()
		}
	}
	return addr
}

// enter makes room for a stranger; false when the door is closed.
func (d *Door) enter(c *Conn) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	for !d.closed {
		victim := d.strangers.excess(c.addr)
		if victim == nil {
			d.counts.Accepted++
			d.strangers.add(c)
			return true
		}
		if wait := grace - time.Since(victim.since); wait > 0 {
			d.mu.Unlock()
			time.Sleep(wait)
			d.mu.Lock()
			continue // it may have left by itself
		}
		d.push(victim)
	}
	return false
}

// relieve gives descriptors back.
func (d *Door) relieve() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for range relief {
		e := d.strangers.order.Front()
		if e == nil {
			return
		}
		d.push(e.Value.(*Conn))
	}
}

// push has a connection go. d.mu is held.
func (d *Door) push(c *Conn) {
	c.in.remove(c)
	d.refuse(c, Crowded)
	abandon(c.Conn)
}

// abandon closes a connection of which nothing shall be left: it would be in TIME_WAIT here.
func abandon(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	conn.Close()
}

func (d *Door) refuse(c *Conn, why Reason) {
	if !c.told {
		c.told = true
		d.counts.Refused[why]++
		total.refused[why].Add(1)
	}
}

// leave ends a connection's handshake.
func (d *Door) leave(c *Conn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if c.in != nil {
		c.in.remove(c)
	}
	switch {
	case c.kept:
	case c.told:
		abandon(c.Conn)
	default:
		c.Close()
	}
}

// Known says that the other end has shown to be of this job. It stays when strangers crowd.
func (c *Conn) Known() {
	if c.door == nil {
		return
	}
	d := c.door
	d.mu.Lock()
	defer d.mu.Unlock()
	if c.in != &d.strangers {
		return
	}
	d.strangers.remove(c)
	if victim := d.known.excess(c.addr); victim != nil {
		d.push(victim)
	}
	d.known.add(c)
}

// Keep takes the connection over: the door closes it no more. False when the door has
// closed it already.
func (c *Conn) Keep() bool {
	if c.door == nil {
		return true
	}
	d := c.door
	d.mu.Lock()
	defer d.mu.Unlock()
	if c.in == nil || d.closed {
		return false
	}
	c.in.remove(c)
	c.kept = true
	return true
}

// Refuse counts the connection as refused, once.
func (c *Conn) Refuse(why Reason) {
	if c.door == nil {
		return
	}
	c.door.mu.Lock()
	defer c.door.mu.Unlock()
	c.door.refuse(c, why)
}

func (s *class) add(c *Conn) {
	c.in, c.at = s, s.order.PushBack(c)
	s.byAddr[c.addr]++
}

func (s *class) remove(c *Conn) {
	s.order.Remove(c.at)
	if s.byAddr[c.addr]--; s.byAddr[c.addr] == 0 {
		delete(s.byAddr, c.addr)
	}
	c.in, c.at = nil, nil
}

// excess is who must go before one more of addr may come, nil when there is room: the
// oldest of that address when it has too many, else of the one that has most.
func (s *class) excess(addr netip.Addr) *Conn {
	switch {
	case s.byAddr[addr] >= s.perAddr:
	case s.order.Len() >= s.max:
		most := 0
		for a, n := range s.byAddr {
			if n > most {
				addr, most = a, n
			}
		}
	default:
		return nil
	}
	for e := s.order.Front(); e != nil; e = e.Next() {
		if c := e.Value.(*Conn); c.addr == addr {
			return c
		}
	}
	return nil
}

// seenMax bounds a Seen.
const seenMax = 4096

// Seen remembers the latest nonces, so that a replay is known. The zero value is ready; it is
// for one goroutine at a time. Only members' nonces are to be added: others could flush it.
type Seen struct {
	has  map[[32]byte]struct{}
	ring [][32]byte
	next int
}

// Add reports whether a nonce is new.
func (s *Seen) Add(nonce [32]byte) bool {
	if _, ok := s.has[nonce]; ok {
		return false
	}
	if s.has == nil {
		s.has = map[[32]byte]struct{}{}
	}
	if len(s.ring) < seenMax {
		s.ring = append(s.ring, nonce)
	} else {
		delete(s.has, s.ring[s.next])
		s.ring[s.next] = nonce
		s.next = (s.next + 1) % seenMax
	}
	s.has[nonce] = struct{}{}
	return true
}
