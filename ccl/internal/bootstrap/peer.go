package bootstrap

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

const (
	// Control frames that one member has not taken yet, besides what became of
	// the others. Only an operation that the member itself takes part in makes more.
	maxQueue = 256
	// flushTimeout bounds the last words to a peer that may have stopped reading.
	flushTimeout = time.Second
	// bigFrame is more than a stopped peer's socket surely takes.
	bigFrame = 16 << 10
)

// peer is the connection to one other rank: the hub has one to everybody, the
// others one to the hub. A goroutine reads, another writes, so that a peer that
// does not read holds nobody up.
type peer struct {
	c        *Control
	conn     net.Conn
	rank     int
	instance uint64
	big      bool // c.mu; what is under way may be more than the peer can take

	mu       sync.Mutex // after c.mu
	some     *sync.Cond // out or finished has changed
	out      net.Buffers
	finished bool // out gets no more; set under c.mu, too
}

// admit makes conn the connection to rank.
func (c *Control) admit(conn net.Conn, rank int, instance uint64) {
	p := &peer{c: c, conn: conn, rank: rank, instance: instance}
	p.some = sync.NewCond(&p.mu)
	c.peers[rank] = p
	c.wg.Go(p.write)
	c.wg.Go(p.read)
}

func (c *Control) peer(rank int) *peer {
	if rank < 0 || rank >= len(c.peers) {
		return nil
	}
	return c.peers[rank]
}

// send queues a frame. c.mu is held.
func (p *peer) send(b []byte) {
	if p.finished {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	// Thousands may leave or be lost at once, and each member hears of each.
	if len(p.out) >= maxQueue+eventKinds*p.c.size {
		p.conn.Close() // read reports it
		return
	}
	p.out = append(p.out, b)
	p.some.Signal()
}

// waiting is how many frames the peer has not taken yet.
func (p *peer) waiting() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.out)
}

// finish lets the queue drain, for a while, and closes. c.mu is held.
func (p *peer) finish() {
	if p.finished {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.finished = true
	p.some.Signal()
	p.conn.SetDeadline(time.Now().Add(flushTimeout))
}

// take waits for frames and returns all there are; none when there come no more.
func (p *peer) take() net.Buffers {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.out) == 0 && !p.finished {
		p.some.Wait()
	}
	out := p.out
	p.out = nil
	return out
}

func (p *peer) write() {
	big := false
	for out := p.take(); len(out) > 0; out = p.take() {
		size := 0
		for _, b := range out {
			size += len(b)
		}
		if was := big; was != (size > bigFrame) {
			big = !was
			p.c.mu.Lock()
			if p.big = big; big {
				setUserTimeout(p.conn, 0)
			} else {
				setUserTimeout(p.conn, p.c.patience)
			}
			p.c.mu.Unlock()
		}
		if _, err := out.WriteTo(p.conn); err != nil {
			p.conn.Close() // read reports it
		}
	}
	// Closing at once would reset the connection when bytes of the peer's are
	// unread, and destroy our last words on their way. read closes.
	if half, ok := p.conn.(interface{ CloseWrite() error }); ok {
		half.CloseWrite()
	} else {
		p.conn.Close()
	}
}

func (p *peer) read() {
	limit := maxHello
	if p.rank == 0 {
		limit = maxFrame
	}
	for {
		t, f, err := readFrame(p.conn, limit)
		if err == nil {
			err = p.c.handle(p, t, f)
		}
		if err != nil {
			p.c.hungUp(p, err)
			p.conn.Close()
			return
		}
	}
}

// handle acts on one frame. An error ends the connection.
func (c *Control) handle(p *peer, t frameType, f fields) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state != stateJoined || c.peers[p.rank] != p {
		return nil // last words, to nobody
	}
	hub := c.rank == 0
	ok := false
	switch {
	case t == frameGather && hub:
		seq, blob := f.u64(), f.bytes()
		ok = f.ok() && c.contribute(p.rank, seq, blob)
	case t == frameResult && !hub:
		ok = c.result(f)
	case t == frameTell && hub:
		blob := f.bytes()
		if ok = f.ok() && len(blob) <= maxStatement; ok {
			c.note(Statement{p.rank, blob})
		}
	case t == frameAbort:
		e := &AbortError{Rank: int(f.u32()), Reason: f.bytes()}
		if ok = f.ok() && e.Rank < c.size && len(e.Reason) <= maxReason && (!hub || e.Rank == p.rank); ok {
			c.relay(Event{Kind: Aborted, Rank: e.Rank, Err: e}, encodeAbort(e))
		}
	case t == frameLost && !hub:
		var e *LostError
		if e, ok = decodeFailure(t, f, c.size).(*LostError); ok {
			c.tell(Event{Kind: Lost, Rank: e.Rank, Err: e})
		}
	case t == frameLeft && !hub:
		if r := int(f.u32()); f.ok() && r < c.size {
			ok = true
			c.tell(Event{Kind: Left, Rank: r})
		}
	case t == frameBye:
		ok = f.ok()
		c.relay(Event{Kind: Left, Rank: p.rank}, seal(appendU32(frame(frameLeft), uint32(p.rank))))
	}
	if !ok {
		return fmt.Errorf("%w: frame type %d", ErrProtocol, t)
	}
	return nil
}

// relay tells an event here and, on the hub, to everybody but its cause.
func (c *Control) relay(e Event, b []byte) {
	if !c.tell(e) || c.rank != 0 {
		return
	}
	for r, p := range c.peers {
		if p != nil && r != e.Rank && c.seen[r]&(1<<Left) == 0 { // who has left does not care
			p.send(b)
		}
	}
}

// hungUp takes leave of a peer whose connection ended. Unless it said so
// before, its process is dead, or as good as dead to everybody.
func (c *Control) hungUp(p *peer, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p.finish()
	if c.peers[p.rank] != p {
		return
	}
	c.peers[p.rank] = nil
	if c.state == stateJoined {
		reason := fmt.Sprintf("control connection: %v", err)
		if errors.Is(err, io.EOF) {
			reason = "its process ended without leaving"
		}
		e := &LostError{Rank: p.rank, Reason: reason}
		c.relay(Event{Kind: Lost, Rank: p.rank, Err: e}, encodeLost(e))
	}
	if c.rank == 0 && c.state != stateJoining && !c.populated() {
		select {
		case <-c.emptied:
		default:
			close(c.emptied)
		}
	}
}
