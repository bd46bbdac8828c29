package gpu

import (
	"time"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/kernels"
	"github.com/lockstep-ccl/lockstep/record"
)

// Run puts a collective on s.
func (c *Comm) Run(s Stream, op *Op) error {
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
	op.Captured = captured
	if err := c.run(s.Stream, op, captured); err != nil {
		return err
	}
	return c.leave(s, captured)
}

// Occupy puts a kernel on s that keeps every multiprocessor of the GPU busy for d
// (what comes next on s is late by that), for the injection of faults.
func (c *Comm) Occupy(s *cuda.Stream, d time.Duration) error {
	a := kernels.DelayArgs{Ns: uint64(d), Abort: uint64(c.abortAt)}
	f := c.move["ls_delay"]
	return s.Launch(f.Func, uint32(c.dev.SMs), f.threads, f.shared, unsafe.Pointer(&a), unsafe.Sizeof(a))
}

func (c *Comm) run(s *cuda.Stream, op *Op, captured bool) error {
	if !op.Coll.HasData() {
		return c.kernel(s, op, plan{record.AlgoLL, 1}, c.buffers(op), op.Count, kernels.First|kernels.Last)
	}
	b := c.buffers(op)
	bytes := op.Count * uint64(op.DType.Size())
	p := c.plan(op, &b, captured)
	c.lastAlgo.Store(uint32(p.algo)<<16 | uint32(p.blocks))
	switch {
	case op.Stride > 0:
		p.algo, p.blocks = c.spaced(op.Coll, bytes)
		return c.staged(s, op, p)
	case lines(p.algo) || p.algo == record.AlgoRing: // peers touch no buffers
		return c.kernel(s, op, p, b, op.Count, kernels.First|kernels.Last)
	case p.algo == record.AlgoCopyEngine:
		return c.engine.run(s, c, op, b)
	case op.Coll.Traits().Root == record.RootTo:
		return c.toRoot(s, op, p)
	case !b.direct && c.asMessages(op):
		return c.messages(s, op)
	case b.direct && !(b.pulled > 1 && bytes%16 != 0):
		return c.kernel(s, op, p, b, op.Count, kernels.First|kernels.Last)
	}
	return c.staged(s, op, p)
}

// plan chooses an operation's algorithm. Copy engines need no windows where nobody
// pushes to receive buffers.
func (c *Comm) plan(op *Op, b *buffers, captured bool) plan {
	bytes := op.Count * uint64(op.DType.Size())
	row := collectives[op.Coll]
	plain := !b.direct
	if plain && b.pulled+b.pushed == 0 { // a Reduce
		w, _ := c.find(op.Send, bytes)
		plain = w == nil
	}
	return c.choose(call{
		coll: op.Coll, bytes: bytes, direct: b.direct || !row.pushes, fixed: captured || !c.copies,
		plain: plain, widened: widened(op.Coll, op.DType),
	})
}

// spaced is the kernel for shares at a stride, and its number of blocks. Staging brings them
// side by side, as the kernel reads and writes them.
func (c *Comm) spaced(coll record.CollKind, bytes uint64) (record.Algo, int) {
	if !coll.Reduces() {
		return record.AlgoSym, blocksFor(bytes, symStep, llBlocks)
	}
	algo, most := c.bandwidth(coll, bytes)
	return algo, blocksFor(bytes, symStep, most)
}

// Last tells which algorithm the last operation took, with how many blocks (0: none).
func (c *Comm) Last() (record.Algo, int) {
	v := c.lastAlgo.Load()
	return record.Algo(v >> 16), int(v & 0xffff)
}

// buffers is where an operation's memory lies on all ranks.
type buffers struct {
	send, recv [MaxRanks]uint64
	direct     bool // peers can reach what they must
	// How many shares of the send buffer peers pull from, and of the receive buffer
	// they push to.
	pulled, pushed int
}

// buffers finds the windows of an operation's memory. It depends on this rank's buffers alone,
// so ranks must register alike, as NCCL demands too.
func (c *Comm) buffers(op *Op) (b buffers) {
	b.send[c.rank], b.recv[c.rank] = uint64(op.Send), uint64(op.Recv)
	b.pulled, b.pushed = c.reached(op.Coll)
	t := op.Coll.Traits()
	if t.Send == record.ShareAll && t.Recv == record.ShareAll && op.Send == op.Recv {
		return b // in place, peers may not write before this rank has sent
	}
	bytes := op.Count * uint64(op.DType.Size())
	// A Reduce reaches neither: only root has a receive buffer, and no other rank knows where.
	// Kernels learn that by toRoot.
	b.direct = b.pulled+b.pushed > 0 &&
		(b.pulled == 0 || c.locate(&b.send, op.Send, uint64(b.pulled)*bytes)) &&
		(b.pushed == 0 || c.locate(&b.recv, op.Recv, uint64(b.pushed)*bytes))
	return b
}

func (c *Comm) locate(at *[MaxRanks]uint64, p cuda.Ptr, n uint64) bool {
	w, off := c.find(p, n)
	if w == nil {
		return false
	}
	for r := range c.size {
		at[r] = uint64(w.at(r, off))
	}
	return true
}

// kernel launches the kernel of a plan. count is in elements.
func (c *Comm) kernel(s *cuda.Stream, op *Op, p plan, b buffers, count uint64, flags uint32) error {
	from, row := c.move, collectives[op.Coll]
	if op.Coll.Reduces() {
		var err error
		if from, err = c.dev.reducers(op.DType); err != nil {
			return err
		}
	} else {
		count *= uint64(op.DType.Size()) // movers count bytes
	}
	f, ok := from[row.kernels[p.algo]]
	if !ok {
		return c.missing(op.Coll, p.algo)
	}
	a := c.args
	a.Send, a.Recv, a.Count = b.send, b.recv, count
	a.Root, a.Op, a.Flags, a.Room = uint32(op.Root), uint32(op.RedOp), flags, uint32(c.resultRoom())
	a.Desc = c.stamps.describe(op, p)
	c.between.stamp(a)
	rate := row.pace
	if p.algo == record.AlgoRing {
		rate = rings
	}
	a.Pace = c.pace(rate, op.Count*uint64(op.DType.Size()), p.blocks)
	f, err := c.stampedByPeer(f, row.kernels[p.algo], op, a)
	if err != nil {
		return err
	}
	threads := f.threads
	if t := c.cfg.Threads; t > 0 && p.algo != record.AlgoBulk && p.algo != record.AlgoPushBulk && p.algo != record.AlgoRing {
		threads = min(threads, uint32(t))
	}
	err = s.Launch(f.Func, uint32(p.blocks), threads, f.shared, unsafe.Pointer(a), unsafe.Sizeof(*a))
	c.between.stamped(a)
	return err
}
