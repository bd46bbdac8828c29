package gpu

import (
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/kernels"
	"github.com/lockstep-ccl/lockstep/record"
)

// between stamps operations that span nodes (Config.HostTells), of which the communicator's own
// operations are parts. The caller of Begin and End uses it between the two.
type between struct {
	rec   *Recording // nil: not recorded
	live  *record.Comm
	heap  cuda.Ptr
	slots uint64
	mask  uint32
	mark  kernel
	args  *kernels.MarkArgs // memory of its own, for cgo
	ops   []cuda.MemOp      // likewise
	desc  map[record.Desc]uint16

	id, at uint64 // of the operation under way, 0 when it has no slot
	// next is what the next kernel stamps of it.
	next uint32
}

func (b *between) init(c *Comm) {
	off, n := c.cfg.Live.StampRange()
	if b.rec = c.cfg.Recording; !c.cfg.HostTells || n == 0 {
		b.rec = nil
	}
	if b.rec == nil {
		return
	}
	b.live, b.heap, b.mark, b.desc = c.cfg.Live, c.heap.At(c.rank), c.move["ls_mark"], map[record.Desc]uint16{}
	b.args, b.ops = &kernels.MarkArgs{}, make([]cuda.MemOp, 2)
	b.slots, b.mask = uint64(b.rec.base)+uint64(off), uint32(n-1)
}

// Enter puts the begin of operation seq on s: its stamp, and a write of count to the u32 at
// word, for the caller. first is the node's own operation that comes next on s and depends on
// nothing before it; nil when something else comes next. met reports whether the stamps will
// tell when the node's other ranks had come to first.
func (c *Comm) Enter(s Stream, seq uint64, d record.Desc, first *Op, word cuda.Ptr, count uint32) (met bool, err error) {
	b := &c.between
	b.id, b.at, b.next = 0, 0, 0
	if b.rec == nil {
		return false, s.Write32(word, count)
	}
	desc, known := b.desc[d]
	if !known {
		desc, _ = b.rec.writer.AddDesc(d) // a full table is counted there
		b.desc[d] = desc
	}
	off, id, ok := b.live.StampSlot(seq, desc)
	if !ok {
		return false, s.Write32(word, count)
	}
	b.id, b.at = id, uint64(b.rec.base)+uint64(off)
	begins := false
	if first != nil {
		begins, met = c.meets(first)
	}
	if begins {
		b.next = kernels.First
		b.ops[0], b.ops[1] = cuda.WriteOp64(b.heap+cuda.Ptr(kernels.HeapSeq), seq-1), cuda.WriteOp(word, count)
		return met, s.Batch(b.ops)
	}
	if met {
		b.next = kernels.Meet
	}
	return met, c.markAt(s, kernels.First, word, count)
}

// Leave puts the end of the operation on s: its stamp, and a write of count to the u32 at word.
func (c *Comm) Leave(s Stream, word cuda.Ptr, count uint32) error {
	if b := &c.between; b.id == 0 {
		return s.Write32(word, count)
	}
	return c.markAt(s, kernels.Last, word, count)
}

func (c *Comm) markAt(s Stream, flags uint32, word cuda.Ptr, count uint32) error {
	b := &c.between
	*b.args = kernels.MarkArgs{Heap: uint64(b.heap), Slot: b.at, ID: b.id, Word: uint64(word), Count: count, Flags: flags}
	return s.Launch(b.mark.Func, 1, b.mark.threads, b.mark.shared, unsafe.Pointer(b.args), unsafe.Sizeof(*b.args))
}

// meets reports whether a collective is one kernel and nothing else, so that it begins when the
// stream comes to it, and whether it has a kernel at all.
func (c *Comm) meets(op *Op) (begins, met bool) {
	if !op.Coll.HasData() {
		return true, true
	}
	if op.Stride > 0 {
		return false, true
	}
	bufs := c.buffers(op)
	p := c.plan(op, &bufs, false)
	return lines(p.algo), p.algo != record.AlgoCopyEngine
}

// stamp has the next kernel, and only that one, make the stamp that is due.
func (b *between) stamp(a *kernels.Args) {
	if b.next != 0 {
		a.Slots, a.SlotMask, a.Desc, a.Flags = b.slots, b.mask, uint32(b.id&0xffff), b.next
	}
}

func (b *between) stamped(a *kernels.Args) {
	if b.next != 0 {
		a.Slots, b.next = 0, 0
	}
}
