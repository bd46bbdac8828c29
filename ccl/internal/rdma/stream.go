package rdma

import (
	"fmt"
	"io"
	"time"
	"unsafe"
)

// What the executor calls.

// Send takes up to len(b) bytes of the stream; the caller may reuse them at
// once. starved says that the receiver gives no credit for more.
func (c *Conn) Send(b []byte) (n int, starved bool, err error) {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	return c.send(b, nil)
}

// SendKept is Send of bytes that the caller leaves as they are until Settled:
// those in registered memory are sent from where they lie, those of a DMA buffer always.
func (c *Conn) SendKept(b []byte) (n int, starved bool, err error) {
	r := regionOf(b)
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	if r != nil && r.buffer == nil && !c.reaches(r) {
		r = nil
	}
	return c.send(b, r)
}

// reaches reports whether a region is registered with the devices of all paths,
// so that a switch does not find that it cannot be. The first time it is registered
// there, without the worker's lock.
func (c *Conn) reaches(r *Region) bool {
	for p := range c.pairs {
		n := c.w.opened(c.pairs[p].Own.Device)
		if n == nil {
			return false
		}
		ok, asked := r.known(n.dev)
		if !asked {
			c.w.mu.Unlock()
			_, err := r.key(n.dev)
			c.w.mu.Lock()
			ok = err == nil
		}
		if !ok {
			return false
		}
	}
	return true
}

func (c *Conn) send(b []byte, r *Region) (n int, starved bool, err error) {
	for n < len(b) {
		size, lane, _ := c.m.chunk(uint64(len(b) - n))
		if size == 0 {
			if n > 0 {
				break
			}
			if err := c.usable(); err != nil {
				return 0, false, err
			}
			c.w.poll(false)
			c.readCredit()
			if size, lane, starved = c.m.chunk(uint64(len(b) - n)); size == 0 {
				break
			}
		}
		var from source
		if r != nil && (size >= keptFrom || r.buffer != nil) {
			from = source{uint64(uintptr(unsafe.Pointer(&b[n]))), r}
		} else {
			copy(c.mem[c.lay.out+c.m.tx.sent%c.m.ring:], b[n:n+int(size)])
		}
		if c.m.send(lane, size, from); from.addr != 0 {
			inPlace.Add(size)
			if r.buffer != nil {
				buffered.Add(size)
			}
		}
		n += int(size)
	}
	if n > 0 {
		c.flush()
		if c.dirty {
			c.work()
		}
	}
	return n, starved, nil
}

// Settled reports whether the caller may change what SendKept took, and tells the
// peer the same of what was consumed here.
func (c *Conn) Settled() bool {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	if c.err != nil {
		return true
	}
	c.m.release()
	c.flush()
	return c.consumed(c.m.tx.kept)
}

// consumed reports whether the peer has consumed the stream up to end, or never will.
func (c *Conn) consumed(end uint64) bool {
	if c.m.tx.acked < end && c.err == nil {
		c.w.poll(false)
		c.readCredit()
	}
	return c.m.tx.acked >= end || c.usable() != nil
}

// Kept is up to where in the stream SendKept has sent bytes from where they lie.
func (c *Conn) Kept() uint64 {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	return c.m.tx.kept
}

// Returned is Settled of what was kept up to a former Kept; it tells the peer nothing.
func (c *Conn) Returned(kept uint64) bool {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	return c.consumed(kept)
}

// Acknowledge tells the peer what was consumed here, if it may wait for it to have its
// memory back.
func (c *Conn) Acknowledge() {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	if c.err == nil {
		c.m.release()
		c.flush()
	}
}

// Abandon ends the connection where Settled is false: the caller is about to change
// what it sent without a copy, because its operation has failed. To the peer this end has closed.
func (c *Conn) Abandon() {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	if c.err == nil && !c.m.settled() {
		c.hear(fmt.Errorf("abandoned with %d bytes that the peer has not consumed: %w", c.m.tx.kept-c.m.tx.acked, io.EOF))
		c.fail(c.gone)
	}
}

// usable is why the connection can not be used any more, nil when it can.
func (c *Conn) usable() error {
	if c.err == nil && c.gone != nil {
		c.w.poll(true)
		c.fail(c.gone)
	}
	return c.err
}

// AlignSend and AlignRecv skip to the next 64-byte boundary of the stream.
func (c *Conn) AlignSend() {
	c.w.mu.Lock()
	c.m.alignSend()
	c.w.mu.Unlock()
}

func (c *Conn) AlignRecv() {
	c.w.mu.Lock()
	c.m.alignRecv()
	c.w.mu.Unlock()
}

// Peek returns up to want bytes that have arrived, or more, in place; they stay
// until Advance.
func (c *Conn) Peek(want int) ([]byte, error) {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	return c.peek(want)
}

func (c *Conn) peek(want int) ([]byte, error) {
	n := c.m.arrived()
	if n < uint64(want) {
		c.w.poll(false)
		if n = c.m.arrived(); n == 0 {
			return nil, c.usable()
		}
	}
	at := c.m.rx.got % c.m.ring
	return c.mem[at:min(at+n, c.m.ring)], nil
}

// Recv copies up to len(b) arrived bytes.
func (c *Conn) Recv(b []byte) (n int, err error) {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	for n < len(b) {
		p, err := c.peek(1)
		if len(p) == 0 {
			if n == 0 {
				return 0, err
			}
			break
		}
		k := copy(b[n:], p)
		n += k
		c.consume(k)
	}
	return n, nil
}

// Advance consumes n bytes that Peek has returned.
func (c *Conn) Advance(n int) {
	c.w.mu.Lock()
	c.consume(n)
	c.w.mu.Unlock()
}

func (c *Conn) consume(n int) {
	c.m.consume(uint64(n))
	c.grant(true)
}

// grant gives credit.
func (c *Conn) grant(eager bool) {
	if c.err == nil {
		c.m.grant(eager)
		c.flush()
	}
}

// WriteLine sends one line.
func (c *Conn) WriteLine(b *[LineSize]byte) (ok, starved bool, err error) {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	lane, _ := c.m.line()
	if lane < 0 {
		if err := c.usable(); err != nil {
			return false, false, err
		}
		c.w.poll(false)
		c.readCredit()
		if lane, starved = c.m.line(); lane < 0 {
			return false, starved, nil
		}
	}
	copy(c.mem[c.lay.linesOut+c.m.tx.lines%LineSlots*lineSize:], b[:])
	c.m.sendLine(lane)
	c.flush()
	if c.dirty {
		c.work()
	}
	return true, false, nil
}

// ReadLine takes the next line, if it is there.
func (c *Conn) ReadLine(b *[LineSize]byte) (ok bool, err error) {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	if !c.m.lineHere() {
		c.w.poll(false)
		if !c.m.lineHere() {
			return false, c.usable()
		}
	}
	copy(b[:], c.mem[c.lay.lines+c.m.rx.lines%LineSlots*lineSize:])
	c.m.consumeLine()
	c.grant(true)
	return true, nil
}

// Lock holds back everything that happens to the connection, its watcher's
// calls included, until Unlock; it is for what the watcher guards with it.
func (c *Conn) Lock()   { c.w.mu.Lock() }
func (c *Conn) Unlock() { c.w.mu.Unlock() }

// Progress is how far the connection's streams are, lines counted as 64 bytes.
type Progress struct {
	Sent     uint64 // taken from the caller
	Consumed uint64 // of it, by the peer
	Received uint64 // consumed here
	News     bool   // the peer has yet to hear of something consumed here
}

// Progress tells it as far as it is known without asking.
func (c *Conn) Progress() Progress {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	t, r := &c.m.tx, &c.m.rx
	return Progress{
		Sent: t.sent + t.lines*lineSize, Consumed: min(t.acked, t.sent) + t.lacked*lineSize,
		Received: r.got + r.lines*lineSize, News: c.m.credits(),
	}
}

// Room is how many bytes the receiver has credit for.
func (c *Conn) Room() int {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	c.readCredit()
	return int(c.m.credit())
}

// Refresh is for a rank that has time: it learns and tells what was consumed,
// and looks whether any write is stuck, and whether the peer's host is there.
func (c *Conn) Refresh() {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	c.w.poll(true)
	c.readCredit()
	c.grant(false)
	now := time.Now()
	c.watchdog(now)
	c.look(now)
	c.dirty = true
	c.work()
}

// Finish reports whether the peer's NIC has all that was sent, or nobody wants it.
func (c *Conn) Finish() bool {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	c.w.poll(true)
	if c.err != nil || c.gone != nil {
		return true
	}
	for i := range c.m.lanes {
		if l := &c.m.lanes[i]; l.phase != running || l.transmitted < l.posted && l.acked < l.posted {
			if l.posted > 0 {
				return false
			}
		}
	}
	return true
}

// Drop cuts the connection, for both ends.
func (c *Conn) Drop(err error) {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	c.fail(err)
}
