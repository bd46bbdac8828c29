package preflight

import (
	"context"
	"errors"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
)

// buffers is what a rank sends and receives: in host memory, or in that of its GPU.
type buffers struct {
	bulk, word ccl.Buffer
	batch      int // round trips of one sample
	free       func(context.Context) error
}

// wordSize is that of a small message, a flag of a protocol.
const wordSize = 8

func hostBuffers(mem []byte) *buffers {
	return &buffers{
		bulk: ccl.Bytes(ccl.Uint8, mem), word: ccl.Bytes(ccl.Uint8, make([]byte, wordSize)), batch: 1,
		free: func(context.Context) error { return nil },
	}
}

// deviceBuffers allocates size bytes on the GPU as a window of both ranks.
// The bulk of them begins where every way of copying finds it aligned.
func deviceBuffers(ctx context.Context, comm *ccl.Comm, size int) (*buffers, error) {
	const begin = 256
	mem, err := comm.MemAlloc(begin + size)
	if err != nil {
		return nil, err
	}
	window, err := comm.WindowRegister(ctx, mem)
	if err != nil {
		return nil, errors.Join(err, mem.Free())
	}
	all := mem.Buffer(ccl.Uint8, begin+size)
	return &buffers{
		bulk: all.Slice(begin, begin+size), word: all.Slice(0, wordSize), batch: 8,
		// Memory stays when the window cannot be ended: a peer may still be writing to it.
		free: func(ctx context.Context) error {
			if err := window.Deregister(ctx); err != nil {
				return err
			}
			return mem.Free()
		},
	}, nil
}

// gpuMemory is how many bytes per second the GPU of comm, a communicator of one
// rank, copies within its memory: what a rank sends itself.
func gpuMemory(ctx context.Context, comm *ccl.Comm, size int, least time.Duration) (rate float64, err error) {
	mem, err := comm.MemAlloc(2 * size)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, mem.Free()) }()
	all, s := mem.Buffer(ccl.Uint8, 2*size), comm.NewStream()
	return best(least, float64(size), func() error {
		const together = 16 // launches cost little beside so many
		for range together {
			err := comm.Group(s, func(g *ccl.Group) error {
				return errors.Join(g.Send(all.Slice(0, size), 0), g.Recv(all.Slice(size, 2*size), 0))
			})
			if err != nil {
				return err
			}
		}
		return s.Wait(ctx)
	}, 16)
}
