package cuda

import (
	"context"
	"fmt"
	"time"
	"unsafe"
)

// Stream is a queue of work for a device; what is enqueued runs in order. The
// methods enqueue and return, unless they say that they wait. Safe for
// concurrent use, except Close.
type Stream struct {
	dev   *Device
	h     uintptr
	owned bool
}

// NewStream makes a stream that does not wait for the legacy default stream.
// Lower priorities run first; 0 is the default, and out of range is clamped.
func (d *Device) NewStream(priority int) (*Stream, error) {
	const nonBlocking = 1
	s := &Stream{dev: d, owned: true}
	if rc := d.call(cuStreamCreateWithPriority, uintptr(unsafe.Pointer(&s.h)), nonBlocking, uintptr(priority)); rc != 0 {
		return nil, d.fail(cuStreamCreateWithPriority, "", rc)
	}
	d.driver.opened(d.Ordinal)
	return s, nil
}

// StreamOf wraps a CUstream of the device's primary context that belongs to
// another (PyTorch's, say); 0 is the legacy default stream.
func (d *Device) StreamOf(handle uintptr) *Stream { return &Stream{dev: d, h: handle} }

// Device is where the stream's work runs.
func (s *Stream) Device() *Device { return s.dev }

// Handle is the CUstream.
func (s *Stream) Handle() uintptr { return s.h }

// Close destroys a stream of NewStream, once the work in it has run; it does not
// wait for that. For a wrapped stream it does nothing.
func (s *Stream) Close() error {
	if !s.owned {
		return nil
	}
	s.owned = false
	s.dev.driver.streams[s.dev.Ordinal].Add(-1)
	if rc := s.dev.call(cuStreamDestroy, s.h); rc != 0 {
		return s.dev.fail(cuStreamDestroy, "", rc)
	}
	return nil
}

// Launch runs a kernel of so many blocks of so many threads, with so many bytes
// of dynamic shared memory. params holds its parameters, size bytes laid out as
// the kernel declares them; they are copied before Launch returns, and must not
// hold Go pointers. It allocates nothing.
func (s *Stream) Launch(f Func, blocks, threads, shared uint32, params unsafe.Pointer, size uintptr) error {
	d := s.dev
	rc := codeClosed
	if d.ctx != 0 {
		rc = launch(d.driver.fn[cuLaunchKernel], d.ctx, f.h, blocks, threads, shared, s.h, params, size)
	}
	if rc != 0 {
		return d.fail(cuLaunchKernel, fmt.Sprintf("(%s, %d×%d threads, %d bytes shared)", f.Name, blocks, threads, shared), rc)
	}
	return nil
}

// Copy copies n bytes between any two places that the GPU can reach, by copy
// engine where the driver has one for it.
func (s *Stream) Copy(dst, src Ptr, n uint64) error {
	if rc := s.dev.enqueue(cuMemcpyAsync, uintptr(dst), uintptr(src), uintptr(n), s.h); rc != 0 {
		return s.dev.fail(cuMemcpyAsync, fmt.Sprintf("(%#x, %#x, %d bytes)", dst, src, n), rc)
	}
	return nil
}

// CopyIn copies n bytes from host memory. Pageable memory may be reused when it
// returns; pinned memory only when the stream has come so far.
func (s *Stream) CopyIn(dst Ptr, src unsafe.Pointer, n uint64) error {
	if rc := s.dev.call(cuMemcpyHtoDAsync, uintptr(dst), uintptr(src), uintptr(n), s.h); rc != 0 {
		return s.dev.fail(cuMemcpyHtoDAsync, fmt.Sprintf("(%#x, %d bytes)", dst, n), rc)
	}
	return nil
}

// CopyOut copies n bytes to host memory. For pageable memory it waits; Go memory
// must be kept alive by the caller until the stream has come so far.
func (s *Stream) CopyOut(dst unsafe.Pointer, src Ptr, n uint64) error {
	if rc := s.dev.call(cuMemcpyDtoHAsync, uintptr(dst), uintptr(src), uintptr(n), s.h); rc != 0 {
		return s.dev.fail(cuMemcpyDtoHAsync, fmt.Sprintf("(%#x, %d bytes)", src, n), rc)
	}
	return nil
}

// Set8 fills n bytes.
func (s *Stream) Set8(dst Ptr, v byte, n uint64) error {
	if rc := s.dev.enqueue(cuMemsetD8Async, uintptr(dst), uintptr(v), uintptr(n), s.h); rc != 0 {
		return s.dev.fail(cuMemsetD8Async, fmt.Sprintf("(%#x, %d bytes)", dst, n), rc)
	}
	return nil
}

// Set32 fills n words of four bytes.
func (s *Stream) Set32(dst Ptr, v uint32, n uint64) error {
	if rc := s.dev.enqueue(cuMemsetD32Async, uintptr(dst), uintptr(v), uintptr(n), s.h); rc != 0 {
		return s.dev.fail(cuMemsetD32Async, fmt.Sprintf("(%#x, %d words)", dst, n), rc)
	}
	return nil
}

// Write32 stores v at p, 4-aligned, after a system-wide barrier: who sees v sees
// all that the stream did before.
func (s *Stream) Write32(p Ptr, v uint32) error {
	if rc := s.dev.enqueue(cuStreamWriteValue32, s.h, uintptr(p), uintptr(v), 0); rc != 0 {
		return s.dev.fail(cuStreamWriteValue32, fmt.Sprintf("(%#x, %d)", p, v), rc)
	}
	return nil
}

// Wait32 holds the stream until int32(*p-v) >= 0: counters may wrap around.
func (s *Stream) Wait32(p Ptr, v uint32) error {
	if rc := s.dev.enqueue(cuStreamWaitValue32, s.h, uintptr(p), uintptr(v), 0); rc != 0 {
		return s.dev.fail(cuStreamWaitValue32, fmt.Sprintf("(%#x, %d)", p, v), rc)
	}
	return nil
}

// MemOp is a Write32 or Wait32 for Batch. Its layout is CUstreamBatchMemOpParams'.
type MemOp struct {
	op    uint32
	_     uint32
	at    Ptr
	value uint64
	_     uint32 // flags, which the driver refuses here
	_     uint32
	_     [2]uint64
}

// WriteOp is Write32.
func WriteOp(p Ptr, v uint32) MemOp { return MemOp{op: 2, at: p, value: uint64(v)} }

// WriteOp64 is a write of 8 bytes.
func WriteOp64(p Ptr, v uint64) MemOp { return MemOp{op: 5, at: p, value: v} }

// WaitOp is Wait32.
func WaitOp(p Ptr, v uint32) MemOp { return MemOp{op: 1, at: p, value: uint64(v)} }

const maxBatch = 256 // the driver's limit

// Batch enqueues many writes and waits, in order, in one call.
func (s *Stream) Batch(ops []MemOp) error {
	for len(ops) > 0 {
		n := min(len(ops), maxBatch)
		rc := codeClosed
		if d := s.dev; d.ctx != 0 {
			rc = batch(d.driver.fn[cuStreamBatchMemOp], d.ctx, s.h, n, unsafe.Pointer(unsafe.SliceData(ops)))
		}
		if rc != 0 {
			return s.dev.fail(cuStreamBatchMemOp, fmt.Sprintf("(%d operations)", n), rc)
		}
		ops = ops[n:]
	}
	return nil
}

// Query tells whether all that was enqueued has run. An error is one of the work.
func (s *Stream) Query() (done bool, err error) {
	switch rc := s.dev.enqueue(cuStreamQuery, s.h, 0, 0, 0); rc {
	case 0:
		return true, nil
	case codeNotReady:
		return false, nil
	default:
		return false, s.dev.fail(cuStreamQuery, "", rc)
	}
}

// Synchronize waits until all that was enqueued has run. Nothing bounds it.
func (s *Stream) Synchronize() error {
	if rc := s.dev.call(cuStreamSynchronize, s.h); rc != 0 {
		return s.dev.fail(cuStreamSynchronize, "", rc)
	}
	return nil
}

// Wait is Synchronize with a bound. It polls, first busily, then in steps of up
// to a millisecond.
func (s *Stream) Wait(ctx context.Context) error { return poll(ctx, s.Query, "stream") }

func poll(ctx context.Context, query func() (bool, error), what string) error {
	const busy = 200 // polls, some tens of microseconds
	for i := 0; ; i++ {
		if done, err := query(); done || err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("wait for a CUDA %s: %w", what, context.Cause(ctx))
		}
		if i >= busy {
			time.Sleep(min(time.Duration(i-busy+1)*20*time.Microsecond, time.Millisecond))
		}
	}
}

// WaitEvent holds the stream until e, as last recorded before this call, has
// happened.
func (s *Stream) WaitEvent(e *Event) error {
	if rc := s.dev.enqueue(cuStreamWaitEvent, s.h, e.h, 0, 0); rc != 0 {
		return s.dev.fail(cuStreamWaitEvent, "", rc)
	}
	return nil
}

// Record makes e happen when the stream has come so far.
func (s *Stream) Record(e *Event) error {
	if rc := s.dev.enqueue(cuEventRecord, e.h, s.h, 0, 0); rc != 0 {
		return s.dev.fail(cuEventRecord, "", rc)
	}
	return nil
}
