package gpu

import (
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/kernels"
	"github.com/lockstep-ccl/lockstep/record"
)

// Begin orders what the caller puts on s after the communicator's operations so far. End must
// follow, with what Begin returned. Between them the caller runs operations on s and nowhere
// else.
func (c *Comm) Begin(s Stream) (captured bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed.Load() {
		return false, ErrClosed
	}
	if captured, err = s.Capturing(); err != nil || captured {
		return captured, err
	}
	return false, c.follow(s, false)
}

// End makes the communicator's next operations come after what is on s.
func (c *Comm) End(s Stream) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.leave(s, false)
}

// Load makes the kernels of a type ready, for Fold and Run. It comes before anything of the operation
// is on a stream: see reducers.
func (c *Comm) Load(dt record.DType) error {
	_, err := c.dev.reducers(dt)
	return err
}

// Fold puts on s the reduction of count elements of each of srcs, at most MaxRanks, in their
// order, into dst, which may be one of them. divisor is what Avg divides by. No peer takes
// part.
func (c *Comm) Fold(s *cuda.Stream, dt record.DType, op record.RedOp, dst cuda.Ptr, srcs []cuda.Ptr, count uint64, divisor int) error {
	fs, err := c.dev.reducers(dt)
	if err != nil {
		return err
	}
	a := kernels.FoldArgs{Dst: uint64(dst), Count: count, K: uint32(len(srcs)), Op: uint32(op), Ranks: uint32(divisor)}
	for i, p := range srcs {
		a.Src[i] = uint64(p)
	}
	f := fs["ls_fold"]
	return s.Launch(f.Func, uint32(blocksFor(count*uint64(dt.Size()), symStep, foldBlocks)), f.threads, f.shared, unsafe.Pointer(&a), unsafe.Sizeof(a))
}

// CopyStaged puts on s a kernel that copies messages between the GPU and pinned memory, and
// ends when all pieces are where they belong. list is count kernels.StagedMessage in pinned
// memory.
func (c *Comm) CopyStaged(s *cuda.Stream, list cuda.Ptr, count int) error {
	a := kernels.StagedArgs{Abort: uint64(c.abortAt), List: uint64(list), Count: uint32(count)}
	f := c.move["ls_staged"]
	return s.Launch(f.Func, uint32(min(count, stagedBlocks)), f.threads, f.shared, unsafe.Pointer(&a), unsafe.Sizeof(a))
}

// stagedBlocks is how many SMs copy messages: one writes to host memory as fast as most
// networks take it.
const stagedBlocks = 8
