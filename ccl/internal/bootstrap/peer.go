package bootstrap

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"time"
)

const (
	// maxQueue bounds a peer's unacknowledged frames, besides those that report events. It
	// suffices for a peer that works: operations in flight wait for it, and are at most
	// maxAhead.
	maxQueue = 256
	// flushTimeout bounds the last write to a peer that may have stopped reading.
	flushTimeout = time.Second
	maxFlushes   = 3 // tries of that write, see put
	// bigFrame is how many bytes the socket buffer of a stopped peer is sure to hold.
	bigFrame = 16 << 10
	// A peer acknowledges every ackEvery frames, and a frame of ackFrom bytes at once, because
	// the sender keeps unacknowledged frames in memory.
	ackEvery = 16
	ackFrom  = 64 << 10
)

// peer is the session with one other rank. The hub has one with every rank, and each other
// rank has one with the hub. One goroutine reads and one writes, so a peer that does not
// read blocks no other. When the connection breaks, the session continues over another one
// (seek.go). For that, frames are numbered from the beginning of the session and kept until
// they are acknowledged.
type peer struct {
	c        *Control
	rank     int
	instance uint64 // random, of its Join

	mu       sync.Mutex // locked after c.mu; conn and over change under both
	some     *sync.Cond // signals each change of the fields below
	conn     net.Conn   // nil while the session seeks one
	big      bool       // more may be in flight than bigFrame, so TCP_USER_TIMEOUT is off
	first    []byte     // the frame to write to conn before out; it has no number
	out      [][]byte   // unacknowledged frames; the first has number base
	base     uint64     // number of frames that the peer has acknowledged
	written  int        // number of frames of out that were written to conn
	got      uint64     // number of frames received from the peer
	acked    uint64     // value of got in the last acknowledgement
	ackDue   bool       // an acknowledgement is to be written
	writing  bool       // a write to conn is in progress
	broken   error      // why a write to conn failed
	finished bool       // out takes no more frames
	until    time.Time  // when a finished session stops seeking a connection
	over     bool       // the session has ended
	failed   error      // why another connection cannot help
	tries    uint64     // number of this end's attempts to resume or probe
	try      uint64     // under c.mu: number of the peer's latest attempt to resume
}

// admit begins the session with rank over conn. got frames have been received on conn already.
// c.mu is held.
func (c *Control) admit(conn net.Conn, rank int, instance, got uint64) {
	p := &peer{c: c, rank: rank, instance: instance, got: got}
	p.some = sync.NewCond(&p.mu)
	c.peers[rank] = p
	c.wg.Add(1) // end calls Done
	p.mu.Lock()
	defer p.mu.Unlock()
	p.attach(conn, nil)
}

// attach makes conn the session's connection. It sends first, if any, and then all
// unacknowledged frames. Both locks are held.
func (p *peer) attach(conn net.Conn, first []byte) {
	if p.conn != nil {
		p.conn.Close()
	}
	p.conn, p.first, p.written = conn, first, 0
	p.acked, p.ackDue, p.big = p.got, false, false
	p.writing, p.broken = false, nil
	p.some.Broadcast()
	p.c.wg.Go(func() { p.write(conn) })
	p.c.wg.Go(func() { p.read(conn) })
}

// peer returns the session with rank, nil if there is none or rank is out of range.
func (c *Control) peer(rank int) *peer {
	if rank < 0 || rank >= len(c.peers) {
		return nil
	}
	return c.peers[rank]
}

// send queues a frame. A peer whose queue is full is lost. c.mu is held.
func (p *peer) send(b []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.finished {
		return
	}
	// All members may leave or be lost at once, and this peer is told of each.
	if len(p.out) >= maxQueue+eventKinds*p.c.size {
		if p.failed = errors.New("it does not take its frames"); p.conn != nil {
			p.conn.Close() // read then ends the session
		}
		return
	}
	p.out = append(p.out, b)
	p.some.Broadcast()
}

// unacknowledged returns how many frames the peer has not acknowledged yet.
func (p *peer) unacknowledged() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.out)
}

// acknowledged drops the frames before number n. It returns false if n is out of range. p.mu is
// held.
func (p *peer) acknowledged(n uint64) bool {
	if n < p.base || n > p.base+uint64(len(p.out)) {
		return false
	}
	k := int(n - p.base)
	p.out = slices.Delete(p.out, 0, k)
	p.base, p.written = n, max(0, p.written-k)
	return true
}

// finish makes the session end after its last frames are written, or when its time is up. c.mu
// is held.
func (p *peer) finish() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.finished {
		return
	}
	now := time.Now()
	p.finished, p.until = true, now.Add(flushTimeout)
	if p.conn != nil && p.writing {
		_ = p.conn.SetWriteDeadline(p.until) // bounds the write in progress; take sets the deadline of the last write
	}
	if p.c.leaving {
		p.until = now.Add(p.c.patience) // without a frameBye the peer reports this rank as lost
	}
	p.some.Broadcast()
}

// end ends the session at once. c.mu is held.
func (p *peer) end() {
	p.finish()
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.over {
		p.over = true
		p.c.wg.Done()
	}
	p.some.Broadcast()
}

// take waits for frames and returns them, to be written to conn. It returns none when the
// session is finished, and false when conn is no longer the session's connection.
func (p *peer) take(conn net.Conn) (net.Buffers, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conn == conn {
		p.writing = false
	}
	for p.conn == conn && p.first == nil && p.written == len(p.out) && !p.ackDue && !p.finished {
		p.some.Wait()
	}
	if p.conn != conn {
		return nil, false
	}
	if p.writing = true; p.finished {
		_ = conn.SetWriteDeadline(time.Now().Add(flushTimeout))
	}
	var out net.Buffers
	if p.first != nil {
		out = append(out, p.first)
		p.first = nil
	}
	if p.ackDue {
		out = append(out, seal(appendU64(frame(frameAck), p.got)))
		p.ackDue, p.acked = false, p.got
	}
	out = append(out, p.out[p.written:]...)
	p.written = len(p.out)
	return out, true
}

// write writes the session's frames to conn until the session is finished or has lost conn.
func (p *peer) write(conn net.Conn) {
	out, ok := p.take(conn)
	for ; ok && len(out) > 0; out, ok = p.take(conn) {
		size := 0
		for _, b := range out {
			size += len(b)
		}
		p.mu.Lock()
		if was := p.big; p.conn == conn && was != (size > bigFrame) {
			if p.big = !was; p.big {
				setUserTimeout(conn, 0)
			} else {
				setUserTimeout(conn, userTimeout)
			}
		}
		p.mu.Unlock()
		if err := put(conn, out); err != nil {
			p.unwritable(conn, err)
			return
		}
	}
	if !ok {
		return
	}
	_ = conn.SetReadDeadline(time.Now().Add(flushTimeout))
	// Close would reset the connection if it holds unread bytes, and the peer would lose the
	// last frames. So this side only shuts down writing, and read closes conn after the peer.
	if half, ok := conn.(interface{ CloseWrite() error }); ok {
		if half.CloseWrite() != nil {
			conn.Close() // the connection has ended
		}
	} else {
		conn.Close()
	}
}

// put writes all of out. On a busy machine the process may first run after the write deadline.
// So if nothing was written by then, put sets a new deadline, and tries maxFlushes times in all.
func put(conn net.Conn, out net.Buffers) error {
	for try := 1; ; try++ {
		n, err := out.WriteTo(conn)
		if n > 0 || try == maxFlushes || !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
		_ = conn.SetWriteDeadline(time.Now().Add(flushTimeout))
	}
}

// unwritable ends a connection after a failed write. The peer may have left in good order, so
// read first takes the frames that have arrived; Close would discard them.
func (p *peer) unwritable(conn net.Conn, err error) {
	p.mu.Lock()
	if p.conn == conn {
		p.broken = err
	}
	p.mu.Unlock()
	if half, ok := conn.(interface{ CloseRead() error }); ok {
		_ = half.CloseRead() // an error means that the connection has ended
		return
	}
	conn.Close()
}

// read handles the frames that arrive on conn until the connection ends.
func (p *peer) read(conn net.Conn) {
	limit := maxHello
	if p.rank == 0 {
		limit = maxFrame
	}
	for {
		t, f, err := readFrame(conn, limit)
		if err == nil {
			err = p.c.handle(p, conn, t, f)
		}
		if err != nil {
			p.c.connectionEnded(p, conn, err)
			conn.Close()
			return
		}
	}
}

var errReplaced = errors.New("another connection has taken its place")

// received counts a frame that arrived on conn, and makes an acknowledgement due. It handles a
// frameAck itself.
func (p *peer) received(conn net.Conn, t frameType, f *fields) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conn != conn {
		return errReplaced // the peer sends the frame again on the new connection
	}
	if t == frameAck {
		if n := f.u64(); !f.ok() || !p.acknowledged(n) {
			return fmt.Errorf("%w: %d frames acknowledged, %d to %d are under way", ErrProtocol, n, p.base, p.base+uint64(len(p.out)))
		}
		return nil
	}
	p.got++
	if p.got-p.acked >= ackEvery || len(f.b) >= ackFrom {
		p.ackDue = true
		p.some.Broadcast()
	}
	return nil
}

// handle acts on one frame. An error ends the connection.
func (c *Control) handle(p *peer, conn net.Conn, t frameType, f fields) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state != stateJoined || c.peers[p.rank] != p {
		return nil // the session or the Control has ended
	}
	if err := p.received(conn, t, &f); err != nil || t == frameAck {
		return err
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
		if ok = errors.As(decodeFailure(t, f, c.size), &e); ok {
			c.deliver(Event{Kind: Lost, Rank: e.Rank, Err: e})
		}
	case t == frameLeft && !hub:
		if r := int(f.u32()); f.ok() && r < c.size {
			ok = true
			c.deliver(Event{Kind: Left, Rank: r})
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

// relay delivers an event to this rank. On the hub it also sends b, the event's frame, to all
// other members. c.mu is held.
func (c *Control) relay(e Event, b []byte) {
	if !c.deliver(e) || c.rank != 0 {
		return
	}
	for r, p := range c.peers {
		if p != nil && r != e.Rank && c.seen[r]&(1<<Left) == 0 {
			p.send(b)
		}
	}
}

// connectionEnded handles the end of conn. The session seeks another connection, unless it has
// failed, the peer has left or finished it, or the roster has not been sent: a rank then joins
// again, in a new session.
func (c *Control) connectionEnded(p *peer, conn net.Conn, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p.mu.Lock()
	if p.conn != conn || p.over {
		p.mu.Unlock()
		return
	}
	if p.broken != nil && errors.Is(err, io.EOF) {
		err = p.broken // unwritable caused this EOF; report the write error
	}
	failed, finished := p.failed, p.finished
	p.conn = nil
	p.some.Broadcast()
	p.mu.Unlock()
	if failed != nil {
		err = failed
	}
	switch {
	case failed != nil, errors.Is(err, ErrProtocol), c.peers[p.rank] != p, c.state == stateJoining,
		c.seen[p.rank]&(1<<Left) != 0, finished && errors.Is(err, io.EOF):
		c.dropPeer(p, fmt.Sprintf("control connection: %v", err))
	default:
		c.wg.Go(func() { c.seek(p, err) })
	}
}

// dropPeer ends the session with a peer, and reports the peer as lost unless it has left. c.mu
// is held.
func (c *Control) dropPeer(p *peer, reason string) {
	p.end()
	if c.peers[p.rank] != p {
		return
	}
	c.peers[p.rank] = nil
	c.untold = true
	if c.state == stateJoined {
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
