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
	msgs  []message
	// device holds the messages of device memory; a group has one kind of memory.
	device []Buffer
	err    error
}

// message is one send or receive of a group; its buffer is the part of the same index.
type message struct {
	peer int32
	send bool
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
		for i, m := range g.msgs {
			if m.send {
				o.bytes += uint64(len(g.parts[i].Buf))
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
	if buf.onDevice() {
		g.device = append(g.device, buf)
		g.msgs = append(g.msgs, message{int32(peer), kind == record.Send})
		return nil
	}
	g.parts = append(g.parts, engine.Part{Buf: buf.raw(), DType: buf.dt})
	g.msgs = append(g.msgs, message{int32(peer), kind == record.Send})
	return nil
}

// maxGroup bounds a group's messages: their index is an algo.Space.
const maxGroup = 1<<16 - 1 - int(engine.GroupSpace)

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
	in := g.nextSelf(0, false)
	for out := g.nextSelf(0, true); out >= 0 || in >= 0; out, in = g.nextSelf(out+1, true), g.nextSelf(in+1, false) {
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

// nextSelf is the first message from index i on that this rank sends to, or
// receives from, itself; -1 when there is none.
func (g *Group) nextSelf(i int, send bool) int {
	for ; i < len(g.msgs); i++ {
		if g.msgs[i].send == send && int(g.msgs[i].peer) == g.c.rank {
			return i
		}
	}
	return -1
}

// pointToPoint builds the schedules of sends, receives, groups and AlltoAllv,
// which depend on more than a shape and are not kept. Its memory is used again.
type pointToPoint struct {
	schedule algo.Schedule
	tracks   [][]algo.Step // one for each peer and direction
}

func (p *pointToPoint) reset(n int) {
	for len(p.tracks) < n {
		p.tracks = append(p.tracks, nil)
	}
	for i := range p.tracks {
		p.tracks[i] = p.tracks[i][:0]
	}
}

// add appends a message to its track. All messages carry their signature.
func (p *pointToPoint) add(track int, s algo.Step) { p.tracks[track] = append(p.tracks[track], s) }

func (p *pointToPoint) build() *algo.Schedule {
	p.schedule.Algo, p.schedule.Proto = record.AlgoDirect, record.ProtoSimple
	p.schedule.Tracks = p.schedule.Tracks[:0]
	for _, t := range p.tracks {
		if len(t) > 0 {
			p.schedule.Tracks = append(p.schedule.Tracks, t)
		}
	}
	return &p.schedule
}

// single is a lone Send or Recv.
func (p *pointToPoint) single(op *operation) *algo.Schedule {
	p.reset(1)
	step := algo.Step{Act: algo.Send, Header: true, Kept: true, Peer: op.root, Src: algo.Ref{Space: algo.SendBuf}, Len: len(op.send)}
	if op.coll == record.Recv {
		step = algo.Step{Act: algo.Recv, Header: true, Peer: op.root, Dst: algo.Ref{Space: algo.RecvBuf}, Len: len(op.recv)}
	}
	p.add(0, step)
	return p.build()
}

func (p *pointToPoint) group(g *Group) *algo.Schedule {
	p.reset(2 * g.c.size)
	for i, m := range g.msgs {
		ref := algo.Ref{Space: engine.GroupSpace + algo.Space(i)}
		switch {
		case int(m.peer) == g.c.rank:
			continue
		case m.send:
			p.add(2*int(m.peer), algo.Step{Act: algo.Send, Header: true, Kept: true, Peer: m.peer, Src: ref, Len: len(g.parts[i].Buf)})
		default:
			p.add(2*int(m.peer)+1, algo.Step{Act: algo.Recv, Header: true, Peer: m.peer, Dst: ref, Len: len(g.parts[i].Buf)})
		}
	}
	in := g.nextSelf(0, false)
	for out := g.nextSelf(0, true); out >= 0; out, in = g.nextSelf(out+1, true), g.nextSelf(in+1, false) {
		p.add(2*g.c.rank, algo.Step{
			Act: algo.Copy, Peer: -1, Len: len(g.parts[out].Buf),
			Dst: algo.Ref{Space: engine.GroupSpace + algo.Space(in)}, Src: algo.Ref{Space: engine.GroupSpace + algo.Space(out)},
		})
	}
	return p.build()
}

func (p *pointToPoint) vector(c *Comm, op *operation) *algo.Schedule {
	p.reset(2 * c.size)
	v, size := op.vector, op.dtype.Size()
	for k := range c.size {
		to, from := (c.rank+k)%c.size, (c.rank-k+c.size)%c.size
		src := algo.Ref{Space: algo.SendBuf, Off: v.sendOffsets[to] * size}
		dst := algo.Ref{Space: algo.RecvBuf, Off: v.recvOffsets[from] * size}
		if k == 0 {
			p.add(0, algo.Step{Act: algo.Copy, Peer: -1, Dst: dst, Src: src, Len: v.sendCounts[to] * size})
			continue
		}
		p.add(2*k, algo.Step{Act: algo.Send, Header: true, Peer: int32(to), Src: src, Len: v.sendCounts[to] * size})
		p.add(2*k+1, algo.Step{Act: algo.Recv, Header: true, Peer: int32(from), Dst: dst, Len: v.recvCounts[from] * size})
	}
	return p.build()
}

// groupPool keeps the groups and vectors of ended operations for the next ones.
type groupPool struct {
	mu      sync.Mutex
	groups  []*Group
	vectors []*vector
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

func (p *groupPool) vector() *vector {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.vectors); n > 0 {
		v := p.vectors[n-1]
		p.vectors = p.vectors[:n-1]
		return v
	}
	return &vector{}
}

func (p *groupPool) putVector(v *vector) {
	*v = vector{}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.vectors = append(p.vectors, v)
}
