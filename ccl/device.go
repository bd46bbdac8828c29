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

// Device is where a rank's buffers may lie besides host memory.
type Device int

// CPU is no device: host memory only.
const CPU Device = 0

// GPU is the CUDA device of an ordinal, as CUDA_VISIBLE_DEVICES numbers them.
func GPU(ordinal int) Device { return Device(ordinal + 1) }

// Ordinal is the CUDA ordinal of a GPU, -1 for CPU.
func (d Device) Ordinal() int { return int(d) - 1 }

func (d Device) String() string {
	if d == CPU {
		return "cpu"
	}
	return fmt.Sprintf("cuda:%d", d.Ordinal())
}

// Devices is how many GPUs this process sees. The error says why there are none.
func Devices() (int, error) {
	drv, err := cuda.Open()
	if err != nil {
		return 0, err
	}
	return drv.Count(), nil
}

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
			return nil, &Error{Op: "MemAlloc", Comm: c.name, Rank: c.rank, Peer: -1, Err: err}
		}
		return &Memory{host: h}, nil
	}
	dev, err := c.gpu.comm.Device().Driver().Device(c.cfg.Device.Ordinal())
	if err != nil {
		return nil, c.gpuError("MemAlloc", err)
	}
	a, err := symm.Allocate(dev, uint64(max(n, 1)))
	if err != nil {
		return nil, c.gpuError("MemAlloc", errors.Join(err, dev.Close()))
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

// CopyIn copies host bytes to device memory of the rank's GPU, CopyOut back, at
// once: no stream's work comes before or after but what has ended.
func (c *Comm) CopyIn(dst Buffer, src []byte) error {
	if c.gpu == nil || !dst.onDevice() && dst.n > 0 || len(src) > dst.size() {
		return c.invalid(record.CollNone, "copy %d bytes of host memory to %d of device memory", len(src), dst.size())
	}
	return c.copied(c.gpu.comm.CopyIn(cuda.Ptr(dst.dev), src))
}

// CopyOut fills dst.
func (c *Comm) CopyOut(dst []byte, src Buffer) error {
	if c.gpu == nil || !src.onDevice() && src.n > 0 || len(dst) > src.size() {
		return c.invalid(record.CollNone, "copy %d bytes of device memory to %d of host memory", src.size(), len(dst))
	}
	return c.copied(c.gpu.comm.CopyOut(dst, cuda.Ptr(src.dev)))
}

// copied is the error of a copy.
func (c *Comm) copied(err error) error {
	if errors.Is(err, gpu.ErrClosed) {
		return &Error{Op: "Copy", Comm: c.name, Rank: c.rank, Peer: -1, Err: ErrClosed}
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
	if c.gpu == nil {
		return nil, c.noGPU("WindowRegister")
	}
	if m.alloc == nil {
		return nil, c.gpuError("WindowRegister", fmt.Errorf("%w: it is a CPU rank's memory", ErrInvalid))
	}
	w, err := c.gpu.comm.Register(ctx, m.alloc)
	if err != nil {
		return nil, c.gpuError("WindowRegister", err)
	}
	return &Window{c, w}, nil
}

// Deregister ends the window on all ranks, which all call it: it returns when
// none of them will touch this rank's memory any more.
func (w *Window) Deregister(ctx context.Context) error {
	if err := w.w.Deregister(); err != nil {
		return w.c.gpuError("Deregister", err)
	}
	if err := w.c.ctl.Barrier(ctx); err != nil {
		return w.c.deriveError("Deregister", err)
	}
	return nil
}

// StreamOf wraps a CUDA stream of the program's (cudaStream_t; 0 is the legacy
// default stream). The communicators' operations are ordered with everything
// else in it, may be captured in a graph, and Wait and Query wait for its whole
// content. The stream must outlive the Stream.
func StreamOf(handle uintptr, d Device) *Stream {
	s := NewStream()
	s.device = true
	s.gpu.handle, s.gpu.foreign, s.gpu.on = handle, true, d
	return s
}

// CUDA is the CUDA stream that carries the device operations of s, 0 before the
// first one.
func (s *Stream) CUDA() uintptr {
	if s.gpu.stream == nil {
		return s.gpu.handle
	}
	return s.gpu.stream.Handle()
}

func (c *Comm) noGPU(op string) error {
	return &Error{Op: op, Comm: c.name, Rank: c.rank, Peer: -1, Err: fmt.Errorf("%w: the rank has no GPU (Config.Device)", ErrInvalid)}
}

func (c *Comm) gpuError(op string, err error) error {
	peer, err := sentinelOf(err)
	return &Error{Op: op, Comm: c.name, Rank: c.rank, Peer: peer, Err: err}
}

// checkHost refuses what the CPU cannot compute with.
func (c *Comm) checkHost(kind record.CollKind, dt DType) error {
	if kind.Reduces() && (dt == Float8E4M3 || dt == Float8E5M2) {
		return c.invalid(kind, "%v in host memory: 8-bit floats are reduced on GPUs only", dt)
	}
	return nil
}

// GPUAlgo says with which algorithm the communicator's last operation on device memory
// ran, as it is recorded, and on how many multiprocessors.
func (c *Comm) GPUAlgo() (algo Algo, sms int) {
	if c.gpu == nil {
		return record.AlgoNone, 0
	}
	algo, sms = c.gpu.comm.Last()
	if p := c.gpu.proxy; p != nil {
		algo = p.Algo()
	}
	return algo, sms
}

// Graph is operations captured from a Stream, to be launched as one.
type Graph struct {
	graph *cuda.Graph
	exec  *cuda.Exec
	comms []*Comm // whose operations are in it
	of    *Stream // holds the device that it was captured on
}

// Capture collects what fn calls on s, operations of communicators among it, in a
// CUDA graph instead of running it; d is the device of s. All ranks capture the
// same operations, and launch their graphs in the same order. Each launch is
// operations of their own in the records.
func (s *Stream) Capture(d Device, fn func() error) (_ *Graph, err error) {
	fail := func(err error) error { return fmt.Errorf("capture a graph: %w", err) }
	if s.gpu.stream == nil {
		if err := s.attach(d); err != nil {
			return nil, fail(err)
		}
	}
	cs, before := s.gpu.stream, s.gpu.comms
	if err := cs.BeginCapture(); err != nil {
		return nil, fail(err)
	}
	s.gpu.comms = nil
	err = fn()
	comms := s.gpu.comms
	s.gpu.comms = before // what is captured does not run
	graph, endErr := cs.EndCapture()
	if err != nil || endErr != nil {
		if graph != nil {
			err = errors.Join(err, graph.Close())
		}
		return nil, fail(errors.Join(err, endErr))
	}
	exec, err := graph.Instantiate()
	if err != nil {
		return nil, fail(errors.Join(err, graph.Close()))
	}
	return &Graph{graph, exec, comms, s}, nil
}

// Launch runs the graph on s, which must be of the device it was captured on: after
// the operations of its communicators that were called before, and before those that
// are called later, on whatever streams.
func (g *Graph) Launch(s *Stream) error {
	for _, c := range g.comms {
		if _, err := c.enter(record.Group, s); err != nil {
			return err
		}
	}
	if s.gpu.stream == nil {
		return fmt.Errorf("%w: launch a graph on a stream of no device", ErrInvalid)
	}
	on, runs := s.owned(s.gpu.stream), true
	for _, c := range g.comms {
		captured, err := c.gpu.comm.Begin(on)
		if err != nil {
			return c.launched(record.Group, err)
		}
		runs = !captured
	}
	if err := g.exec.Launch(s.gpu.stream); err != nil {
		return s.gpuFailed(err)
	}
	for _, c := range g.comms {
		if !runs {
			break // it is part of another graph now
		}
		if err := c.gpu.comm.End(on); err != nil {
			return c.launched(record.Group, err)
		}
	}
	return nil
}

// Close frees the graph, which must not be running.
func (g *Graph) Close() error { return errors.Join(g.exec.Close(), g.graph.Close()) }
