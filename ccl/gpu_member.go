package ccl

import (
	"errors"
	"fmt"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/failure"
	"github.com/lockstep-ccl/lockstep/ccl/internal/gpu"
	"github.com/lockstep-ccl/lockstep/record"
)

// enter checks that the communicator takes calls on device memory, and is s's CUDA stream.
func (c *gpuMember) enter(kind record.CollKind, s *Stream) (*cuda.Stream, error) {
	if f := c.x.Failed(); f != nil {
		return nil, c.x.Error(kind.String(), 0, f)
	}
	cs, err := s.usedBy(c)
	if err != nil {
		return nil, c.x.Wrap(kind.String(), err)
	}
	if c.x.Faults != nil {
		if d := c.x.Faults.Entry(c.x.Name); d > 0 {
			if err := c.comm.Occupy(cs, d); err != nil {
				return nil, c.launched(kind, err)
			}
		}
	}
	return cs, nil
}

// launched counts a launch. An error ends the communicator: peers that have launched the
// operation would wait for this rank forever.
func (c *gpuMember) launched(kind record.CollKind, err error) error {
	n := c.calls.Add(1)
	if err == nil {
		return nil
	}
	f := c.broke(fmt.Errorf("%v: %w", kind, err))
	return c.x.Error(kind.String(), n, f)
}

// broke ends the communicator with an error of the GPU side.
func (c *gpuMember) broke(err error) *failure.Failure {
	if errors.Is(err, gpu.ErrClosed) {
		return &failure.Closed // by another goroutine, since the call has begun
	}
	f := &failure.Failure{Peer: -1, Err: fmt.Errorf("%w: rank %d: %w", ErrInternal, c.x.Rank, err)}
	c.x.Fail(f, true)
	return f
}
