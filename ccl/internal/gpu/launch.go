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
	case lines(p.algo):
		return c.kernel(s, op, p, b, op.Count, kernels.First|kernels.Last)
	case p.algo == record.AlgoCopyEngine:
		return c.engine.run(s, c, op, b)
	case op.Coll.Traits().Root == record.RootTo:
		return c.toRoot(s, op, p)
	case b.direct && !(b.pulled > 1 && bytes%16 != 0):
		return c.kernel(s, op, p, b, op.Count, kernels.First|kernels.Last)
	}
	return c.staged(s, op, p)
}

// plan chooses an operation's algorithm. Copy engines need no windows where nobody
// pushes to receive buffers.
func (c *Comm) plan(op *Op, b *buffers, captured bool) plan {
	bytes := op.Count * uint64(op.DType.Size())
	return c.choose(op.Coll, bytes, b.direct || !collectives[op.Coll].pushes, captured || !c.copies)
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
	a.Pace = c.pace(row.pace, op.Count*uint64(op.DType.Size()), p.blocks)
	f, err := c.stampedByPeer(f, row.kernels[p.algo], op, a)
	if err != nil {
		return err
	}
	threads := f.threads
	if t := c.cfg.Threads; t > 0 && p.algo != record.AlgoBulk && p.algo != record.AlgoPushBulk {
		threads = min(threads, uint32(t))
	}
	err = s.Launch(f.Func, uint32(p.blocks), threads, f.shared, unsafe.Pointer(a), unsafe.Sizeof(*a))
	c.between.stamped(a)
	return err
}

// ends is the flags of a piece of n elements, after done of count: whether it is the
// operation's first, and whether it is the last.
func ends(done, n, count uint64) (flags uint32) {
	if done == 0 {
		flags |= kernels.First
	}
	if done+n == count {
		flags |= kernels.Last
	}
	return flags
}

// staged runs a collective in pieces through staging memory: one whose buffers peers cannot
// reach, or whose shares are aligned unlike their destination (element by element those took 17
// times as long). The kernel of a piece ends only when all peers are done with this rank's
// staging memory, so the stream's order is all that pieces need.
func (c *Comm) staged(s *cuda.Stream, op *Op, p plan) error {
	size := uint64(op.DType.Size())
	t := op.Coll.Traits()
	shares := uint64(t.Shares(c.size))
	pulled, pushed := c.reached(op.Coll)
	most := c.stage.Size / shares / size &^ 255 // elements a piece: pieces stay aligned
	own := c.stage.Own()
	for done, n := uint64(0), uint64(0); done < op.Count || op.Count == 0; done += n {
		n = min(most, op.Count-done)
		if pulled > 1 && n >= 256 {
			n &^= 255 // shares lie side by side in staging memory
		}
		flags := ends(done, n, op.Count)
		var b buffers
		b.send[c.rank], b.recv[c.rank] = uint64(op.Send)+done*size, uint64(op.Recv)+done*size
		stage := func(at *[MaxRanks]uint64, off uint64) {
			for r := range c.size {
				at[r] = uint64(c.stage.At(r)) + off
			}
		}
		// copies moves a piece of each of k shares to or from staging.
		copies := func(from, to cuda.Ptr, fromStep, toStep uint64, k int) error {
			for i := range uint64(k) {
				if err := s.Copy(to+cuda.Ptr(i*toStep), from+cuda.Ptr(i*fromStep), n*size); err != nil {
					return err
				}
			}
			return nil
		}
		send, recv := op.Send+cuda.Ptr(done*size), op.Recv+cuda.Ptr(done*size)
		whole := op.Count * size
		if op.Stride > 0 {
			whole = op.Stride * size
		}
		if pulled > 0 {
			stage(&b.send, 0)
			if err := copies(send, own, whole, n*size, pulled); err != nil {
				return err
			}
		}
		if pushed > 0 {
			stage(&b.recv, 0)
		}
		if pulled == 0 && t.Send == record.ShareAll && n < op.Count {
			// The kernel reads shares at distance count: what is sent has to lie so.
			return c.stagedAlltoAll(s, op, p)
		}
		if err := c.kernel(s, op, p, b, n, flags); err != nil {
			return err
		}
		if err := copies(own, recv, n*size, whole, pushed); err != nil {
			return err
		}
		if op.Count == 0 {
			break
		}
	}
	return nil
}

// resultRoom is the part of staging memory that Reduce keeps for results that peers cannot
// write in place.
func (c *Comm) resultRoom() uint64 { return min(kernels.RingBytes, c.stage.Size/2) }

// toRoot is Reduce by a kernel, in which root tells its peers where it receives. Input in
// windows goes in one launch, other input in pieces through staging memory; ranks agree on
// which.
func (c *Comm) toRoot(s *cuda.Stream, op *Op, p plan) error {
	size := uint64(op.DType.Size())
	var sends [MaxRanks]uint64
	most, staged := op.Count, !c.locate(&sends, op.Send, op.Count*size)
	if staged {
		room := c.resultRoom()
		most = (c.stage.Size - room) / size &^ 255
		for r := range c.size {
			sends[r] = uint64(c.stage.At(r)) + room
		}
	}
	for done := uint64(0); done < op.Count; done += most {
		n := min(most, op.Count-done)
		flags := ends(done, n, op.Count)
		if staged {
			if err := s.Copy(cuda.Ptr(sends[c.rank]), op.Send+cuda.Ptr(done*size), n*size); err != nil {
				return err
			}
		}
		b := buffers{send: sends}
		if c.rank == op.Root {
			b.recv = c.told(op.Recv+cuda.Ptr(done*size), n*size, sends[c.rank])
		}
		if err := c.kernel(s, op, p, b, n, flags); err != nil {
			return err
		}
	}
	return nil
}

// told is what root of a Reduce tells its peers of n bytes at recv: where each has mapped them.
// It is nothing where they are not mapped, or are aligned unlike send, which would move bytes
// one by one.
func (c *Comm) told(recv cuda.Ptr, n, send uint64) (at [MaxRanks]uint64) {
	if w, off := c.find(recv, n); w != nil && (uint64(recv)^send)%16 == 0 {
		for r := range c.size {
			at[r] = uint64(w.theirs[r]) + off
		}
	}
	at[c.rank] = uint64(recv)
	return at
}

// stagedAlltoAll is AlltoAll of more than staging holds: half of staging takes
// what is sent, half what comes.
func (c *Comm) stagedAlltoAll(s *cuda.Stream, op *Op, p plan) error {
	size, n := uint64(op.DType.Size()), uint64(c.size)
	most := c.stage.Size / 2 / n / size &^ 255
	own, half := c.stage.Own(), cuda.Ptr(c.stage.Size/2)
	for done := uint64(0); done < op.Count; done += most {
		k := min(most, op.Count-done)
		var b buffers
		for r := range c.size {
			b.recv[r] = uint64(c.stage.At(r) + half)
			src := op.Send + cuda.Ptr((uint64(r)*op.Count+done)*size)
			if err := s.Copy(own+cuda.Ptr(uint64(r)*k*size), src, k*size); err != nil {
				return err
			}
		}
		b.send[c.rank] = uint64(own)
		if err := c.kernel(s, op, p, b, k, ends(done, k, op.Count)); err != nil {
			return err
		}
		for r := range c.size {
			dst := op.Recv + cuda.Ptr((uint64(r)*op.Count+done)*size)
			if err := s.Copy(dst, own+half+cuda.Ptr(uint64(r)*k*size), k*size); err != nil {
				return err
			}
		}
	}
	return nil
}
