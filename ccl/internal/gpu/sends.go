package gpu

import (
	"errors"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/kernels"
	"github.com/lockstep-ccl/lockstep/record"
)

// Message is one send or receive of a group.
type Message struct {
	Peer  int
	Send  bool
	Buf   cuda.Ptr
	Bytes uint64
}

// sender runs sends and receives by kernels, which need nothing of the host (lanes.go). Both
// sides classify a message by its size; messages of a pair and class match in the order of the
// calls.
type sender struct {
	c    *Comm
	args *kernels.P2PArgs // memory of its own, for cgo
	list list
}

func (x *sender) init(c *Comm) {
	x.c = c
	x.args = &kernels.P2PArgs{}
	x.list = list{a: &kernels.P2PListArgs{}, load: &kernels.ItemsArgs{}}
}

// word is a counter in a rank's heap.
func (c *Comm) word(rank int, field uintptr, index int) cuda.Ptr {
	return c.heap.At(rank) + cuda.Ptr(field+4*uintptr(index))
}

// Exchange puts a group of messages on s, as one operation. Those of this rank to
// itself must match in number and size.
func (c *Comm) Exchange(s Stream, coll record.CollKind, msgs []Message, stream uint32) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed.Load() {
		return ErrClosed
	}
	captured, err := s.Capturing()
	if err != nil {
		return err
	}
	if err := c.follow(s, captured); err != nil {
		return err
	}
	if err := c.sends.exchange(s.Stream, captured, coll, msgs, stream); err != nil {
		return err
	}
	return c.leave(s, captured)
}

func (x *sender) exchange(s *cuda.Stream, captured bool, coll record.CollKind, msgs []Message, stream uint32) error {
	op := Op{Coll: coll, DType: record.Uint8, Root: -1, Stream: stream, Captured: captured}
	if len(msgs) == 1 {
		op.Root = msgs[0].Peer
	}
	var peers []Message
	for _, m := range msgs {
		if m.Send {
			op.Bytes += m.Bytes
		}
		if m.Peer != x.c.rank {
			peers = append(peers, m)
		}
	}
	if err := x.self(s, msgs); err != nil {
		return err
	}
	return x.kernels(s, &op, peers)
}

// self copies what this rank sends to itself.
func (x *sender) self(s *cuda.Stream, msgs []Message) error {
	in := 0
	for _, m := range msgs {
		if m.Peer != x.c.rank || !m.Send {
			continue
		}
		for in < len(msgs) && (msgs[in].Send || msgs[in].Peer != m.Peer) {
			in++
		}
		if in == len(msgs) || msgs[in].Bytes != m.Bytes {
			return errors.New("this rank's messages to itself do not match")
		}
		if m.Bytes > 0 && msgs[in].Buf != m.Buf {
			if err := s.Copy(msgs[in].Buf, m.Buf, m.Bytes); err != nil {
				return err
			}
		}
		in++
	}
	return nil
}

// kernels sends and receives messages by a kernel; its parameter is shorter where there is one
// message of each pair. All messages go on at once, since a peer may need any of them before it
// comes to another.
func (x *sender) kernels(s *cuda.Stream, op *Op, msgs []Message) error {
	c := x.c
	if !single(c, msgs) {
		return x.list.run(c, s, op, msgs)
	}
	*x.args = kernels.P2PArgs{
		Heaps: uint64(c.heap.Base), Stride: c.heap.Stride, Abort: c.args.Abort, Rank: c.args.Rank, Ranks: c.args.Ranks,
	}
	r := round{a: x.args}
	for _, m := range msgs {
		r.add(c, m, c.messageAlgo(m.Bytes))
	}
	blocks := r.place(c)
	_, algo := r.kernel(c)
	x.args.Slots, x.args.SlotMask = c.args.Slots, c.args.SlotMask
	x.args.Desc, x.args.Flags = c.stamps.describe(op, plan{algo, int(blocks)}), kernels.First|kernels.Last
	c.lastAlgo.Store(uint32(algo)<<16 | blocks)
	return r.launch(c, s, blocks)
}
