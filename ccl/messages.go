package ccl

import (
	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/executor"
	"github.com/lockstep-ccl/lockstep/record"
)

func (c *Comm) checkPeer(kind record.CollKind, peer int) error {
	if peer < 0 || peer >= c.size || peer == c.who.Rank {
		return c.who.Invalid(kind, "peer %d for rank %d of %d (a rank sends to itself only within a group)", peer, c.who.Rank, c.size)
	}
	return nil
}

// Send sends buf to peer, which must call Recv with as many elements of the
// same type. It ends when the bytes have left buf. Sends and receives that must
// overlap to make progress belong in one Group.
func (c *Comm) Send(s *Stream, buf Buffer, peer int) error {
	if err := c.checkPeer(record.Send, peer); err != nil {
		return err
	}
	if buf.onDevice() {
		g, err := c.device(record.Send.String())
		if err != nil {
			return err
		}
		return g.exchange(s, record.Send, peer, buf.n, func(add func(send bool, b Buffer, peer int)) { add(true, buf, peer) })
	}
	return c.x.Put(&s.order, &executor.Operation{
		Call:  algo.Call{Coll: record.Send, DType: buf.dt, Root: int32(peer), Count: buf.n},
		Bytes: uint64(buf.size()), Send: buf.raw(),
	})
}

// Recv receives buf from peer.
func (c *Comm) Recv(s *Stream, buf Buffer, peer int) error {
	if err := c.checkPeer(record.Recv, peer); err != nil {
		return err
	}
	if buf.onDevice() {
		g, err := c.device(record.Recv.String())
		if err != nil {
			return err
		}
		return g.exchange(s, record.Recv, peer, buf.n, func(add func(send bool, b Buffer, peer int)) { add(false, buf, peer) })
	}
	return c.x.Put(&s.order, &executor.Operation{
		Call:  algo.Call{Coll: record.Recv, DType: buf.dt, Root: int32(peer), Count: buf.n},
		Bytes: uint64(buf.size()), Recv: buf.raw(),
	})
}

// Group calls fn to collect sends and receives, then puts them in the queue as
// one operation. Messages between two ranks are matched in the order of the calls;
// a rank may send to itself. fn must not keep the Group, nor call the communicator.
// When fn or one of its calls returns an error, nothing is sent.
func (c *Comm) Group(s *Stream, fn func(g *Group) error) error {
	g := c.groups.get(c.x)
	defer c.groups.put(g)
	err := fn(g)
	if err == nil {
		err = g.err
	}
	if err == nil {
		err = g.check()
	}
	if err != nil || len(g.messages.Msgs) == 0 {
		return err
	}
	if len(g.device) > 0 {
		side, err := c.device(record.Group.String())
		if err != nil {
			return err
		}
		return side.exchange(s, record.Group, noRoot, 0, g.each)
	}
	o := executor.Operation{Call: algo.Call{Coll: record.Group, Root: noRoot}, Messages: g.messages}
	g.messages = nil // the queue's
	for _, m := range o.Messages.Msgs {
		if m.Send {
			o.Bytes += uint64(m.Len)
		}
	}
	return c.x.Put(&s.order, &o)
}
