package ccl

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/executor"
	"github.com/lockstep-ccl/lockstep/ccl/internal/failure"
	"github.com/lockstep-ccl/lockstep/ccl/internal/gpu"
)

// Stream is a sequence of operations. They run in the order of the calls, also
// when they are of different communicators. A Stream may be used with any
// communicator of the process, by one goroutine at a time; several streams may
// be used at once.
type Stream struct {
	order  executor.Order
	device bool // it has work of a GPU
	gpu    gpuStream
}

// gpuStream is the CUDA side of a Stream.
type gpuStream struct {
	on      Device
	stream  *cuda.Stream
	handle  uintptr // of a foreign stream
	foreign bool
	comms   []*gpuMember // that have used it since the last Wait
}

// gpuMember is the GPU side of a communicator as its streams know it.
type gpuMember struct {
	x      *executor.Executor
	device Device
	comm   *gpu.Comm
	calls  atomic.Uint64 // on device memory, for errors
}

var streams atomic.Uint32

// NewStream makes a stream. It needs no closing. With device memory it gets a
// CUDA stream of its own at first use.
func NewStream() *Stream { return &Stream{order: executor.NewOrder(streams.Add(1))} }

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

// Wait returns when every operation called on the stream has ended, and carries
// them out meanwhile. An operation that failed, and any that could not run
// because of it, make it return the *Error, once; those of other communicators
// have ended, too, by then. When ctx ends first Wait returns an *Error that wraps
// ErrTimeout or the context's error; the operations go on, and their buffers
// stay in use until another Wait returns or the communicator is aborted and closed.
func (s *Stream) Wait(ctx context.Context) error {
	ended, failed := s.order.Wait(ctx)
	if ended && s.device {
		if err := s.waitGPU(ctx); failed == nil {
			failed = err
		}
	}
	return failed
}

// Query reports whether every operation of the stream has ended; it does no
// work itself. An error is that of Wait.
func (s *Stream) Query() (done bool, err error) {
	if done, err = s.order.Query(); !done || err != nil || !s.device {
		return done, err
	}
	return s.queryGPU()
}

// attach gives s its CUDA stream and its own reference to the device, since a Stream outlives
// communicators.
func (s *Stream) attach(d Device) error {
	g := &s.gpu
	if g.foreign && g.on != d {
		return fmt.Errorf("%w: a stream of %v for a rank on %v", ErrInvalid, g.on, d)
	}
	drv, err := cuda.Open()
	if err != nil {
		return err
	}
	dev, err := drv.Device(d.Ordinal())
	if err != nil {
		return err
	}
	cs := dev.StreamOf(g.handle)
	if !g.foreign {
		if cs, err = dev.NewStream(0); err != nil {
			return errors.Join(err, dev.Close())
		}
	}
	runtime.AddCleanup(s, func(own bool) {
		if own {
			_ = cs.Close()
		}
		_ = dev.Close()
	}, !g.foreign)
	g.stream, g.on, s.device = cs, d, true
	return nil
}

// owned is the CUDA stream with what keeps it.
func (s *Stream) owned(cs *cuda.Stream) gpu.Stream {
	if s.gpu.foreign {
		return gpu.Stream{Stream: cs}
	}
	return gpu.Stream{Stream: cs, Owner: s}
}

// usedBy is the CUDA stream of s for the GPU of c, which uses it from now on.
func (s *Stream) usedBy(c *gpuMember) (*cuda.Stream, error) {
	g := &s.gpu
	if g.stream == nil {
		if err := s.attach(c.device); err != nil {
			return nil, err
		}
	}
	if g.on != c.device {
		return nil, fmt.Errorf("%w: a stream of %v for a rank on %v", ErrInvalid, g.on, c.device)
	}
	for i, u := range g.comms {
		if u == c {
			if i != len(g.comms)-1 {
				g.comms = append(append(g.comms[:i], g.comms[i+1:]...), c)
			}
			return g.stream, nil
		}
	}
	g.comms = append(g.comms, c)
	return g.stream, nil
}

// spinGPU is how long a Wait polls before it sleeps: a sleep takes longer than most operations
// do.
const spinGPU = time.Millisecond

// waitGPU waits for the content of the CUDA stream.
func (s *Stream) waitGPU(ctx context.Context) error {
	g := &s.gpu
	if g.stream == nil {
		return nil
	}
	began := time.Now()
	for {
		done, err := g.stream.Query()
		if err != nil {
			return s.gpuFailed(err)
		}
		if done {
			break
		}
		if waited := time.Since(began); waited < spinGPU {
			runtime.Gosched()
		} else {
			time.Sleep(min(waited/20, 200*time.Microsecond))
		}
		if ctx.Err() != nil {
			for _, c := range g.comms {
				return c.x.Interrupted(ctx, c.calls.Load())
			}
			return context.Cause(ctx)
		}
	}
	return s.gpuDone()
}

// gpuDone returns the error of a communicator that has failed: its kernels returned early, so
// their results are not valid.
func (s *Stream) gpuDone() error {
	comms := s.gpu.comms
	s.gpu.comms = comms[:0]
	for _, c := range comms {
		if f := c.x.Over(); f != nil && f != &failure.Closed {
			return c.x.Error("Wait", c.calls.Load(), f)
		}
	}
	return nil
}

// gpuFailed ends the communicators that used the stream with a driver's error, after which the
// CUDA context cannot be used.
func (s *Stream) gpuFailed(err error) error {
	err = fmt.Errorf("%w: %w", ErrInternal, err)
	for _, c := range s.gpu.comms {
		c.x.Fail(&failure.Failure{Peer: -1, Err: fmt.Errorf("rank %d: %w", c.x.Rank, err)}, true)
	}
	for _, c := range s.gpu.comms {
		return c.x.Error("Wait", c.calls.Load(), &failure.Failure{Peer: -1, Err: err})
	}
	return err
}

func (s *Stream) queryGPU() (done bool, err error) {
	if s.gpu.stream == nil {
		return true, nil
	}
	done, err = s.gpu.stream.Query()
	switch {
	case err != nil:
		return true, s.gpuFailed(err)
	case !done:
		return false, nil
	}
	return true, s.gpuDone()
}
