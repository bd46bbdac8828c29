package gpu

import (
	"errors"
	"sync/atomic"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/kernels"
	"github.com/lockstep-ccl/lockstep/record"
)

// copyEngine runs large collectives on the GPU's copy engines. Every ordered pair
// of ranks is a queue of transfers, numbered from 1 by both hosts alike, because
// both make the same calls in the same order. Before transfer k from a to b, b's
// stream writes k (or more) to a's word ready[b], where a's stream waits for it; after
// it, a's stream writes k to b's word copied[a]. A stream's write comes after
// everything before it in that stream is visible to all.
type copyEngine struct {
	c *Comm
	// out carries this rank's transfers, one after the other, beginning with the
	// next rank: at any time every rank sends to one and receives from one, as fast
	// as a link can. (Three at once to three ranks got half of that on H200s.)
	out  *cuda.Stream
	fold *cuda.Stream
	sent [MaxRanks]atomic.Uint32 // transfers to each peer so far
	got  [MaxRanks]atomic.Uint32 // and from each
	// begun: the caller's stream has reached the operation; sentAll and foldedAll:
	// the streams have done their part; folded, passed: piece by piece, by parity.
	begun, sentAll, foldedAll *cuda.Event
	folded, passed            [2]*cuda.Event
	ops                       []cuda.MemOp
}

// init makes the engine ready for its first operation: streams are scarce.
func (e *copyEngine) init(c *Comm) error {
	if e.c != nil {
		return nil
	}
	errs := []error{c.newStream(&e.out), c.newStream(&e.fold)}
	for _, v := range e.events() {
		errs = append(errs, c.newEvent(v))
	}
	e.ops = make([]cuda.MemOp, 0, 2*MaxRanks)
	e.c = c
	return errors.Join(errs...)
}

func (e *copyEngine) events() []**cuda.Event {
	return []**cuda.Event{&e.begun, &e.sentAll, &e.foldedAll, &e.folded[0], &e.folded[1], &e.passed[0], &e.passed[1]}
}

func (e *copyEngine) close() error {
	var errs []error
	for _, s := range []*cuda.Stream{e.out, e.fold} {
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

// release lists the writes that let go of every stream that waits.
func (e *copyEngine) release(c *Comm, ops []cuda.MemOp) []cuda.MemOp {
	for r := range c.size {
		if r != c.rank {
			ops = append(ops,
				cuda.WriteOp(c.word(c.rank, kernels.HeapReady, r), e.sent[r].Load()+beyond),
				cuda.WriteOp(c.word(c.rank, kernels.HeapCopied, r), e.got[r].Load()+beyond))
		}
	}
	return ops
}

// ready is the word in source's heap that says what destination is ready for.
func (e *copyEngine) ready(source, destination int) cuda.Ptr {
	return e.c.word(source, kernels.HeapReady, destination)
}

// copied is the word in destination's heap that says what source has copied.
func (e *copyEngine) copied(destination, source int) cuda.Ptr {
	return e.c.word(destination, kernels.HeapCopied, source)
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

// begin makes the transfers of an operation come after what is in s.
func (e *copyEngine) begin(s *cuda.Stream) error {
	if err := s.Record(e.begun); err != nil {
		return err
	}
	return e.out.WaitEvent(e.begun)
}

// grant tells all peers, in s, that their next n transfers may come.
func (e *copyEngine) grant(s *cuda.Stream, n uint32) error {
	ops := e.ops[:0]
	_ = e.c.each(func(p int) error {
		ops = append(ops, cuda.WriteOp(e.ready(p, e.c.rank), e.got[p].Load()+n))
		return nil
	})
	return s.Batch(ops)
}

// push is the next transfer to peer p. A transfer of nothing still counts.
func (e *copyEngine) push(p int, dst, src cuda.Ptr, n uint64) error {
	k := e.sent[p].Add(1)
	s := e.out
	if err := s.Batch(append(e.ops[:0], cuda.WaitOp(e.ready(e.c.rank, p), k))); err != nil {
		return err
	}
	if n > 0 {
		if err := s.Copy(dst, src, n); err != nil {
			return err
		}
	}
	return s.Batch(append(e.ops[:0], cuda.WriteOp(e.copied(p, e.c.rank), k)))
}

// arrived makes s wait until the next n transfers of every peer have come, and
// counts them when done.
func (e *copyEngine) arrived(s *cuda.Stream, n uint32, count bool) error {
	ops := e.ops[:0]
	_ = e.c.each(func(p int) error {
		ops = append(ops, cuda.WaitOp(e.copied(e.c.rank, p), e.got[p].Load()+n))
		if count {
			e.got[p].Add(n)
		}
		return nil
	})
	return s.Batch(ops)
}

// end makes s wait for this rank's own transfers.
func (e *copyEngine) end(s *cuda.Stream) error {
	if err := e.out.Record(e.sentAll); err != nil {
		return err
	}
	return s.WaitEvent(e.sentAll)
}

// run puts a collective on s and on the engine's streams.
func (e *copyEngine) run(s *cuda.Stream, c *Comm, op *Op, b buffers) error {
	if err := e.init(c); err != nil {
		return err
	}
	mark, err := c.stamps.begin(s, op)
	if err != nil {
		return err
	}
	bytes := op.Count * uint64(op.DType.Size())
	switch op.Coll {
	case record.AllGather:
		err = e.exchange(s, func(p int) (dst, src cuda.Ptr) {
			return cuda.Ptr(b.recv[p]) + cuda.Ptr(uint64(c.rank)*bytes), op.Send
		}, bytes)
	case record.AlltoAll:
		err = e.exchange(s, func(p int) (dst, src cuda.Ptr) {
			return cuda.Ptr(b.recv[p]) + cuda.Ptr(uint64(c.rank)*bytes), op.Send + cuda.Ptr(uint64(p)*bytes)
		}, bytes)
	case record.Broadcast:
		err = e.broadcast(s, op, b, bytes)
	case record.Reduce:
		err = e.reduceToRoot(s, op)
	case record.ReduceScatter:
		err = e.reduce(s, op, b, false)
	case record.AllReduce:
		err = e.reduce(s, op, b, true)
	}
	if err != nil {
		return err
	}
	return c.stamps.end(s, mark)
}

// exchange sends every rank n bytes: dst in p's memory, src in this rank's.
func (e *copyEngine) exchange(s *cuda.Stream, part func(p int) (dst, src cuda.Ptr), n uint64) error {
	c := e.c
	if err := e.begin(s); err != nil {
		return err
	}
	if err := e.grant(s, 1); err != nil {
		return err
	}
	if err := c.each(func(p int) error {
		dst, src := part(p)
		return e.push(p, dst, src, n)
	}); err != nil {
		return err
	}
	if dst, src := part(c.rank); dst != src {
		if err := s.Copy(dst, src, n); err != nil {
			return err
		}
	}
	if err := e.end(s); err != nil {
		return err
	}
	return e.arrived(s, 1, true)
}

// A broadcast travels in so many pieces, so that a rank passes one on while the
// next comes; a piece is never too short to be worth its flags.
const (
	broadcastPieces = 64
	broadcastLeast  = 4 << 20
)

// broadcast sends the buffer down a chain, from root to the next rank and so on:
// each rank receives from one and sends to one. (Scattering and passing on, where
// ranks receive from several at once, was three times slower on H200s.) Pieces take
// turns on two streams, so that one's flags cost the other no time.
func (e *copyEngine) broadcast(s *cuda.Stream, op *Op, b buffers, bytes uint64) error {
	c := e.c
	pieces := min(max(bytes/broadcastLeast, 1), broadcastPieces)
	step := ((bytes+pieces-1)/pieces + 511) &^ 511
	next, prev := (c.rank+1)%c.size, (c.rank+c.size-1)%c.size
	first, last := c.rank == op.Root, next == op.Root
	src := op.Recv
	if first {
		src = op.Send
	}
	if err := errors.Join(e.begin(s), e.fold.WaitEvent(e.begun)); err != nil {
		return err
	}
	if !first {
		if err := s.Batch(append(e.ops[:0], cuda.WriteOp(e.ready(prev, c.rank), e.got[prev].Load()+uint32(pieces)))); err != nil {
			return err
		}
	}
	lanes := [2]*cuda.Stream{e.out, e.fold}
	for i := range pieces {
		if last {
			break
		}
		lane := lanes[i&1]
		ops := e.ops[:0]
		if !first {
			ops = append(ops, cuda.WaitOp(e.copied(c.rank, prev), e.got[prev].Load()+uint32(i)+1))
		}
		k := e.sent[next].Add(1)
		if err := lane.Batch(append(ops, cuda.WaitOp(e.ready(c.rank, next), k))); err != nil {
			return err
		}
		off := min(i*step, bytes)
		if n := min(step, bytes-off); n > 0 {
			if err := lane.Copy(cuda.Ptr(b.recv[next]+off), src+cuda.Ptr(off), n); err != nil {
				return err
			}
		}
		// The word of the piece before, which is the other lane's, has to be written
		// first: this one's speaks for both.
		if i > 0 {
			if err := lane.WaitEvent(e.passed[(i-1)&1]); err != nil {
				return err
			}
		}
		if err := lane.Batch(append(e.ops[:0], cuda.WriteOp(e.copied(next, c.rank), k))); err != nil {
			return err
		}
		if err := lane.Record(e.passed[i&1]); err != nil {
			return err
		}
	}
	if first && op.Recv != op.Send && op.Recv != 0 {
		if err := s.Copy(op.Recv, op.Send, bytes); err != nil {
			return err
		}
	}
	if err := errors.Join(e.end(s), e.endFold(s)); err != nil {
		return err
	}
	if first {
		// Root receives nothing, so nothing tells it that the others have begun the
		// operation but that the next took its transfers.
		return nil
	}
	e.got[prev].Add(uint32(pieces))
	return s.Batch(append(e.ops[:0], cuda.WaitOp(e.copied(c.rank, prev), e.got[prev].Load())))
}

// reduce is ReduceScatter, and AllReduce when all is set. Each share goes to its
// rank in pieces, into staging memory, where a small kernel folds what came from
// everyone; for AllReduce the result then goes to everyone in the same queue.
// Staging has room for two pieces of each peer.
func (e *copyEngine) reduce(s *cuda.Stream, op *Op, b buffers, all bool) error {
	c := e.c
	size, n := uint64(op.DType.Size()), uint64(c.size)
	slot := c.stage.Size / (2 * n) &^ 511
	share := op.Count // elements
	if all {
		align := 512 / size
		share = ((op.Count+n-1)/n + align - 1) / align * align
	}
	pieces, step := cut(share, size, slot)
	// part is piece i of rank r's share, in elements.
	part := func(r int, i uint64) (off, k uint64) {
		begin, end := uint64(r)*share, (uint64(r)+1)*share
		if all {
			begin, end = min(begin, op.Count), min(end, op.Count)
		}
		off = min(begin+i*step, end)
		return off, min(begin+(i+1)*step, end) - off
	}
	stage := func(at, from int, i uint64) cuda.Ptr {
		return c.stage.At(at) + cuda.Ptr(((i&1)*n+uint64(from))*slot)
	}
	// The order of a pair's transfers: piece 0, piece 1, result 0, piece 2, result 1…
	// piece(i) is the number of piece i, from 1; free(i) what may come before piece i
	// has room.
	piece := func(i uint64) uint32 {
		if !all || i == 0 {
			return uint32(i) + 1
		}
		return uint32(2 * i)
	}
	total := uint32(pieces)
	if all {
		total *= 2
	}
	before := func(i uint64) uint32 {
		if i >= pieces {
			return total
		}
		return piece(i) - 1
	}
	if err := e.begin(s); err != nil {
		return err
	}
	if err := e.fold.WaitEvent(e.begun); err != nil {
		return err
	}
	if err := e.grant(s, before(2)); err != nil {
		return err
	}
	result := func(i uint64) error {
		off, k := part(c.rank, i)
		if err := e.out.WaitEvent(e.folded[i&1]); err != nil {
			return err
		}
		return c.each(func(p int) error {
			return e.push(p, cuda.Ptr(b.recv[p]+off*size), op.Recv+cuda.Ptr(off*size), k*size)
		})
	}
	for i := range pieces {
		if err := c.each(func(p int) error {
			off, k := part(p, i)
			return e.push(p, stage(p, c.rank, i), cuda.Ptr(b.send[c.rank]+off*size), k*size)
		}); err != nil {
			return err
		}
		if all && i > 0 {
			if err := result(i - 1); err != nil {
				return err
			}
		}
		off, k := part(c.rank, i)
		dst := off
		if !all {
			dst -= uint64(c.rank) * op.Count
		}
		if err := e.arrived(e.fold, piece(i), false); err != nil {
			return err
		}
		if err := e.foldPiece(op, op.Recv+cuda.Ptr(dst*size), op.Send+cuda.Ptr(off*size), k, func(r int) cuda.Ptr { return stage(c.rank, r, i) }); err != nil {
			return err
		}
		if err := e.fold.Record(e.folded[i&1]); err != nil {
			return err
		}
		if i+2 < pieces {
			if err := e.grant(e.fold, before(i+3)); err != nil {
				return err
			}
		}
	}
	if all {
		if err := result(pieces - 1); err != nil {
			return err
		}
	}
	if err := e.end(s); err != nil {
		return err
	}
	if err := e.endFold(s); err != nil {
		return err
	}
	return e.arrived(s, total, true)
}

// endFold makes s wait for the folding.
func (e *copyEngine) endFold(s *cuda.Stream) error {
	if err := e.fold.Record(e.foldedAll); err != nil {
		return err
	}
	return s.WaitEvent(e.foldedAll)
}

// cut divides a share of n elements into pieces that a staging slot holds, but at
// least a handful, so that sending, folding and passing on overlap.
func cut(n, size, slot uint64) (pieces, step uint64) {
	pieces = max((n*size+slot-1)/slot, min(4, max(n*size/(2<<20), 1)))
	step = max((n*size/pieces+511)&^511/size, 1)
	return max((n+step-1)/step, 1), step
}

// reduceToRoot is Reduce: the ranks that are not root reduce a share each, and pass
// it on to root's staging memory, from where root takes it. So every link carries
// the buffer once.
func (e *copyEngine) reduceToRoot(s *cuda.Stream, op *Op) error {
	c := e.c
	size, n := uint64(op.DType.Size()), uint64(c.size)
	slot := c.stage.Size / (2 * n) &^ 511
	align := 512 / size
	share := ((op.Count+n-2)/(n-1) + align - 1) / align * align
	pieces, step := cut(share, size, slot)
	part := func(r int, i uint64) (off, k uint64) {
		begin := uint64((r-op.Root+c.size)%c.size-1) * share
		end := min(begin+share, op.Count)
		off = min(begin+i*step, end)
		return off, min(begin+(i+1)*step, end) - off
	}
	stage := func(at, from int, i uint64) cuda.Ptr {
		return c.stage.At(at) + cuda.Ptr(((i&1)*n+uint64(from))*slot)
	}
	if err := e.begin(s); err != nil {
		return err
	}
	if err := e.fold.WaitEvent(e.begun); err != nil {
		return err
	}
	if err := e.grant(s, uint32(min(pieces, 2))); err != nil {
		return err
	}
	pass := func(i uint64) error {
		_, k := part(c.rank, i)
		if err := e.out.WaitEvent(e.folded[i&1]); err != nil {
			return err
		}
		if err := e.push(op.Root, stage(op.Root, c.rank, i), stage(c.rank, c.rank, i), k*size); err != nil {
			return err
		}
		return e.out.Record(e.passed[i&1])
	}
	for i := range pieces {
		if err := c.each(func(p int) error {
			if p == op.Root {
				return nil
			}
			off, k := part(p, i)
			return e.push(p, stage(p, c.rank, i), op.Send+cuda.Ptr(off*size), k*size)
		}); err != nil {
			return err
		}
		if c.rank != op.Root && i > 0 {
			if err := pass(i - 1); err != nil {
				return err
			}
		}
		if err := e.arrived(e.fold, uint32(i)+1, false); err != nil {
			return err
		}
		if err := e.takePiece(op, part, stage, i); err != nil {
			return err
		}
		if i+2 < pieces {
			if err := e.grant(e.fold, uint32(i)+3); err != nil {
				return err
			}
		}
	}
	if c.rank != op.Root {
		if err := pass(pieces - 1); err != nil {
			return err
		}
	}
	if err := errors.Join(e.end(s), e.endFold(s)); err != nil {
		return err
	}
	return e.arrived(s, uint32(pieces), true)
}

// takePiece is what a rank does with piece i of what has come: root takes the
// results, the others fold.
func (e *copyEngine) takePiece(op *Op, part func(int, uint64) (uint64, uint64), stage func(int, int, uint64) cuda.Ptr, i uint64) error {
	c := e.c
	size := uint64(op.DType.Size())
	if c.rank == op.Root {
		return c.each(func(p int) error {
			off, k := part(p, i)
			if k == 0 {
				return nil
			}
			return e.fold.Copy(op.Recv+cuda.Ptr(off*size), stage(c.rank, p, i), k*size)
		})
	}
	if i >= 2 { // the slot's former result has to be with root
		if err := e.fold.WaitEvent(e.passed[i&1]); err != nil {
			return err
		}
	}
	off, k := part(c.rank, i)
	if err := e.foldPiece(op, stage(c.rank, c.rank, i), op.Send+cuda.Ptr(off*size), k, func(r int) cuda.Ptr { return stage(c.rank, r, i) }); err != nil {
		return err
	}
	return e.fold.Record(e.folded[i&1])
}

// foldBlocks is for how many blocks a fold is cut: it must be quicker than the
// links, and takes little of the time.
const foldBlocks = 64

// foldPiece puts into dst the reduction of k elements of every rank: own for this
// one, from(r) for the others.
func (e *copyEngine) foldPiece(op *Op, dst, own cuda.Ptr, k uint64, from func(r int) cuda.Ptr) error {
	if k == 0 {
		return nil
	}
	c := e.c
	fs, err := c.dev.reducers(op.DType)
	if err != nil {
		return err
	}
	a := kernels.FoldArgs{Dst: uint64(dst), Count: k, K: uint32(c.size), Op: uint32(op.RedOp), Ranks: uint32(c.size)}
	for r := range c.size {
		a.Src[r] = uint64(from(r))
	}
	a.Src[c.rank] = uint64(own)
	f := fs["ls_fold"]
	return e.fold.Launch(f.Func, foldBlocks, f.threads, f.shared, unsafe.Pointer(&a), unsafe.Sizeof(a))
}
