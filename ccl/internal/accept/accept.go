package accept

import (
	"container/list"
	"fmt"
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
	// grace is how long a stranger stays at least, whatever comes after it. When all are younger
	// only those come in that have said already what a member would.
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

// Verdict is what a first message tells by itself.
type Verdict uint8

const (
	More     Verdict = iota // not all of it has come
	Member                  // it looks like a member's; it may have been overheard
	Stranger                // it is none
)

// Options of a Door.
type Options struct {
	Strangers int // at a time; 2048
	PerAddr   int // of them, of one address (IPv6: of one /64); half of Strangers
	Known     int // in their handshake at a time; 8192
	// Look judges what has come of the first message, which is at most Hello bytes long. They stay in
	// the socket. A connection is served when Look has judged; nil: at once.
	Hello int
	Look  func(hello []byte) Verdict
	// Serve authenticates a connection. It takes it over with Keep, or leaves it to be
	// closed when Serve returns. It must end soon after the connection is closed, by Close
	// as well.
	Serve func(*Conn)
}

// Door is a listener that strangers may reach. Safe for concurrent use.
type Door struct {
	ln    *net.TCPListener
	serve func(*Conn)
	look  func(hello []byte) Verdict
	wg    sync.WaitGroup

	mu     sync.Mutex
	closed bool
	// A connection begins among the strangers. It is expected when its first message, not read
	// yet, looks like a member's; and known when it is one.
	strangers, expected, known class
	lobby                      lobby
	counts                     Counts
}

// Conn is a connection in its handshake.
type Conn struct {
	net.Conn // nil in the lobby
	door     *Door
	addr     netip.Addr
	since    time.Time

	// door.mu
	fd     int           // in the lobby
	waits  *list.Element // there, nil elsewhere
	in     *class        // nil when it is none of the door's any more
	at, by *list.Element // in the class's order, and its address's
	kept   bool
	told   bool // counted as refused
}

// New begins to accept. Close the Door, not ln.
func New(ln *net.TCPListener, o Options) (*Door, error) {
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
		ln: ln, serve: o.Serve, look: o.Look,
		strangers: newClass(o.Strangers, o.PerAddr),
		expected:  newClass(o.Known, o.Known),
		known:     newClass(o.Known, o.Known),
	}
	if err := d.lobby.open(ln, o.Hello); err != nil {
		return nil, fmt.Errorf("watch the listener %s: %w", ln.Addr(), err)
	}
	d.wg.Go(d.run)
	return d, nil
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
			if c := e.Value.(*Conn); c.waits == nil {
				c.Close()
			}
		}
	}
	d.mu.Unlock()
	d.ln.Close()
	d.lobby.ep.Close()
	d.wg.Wait()
}

// Counts are this door's.
func (d *Door) Counts() Counts {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.counts
}

// enter finds room for a connection that has come, of whose first message is judged what is there.
// It never waits: members that come meanwhile would, too, and the kernel's queue is short. d.mu is held.
func (d *Door) enter(c *Conn, is Verdict) (in bool) {
	if d.closed {
		return false
	}
	d.counts.Accepted++
	if is == Member {
		d.admit(&d.expected, c)
		return true
	}
	victim := d.strangers.excess(c.addr)
	for victim != nil && d.expect(victim) {
		victim = d.strangers.excess(c.addr)
	}
	if victim != nil {
		d.crowd()
	}
	switch {
	case victim == nil:
	case is == More && time.Since(victim.since) >= grace:
		d.push(victim)
	default: // nobody goes for who is none; or so many come that those before it have had no time
		d.refuse(c, Crowded)
		return false
	}
	d.strangers.add(c)
	return true
}

// expect moves a stranger of the lobby to the expected if it has said what a member would. d.mu is held.
func (d *Door) expect(c *Conn) bool {
	if c.waits == nil || d.judge(c) != Member {
		return false
	}
	d.begin(c, Member)
	return true
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
	d.abandon(c)
}

// abandon closes a connection of which nothing shall be left: it would be in TIME_WAIT here. d.mu is held.
func (d *Door) abandon(c *Conn) {
	if c.Conn == nil {
		d.lobby.reset(c)
		return
	}
	if tcp, ok := c.Conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	c.Close()
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
		d.abandon(c)
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
