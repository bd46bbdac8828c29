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
	// FirstTimeout is the default of Options.FirstTimeout. A peer sends its first message without
	// waiting for anything.
	FirstTimeout = 2 * time.Second
	// grace is how long an unauthenticated connection is not evicted, unless its address has far
	// more of them than the new one's. If all are younger, only plausible connections are admitted.
	grace = 100 * time.Millisecond
	// retry is the pause after accept has failed, usually because there are no descriptors.
	retry = time.Millisecond
	// freedAtOnce is how many connections are evicted when there are no descriptors.
	freedAtOnce = 64
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

// Counts counts connections, of one Acceptor or of all Acceptors that the process ever had.
type Counts struct {
	Accepted uint64
	Refused  [reasons]uint64 // by Reason
}

// AllRefused returns the number of refused connections.
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

// Total returns the counts of the process, without those of Acceptors with Options.Uncounted.
func Total() (c Counts) {
	c.Accepted = total.accepted.Load()
	for i := range c.Refused {
		c.Refused[i] = total.refused[i].Load()
	}
	return c
}

// Inspection says what a connection's first message shows by itself.
type Inspection uint8

const (
	Incomplete Inspection = iota // more bytes are needed
	Plausible                    // it looks like a member's, but may be a replay
	Invalid                      // no member sends it
)

// Options configures an Acceptor. Zero values stand for the defaults.
type Options struct {
	// MaxUnauthenticated bounds the unauthenticated connections, by default 2048. MaxPerAddr bounds
	// those of one address (IPv6: of one /64), by default half of that.
	MaxUnauthenticated, MaxPerAddr int
	// MaxHandshakes bounds the plausible connections, and the authenticated ones that are in their
	// handshake, by default 8192 each.
	MaxHandshakes int
	// MaxServed bounds how many connections are served at a time. 0 is no bound. Addresses take turns
	// among the queued connections, of which there are at most MaxUnauthenticated.
	MaxServed int
	// FirstTimeout is how long a connection may take to send its first message.
	FirstTimeout time.Duration
	// FilterSYNs is for listeners whose clients are other programs, such as browsers, and do not
	// use Dial. The backlog then stays long. When it fills up, a socket filter drops some of the
	// SYNs of the addresses that connect most.
	FilterSYNs bool
	// Uncounted keeps the Acceptor's counts out of Total.
	Uncounted bool
	// Inspect judges the first bytes of a connection, at most PeekSize. They stay in the socket. A
	// connection is served when the result is not Incomplete, or at once if Inspect is nil.
	PeekSize int
	Inspect  func(first []byte) Inspection
	// Serve authenticates a connection. It calls Keep to take the connection over. Otherwise the
	// Acceptor closes it when Serve returns. Serve must return soon after the connection is
	// closed, which Close also does.
	Serve func(*Conn)
}

// Acceptor accepts the connections of a listener that anyone may reach. It is safe for concurrent use.
type Acceptor struct {
	ln           *net.TCPListener
	serve        func(*Conn)
	inspectFirst func(first []byte) Inspection
	wg           sync.WaitGroup

	mu     sync.Mutex
	closed bool
	// Each connection that is not kept is in one class. It begins as unauthenticated. If Inspect
	// finds it plausible, it is plausible from then on, or queued first if MaxServed bounds how many
	// are served. Conn.Authenticated makes it authenticated.
	unauthenticated, plausible, authenticated, queued class
	maxServed, serving                                int
	filterSYNs, uncounted                             bool
	pending                                           pendingSet
	filter                                            synFilter
	counts                                            Counts
}

// Conn is a connection in its handshake.
type Conn struct {
	net.Conn // nil while it is pending or queued
	acceptor *Acceptor
	addr     netip.Addr
	since    time.Time

	// guarded by acceptor.mu
	fd      int           // while it is pending or queued
	gen     int32         // distinguishes it from other connections that had the same descriptor
	pending *list.Element // nil if it is not pending
	in      *class        // nil if the Acceptor no longer has it
	at, by  *list.Element // its places in the class's order, and in its address's
	kept    bool
	refused bool // counted as refused
}

// New returns an Acceptor that accepts ln's connections. The caller must close it, which closes ln.
func New(ln *net.TCPListener, o Options) (*Acceptor, error) {
	if o.MaxUnauthenticated <= 0 {
		o.MaxUnauthenticated = 2048
	}
	if o.MaxPerAddr <= 0 {
		o.MaxPerAddr = max(1, o.MaxUnauthenticated/2)
	}
	if o.MaxHandshakes <= 0 {
		o.MaxHandshakes = 8192
	}
	a := &Acceptor{
		ln: ln, serve: o.Serve, inspectFirst: o.Inspect,
		unauthenticated: newClass(o.MaxUnauthenticated, o.MaxPerAddr),
		plausible:       newClass(o.MaxHandshakes, o.MaxHandshakes),
		authenticated:   newClass(o.MaxHandshakes, o.MaxHandshakes),
		queued:          newClass(o.MaxUnauthenticated, o.MaxPerAddr),
		maxServed:       o.MaxServed, filterSYNs: o.FilterSYNs, uncounted: o.Uncounted,
	}
	if o.FirstTimeout <= 0 {
		o.FirstTimeout = FirstTimeout
	}
	if err := a.pending.open(ln, o.PeekSize, o.FirstTimeout); err != nil {
		return nil, fmt.Errorf("watch the listener %s: %w", ln.Addr(), err)
	}
	a.wg.Go(a.run)
	return a, nil
}

// Wrap returns conn as a Conn that belongs to no Acceptor.
func Wrap(conn net.Conn) *Conn { return &Conn{Conn: conn} }

// Close closes the listener and all connections that are not kept. It returns when all calls of Serve
// have.
func (a *Acceptor) Close() {
	a.mu.Lock()
	a.closed = true
	for _, c := range []*class{&a.unauthenticated, &a.plausible, &a.authenticated} {
		for e := c.order.Front(); e != nil; e = e.Next() {
			if c := e.Value.(*Conn); c.pending == nil {
				c.Close()
			}
		}
	}
	a.mu.Unlock()
	a.ln.Close()
	a.pending.ep.Close()
	a.wg.Wait()
}

// Counts returns the Acceptor's counts.
func (a *Acceptor) Counts() Counts {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.counts
}

// admit makes room for a new connection and puts it in a class. is says what its first bytes show. It
// returns false if there is no room. It never blocks: the backlog would fill up with members that
// connect meanwhile. a.mu is held.
func (a *Acceptor) admit(c *Conn, is Inspection) (in bool) {
	if a.closed {
		return false
	}
	a.counts.Accepted++
	if is == Plausible {
		a.addEvicting(a.readyClass(), c)
		return true
	}
	victim := a.unauthenticated.victim(c.addr)
	for victim != nil && a.promote(victim) {
		victim = a.unauthenticated.victim(c.addr)
	}
	if victim != nil {
		a.full()
	}
	switch {
	case victim == nil:
	case is == Incomplete && (time.Since(victim.since) >= grace || a.unauthenticated.count(victim.addr) > 2*a.unauthenticated.count(c.addr)+2):
		a.evict(victim) // its grace is over, or its address has far more connections than the new one's
	default: // an Invalid connection evicts none; and so many connect that all are within their grace
		a.refuse(c, Crowded)
		return false
	}
	a.unauthenticated.add(c)
	return true
}

// promote starts a pending connection if its first message has become plausible. It reports whether it
// has. a.mu is held.
func (a *Acceptor) promote(c *Conn) bool {
	if c.pending == nil || a.inspect(c) != Plausible {
		return false
	}
	a.startPending(c, Plausible)
	return true
}

// readyClass returns the class of connections that have become plausible. a.mu is held.
func (a *Acceptor) readyClass() *class {
	if a.maxServed > 0 {
		return &a.queued
	}
	return &a.plausible
}

// addEvicting adds c to a class. If the class is full, it evicts a connection. a.mu is held.
func (a *Acceptor) addEvicting(to *class, c *Conn) {
	if victim := to.victim(c.addr); victim != nil {
		a.evict(victim)
	}
	to.add(c)
}

// freeDescriptors evicts the oldest connections that have not been authenticated.
func (a *Acceptor) freeDescriptors() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for range freedAtOnce {
		e := a.unauthenticated.order.Front()
		if e == nil {
			e = a.queued.order.Front()
		}
		if e == nil {
			return
		}
		a.evict(e.Value.(*Conn))
	}
}

// evict ends a connection to make room. a.mu is held.
func (a *Acceptor) evict(c *Conn) {
	c.in.remove(c)
	a.refuse(c, Crowded)
	a.reset(c)
}

// reset closes a connection with a RST, so that it leaves no TIME_WAIT here. a.mu is held.
func (a *Acceptor) reset(c *Conn) {
	if c.Conn == nil {
		a.pending.reset(c)
		return
	}
	if tcp, ok := c.Conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	c.Close()
}

// refuse counts a connection as refused, once. a.mu is held.
func (a *Acceptor) refuse(c *Conn, why Reason) {
	if !c.refused {
		c.refused = true
		a.counts.Refused[why]++
		if !a.uncounted {
			total.refused[why].Add(1)
		}
	}
}

// finish ends a connection's handshake, after Serve.
func (a *Acceptor) finish(c *Conn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c.in != nil {
		c.in.remove(c)
	}
	switch {
	case c.kept:
	case c.refused:
		a.reset(c)
	default:
		c.Close()
	}
	a.serving--
	a.startQueued()
}

// Source returns the address by which connections are counted: an IPv4 address, or the /64 of an IPv6
// address, since one host may have a whole /64.
func (c *Conn) Source() netip.Addr { return c.addr }

// Authenticated says that the peer has proved to be of this job. Unauthenticated connections then do
// not evict it.
func (c *Conn) Authenticated() {
	if c.acceptor == nil {
		return
	}
	a := c.acceptor
	a.mu.Lock()
	defer a.mu.Unlock()
	if c.in == nil || c.in == &a.authenticated {
		return
	}
	c.in.remove(c)
	a.addEvicting(&a.authenticated, c)
}

// demote makes a plausible connection unauthenticated. a.mu is held.
func (c *Conn) demote() {
	if a := c.acceptor; c.in == &a.plausible {
		c.in.remove(c)
		a.addEvicting(&a.unauthenticated, c)
	}
}

// Keep takes the connection over from the Acceptor, which then does not close it. It returns false if
// the Acceptor has closed it already.
func (c *Conn) Keep() bool {
	if c.acceptor == nil {
		return true
	}
	a := c.acceptor
	a.mu.Lock()
	defer a.mu.Unlock()
	if c.in == nil || a.closed {
		return false
	}
	c.in.remove(c)
	c.kept = true
	return true
}

// Refuse counts the connection as refused, once. A plausible one becomes unauthenticated.
func (c *Conn) Refuse(why Reason) {
	if c.acceptor == nil {
		return
	}
	c.acceptor.mu.Lock()
	defer c.acceptor.mu.Unlock()
	c.demote()
	c.acceptor.refuse(c, why)
}

// seenMax bounds a Seen.
const seenMax = 4096

// Seen remembers the latest nonces, to recognise a replay. The zero value is ready. One goroutine at
// a time may use it. Only members' nonces may be added: a flood of others would displace them.
type Seen struct {
	has  map[[32]byte]struct{}
	ring [][32]byte
	next int
}

// Add remembers a nonce. It reports whether the nonce is new.
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
