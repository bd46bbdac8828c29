package gpu

import (
	"fmt"
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
	if op.Coll == record.Barrier {
		return c.kernel(s, op, plan{WayLL, 1}, c.buffers(op), op.Count, kernels.First|kernels.Last)
	}
	b := c.buffers(op)
	bytes := op.Count * uint64(op.DType.Size())
	p := c.plan(op, &b, captured)
	c.lastWay.Store(uint32(p.way)<<16 | uint32(p.blocks))
	switch {
	case op.Stride > 0:
		p.way, p.blocks = c.spaced(op.Coll, bytes)
		return c.staged(s, op, p)
	case p.way.lines():
		return c.kernel(s, op, p, b, op.Count, kernels.First|kernels.Last)
	case p.way == WayCopy:
		return c.engine.run(s, c, op, b)
	case op.Coll == record.Reduce:
		return c.toRoot(s, op, p)
	case b.direct && !(op.Coll == record.ReduceScatter && op.Count*uint64(op.DType.Size())%16 != 0):
		return c.kernel(s, op, p, b, op.Count, kernels.First|kernels.Last)
	}
	return c.staged(s, op, p)
}

// plan chooses an operation's way.
func (c *Comm) plan(op *Op, b *buffers, captured bool) plan {
	bytes := op.Count * uint64(op.DType.Size())
	return c.choose(op.Coll, bytes, b.direct || op.Coll == record.Reduce || op.Coll == record.ReduceScatter, captured || !c.copies)
}

// spaced is the kernel for shares that do not lie side by side: kernels read and
// write them so, and staging brings them there.
func (c *Comm) spaced(coll record.CollKind, bytes uint64) (Way, int) {
	if !reduces(coll) {
		return WaySym, blocksFor(bytes, symStep, llBlocks)
	}
	way, most := c.bandwidth(coll, bytes)
	return way, blocksFor(bytes, symStep, most)
}

// Last tells which way the last operation took, with how many blocks (0: none).
func (c *Comm) Last() (Way, int) {
	v := c.lastWay.Load()
	return Way(v >> 16), int(v & 0xffff)
}

// buffers is where an operation's memory lies on all ranks.
type buffers struct {
	send, recv [MaxRanks]uint64
	direct     bool // peers can reach what they must
}

// buffers finds the windows of an operation's memory. It depends on this rank's
// buffers alone, so ranks must agree on what is registered, as NCCL wants it too.
func (c *Comm) buffers(op *Op) (b buffers) {
	b.send[c.rank], b.recv[c.rank] = uint64(op.Send), uint64(op.Recv)
	shares := uint64(c.size)
	var sendShares, recvShares uint64 // that peers reach; 0: they do not
	switch op.Coll {
	case record.AllReduce:
		sendShares, recvShares = 1, 1
	case record.ReduceScatter:
		sendShares = shares
	case record.AlltoAll:
		if op.Send == op.Recv {
			return b // in place, peers may not write before this rank has sent
		}
		recvShares = shares
	case record.AllGather:
		recvShares = shares
	case record.Broadcast:
		recvShares = 1
	case record.Reduce:
		// Only root has a receive buffer: nobody else can tell where it is. Copy engines
		// need no window, and for kernels toRoot finds what there is.
		return b
	default:
		return b
	}
	bytes := op.Count * uint64(op.DType.Size())
	b.direct = (sendShares == 0 || c.locate(&b.send, op.Send, sendShares*bytes)) &&
		(recvShares == 0 || c.locate(&b.recv, op.Recv, recvShares*bytes))
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

// kernelNames of ways and collectives.
var kernelNames = map[record.CollKind][numWays]string{
	record.AllReduce:     {WayLL: "ls_allreduce_ll", WayLL2: "ls_allreduce_ll2", WayLL12: "ls_allreduce_ll12", WaySym: "ls_allreduce_sym", WayBulk: "ls_allreduce_bulk", WayPushBulk: "ls_allreduce_pushbulk"},
	record.ReduceScatter: {WayLL: "ls_reducescatter_ll", WayLL12: "ls_reducescatter_ll12", WaySym: "ls_reducescatter_sym", WayBulk: "ls_reducescatter_bulk"},
	record.Reduce:        {WayLL: "ls_reduce_ll", WayLL12: "ls_reduce_ll12", WaySym: "ls_reduce_sym", WayBulk: "ls_reduce_bulk"},
	record.AllGather:     {WayLL: "ls_allgather_ll", WayLL12: "ls_allgather_ll12", WaySym: "ls_allgather_push", WayBulk: "ls_allgather_bulk"},
	record.AlltoAll:      {WayLL: "ls_alltoall_ll", WayLL12: "ls_alltoall_ll12", WaySym: "ls_alltoall_push", WayBulk: "ls_alltoall_bulk"},
	record.Broadcast:     {WayLL: "ls_broadcast_ll", WayLL2: "ls_broadcast_ll2", WayLL12: "ls_broadcast_ll12", WaySym: "ls_broadcast_push", WayBulk: "ls_broadcast_bulk"},
	record.Barrier:       {WayLL: "ls_barrier"},
}

// kernel launches the kernel of a plan. count is in elements.
func (c *Comm) kernel(s *cuda.Stream, op *Op, p plan, b buffers, count uint64, flags uint32) error {
	from := c.move
	switch op.Coll {
	case record.AllReduce, record.ReduceScatter, record.Reduce:
		var err error
		if from, err = c.dev.reducers(op.DType); err != nil {
			return err
		}
	default:
		count *= uint64(op.DType.Size()) // movers count bytes
	}
	f, ok := from[kernelNames[op.Coll][p.way]]
	if !ok {
		return fmt.Errorf("no kernel for %v by %v on compute capability %d.%d", op.Coll, p.way, c.dev.Major, c.dev.Minor)
	}
	a := c.args
	a.Send, a.Recv, a.Count = b.send, b.recv, count
	a.Root, a.Op, a.Flags, a.Room = uint32(op.Root), uint32(op.RedOp), flags, uint32(c.resultRoom())
	a.Desc = c.stamps.describe(op, p)
	c.between.stamp(a)
	a.Pace = c.pace(op.Coll, op.Count*uint64(op.DType.Size()), p.blocks)
	threads := f.threads
	if t := c.cfg.Threads; t > 0 && p.way != WayBulk && p.way != WayPushBulk {
		threads = min(threads, uint32(t))
	}
	err := s.Launch(f.Func, uint32(p.blocks), threads, f.shared, unsafe.Pointer(a), unsafe.Sizeof(*a))
	c.between.stamped(a)
	return err
}

// ends says of a piece of n, after done of count, whether it is its operation's
// first one, and whether it is the last.
func ends(done, n, count uint64) (flags uint32) {
	if done == 0 {
		flags |= kernels.First
	}
	if done+n == count {
		flags |= kernels.Last
	}
	return flags
}

// staged runs a collective whose buffers peers cannot reach, or whose shares are aligned
// unlike what they are reduced to (element by element, which took 17 times as long): in
// pieces, through staging memory. A piece's kernel ends only when all peers have done with this
// rank's staging memory, so that pieces need no more order than the stream's.
func (c *Comm) staged(s *cuda.Stream, op *Op, p plan) error {
	size := uint64(op.DType.Size())
	shares := uint64(1)
	switch op.Coll {
	case record.AllGather, record.ReduceScatter, record.AlltoAll:
		shares = uint64(c.size)
	}
	most := c.stage.Size / shares / size &^ 255 // elements a piece: pieces stay aligned
	own := c.stage.Own()
	for done, n := uint64(0), uint64(0); done < op.Count || op.Count == 0; done += n {
		n = min(most, op.Count-done)
		if op.Coll == record.ReduceScatter && n >= 256 {
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
		var err error
		switch op.Coll {
		case record.AllReduce:
			stage(&b.send, 0)
			stage(&b.recv, 0)
			err = copies(send, own, 0, 0, 1)
		case record.ReduceScatter:
			stage(&b.send, 0)
			err = copies(send, own, whole, n*size, c.size)
		case record.AllGather, record.Broadcast:
			stage(&b.recv, 0)
		case record.AlltoAll:
			// The kernel reads shares at distance count: what is sent has to lie so.
			stage(&b.recv, 0)
			if n < op.Count {
				return c.stagedAlltoAll(s, op, p)
			}
		}
		if err != nil {
			return err
		}
		if err := c.kernel(s, op, p, b, n, flags); err != nil {
			return err
		}
		switch op.Coll {
		case record.AllReduce, record.Broadcast:
			err = copies(own, recv, 0, 0, 1)
		case record.AllGather, record.AlltoAll:
			err = copies(own, recv, n*size, whole, c.size)
		}
		if err != nil {
			return err
		}
		if op.Count == 0 {
			break
		}
	}
	return nil
}

// resultRoom is how much of staging memory Reduce keeps for results whose place no
// peer can write to.
func (c *Comm) resultRoom() uint64 { return min(kernels.RingBytes, c.stage.Size/2) }

// toRoot is Reduce by a kernel, to whose peers root tells where it receives. What is
// sent takes one, when it is in windows, and pieces through staging memory when not:
// ranks agree on that.
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

// told is what root of a Reduce tells its peers of n bytes at recv: where they have
// mapped it, or nothing where they have not, or where it is aligned unlike send,
// which makes bytes go one by one.
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
