package accept

import (
	"container/list"
	"errors"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/record"
)

const (
	// FirstTimeout bounds the wait for a connection's first message, which its other end
	// sends without waiting for anything.
	FirstTimeout = 2 * time.Second
	// grace is how long a stranger stays at least, whatever comes after it. When all are younger
	// only those come in that have said already what a member would; that is cheaper to
	// find out than to serve them, so a large flood costs less of each than a small one.
	grace = 100 * time.Millisecond
	// retry is the pause after a failure to accept, as without descriptors.
	retry = time.Millisecond
	// relief is how many strangers go when there are no descriptors.
	relief = 64
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
	Strangers int // at a time; 2048
	PerAddr   int // of them, of one address (IPv6: of one /64); half of Strangers
	Known     int // in their handshake at a time; 8192
	// Hello is the size of the first message, and Member whether one is a member's, as far as it
	// tells by itself: who has sent one that has not been read yet is pushed out by no stranger.
	Hello  int
	Member func(hello []byte) bool
	// Serve authenticates a connection. It takes it over with Keep, or leaves it to be
	// closed when Serve returns. It must end soon after the connection is closed, by Close
	// as well.
	Serve func(*Conn)
}

// Door is a listener that strangers may reach. Safe for concurrent use.
type Door struct {
	ln     net.Listener
	serve  func(*Conn)
	member func(hello []byte) bool
	wg     sync.WaitGroup

	mu     sync.Mutex
	closed bool
	// A connection begins among the strangers. It is expected when its first message, not read
	// yet, looks like a member's; and known when it is one.
	strangers, expected, known class
	hello                      []byte // room to look at a message
	counts                     Counts
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
		o.Strangers = 2048
	}
	if o.PerAddr <= 0 {
		o.PerAddr = max(1, o.Strangers/2)
	}
	if o.Known <= 0 {
		o.Known = 8192
	}
	d := &Door{
		ln: ln, serve: o.Serve, member: o.Member, hello: make([]byte, o.Hello),
		strangers: class{max: o.Strangers, perAddr: o.PerAddr, byAddr: map[netip.Addr]int{}},
		expected:  class{max: o.Known, perAddr: o.Known, byAddr: map[netip.Addr]int{}},
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
	for _, c := range []*class{&d.strangers, &d.expected, &d.known} {
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
			abandon(conn)
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

// enter finds room for a connection that has come; false when there is none. It never waits:
// members that come meanwhile would, too, and the kernel's queue is short.
func (d *Door) enter(c *Conn) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	for !d.closed {
		victim := d.strangers.excess(c.addr)
		switch {
		case victim == nil:
			d.strangers.add(c)
		case d.expect(victim):
			continue
		case time.Since(victim.since) >= grace:
			d.push(victim)
			d.strangers.add(c)
		case d.announced(c.Conn):
			d.admit(&d.expected, c)
		default: // so many come that those before it have had no time
			d.counts.Accepted++
			d.refuse(c, Crowded)
			return false
		}
		d.counts.Accepted++
		return true
	}
	return false
}

// expect moves a stranger to the expected if it has said what a member would. d.mu is held.
func (d *Door) expect(c *Conn) bool {
	if !d.announced(c.Conn) {
		return false
	}
	d.strangers.remove(c)
	d.admit(&d.expected, c)
	return true
}

// announced reports whether a member's first message waits to be read. d.mu is held.
func (d *Door) announced(conn net.Conn) bool {
	tcp, ok := conn.(*net.TCPConn)
	if !ok || d.member == nil || len(d.hello) == 0 {
		return false
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return false
	}
	n := 0
	err = raw.Control(func(fd uintptr) {
		n, _, _ = unix.Recvfrom(int(fd), d.hello, unix.MSG_PEEK|unix.MSG_DONTWAIT)
	})
	return err == nil && n == len(d.hello) && d.member(d.hello)
}

// admit adds to a class, in which the oldest goes when it is full. d.mu is held.
func (d *Door) admit(to *class, c *Conn) {
	if victim := to.excess(c.addr); victim != nil {
		d.push(victim)
	}
	to.add(c)
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
	if c.in == nil || c.in == &d.known {
		return
	}
	c.in.remove(c)
	d.admit(&d.known, c)
}

// stranger says that the other end has shown nothing, whatever it seemed. d.mu is held.
func (c *Conn) stranger() {
	if d := c.door; c.in == &d.expected {
		c.in.remove(c)
		d.admit(&d.strangers, c)
	}
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
	c.stranger()
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
