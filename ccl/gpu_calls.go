package ccl

import (
	"errors"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/executor"
	"github.com/lockstep-ccl/lockstep/ccl/internal/gpu"
	"github.com/lockstep-ccl/lockstep/ccl/internal/proxy"
	"github.com/lockstep-ccl/lockstep/record"
)

// submit launches a collective on device memory.
func (g *gpuPart) submit(s *Stream, kind record.CollKind, send, recv Buffer, op Op, root, count, shares int, dt DType) error {
	if send.p != nil && send.n > 0 || recv.p != nil && recv.n > 0 {
		return g.x.Invalid(kind, "one buffer is in host memory, the other in device memory")
	}
	if t := kind.Traits(); t.Root != record.RootNone && t.Parted() {
		return g.rooted(s, kind, send, recv, root)
	}
	cs, err := g.enter(kind, s)
	if err != nil {
		return err
	}
	if count == 0 && kind.HasData() {
		return nil
	}
	bytes, inPlace := uint64(count*dt.Size()*shares), send.dev == recv.dev
	if p := g.proxy; p != nil {
		o := proxy.Call{
			Coll: kind, DType: dt, Op: op, InPlace: inPlace, Root: int32(root), Count: count, Bytes: bytes, Stream: s.order.ID(),
		}
		return g.crossed(kind, p.Run(s.owned(cs), &o, cuda.Ptr(send.dev), cuda.Ptr(recv.dev), g.putter(s, &o)))
	}
	o := gpu.Op{
		Coll: kind, DType: dt, RedOp: op, Root: root, Count: uint64(count),
		Send: cuda.Ptr(send.dev), Recv: cuda.Ptr(recv.dev),
		Bytes: bytes, Stream: s.order.ID(), InPlace: inPlace,
	}
	return g.launched(kind, g.comm.Run(s.owned(cs), &o))
}

// putter puts the network's part of a call in the queue.
func (g *gpuPart) putter(s *Stream, o *proxy.Call) func(*proxy.Op) error {
	return func(x *proxy.Op) error {
		return g.x.Put(&s.order, &executor.Operation{
			Call:  algo.Call{Coll: o.Coll, DType: o.DType, Op: o.Op, InPlace: o.InPlace, Root: o.Root, Count: o.Count},
			Bytes: o.Bytes, Proxy: x,
		})
	}
}

// crossed makes the caller's error of one that the proxy returned.
func (g *gpuPart) crossed(kind record.CollKind, err error) error {
	var caller *proxy.CallerError
	var many *proxy.TooManyError
	switch {
	case errors.As(err, &caller):
		return caller.Err
	case errors.As(err, &many), errors.Is(err, proxy.ErrCaptured):
		return g.x.Invalid(kind, "%v", err)
	}
	return g.launched(kind, err)
}

// exchange launches sends and receives of device memory that collect lists. root
// and count are what ranks must agree on.
func (g *gpuPart) exchange(s *Stream, kind record.CollKind, root, count int, collect func(add func(send bool, b Buffer, peer int))) error {
	cs, err := g.enter(kind, s)
	if err != nil {
		return err
	}
	var msgs []gpu.Message
	o := proxy.Call{Coll: kind, DType: record.Uint8, Root: int32(root), Count: count, Stream: s.order.ID()}
	collect(func(send bool, b Buffer, peer int) {
		msgs = append(msgs, gpu.Message{Peer: peer, Send: send, Buf: cuda.Ptr(b.dev), Bytes: uint64(b.size())})
		if send {
			o.Bytes += uint64(b.size())
		}
	})
	if p := g.proxy; p != nil {
		return g.crossed(kind, p.Exchange(s.owned(cs), &o, msgs, g.putter(s, &o)))
	}
	return g.launched(kind, g.comm.Exchange(s.owned(cs), kind, msgs, s.order.ID()))
}

// rooted is a collective whose root exchanges a part with everyone: Gather and Scatter.
func (g *gpuPart) rooted(s *Stream, kind record.CollKind, send, recv Buffer, root int) error {
	gather := kind.Traits().Root == record.RootTo
	count := send.size() // of one rank's share
	if !gather {
		count = recv.size()
	}
	return g.exchange(s, kind, root, count, func(add func(send bool, b Buffer, peer int)) {
		if g.x.Rank == root {
			whole, part := recv, send
			if !gather {
				whole, part = send, recv
			}
			n := whole.n / g.x.Size
			for p := range g.x.Size {
				if p != root {
					add(!gather, whole.Slice(p*n, (p+1)*n), p)
				}
			}
			own := whole.Slice(root*n, (root+1)*n)
			if own.dev != part.dev {
				if gather {
					add(true, part, root)
					add(false, own, root)
				} else {
					add(true, own, root)
					add(false, part, root)
				}
			}
			return
		}
		if gather {
			add(true, send, root)
		} else {
			add(false, recv, root)
		}
	})
}
