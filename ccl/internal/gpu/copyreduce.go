package gpu

import (
	"errors"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/kernels"
)

// reduce is ReduceScatter, and AllReduce when all is set. Each share goes to its
// rank in pieces, into the channel's staging memory, where a small kernel folds
// what came from everyone; for AllReduce the result then goes to everyone on the
// same channel. So a channel has room for its next piece once it has folded this one.
func (e *copyEngine) reduce(s *cuda.Stream, op *Op, b buffers, all bool) error {
	c, peers := e.c, e.c.peers()
	size, n := uint64(op.DType.Size()), uint64(c.size)
	share := op.Count // elements
	each := uint32(1) // transfers of a pair for a piece
	if all {
		each = 2
		align := 512 / size
		share = ((op.Count+n-1)/n + align - 1) / align * align
	}
	pieces, step := cut(share, size, e.slotSize())
	// part is piece i of rank r's share, in elements.
	part := func(r int, i uint64) (off, k uint64) {
		begin, end := uint64(r)*share, (uint64(r)+1)*share
		if all {
			begin, end = min(begin, op.Count), min(end, op.Count)
		}
		off = min(begin+i*step, end)
		return off, min(begin+(i+1)*step, end) - off
	}
	for i := range e.channels {
		if err := e.channels[i].grant(s, min(channelPieces(pieces, i), 1)*each, peers); err != nil {
			return err
		}
	}
	for i := range pieces {
		h, turn := &e.channels[i&1], uint32(i>>1)
		var round []transfer
		for _, p := range peers {
			off, k := part(p, i)
			round = append(round, transfer{p, e.slot(p, c.rank, i&1), op.Send + cuda.Ptr(off*size), k * size})
		}
		if err := h.send(round); err != nil {
			return err
		}
		off, k := part(c.rank, i)
		dst := off
		if !all {
			dst -= uint64(c.rank) * op.Count
		}
		if err := h.arrived(e.fold, turn*each+1, peers, false); err != nil {
			return err
		}
		if err := e.foldPiece(op, op.Recv+cuda.Ptr(dst*size), op.Send+cuda.Ptr(off*size), k, i&1); err != nil {
			return err
		}
		if i+2 < pieces {
			if err := h.grant(e.fold, (turn+2)*each, peers); err != nil {
				return err
			}
		}
		if !all {
			continue
		}
		if err := errors.Join(e.fold.Record(e.folded[i&1]), h.out.WaitEvent(e.folded[i&1])); err != nil {
			return err
		}
		round = round[:0]
		for _, p := range peers {
			round = append(round, transfer{p, cuda.Ptr(b.recv[p] + off*size), op.Recv + cuda.Ptr(off*size), k * size})
		}
		if err := h.send(round); err != nil {
			return err
		}
	}
	errs := []error{e.end(s)}
	for i := range e.channels {
		errs = append(errs, e.channels[i].arrived(s, channelPieces(pieces, i)*each, peers, true))
	}
	return errors.Join(errs...)
}

// reduceToRoot is Reduce: the ranks that are not root reduce a share each, and pass
// it on to root's staging memory, from where root takes it. So every link carries
// the buffer once.
func (e *copyEngine) reduceToRoot(s *cuda.Stream, op *Op, _ buffers) error {
	c, peers := e.c, e.c.peers()
	size, n := uint64(op.DType.Size()), uint64(c.size)
	align := 512 / size
	share := ((op.Count+n-2)/(n-1) + align - 1) / align * align
	pieces, step := cut(share, size, e.slotSize())
	part := func(r int, i uint64) (off, k uint64) {
		begin := min(uint64((r-op.Root+c.size)%c.size-1)*share, op.Count)
		end := min(begin+share, op.Count)
		off = min(begin+i*step, end)
		return off, min(begin+(i+1)*step, end) - off
	}
	for i := range e.channels {
		if err := e.channels[i].grant(s, min(channelPieces(pieces, i), 1), peers); err != nil {
			return err
		}
	}
	for i := range pieces {
		h, turn := &e.channels[i&1], uint32(i>>1)
		var round []transfer
		for _, p := range peers {
			if p != op.Root {
				off, k := part(p, i)
				round = append(round, transfer{p, e.slot(p, c.rank, i&1), op.Send + cuda.Ptr(off*size), k * size})
			}
		}
		if err := h.send(round); err != nil {
			return err
		}
		if err := h.arrived(e.fold, turn+1, peers, false); err != nil {
			return err
		}
		if err := e.takePiece(op, h, part, i); err != nil {
			return err
		}
		if i+2 < pieces {
			if err := h.grant(e.fold, turn+2, peers); err != nil {
				return err
			}
		}
	}
	errs := []error{e.end(s)}
	for i := range e.channels {
		errs = append(errs, e.channels[i].arrived(s, channelPieces(pieces, i), peers, true))
	}
	return errors.Join(errs...)
}

// takePiece is what a rank does with piece i of what has come: root takes the
// results, the others fold and pass on.
func (e *copyEngine) takePiece(op *Op, h *channel, part func(int, uint64) (uint64, uint64), i uint64) error {
	c := e.c
	size := uint64(op.DType.Size())
	if c.rank == op.Root {
		return c.each(func(p int) error {
			off, k := part(p, i)
			if k == 0 {
				return nil
			}
			return e.fold.Copy(op.Recv+cuda.Ptr(off*size), e.slot(c.rank, p, i&1), k*size)
		})
	}
	// The result takes this rank's own slot, which the channel's last result has to
	// have left.
	mine := e.slot(c.rank, c.rank, i&1)
	if i >= 2 {
		if err := e.fold.WaitEvent(h.passed); err != nil {
			return err
		}
	}
	off, k := part(c.rank, i)
	if err := e.foldPiece(op, mine, op.Send+cuda.Ptr(off*size), k, i&1); err != nil {
		return err
	}
	if err := errors.Join(e.fold.Record(e.folded[i&1]), h.out.WaitEvent(e.folded[i&1])); err != nil {
		return err
	}
	if err := h.send([]transfer{{op.Root, e.slot(op.Root, c.rank, i&1), mine, k * size}}); err != nil {
		return err
	}
	return h.out.Record(h.passed)
}

// foldBlocks is for how many blocks a fold is cut: it must be quicker than the
// links, and takes little of the time.
const foldBlocks = 32

// foldPiece puts into dst the reduction of k elements of every rank: own for this
// one, the channel's slots for the others.
func (e *copyEngine) foldPiece(op *Op, dst, own cuda.Ptr, k uint64, channel uint64) error {
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
		a.Src[r] = uint64(e.slot(c.rank, r, channel))
	}
	a.Src[c.rank] = uint64(own)
	f, ok := fs["ls_fold_bulk"] // where there is one
	if !ok {
		f = fs["ls_fold"]
	}
	return e.fold.Launch(f.Func, foldBlocks, f.threads, f.shared, unsafe.Pointer(&a), unsafe.Sizeof(a))
}
