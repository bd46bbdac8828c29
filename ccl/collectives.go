package ccl

import (
	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/executor"
	"github.com/lockstep-ccl/lockstep/record"
)

// Every call returns once the operation is in the communicator's queue; the
// result is there when the stream's Wait returns. Calls that can not be right on
// this rank alone (types or counts that do not fit, a rank that does not exist,
// buffers that overlap in part) return an ErrInvalid at once and do nothing.
// Buffers may be the same memory where NCCL allows it ("in place").

// checkPair tells what is wrong with a pair of buffers whose counts must be in
// the ratio that the collective's shares have.
func (c *Comm) checkPair(kind record.CollKind, t *record.Traits, send, recv *Buffer) error {
	if send.dt != recv.dt {
		return c.who.Invalid(kind, "send buffer has %v, receive buffer %v", send.dt, recv.dt)
	}
	sendShares, recvShares := t.Send.Of(c.size), t.Recv.Of(c.size)
	if send.n*recvShares != recv.n*sendShares {
		return c.who.Invalid(kind, "send buffer has %d elements, receive buffer %d; want a ratio of %d to %d", send.n, recv.n, sendShares, recvShares)
	}
	if t.Send == record.ShareAll && t.Recv == record.ShareAll && send.n%c.size != 0 {
		return c.who.Invalid(kind, "%d elements are not %d equal parts", send.n, c.size)
	}
	return nil
}

// overlap reports whether a and b share memory other than as allowed: with b's
// first byte at a+shift.
func overlap(a, b *Buffer, shift int) (inPlace, bad bool) {
	pa, pb := a.address(), b.address()
	if a.n == 0 || b.n == 0 {
		return pa == pb && pa != 0 && shift == 0, false
	}
	if pb == pa+uintptr(shift) {
		return true, false
	}
	return false, pa < pb+uintptr(b.size()) && pb < pa+uintptr(a.size())
}

// noRoot is the root of a collective that has none.
const noRoot = -1

// collective checks a call against its kind's traits and submits it. The root's
// buffer of a rooted collective counts on the root alone; other ranks' is none.
func (c *Comm) collective(s *Stream, kind record.CollKind, send, recv Buffer, op Op, root int) error {
	t := kind.Traits()
	if t.Root != record.RootNone && (root < 0 || root >= c.size) {
		return c.who.Invalid(kind, "root %d, communicator has ranks 0 to %d", root, c.size-1)
	}
	switch {
	case t.Root == record.RootFrom && c.who.Rank != root:
		send = Buffer{dt: recv.dt}
	case t.Root == record.RootTo && c.who.Rank != root:
		recv = Buffer{dt: send.dt}
	default:
		if err := c.checkPair(kind, t, &send, &recv); err != nil {
			return err
		}
	}
	if t.Reduces && op > Avg {
		return c.who.Invalid(kind, "unknown operator %v", op)
	}
	// Every rank has one of the two; a share of it is the call's count.
	count, share := send.n, t.Send
	if t.Root == record.RootFrom {
		count, share = recv.n, t.Recv
	}
	if share == record.ShareAll { // else nothing is divided: a division is slow
		count /= c.size
	}
	return c.submit(s, kind, t, &send, &recv, op, root, count)
}

// submit puts a checked collective in the queue, or on the GPU's stream.
func (c *Comm) submit(s *Stream, kind record.CollKind, t *record.Traits, send, recv *Buffer, op Op, root, count int) error {
	dt := recv.dt
	if recv.none() {
		dt = send.dt
	}
	bytes := count * dt.Size()
	inPlace, bad := overlap(send, recv, t.InPlace(c.who.Rank)*bytes)
	if bad {
		return c.who.Invalid(kind, "send and receive buffers overlap in part")
	}
	shares := t.Shares(c.size)
	if send.onDevice() || recv.onDevice() {
		g, err := c.device(kind.String())
		if err != nil {
			return err
		}
		return g.submit(s, kind, *send, *recv, op, root, count, shares, dt)
	}
	if err := c.checkHost(kind, dt); err != nil {
		return err
	}
	return c.x.Put(&s.order, &executor.Operation{
		Call:  algo.Call{Coll: kind, DType: dt, Op: op, InPlace: inPlace, Root: int32(root), Count: count},
		Bytes: uint64(bytes * shares), Send: send.raw(), Recv: recv.raw(),
	})
}

// AllReduce leaves in recv, on every rank, the reduction of all ranks' send.
func (c *Comm) AllReduce(s *Stream, send, recv Buffer, op Op) error {
	return c.collective(s, record.AllReduce, send, recv, op, noRoot)
}

// Reduce leaves in root's recv the reduction of all ranks' send. Other ranks'
// recv may be the zero Buffer.
func (c *Comm) Reduce(s *Stream, send, recv Buffer, op Op, root int) error {
	return c.collective(s, record.Reduce, send, recv, op, root)
}

// Broadcast leaves in every rank's recv what root has in send. Other ranks'
// send may be the zero Buffer.
func (c *Comm) Broadcast(s *Stream, send, recv Buffer, root int) error {
	return c.collective(s, record.Broadcast, send, recv, Sum, root)
}

// AllGather leaves in every rank's recv all ranks' send, by rank; recv has Size
// times as many elements. In place when send is this rank's part of recv.
func (c *Comm) AllGather(s *Stream, send, recv Buffer) error {
	return c.collective(s, record.AllGather, send, recv, Sum, noRoot)
}

// ReduceScatter leaves in recv this rank's part of the reduction of all ranks'
// send, which has Size times as many elements. In place when recv is this rank's
// part of send.
func (c *Comm) ReduceScatter(s *Stream, send, recv Buffer, op Op) error {
	return c.collective(s, record.ReduceScatter, send, recv, op, noRoot)
}

// AlltoAll sends the i-th of Size equal parts of send to rank i, which leaves it
// in the part of recv that is this rank's.
// On device memory it is in place on all ranks or on none.
func (c *Comm) AlltoAll(s *Stream, send, recv Buffer) error {
	return c.collective(s, record.AlltoAll, send, recv, Sum, noRoot)
}

// Gather leaves in root's recv all ranks' send, by rank. Other ranks' recv may
// be the zero Buffer.
func (c *Comm) Gather(s *Stream, send, recv Buffer, root int) error {
	return c.collective(s, record.Gather, send, recv, Sum, root)
}

// Scatter leaves in every rank's recv its part of root's send. Other ranks' send
// may be the zero Buffer.
func (c *Comm) Scatter(s *Stream, send, recv Buffer, root int) error {
	return c.collective(s, record.Scatter, send, recv, Sum, root)
}

// Barrier ends when every rank has called it. On a stream that has run or wraps
// work of a GPU, it is the GPUs' barrier.
func (c *Comm) Barrier(s *Stream) error {
	if s.device {
		g, err := c.device(record.Barrier.String())
		if err != nil {
			return err
		}
		return g.submit(s, record.Barrier, Buffer{}, Buffer{}, Sum, noRoot, 0, 1, Uint8)
	}
	return c.x.Put(&s.order, &executor.Operation{Call: algo.Call{Coll: record.Barrier, DType: Uint8, Root: noRoot}})
}

// AlltoAllv is AlltoAll with parts of any size: sendCounts[i] elements at
// sendOffsets[i] of send go to rank i, which takes them as its recvCounts of this
// rank. The slices have Size entries each and stay in use until the operation
// has ended. Send and receive buffers may not overlap.
func (c *Comm) AlltoAllv(s *Stream, send Buffer, sendCounts, sendOffsets []int, recv Buffer, recvCounts, recvOffsets []int) error {
	if send.dt != recv.dt {
		return c.who.Invalid(record.AlltoAllv, "send buffer has %v, receive buffer %v", send.dt, recv.dt)
	}
	total := 0
	check := func(what string, b Buffer, counts, offsets []int) error {
		if len(counts) != c.size || len(offsets) != c.size {
			return c.who.Invalid(record.AlltoAllv, "%d %s counts and %d offsets for %d ranks", len(counts), what, len(offsets), c.size)
		}
		for i, n := range counts {
			if n < 0 || offsets[i] < 0 || offsets[i] > b.n-n {
				return c.who.Invalid(record.AlltoAllv, "%s part %d is elements %d to %d of %d", what, i, offsets[i], offsets[i]+n, b.n)
			}
			total += n
		}
		return nil
	}
	if err := check("receive", recv, recvCounts, recvOffsets); err != nil {
		return err
	}
	total = 0
	if err := check("send", send, sendCounts, sendOffsets); err != nil {
		return err
	}
	if sendCounts[c.who.Rank] != recvCounts[c.who.Rank] {
		return c.who.Invalid(record.AlltoAllv, "this rank sends itself %d elements and expects %d", sendCounts[c.who.Rank], recvCounts[c.who.Rank])
	}
	if same, bad := overlap(&send, &recv, 0); same && total > 0 || bad {
		return c.who.Invalid(record.AlltoAllv, "send and receive buffers overlap")
	}
	return c.exchange(s, record.AlltoAllv, send, recv, total, algo.Vector{SendCounts: sendCounts, SendOffsets: sendOffsets, RecvCounts: recvCounts, RecvOffsets: recvOffsets})
}

// exchange submits a checked collective of total elements that v says how to send and
// receive: a part of any size for each pair of ranks.
func (c *Comm) exchange(s *Stream, kind record.CollKind, send, recv Buffer, total int, v algo.Vector) error {
	if send.onDevice() || recv.onDevice() {
		g, err := c.device(kind.String())
		if err != nil {
			return err
		}
		return g.exchange(s, kind, noRoot, 0, func(add func(send bool, b Buffer, peer int)) {
			for p := range c.size {
				add(true, send.Slice(v.SendOffsets[p], v.SendOffsets[p]+v.SendCounts[p]), p)
				add(false, recv.Slice(v.RecvOffsets[p], v.RecvOffsets[p]+v.RecvCounts[p]), p)
			}
		})
	}
	whole := c.x.Vector()
	*whole = v
	return c.x.Put(&s.order, &executor.Operation{
		Call:  algo.Call{Coll: kind, DType: send.dt, Root: noRoot},
		Bytes: uint64(total * send.dt.Size()), Send: send.raw(), Recv: recv.raw(), Vector: whole,
	})
}

// checkHost refuses what the CPU cannot compute with.
func (c *Comm) checkHost(kind record.CollKind, dt DType) error {
	if kind.Reduces() && (dt == Float8E4M3 || dt == Float8E5M2) {
		return c.who.Invalid(kind, "%v in host memory: 8-bit floats are reduced on GPUs only", dt)
	}
	return nil
}
