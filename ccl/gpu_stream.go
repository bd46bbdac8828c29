package ccl

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/gpu"
)

// gpuStream is the CUDA side of a Stream.
type gpuStream struct {
	on      Device
	stream  *cuda.Stream
	handle  uintptr // of a foreign stream
	foreign bool
	comms   []*Comm // that have used it since the last Wait
}

// attach gives s its CUDA stream, and a hold of the device of its own: a Stream
// outlives communicators.
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

// cudaStream is the CUDA stream of s for c's device.
func (c *Comm) cudaStream(s *Stream) (*cuda.Stream, error) {
	g := &s.gpu
	if g.stream == nil {
		if err := s.attach(c.cfg.Device); err != nil {
			return nil, err
		}
	}
	if g.on != c.cfg.Device {
		return nil, fmt.Errorf("%w: a stream of %v for a rank on %v", ErrInvalid, g.on, c.cfg.Device)
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

// spinGPU is how long a Wait polls before it sleeps: a sleep takes longer than most
// operations.
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
				return c.interrupted(ctx, c.gpu.calls.Load())
			}
			return context.Cause(ctx)
		}
	}
	return s.gpuDone()
}

// gpuDone tells whether what has ended is good: kernels leave early when their
// communicator is over.
func (s *Stream) gpuDone() error {
	comms := s.gpu.comms
	s.gpu.comms = comms[:0]
	for _, c := range comms {
		if f := c.failed.Load(); f != nil && f != &failureClosed {
			return &Error{Op: "Wait", Comm: c.name, Seq: c.gpu.calls.Load(), Rank: c.rank, Peer: f.peer, Err: f.err}
		}
	}
	return nil
}

// gpuFailed makes a driver's error the end of the communicators that used the stream:
// after one the CUDA context is of no use.
func (s *Stream) gpuFailed(err error) error {
	err = fmt.Errorf("%w: %w", ErrInternal, err)
	for _, c := range s.gpu.comms {
		c.fail(&failure{-1, fmt.Errorf("rank %d: %w", c.rank, err)}, true)
	}
	for _, c := range s.gpu.comms {
		return &Error{Op: "Wait", Comm: c.name, Seq: c.gpu.calls.Load(), Rank: c.rank, Peer: -1, Err: err}
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
