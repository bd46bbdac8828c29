package ccl

import (
	"sync"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/engine"
	"github.com/lockstep-ccl/lockstep/record"
)

// Group collects sends and receives that run as one operation, all at once (it
// is what ncclGroupStart and ncclGroupEnd enclose, on one communicator).
type Group struct {
	c     *Comm
	parts []engine.Part
	msgs  []algo.Message // each one's buffer is the part of the same index
	// device holds the messages of device memory; a group has one kind of memory.
	device []Buffer
	err    error
}

// Group calls fn to collect sends and receives, then puts them in the queue as
// one operation. Messages between two ranks are matched in the order of the calls;
// a rank may send to itself. fn must not keep the Group, nor call the communicator.
// When fn or one of its calls returns an error, nothing is sent.
func (c *Comm) Group(s *Stream, fn func(g *Group) error) error {
	g := c.groups.get()
	g.c = c
	err := fn(g)
	if err == nil {
		err = g.err
	}
	if err == nil {
		err = g.check()
	}
	if err == nil && len(g.device) > 0 {
		err = c.groupGPU(s, g)
		c.groups.put(g)
		return err
	}
	if err == nil && len(g.msgs) > 0 {
		o := operation{coll: record.Group, root: -1, group: g}
		for _, m := range g.msgs {
			if m.Send {
				o.bytes += uint64(m.Len)
			}
		}
		if err = c.put(s, &o); err == nil {
			return nil
		}
	}
	c.groups.put(g)
	return err
}

// Send adds the sending of buf to peer.
func (g *Group) Send(buf Buffer, peer int) error { return g.add(record.Send, buf, peer) }

// Recv adds the receiving of buf from peer.
func (g *Group) Recv(buf Buffer, peer int) error { return g.add(record.Recv, buf, peer) }

func (g *Group) add(kind record.CollKind, buf Buffer, peer int) error {
	if peer < 0 || peer >= g.c.size {
		err := g.c.invalid(kind, "peer %d, communicator has ranks 0 to %d", peer, g.c.size-1)
		if g.err == nil {
			g.err = err
		}
		return err
	}
	g.msgs = append(g.msgs, algo.Message{Peer: int32(peer), Send: kind == record.Send, Len: buf.size()})
	if buf.onDevice() {
		g.device = append(g.device, buf)
	} else {
		g.parts = append(g.parts, engine.Part{Buf: buf.raw(), DType: buf.dt})
	}
	return nil
}

// maxGroup bounds a group's messages: their index is an algo.Space.
const maxGroup = 1<<16 - 1 - int(algo.PartSpace)

// check matches the rank's messages to itself.
func (g *Group) check() error {
	if len(g.msgs) > maxGroup {
		return g.c.invalid(record.Group, "%d messages, at most %d", len(g.msgs), maxGroup)
	}
	if len(g.device) > 0 {
		if len(g.device) != len(g.msgs) {
			return g.c.invalid(record.Group, "messages of host memory and of device memory in one group")
		}
		return nil
	}
	self := func(i int, send bool) int { return algo.NextSelf(g.msgs, g.c.rank, i, send) }
	in := self(0, false)
	for out := self(0, true); out >= 0 || in >= 0; out, in = self(out+1, true), self(in+1, false) {
		if out < 0 || in < 0 {
			return g.c.invalid(record.Group, "this rank's sends to itself and receives from itself differ in number")
		}
		a, b := g.parts[out], g.parts[in]
		if len(a.Buf) != len(b.Buf) || a.DType != b.DType {
			return g.c.invalid(record.Group, "this rank sends itself %d bytes of %v and receives %d of %v", len(a.Buf), a.DType, len(b.Buf), b.DType)
		}
	}
	return nil
}

// groupPool keeps the groups and vectors of ended operations for the next ones.
type groupPool struct {
	mu      sync.Mutex
	groups  []*Group
	vectors []*algo.Vector
}

func (p *groupPool) get() *Group {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.groups); n > 0 {
		g := p.groups[n-1]
		p.groups = p.groups[:n-1]
		return g
	}
	return &Group{}
}

func (p *groupPool) put(g *Group) {
	clear(g.parts)
	clear(g.device)
	g.parts, g.msgs, g.device, g.err = g.parts[:0], g.msgs[:0], g.device[:0], nil
	p.mu.Lock()
	defer p.mu.Unlock()
	p.groups = append(p.groups, g)
}

func (p *groupPool) vector() *algo.Vector {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.vectors); n > 0 {
		v := p.vectors[n-1]
		p.vectors = p.vectors[:n-1]
		return v
	}
	return &algo.Vector{}
}

func (p *groupPool) putVector(v *algo.Vector) {
	*v = algo.Vector{}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.vectors = append(p.vectors, v)
}
