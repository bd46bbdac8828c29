package ccl

import (
	"sync"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/engine"
	"github.com/lockstep-ccl/lockstep/ccl/internal/executor"
	"github.com/lockstep-ccl/lockstep/record"
)

// Group collects sends and receives that run as one operation, all at once (it
// is what ncclGroupStart and ncclGroupEnd enclose, on one communicator).
type Group struct {
	x        *executor.Executor
	messages *executor.Messages
	// device holds the messages of device memory; a group has one kind of memory.
	device []Buffer
	err    error
}

// Send adds the sending of buf to peer.
func (g *Group) Send(buf Buffer, peer int) error { return g.add(record.Send, buf, peer) }

// Recv adds the receiving of buf from peer.
func (g *Group) Recv(buf Buffer, peer int) error { return g.add(record.Recv, buf, peer) }

func (g *Group) add(kind record.CollKind, buf Buffer, peer int) error {
	if peer < 0 || peer >= g.x.Size {
		err := g.x.Invalid(kind, "peer %d, communicator has ranks 0 to %d", peer, g.x.Size-1)
		if g.err == nil {
			g.err = err
		}
		return err
	}
	g.messages.Msgs = append(g.messages.Msgs, algo.Message{Peer: int32(peer), Send: kind == record.Send, Len: buf.size()})
	if buf.onDevice() {
		g.device = append(g.device, buf)
	} else {
		g.messages.Parts = append(g.messages.Parts, engine.Part{Buf: buf.raw(), DType: buf.dt})
	}
	return nil
}

// each lists the messages of device memory.
func (g *Group) each(add func(send bool, b Buffer, peer int)) {
	for i, m := range g.messages.Msgs {
		add(m.Send, g.device[i], int(m.Peer))
	}
}

// maxGroup bounds a group's messages: their index is an algo.Space.
const maxGroup = 1<<16 - 1 - int(algo.PartSpace)

// check matches the rank's messages to itself.
func (g *Group) check() error {
	if len(g.messages.Msgs) > maxGroup {
		return g.x.Invalid(record.Group, "%d messages, at most %d", len(g.messages.Msgs), maxGroup)
	}
	if len(g.device) > 0 {
		if len(g.device) != len(g.messages.Msgs) {
			return g.x.Invalid(record.Group, "messages of host memory and of device memory in one group")
		}
		return nil
	}
	self := func(i int, send bool) int { return algo.NextSelf(g.messages.Msgs, g.x.Rank, i, send) }
	in := self(0, false)
	for out := self(0, true); out >= 0 || in >= 0; out, in = self(out+1, true), self(in+1, false) {
		if out < 0 || in < 0 {
			return g.x.Invalid(record.Group, "this rank's sends to itself and receives from itself differ in number")
		}
		a, b := g.messages.Parts[out], g.messages.Parts[in]
		if len(a.Buf) != len(b.Buf) || a.DType != b.DType {
			return g.x.Invalid(record.Group, "this rank sends itself %d bytes of %v and receives %d of %v", len(a.Buf), a.DType, len(b.Buf), b.DType)
		}
	}
	return nil
}

// groupPool keeps groups whose calls have returned for the next ones.
type groupPool struct {
	mu     sync.Mutex
	groups []*Group
}

func (p *groupPool) get(x *executor.Executor) *Group {
	p.mu.Lock()
	defer p.mu.Unlock()
	var g *Group
	if n := len(p.groups); n > 0 {
		g = p.groups[n-1]
		p.groups = p.groups[:n-1]
	} else {
		g = &Group{x: x}
	}
	g.messages = x.Messages()
	return g
}

func (p *groupPool) put(g *Group) {
	if g.messages != nil {
		g.x.Discard(g.messages)
	}
	clear(g.device)
	g.messages, g.device, g.err = nil, g.device[:0], nil
	p.mu.Lock()
	defer p.mu.Unlock()
	p.groups = append(p.groups, g)
}
