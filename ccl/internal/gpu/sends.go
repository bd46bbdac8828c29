package gpu

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

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

// errAhead is returned where a rank calls more receives than its peer may lag.
var errAhead = fmt.Errorf("more than %d receives from one rank are called ahead of their sends", descriptors)

// sender runs sends and receives. Small messages take kernels, which need nothing of the host
// (lanes.go). Large ones take the copy engines, straight into the receiver's buffer where that
// is in a window, else through its staging memory. Both sides classify a message by its size;
// messages of a pair and class match in the order of the calls.
//
// A receiver's call puts into the mailbox where the bytes shall go. If it is there, the caller
// of the send puts the copy on a stream. If not, a goroutine does so later, and the caller's
// stream waits for a word that the copy's stream writes.
type sender struct {
	c    *Comm
	to   [MaxRanks]*cuda.Stream // copies to a peer
	from [MaxRanks]*cuda.Stream // copies out of staging
	done [MaxRanks]*cuda.Event
	ops  []cuda.MemOp
	args *kernels.P2PArgs // memory of its own, for cgo
	list list

	called   [MaxRanks]uint64        // sends to each peer called
	expected [MaxRanks]uint64        // receives from each peer called
	granted  [MaxRanks]atomic.Uint32 // transfers of those receives
	staged   [MaxRanks]bool          // some receive from the peer went through staging

	mu      sync.Mutex // guards what follows; taken inside Comm.mu
	queue   []pending
	sent    [MaxRanks]atomic.Uint32 // transfers to each peer
	running bool
	stop    chan struct{}
	wg      sync.WaitGroup
	failure error
	left    atomic.Uint64 // bit per peer: sends are in the queue
}

// pending is a send whose receiver has not called.
type pending struct {
	peer   int
	number uint64
	buf    cuda.Ptr
	bytes  uint64
	begun  *cuda.Event
}

func (x *sender) init(c *Comm) {
	x.c = c
	x.stop = make(chan struct{})
	x.ops = make([]cuda.MemOp, 0, 2*MaxRanks)
	x.args = &kernels.P2PArgs{}
	x.list = list{a: &kernels.P2PListArgs{}, load: &kernels.ItemsArgs{}}
}

func (x *sender) close() error {
	if x.stop != nil {
		close(x.stop)
		x.wg.Wait()
		x.stop = nil
	}
	var errs []error
	for r := range MaxRanks {
		for _, s := range []*cuda.Stream{x.to[r], x.from[r]} {
			if s != nil {
				errs = append(errs, s.Synchronize(), s.Close())
			}
		}
		if x.done[r] != nil {
			errs = append(errs, x.done[r].Close())
		}
		x.to[r], x.from[r], x.done[r] = nil, nil, nil
	}
	for _, p := range x.queue {
		errs = append(errs, p.begun.Close())
	}
	x.queue = nil
	return errors.Join(errs...)
}

// word is a counter in a rank's heap.
func (c *Comm) word(rank int, field uintptr, index int) cuda.Ptr {
	return c.heap.At(rank) + cuda.Ptr(field+4*uintptr(index))
}

// release lists the writes that end the wait of every stream.
func (x *sender) release(ops []cuda.MemOp) []cuda.MemOp {
	c := x.c
	for r := range c.size {
		if r != c.rank {
			ops = append(ops,
				passed(c.word(c.rank, kernels.HeapSendReady, r), x.sent[r].Load()),
				passed(c.word(c.rank, kernels.HeapSendArrived, r), x.granted[r].Load()),
				cuda.WriteOp(c.word(c.rank, kernels.HeapSendDone, r), 1<<30)) // numbers go up to less
		}
	}
	return ops
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
	c := x.c
	x.mu.Lock()
	err := x.failure
	x.mu.Unlock()
	if err != nil {
		return err
	}
	var bytes uint64
	var large, kernel []Message
	for _, m := range msgs {
		if m.Send {
			bytes += m.Bytes
		}
		if m.Peer == c.rank {
			continue
		}
		if c.messageAlgo(m.Bytes, captured || !c.copies) == record.AlgoCopyEngine {
			large = append(large, m)
		} else {
			kernel = append(kernel, m)
		}
	}
	op := Op{Coll: coll, DType: record.Uint8, Root: -1, Bytes: bytes, Stream: stream, Captured: captured}
	if len(msgs) == 1 {
		op.Root = msgs[0].Peer
	}
	if err := x.self(s, msgs); err != nil {
		return err
	}
	if len(large) == 0 {
		return x.kernels(s, &op, kernel, captured)
	}
	c.lastAlgo.Store(uint32(record.AlgoCopyEngine) << 16)
	mark, err := c.stamps.begin(s, &op)
	if err != nil {
		return err
	}
	if err := x.copies(s, large); err != nil {
		return err
	}
	if err := x.kernels(s, nil, kernel, captured); err != nil {
		return err
	}
	if err := x.wait(s, large); err != nil {
		return err
	}
	return c.stamps.end(s, mark)
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
// comes to another. op is nil when the operation is recorded otherwise.
func (x *sender) kernels(s *cuda.Stream, op *Op, msgs []Message, captured bool) error {
	c := x.c
	if len(msgs) == 0 && op == nil {
		return nil
	}
	fixed := captured || !c.copies
	if !single(c, msgs, fixed) {
		return x.list.run(c, s, op, msgs, fixed)
	}
	*x.args = kernels.P2PArgs{
		Heaps: uint64(c.heap.Base), Stride: c.heap.Stride, Abort: c.args.Abort, Rank: c.args.Rank, Ranks: c.args.Ranks,
	}
	r := round{a: x.args}
	for _, m := range msgs {
		r.add(c, m, c.messageAlgo(m.Bytes, fixed))
	}
	blocks := r.place(c)
	if op != nil {
		_, algo := r.kernel(c)
		x.args.Slots, x.args.SlotMask = c.args.Slots, c.args.SlotMask
		x.args.Desc, x.args.Flags = c.stamps.describe(op, plan{algo, int(blocks)}), kernels.First|kernels.Last
		c.lastAlgo.Store(uint32(algo)<<16 | blocks)
	}
	return r.launch(c, s, blocks)
}

// copies begins the large messages.
func (x *sender) copies(s *cuda.Stream, msgs []Message) error {
	c := x.c
	begun, err := c.dev.NewEvent(false)
	if err != nil {
		return err
	}
	keep := false
	defer func() {
		if !keep {
			_ = begun.Close()
		}
	}()
	if err := s.Record(begun); err != nil {
		return err
	}
	for _, m := range msgs {
		if m.Send {
			continue
		}
		if err := errors.Join(c.newStream(&x.from[m.Peer]), c.newEvent(&x.done[m.Peer])); err != nil {
			return err
		}
		if err := x.receive(s, begun, m); err != nil {
			return err
		}
	}
	for _, m := range msgs {
		if !m.Send {
			continue
		}
		if err := c.newStream(&x.to[m.Peer]); err != nil {
			return err
		}
		x.called[m.Peer]++
		p := pending{peer: m.Peer, number: x.called[m.Peer], buf: m.Buf, bytes: m.Bytes, begun: begun}
		x.mu.Lock()
		if x.left.Load()&(1<<p.peer) == 0 {
			if l, ok := c.mail.read(c.rank, p.peer, p.number); ok {
				err := x.send(p, l)
				x.mu.Unlock()
				if err != nil {
					return err
				}
				continue
			}
		}
		// Each pending send has an event of its own: they end at different times.
		if p.begun, err = c.dev.NewEvent(false); err == nil {
			err = s.Record(p.begun)
		}
		if err != nil {
			x.mu.Unlock()
			return err
		}
		x.queue = append(x.queue, p)
		x.left.Or(1 << p.peer)
		if !x.running {
			x.running = true
			x.wg.Add(1)
			go x.run(x.stop)
		}
		x.mu.Unlock()
	}
	return nil
}

// room is how much of a message staging takes at once: two such pieces of each peer.
func (x *sender) room() uint64 { return x.c.directStage() / uint64(2*x.c.size) &^ 511 }

// receive tells the sender where its bytes shall go, and puts on streams what the receiving
// side does. The bytes of a receive outside of windows come through staging memory.
func (x *sender) receive(s *cuda.Stream, begun *cuda.Event, m Message) error {
	c := x.c
	number := x.expected[m.Peer] + 1
	if number > descriptors && !c.mail.taken(m.Peer, c.rank, number-descriptors) {
		return errAhead
	}
	x.expected[m.Peer] = number
	ready := c.word(m.Peer, kernels.HeapSendReady, c.rank)
	if w, off := c.find(m.Buf, m.Bytes); w != nil {
		k := x.granted[m.Peer].Add(1)
		on := s
		if x.staged[m.Peer] {
			// What comes before is granted piece by piece on that stream.
			on = x.from[m.Peer]
			if err := on.WaitEvent(begun); err != nil {
				return err
			}
		}
		if err := c.tell(on, ready, k); err != nil {
			return err
		}
		c.mail.post(m.Peer, c.rank, number, w.id+1, off, m.Bytes)
		return nil
	}
	x.staged[m.Peer] = true
	from, room := x.from[m.Peer], x.room()
	pieces := uint32((m.Bytes + room - 1) / room)
	first := x.granted[m.Peer].Load()
	x.granted[m.Peer].Add(pieces)
	if err := from.WaitEvent(begun); err != nil {
		return err
	}
	if err := c.tell(from, ready, first+min(pieces, 2)); err != nil {
		return err
	}
	c.mail.post(m.Peer, c.rank, number, 0, 0, m.Bytes)
	for i := range pieces {
		if err := from.Batch(append(x.ops[:0], reached(c.word(c.rank, kernels.HeapSendArrived, m.Peer), first+i+1))); err != nil {
			return err
		}
		off := uint64(i) * room
		if err := from.Copy(m.Buf+cuda.Ptr(off), x.slot(c.rank, m.Peer, i), min(room, m.Bytes-off)); err != nil {
			return err
		}
		if i+2 < pieces {
			if err := c.tell(from, ready, first+i+3); err != nil {
				return err
			}
		}
	}
	return from.Record(x.done[m.Peer])
}

// slot is where in at's staging memory piece i from a rank goes.
func (x *sender) slot(at, from int, i uint32) cuda.Ptr {
	c := x.c
	return c.stage.At(at) + cuda.Ptr((uint64(i&1)*uint64(c.size)+uint64(from))*x.room())
}

// send puts a send on its stream; l is its receiver's descriptor. The caller has the lock.
func (x *sender) send(p pending, l descriptor) error {
	c := x.c
	if l.bytes != p.bytes {
		return &SizeError{Peer: p.peer, Sends: p.bytes, Receives: l.bytes}
	}
	s := x.to[p.peer]
	if err := s.WaitEvent(p.begun); err != nil {
		return err
	}
	piece := func(dst, src cuda.Ptr, n uint64) error {
		k := x.sent[p.peer].Add(1)
		if err := s.Batch([]cuda.MemOp{reached(c.word(c.rank, kernels.HeapSendReady, p.peer), k)}); err != nil {
			return err
		}
		if err := s.Copy(dst, src, n); err != nil {
			return err
		}
		return c.tell(s, c.word(p.peer, kernels.HeapSendArrived, c.rank), k)
	}
	if l.window > 0 {
		w := c.window(l.window - 1)
		if w == nil || l.where > w.size || l.bytes > w.size-l.where {
			return fmt.Errorf("rank %d asks for %d bytes at %d of window %d, which is not there", p.peer, l.bytes, l.where, l.window-1)
		}
		if err := piece(w.at(p.peer, l.where), p.buf, p.bytes); err != nil {
			return err
		}
	} else {
		room := x.room()
		for i, off := uint32(0), uint64(0); off < p.bytes; i, off = i+1, off+room {
			if err := piece(x.slot(p.peer, c.rank, i), p.buf+cuda.Ptr(off), min(room, p.bytes-off)); err != nil {
				return err
			}
		}
	}
	return s.Batch([]cuda.MemOp{cuda.WriteOp(c.word(c.rank, kernels.HeapSendDone, p.peer), uint32(p.number))})
}

// SizeError is a send and a receive that do not agree.
type SizeError struct {
	Peer            int
	Sends, Receives uint64
}

func (e *SizeError) Error() string {
	return fmt.Sprintf("this rank sends %d bytes to rank %d, which receives %d", e.Sends, e.Peer, e.Receives)
}

// wait makes s wait for the large messages.
func (x *sender) wait(s *cuda.Stream, msgs []Message) error {
	c := x.c
	for _, m := range msgs {
		var err error
		switch {
		case m.Send:
			err = s.Batch(append(x.ops[:0], cuda.WaitOp(c.word(c.rank, kernels.HeapSendDone, m.Peer), uint32(x.called[m.Peer]))))
		default:
			if w, _ := c.find(m.Buf, m.Bytes); w == nil {
				err = s.WaitEvent(x.done[m.Peer])
			} else {
				// A counter is not waited for from further away than half its range.
				if x.staged[m.Peer] {
					err = s.WaitEvent(x.done[m.Peer])
				}
				err = errors.Join(err, s.Batch(append(x.ops[:0], reached(c.word(c.rank, kernels.HeapSendArrived, m.Peer), x.granted[m.Peer].Load()))))
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}
