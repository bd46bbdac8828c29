package gpu

import (
	"errors"
	"sync/atomic"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/kernels"
	"github.com/lockstep-ccl/lockstep/record"
)

// copyEngine runs large collectives on the GPU's copy engines. Pieces of an
// operation take turns on two channels, so that what one spends on words and on
// getting an engine to begin (some 20 µs on an H200) the other spends copying.
type copyEngine struct {
	c        *Comm
	channels [2]channel
	fold     *cuda.Stream
	// begun: the caller's stream has reached the operation; foldedAll: fold has done
	// its part; folded: a channel's last piece.
	begun, foldedAll *cuda.Event
	folded           [2]*cuda.Event
	ops              []cuda.MemOp
}

// channel is a stream of transfers. On each, every ordered pair of ranks is a
// queue of transfers, numbered from 1 by both hosts alike, because both make the
// same calls in the same order. Before transfer k from a to b, b's stream writes k
// (or more) to a's counter ready[b], where a's stream waits for it; after it, a's
// stream writes k to b's counter copied[a]. A write comes after everything before it
// in its stream is visible to all.
//
// Transfers to several peers go one after the other, beginning with the next rank:
// so every rank sends to one and receives from one at a time, as fast as a link
// can. (Three at once to three ranks got half of that on H200s.)
type channel struct {
	e      *copyEngine
	index  uintptr
	out    *cuda.Stream
	sent   [MaxRanks]atomic.Uint32 // transfers to each peer so far
	got    [MaxRanks]atomic.Uint32 // and from each
	done   *cuda.Event
	passed *cuda.Event // the last round has been sent
}

// transfer is n bytes for a peer.
type transfer struct {
	peer     int
	dst, src cuda.Ptr
	n        uint64
}

// init makes the engine ready for its first operation: streams are scarce.
func (e *copyEngine) init(c *Comm) error {
	if e.c != nil {
		return nil
	}
	errs := []error{c.newStream(&e.fold)}
	for i := range e.channels {
		h := &e.channels[i]
		h.e, h.index = e, uintptr(i)
		errs = append(errs, c.newStream(&h.out))
	}
	for _, v := range e.events() {
		errs = append(errs, c.newEvent(v))
	}
	e.ops = make([]cuda.MemOp, 0, 2*MaxRanks)
	e.c = c
	return errors.Join(errs...)
}

func (e *copyEngine) events() []**cuda.Event {
	list := []**cuda.Event{&e.begun, &e.foldedAll, &e.folded[0], &e.folded[1]}
	for i := range e.channels {
		list = append(list, &e.channels[i].done, &e.channels[i].passed)
	}
	return list
}

func (e *copyEngine) close() error {
	var errs []error
	for _, s := range []*cuda.Stream{e.channels[0].out, e.channels[1].out, e.fold} {
		if s != nil {
			errs = append(errs, s.Synchronize(), s.Close())
		}
	}
	for _, v := range e.events() {
		if *v != nil {
			errs = append(errs, (*v).Close())
		}
	}
	return errors.Join(errs...)
}

// release lists the writes that end the wait of every stream.
func (e *copyEngine) release(c *Comm, ops []cuda.MemOp) []cuda.MemOp {
	for i := range e.channels {
		h := &e.channels[i]
		for r := range c.size {
			if r != c.rank {
				ops = append(ops,
					passed(h.word(c, c.rank, kernels.HeapReady, r), h.sent[r].Load()),
					passed(h.word(c, c.rank, kernels.HeapCopied, r), h.got[r].Load()))
			}
		}
	}
	return ops
}

// word is where in a rank's heap the channel's field for another rank is.
func (h *channel) word(c *Comm, rank int, field uintptr, other int) cuda.Ptr {
	return c.word(rank, field+4*MaxRanks*h.index, other)
}

// each calls f for every peer, beginning with the next rank, so that no two ranks
// begin with the same one.
func (c *Comm) each(f func(peer int) error) error {
	for i := 1; i < c.size; i++ {
		if err := f((c.rank + i) % c.size); err != nil {
			return err
		}
	}
	return nil
}

// peers is each as a list.
func (c *Comm) peers() []int {
	list := make([]int, 0, MaxRanks)
	_ = c.each(func(p int) error { list = append(list, p); return nil })
	return list
}

// begin makes the engine's work come after what is in s.
func (e *copyEngine) begin(s *cuda.Stream) error {
	return errors.Join(s.Record(e.begun), e.channels[0].out.WaitEvent(e.begun), e.channels[1].out.WaitEvent(e.begun), e.fold.WaitEvent(e.begun))
}

// end makes s wait for the engine's work.
func (e *copyEngine) end(s *cuda.Stream) error {
	errs := []error{e.fold.Record(e.foldedAll), s.WaitEvent(e.foldedAll)}
	for i := range e.channels {
		h := &e.channels[i]
		errs = append(errs, h.out.Record(h.done), s.WaitEvent(h.done))
	}
	return errors.Join(errs...)
}

// grant tells peers, in s, that their next n transfers may come.
func (h *channel) grant(s *cuda.Stream, n uint32, peers []int) error {
	c := h.e.c
	for _, p := range peers {
		if err := c.tell(s, h.word(c, p, kernels.HeapReady, c.rank), h.got[p].Load()+n); err != nil {
			return err
		}
	}
	return nil
}

// send is the next round of transfers, at most one to a peer. A transfer of nothing
// still counts.
func (h *channel) send(round []transfer) error {
	if len(round) == 0 {
		return nil
	}
	c, ops := h.e.c, h.e.ops[:0]
	for _, t := range round {
		ops = append(ops, reached(h.word(c, c.rank, kernels.HeapReady, t.peer), h.sent[t.peer].Add(1)))
	}
	if err := h.out.Batch(ops); err != nil {
		return err
	}
	for _, t := range round {
		if t.n > 0 {
			if err := h.out.Copy(t.dst, t.src, t.n); err != nil {
				return err
			}
		}
	}
	for _, t := range round {
		if err := c.tell(h.out, h.word(c, t.peer, kernels.HeapCopied, c.rank), h.sent[t.peer].Load()); err != nil {
			return err
		}
	}
	return nil
}

// arrived makes s wait until the next n transfers of peers have come, and counts
// them when done.
func (h *channel) arrived(s *cuda.Stream, n uint32, peers []int, count bool) error {
	c, ops := h.e.c, h.e.ops[:0]
	for _, p := range peers {
		ops = append(ops, reached(h.word(c, c.rank, kernels.HeapCopied, p), h.got[p].Load()+n))
		if count {
			h.got[p].Add(n)
		}
	}
	return s.Batch(ops)
}

// run puts a collective on s and on the engine's streams.
func (e *copyEngine) run(s *cuda.Stream, c *Comm, op *Op, b buffers) error {
	row := collectives[op.Coll]
	if row.copies == nil {
		return c.missing(op.Coll, record.AlgoCopyEngine)
	}
	if err := e.init(c); err != nil {
		return err
	}
	if op.Coll.Reduces() { // before anything waits for peers: see reducers
		if _, err := c.dev.reducers(op.DType); err != nil {
			return err
		}
	}
	mark, err := c.stamps.begin(s, op)
	if err != nil {
		return err
	}
	if err := e.begin(s); err != nil {
		return err
	}
	if err := row.copies(e, s, op, b); err != nil {
		return err
	}
	return c.stamps.end(s, mark)
}

func (e *copyEngine) allGather(s *cuda.Stream, op *Op, b buffers) error {
	bytes := op.bytes()
	own := cuda.Ptr(uint64(e.c.rank) * bytes)
	return e.exchange(s, func(p int) (dst, src cuda.Ptr) { return cuda.Ptr(b.recv[p]) + own, op.Send }, bytes)
}

func (e *copyEngine) allToAll(s *cuda.Stream, op *Op, b buffers) error {
	bytes := op.bytes()
	own := cuda.Ptr(uint64(e.c.rank) * bytes)
	return e.exchange(s, func(p int) (dst, src cuda.Ptr) {
		return cuda.Ptr(b.recv[p]) + own, op.Send + cuda.Ptr(uint64(p)*bytes)
	}, bytes)
}

func (e *copyEngine) reduceScatter(s *cuda.Stream, op *Op, b buffers) error {
	return e.reduce(s, op, b, false)
}

func (e *copyEngine) allReduce(s *cuda.Stream, op *Op, b buffers) error {
	return e.reduce(s, op, b, true)
}

// exchange sends every rank n bytes: dst in p's memory, src in this rank's.
func (e *copyEngine) exchange(s *cuda.Stream, part func(p int) (dst, src cuda.Ptr), n uint64) error {
	c, h, peers := e.c, &e.channels[0], e.c.peers()
	if err := h.grant(s, 1, peers); err != nil {
		return err
	}
	var round []transfer
	for _, p := range peers {
		dst, src := part(p)
		round = append(round, transfer{p, dst, src, n})
	}
	if err := h.send(round); err != nil {
		return err
	}
	if dst, src := part(c.rank); dst != src {
		if err := s.Copy(dst, src, n); err != nil {
			return err
		}
	}
	return errors.Join(e.end(s), h.arrived(s, 1, peers, true))
}

// A broadcast travels in so many pieces, so that a rank passes one on while the
// next comes; a piece is never too short to be worth its words.
const (
	broadcastPieces = 64
	broadcastLeast  = 4 << 20
)

// broadcast sends the buffer down a chain, from root to the next rank and so on:
// each rank receives from one and sends to one. (Scattering and passing on, where
// ranks receive from several at once, was three times slower on H200s.)
func (e *copyEngine) broadcast(s *cuda.Stream, op *Op, b buffers) error {
	c, bytes := e.c, op.bytes()
	pieces := min(max(bytes/broadcastLeast, 1), broadcastPieces)
	if c.size == 2 {
		pieces = 1 // nobody passes anything on
	}
	step := ((bytes+pieces-1)/pieces + 511) &^ 511
	next, prev := (c.rank+1)%c.size, []int{(c.rank + c.size - 1) % c.size}
	first, last := c.rank == op.Root, next == op.Root
	src := op.Recv
	if first {
		src, prev = op.Send, nil
	}
	for i := range e.channels {
		if err := e.channels[i].grant(s, channelPieces(pieces, i), prev); err != nil {
			return err
		}
	}
	for i := range pieces {
		if last {
			break
		}
		h := &e.channels[i&1]
		if err := h.arrived(h.out, uint32(i>>1)+1, prev, false); err != nil {
			return err
		}
		off := min(i*step, bytes)
		if err := h.send([]transfer{{next, cuda.Ptr(b.recv[next] + off), src + cuda.Ptr(off), min(step, bytes-off)}}); err != nil {
			return err
		}
	}
	if first && op.Recv != op.Send && op.Recv != 0 {
		if err := s.Copy(op.Recv, op.Send, bytes); err != nil {
			return err
		}
	}
	// Root receives nothing. It knows that the others have begun the operation because the next
	// rank took its transfers.
	errs := []error{e.end(s)}
	for i := range e.channels {
		errs = append(errs, e.channels[i].arrived(s, channelPieces(pieces, i), prev, true))
	}
	return errors.Join(errs...)
}

// channelPieces is how many of so many pieces channel i has.
func channelPieces(pieces uint64, i int) uint32 { return uint32((pieces + 1 - uint64(i)) / 2) }

// cut divides a share of n elements into pieces that a staging slot holds, but at
// least a handful, so that sending, folding and passing on overlap.
func cut(n, size, slot uint64) (pieces, step uint64) {
	pieces = max((n*size+slot-1)/slot, min(4, max(n*size/(2<<20), 1)))
	step = max((n*size/pieces+511)&^511/size, 1)
	return max((n+step-1)/step, 1), step
}

// slot is the staging memory for what a rank sends to at on a channel.
func (e *copyEngine) slot(at, from int, channel uint64) cuda.Ptr {
	n := uint64(e.c.size)
	return e.c.stage.At(at) + cuda.Ptr((channel*n+uint64(from))*e.slotSize())
}

func (e *copyEngine) slotSize() uint64 { return e.c.stage.Size / uint64(2*e.c.size) &^ 511 }
