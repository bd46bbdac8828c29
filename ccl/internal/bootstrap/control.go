package bootstrap

import (
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"time"
)

// EventKind is what happened to a member.
type EventKind uint8

const (
	Lost    EventKind = iota + 1 // its process or host died: Err is a *LostError
	Aborted                      // it called Abort: Err is an *AbortError
	Left                         // it called Leave: Err is nil

	eventKinds = int(iota)
)

// Event reports that a member was lost, aborted or left. A member has at most one event of
// each kind.
type Event struct {
	Kind EventKind
	Rank int
	Err  error
}

// maxAhead bounds the operations in flight, and so the blobs that the hub holds for members
// that are behind.
const maxAhead = 64

type state uint8

const (
	stateJoining state = iota
	stateJoined
	stateClosed
)

// Control is one rank's end of a communicator's control plane. All members must call
// AllGather, Barrier and Broadcast in the same order. It is safe for concurrent use.
type Control struct {
	id         ID
	rank, size int
	secret     []byte
	instance   uint64
	members    []Member  // fixed once joined
	listener   *Listener // a reference, until Close
	events     chan Event
	statements chan Statement // hub: see Told
	ready      chan struct{}  // hub: all ranks have joined
	joinFailed chan struct{}  // hub: closed when the rendezvous has failed, with joinErr
	wg         sync.WaitGroup

	mu       sync.Mutex
	state    state
	leaving  bool          // in Leave until its ctx ends: sessions may wait for a connection to send their last frames
	patience time.Duration // how long a host may be silent
	peers    []*peer       // hub: by rank, nil without a session; others: peers[0] is the hub
	seq      uint64        // of this rank's next operation
	floor    uint64        // hub: all operations before it are complete
	ops      map[uint64]*op
	failure  error         // what operations return after a member was lost, left or aborted
	seen     []byte        // bit set of the EventKinds delivered, by rank
	rejected int           // hub: connections that did not prove the secret
	detail   string        // hub: where the last of them came from
	untold   bool          // hub: the ranks missing, or the count of rejections, have changed since tellMissing last sent them
	joinErr  error         // hub: why the rendezvous has failed
	informed map[int]bool  // hub: ranks that have been told joinErr
	emptied  chan struct{} // hub: closed when all other ranks have left or died
}

// op is one gather in flight.
type op struct {
	blobs [][]byte
	from  []bool        // hub: ranks that have contributed
	have  int           // blobs so far
	done  chan struct{} // closed when complete or failed
}

func newControl(cfg Config) *Control {
	c := &Control{
		id: cfg.ID, rank: cfg.Rank, size: cfg.Size, secret: cfg.Secret, instance: rand.Uint64(),
		members: make([]Member, max(cfg.Size, cfg.Rank+1)),
		events:  make(chan Event, eventKinds*cfg.Size), statements: make(chan Statement, maxTold),
		ready:      make(chan struct{}),
		joinFailed: make(chan struct{}),
		peers:      make([]*peer, cfg.Size),
		ops:        make(map[uint64]*op),
		seen:       make([]byte, cfg.Size),
		informed:   make(map[int]bool),
		emptied:    make(chan struct{}),

		patience: cmp.Or(cfg.Outage, DefaultOutage),
	}
	c.members[cfg.Rank].Info = cfg.Info
	return c
}

func (c *Control) Rank() int { return c.rank }
func (c *Control) Size() int { return c.size }

// ID returns the communicator's ID. Regroup derives its token from the parent's.
func (c *Control) ID() ID { return c.id }

// Members returns the description of each rank, by rank. The caller must not change it.
func (c *Control) Members() []Member { return c.members }

// Host returns the address at which the other ranks reach this rank's host.
func (c *Control) Host() string {
	host, _, _ := net.SplitHostPort(c.members[c.rank].Addr) // Join has parsed or formatted it
	return host
}

// Listener returns this rank's Listener, with a reference that the caller must close or give
// to Join as Config.Listener. Its NewID makes the ID of a communicator that has this rank as
// rank 0, and that new processes may join (Grow).
func (c *Control) Listener() *Listener { return c.listener.hold() }

// Patience raises the silence after which a host counts as dead to d, if that is longer than
// Config.Outage. It is for communicators whose data takes another network that also reports
// dead hosts: they need not fail when only the control plane's network does.
func (c *Control) Patience(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.patience = max(c.patience, d)
}

// Key returns a 32-byte key for purpose, the same on all members of this communicator only.
func (c *Control) Key(purpose string) []byte {
	m := hmac.New(sha256.New, c.secret)
	m.Write([]byte("key\x00"))
	m.Write(c.id.Token[:])
	io.WriteString(m, purpose)
	return m.Sum(nil)
}

// Events delivers what happens to other members. The channel has room for all events, so a
// slow reader does not block the control plane. Close and Leave close it.
func (c *Control) Events() <-chan Event { return c.events }

// Err returns why the communicator is broken: a *LostError, an *AbortError, or ErrClosed after
// Leave. It returns nil while operations can succeed.
func (c *Control) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.failure
}

// AllGather returns all members' blobs, by rank. A blob has at most MaxBlob(size) bytes. It
// fails with a *LostError, an *AbortError, ErrClosed or ctx's cause, and may then succeed on
// other ranks. A call that ctx has ended stays in flight until all members have called. With 64
// in flight, AllGather fails at once.
func (c *Control) AllGather(ctx context.Context, blob []byte) ([][]byte, error) {
	if limit := MaxBlob(c.size); len(blob) > limit {
		return nil, fmt.Errorf("rank %d: gather of %d bytes, limit %d for %d ranks", c.rank, len(blob), limit, c.size)
	}
	c.mu.Lock()
	if err := c.usable(); err != nil {
		c.mu.Unlock()
		return nil, err
	}
	seq := c.seq
	if c.underWay() >= maxAhead {
		c.mu.Unlock()
		return nil, fmt.Errorf("rank %d: gather %d: %d before it wait for other ranks", c.rank, seq, maxAhead)
	}
	c.seq++
	o := c.op(seq)
	if c.rank == 0 {
		c.contribute(0, seq, blob)
	} else {
		b := appendU64(frame(frameGather), seq)
		c.peers[0].send(seal(appendBytes(b, blob)))
	}
	c.mu.Unlock()

	select {
	case <-o.done:
	case <-ctx.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case o.have == c.size: // a complete result is returned even if the communicator has failed since
		return o.blobs, nil
	case c.failure != nil:
		return nil, c.failure
	case c.state == stateClosed:
		return nil, ErrClosed
	}
	return nil, fmt.Errorf("rank %d: gather %d: %w", c.rank, seq, context.Cause(ctx))
}

// Barrier returns when every member has called it. It fails as AllGather does.
func (c *Control) Barrier(ctx context.Context) error {
	_, err := c.AllGather(ctx, nil)
	return err
}

// Broadcast returns root's blob on every member. It fails as AllGather does.
func (c *Control) Broadcast(ctx context.Context, root int, blob []byte) ([]byte, error) {
	if root < 0 || root >= c.size {
		return nil, fmt.Errorf("rank %d: broadcast from rank %d of %d", c.rank, root, c.size)
	}
	if c.rank != root {
		blob = nil
	}
	blobs, err := c.AllGather(ctx, blob)
	if err != nil {
		return nil, err
	}
	return blobs[root], nil
}

// Abort tells every member that the communicator is aborted, and why. It cuts reason to
// 4 KiB. The caller gets no event of its own abort.
func (c *Control) Abort(reason []byte) {
	if len(reason) > maxReason {
		reason = reason[:maxReason]
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state != stateJoined {
		return
	}
	e := &AbortError{Rank: c.rank, Reason: reason}
	c.seen[c.rank] |= 1 << Aborted
	c.breakWith(e)
	c.broadcastLocked(encodeAbort(e))
}

// Leave ends the membership of a rank whose work is complete. Rank 0 first waits until all
// others have left or died, because they learn of each other through it. It fails if ctx ends
// meanwhile. If the network is out, the last frames wait for a connection until ctx ends or the
// host counts as dead.
func (c *Control) Leave(ctx context.Context) error {
	c.mu.Lock()
	if c.state != stateJoined {
		c.mu.Unlock()
		return nil
	}
	c.breakWith(ErrClosed)
	c.broadcastLocked(seal(frame(frameBye)))
	wait := c.rank == 0 && c.populated()
	c.mu.Unlock()
	var err error
	if wait {
		select {
		case <-c.emptied:
		case <-ctx.Done():
			err = fmt.Errorf("rank 0: leave: members are still there: %w", context.Cause(ctx))
		}
	}
	c.mu.Lock()
	c.leaving = true
	c.mu.Unlock()
	defer context.AfterFunc(ctx, c.hurry)()
	c.Close()
	return err
}

// hurry shortens to flushTimeout how long the last frames may wait for a connection.
func (c *Control) hurry() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leaving = false
	for _, p := range c.peers {
		if p != nil {
			p.mu.Lock()
			if soon := time.Now().Add(flushTimeout); p.until.After(soon) {
				p.until = soon
			}
			p.mu.Unlock()
		}
	}
}

// Close ends this rank's membership. The others get a Left event and do not count it as dead.
// After rank 0 has closed, the others get no more events of each other.
func (c *Control) Close() error {
	c.mu.Lock()
	if c.state == stateClosed {
		c.mu.Unlock()
		return nil
	}
	if c.state == stateJoined {
		c.broadcastLocked(seal(frame(frameBye)))
	}
	c.state = stateClosed
	for _, p := range c.peers {
		if p != nil {
			p.finish()
		}
	}
	c.releaseOps()
	c.mu.Unlock()
	c.wg.Wait() // before the listener closes: the last frames may need another connection
	if c.listener != nil {
		c.listener.dropRoute(c.id.Token, c)
		c.listener.Close()
	}
	close(c.events)
	close(c.statements)
	return nil
}

// usable returns why no operation can begin, nil if one can.
func (c *Control) usable() error {
	if c.state != stateJoined {
		return ErrClosed
	}
	return c.failure
}

// underWay counts the operations that this rank has begun and that are not complete.
func (c *Control) underWay() int {
	if c.rank == 0 {
		return int(c.seq - c.floor)
	}
	return len(c.ops)
}

// op returns operation seq, and begins it if it is new.
func (c *Control) op(seq uint64) *op {
	o := c.ops[seq]
	if o == nil {
		o = &op{done: make(chan struct{})}
		if c.rank == 0 {
			o.blobs, o.from = make([][]byte, c.size), make([]bool, c.size)
		}
		c.ops[seq] = o
	}
	return o
}

// contribute takes rank's blob of operation seq on the hub. It returns false if a correct member
// would not have sent it. With the last blob it sends the result to all.
func (c *Control) contribute(rank int, seq uint64, blob []byte) bool {
	if seq < c.floor || seq >= c.floor+maxAhead || len(blob) > MaxBlob(c.size) {
		return false
	}
	o := c.op(seq)
	if o.from[rank] {
		return false
	}
	o.from[rank], o.blobs[rank] = true, blob
	o.have++
	if o.have < c.size {
		return true
	}
	c.floor = seq + 1 // each rank contributes in order, so operations complete in order
	delete(c.ops, seq)
	b := appendU64(frame(frameResult), seq)
	for _, blob := range o.blobs {
		b = appendBytes(b, blob)
	}
	c.broadcastLocked(seal(b))
	close(o.done)
	return true
}

// result completes an operation with the blobs in frame f from the hub. It returns false if f is
// malformed.
func (c *Control) result(f fields) bool {
	seq := f.u64()
	blobs := make([][]byte, c.size)
	for i := range blobs {
		blobs[i] = f.bytes()
	}
	o := c.ops[seq]
	if !f.ok() || o == nil {
		return f.ok()
	}
	delete(c.ops, seq)
	o.blobs, o.have = blobs, c.size
	close(o.done)
	return true
}

// breakWith fails the operations in flight, and those that begin later, with err. It does not
// replace the error of an earlier call.
func (c *Control) breakWith(err error) {
	if c.failure == nil {
		c.failure = err
	}
	c.releaseOps()
}

// releaseOps wakes the callers of the operations in flight, which then fail.
func (c *Control) releaseOps() {
	for seq, o := range c.ops {
		delete(c.ops, seq)
		close(o.done)
	}
}

// deliver sends an event to the reader of Events and breaks the communicator. It returns false if
// the event was delivered before, if a rank is lost that had left before, or if this rank has
// closed.
func (c *Control) deliver(e Event) bool {
	if c.state != stateJoined || e.Rank >= c.size || c.seen[e.Rank]&(1<<e.Kind) != 0 {
		return false
	}
	if e.Kind == Lost && c.seen[e.Rank]&(1<<Left) != 0 {
		return false // the connection ended because the rank has left
	}
	c.seen[e.Rank] |= 1 << e.Kind
	if e.Kind == Left {
		c.breakWith(&LostError{Rank: e.Rank, Reason: "it left the communicator"})
	} else {
		c.breakWith(e.Err)
	}
	c.events <- e // never blocks: the channel has room for every possible event
	return true
}

func (c *Control) broadcastLocked(b []byte) {
	for _, p := range c.peers {
		if p != nil {
			p.send(b)
		}
	}
}

// populated reports whether any session is still open.
func (c *Control) populated() bool {
	for _, p := range c.peers {
		if p != nil {
			return true
		}
	}
	return false
}
