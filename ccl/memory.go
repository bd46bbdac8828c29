package ccl

import (
	"context"
	"errors"
	"fmt"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/gpu"
	"github.com/lockstep-ccl/lockstep/ccl/internal/symm"
	"github.com/lockstep-ccl/lockstep/record"
)

// Memory is what MemAlloc makes (it is what ncclMemAlloc makes): on a GPU, memory that
// can become a window; of a CPU rank, memory that RDMA sends from where it lies.
//
// It outlives the communicator, and may become a window of another.
type Memory struct {
	dev   *cuda.Device // a hold of its own
	alloc *symm.Allocation
	host  *hostMemory // instead of both, of a CPU rank
}

// MemAlloc allocates at least n bytes on the rank's device, zeroed where that is the CPU.
//
// A CPU rank's Send of 64 KiB or more from such memory over RDMA does not buffer: it
// ends when the peer has received the bytes, not when they have been copied. Two ranks
// that send to each other before they receive need a Group.
func (c *Comm) MemAlloc(n int) (*Memory, error) {
	if c.cfg.Device == CPU {
		h, err := allocHost(max(n, 1))
		if err != nil {
			return nil, c.who.Wrap("MemAlloc", err)
		}
		return &Memory{host: h}, nil
	}
	dev, err := c.gpu.comm.Device().Driver().Device(c.cfg.Device.Ordinal())
	if err != nil {
		return nil, c.who.Wrap("MemAlloc", err)
	}
	a, err := symm.Allocate(dev, uint64(max(n, 1)))
	if err != nil {
		return nil, c.who.Wrap("MemAlloc", errors.Join(err, dev.Close()))
	}
	return &Memory{dev: dev, alloc: a}, nil
}

// Ptr is the CUDA device pointer, or the address of a CPU rank's memory; Size is how
// many bytes there are at it.
func (m *Memory) Ptr() uintptr {
	if m.host != nil {
		return m.host.address()
	}
	return uintptr(m.alloc.Ptr)
}

// Size is how many bytes the memory has: what was asked for, rounded up.
func (m *Memory) Size() int {
	if m.host != nil {
		return len(m.host.b)
	}
	return int(m.alloc.Size)
}

// Buffer is the first n elements of the memory. It panics when there are fewer.
func (m *Memory) Buffer(dt DType, n int) Buffer {
	if n*dt.Size() > m.Size() {
		panic(fmt.Sprintf("ccl: %d elements of %v in %d bytes of memory", n, dt, m.Size()))
	}
	if m.host != nil {
		return Bytes(dt, m.host.b[:n*dt.Size()])
	}
	return OnDevice(dt, m.Ptr(), n)
}

// CopyIn copies host bytes to device memory of the rank's GPU, CopyOut copies back. Both return
// when the copy is done. They are ordered with no stream: work that must come first has to have
// ended.
func (c *Comm) CopyIn(dst Buffer, src []byte) error {
	if c.gpu == nil || !dst.onDevice() && dst.n > 0 || len(src) > dst.size() {
		return c.who.Invalid(record.CollNone, "copy %d bytes of host memory to %d of device memory", len(src), dst.size())
	}
	return c.copied(c.gpu.comm.CopyIn(cuda.Ptr(dst.dev), src))
}

// CopyOut fills dst.
func (c *Comm) CopyOut(dst []byte, src Buffer) error {
	if c.gpu == nil || !src.onDevice() && src.n > 0 || len(dst) > src.size() {
		return c.who.Invalid(record.CollNone, "copy %d bytes of device memory to %d of host memory", src.size(), len(dst))
	}
	return c.copied(c.gpu.comm.CopyOut(dst, cuda.Ptr(src.dev)))
}

// copied is the error of a copy.
func (c *Comm) copied(err error) error {
	if errors.Is(err, gpu.ErrClosed) {
		return c.who.Wrap("Copy", ErrClosed)
	}
	return err
}

// Free ends the memory. No operation may be using it, and windows of it must
// have been deregistered on all ranks.
func (m *Memory) Free() error {
	if m.host != nil {
		return m.host.free()
	}
	return errors.Join(m.alloc.Close(), m.dev.Close())
}

// Window is memory of every rank that peers read and write in place.
type Window struct {
	c *Comm
	w *gpu.Window
}

// WindowRegister makes memory of every rank a window (it is
// ncclCommWindowRegister with NCCL_WIN_COLL_SYMMETRIC): collectives on buffers in
// it, at the same offset on all ranks, need no staging. All ranks call it, with
// memory of the same size, and all use it in the same calls.
func (c *Comm) WindowRegister(ctx context.Context, m *Memory) (*Window, error) {
	g, err := c.device("WindowRegister")
	if err != nil {
		return nil, err
	}
	if m.alloc == nil {
		return nil, c.who.Wrap("WindowRegister", fmt.Errorf("%w: it is a CPU rank's memory", ErrInvalid))
	}
	w, err := g.comm.Register(ctx, m.alloc)
	if err != nil {
		return nil, c.who.Wrap("WindowRegister", err)
	}
	return &Window{c, w}, nil
}

// Deregister ends the window on all ranks, which all call it: it returns when
// none of them will touch this rank's memory any more.
func (w *Window) Deregister(ctx context.Context) error {
	if err := w.w.Deregister(); err != nil {
		return w.c.who.Wrap("Deregister", err)
	}
	if err := w.c.ctl.Barrier(ctx); err != nil {
		return w.c.who.Wrap("Deregister", err)
	}
	return nil
}
