package ccl

import (
	"context"
	"sync/atomic"
)

// Stream is a sequence of operations. They run in the order of the calls, also
// when they are of different communicators. A Stream may be used with any
// communicator of the process, by one goroutine at a time; several streams may
// be used at once.
type Stream struct {
	id   uint32
	uses []use // last operation on each communicator since the last Wait

	device bool // it has work of a GPU
	gpu    gpuStream
}

// use names an operation.
type use struct {
	comm *Comm
	seq  uint64
}

func (u use) done() bool { return u.comm == nil || u.comm.queue.finished.Load() >= u.seq }

var streams atomic.Uint32

// NewStream makes a stream. It needs no closing. With device memory it gets a
// CUDA stream of its own at first use.
func NewStream() *Stream { return &Stream{id: streams.Add(1), uses: make([]use, 0, 8)} }

// NewStream makes a stream; it is not tied to c.
func (c *Comm) NewStream() *Stream { return NewStream() }

// note records that the stream's last operation is seq of c, and returns the
// operation of another communicator that must end before, if any.
func (s *Stream) note(c *Comm, seq uint64) (after use) {
	n := len(s.uses)
	if n > 0 && s.uses[n-1].comm == c {
		s.uses[n-1].seq = seq
		return use{}
	}
	if n > 0 && !s.uses[n-1].done() {
		after = s.uses[n-1]
	}
	for i := range s.uses {
		if s.uses[i].comm == c {
			s.uses = append(s.uses[:i], s.uses[i+1:]...)
			break
		}
	}
	s.uses = append(s.uses, use{c, seq})
	return after
}

// Wait returns when every operation called on the stream has ended, and carries
// them out meanwhile. An operation that failed, and any that could not run
// because of it, make it return the *Error, once; those of other communicators
// have ended, too, by then. When ctx ends first Wait returns an *Error that wraps
// ErrTimeout or the context's error; the operations go on, and their buffers
// stay in use until another Wait returns or the communicator is aborted and closed.
func (s *Stream) Wait(ctx context.Context) error {
	var failed error
	for _, u := range s.uses {
		if err := u.comm.drive(ctx, u.seq); err != nil {
			if !u.done() {
				return err
			}
			if failed == nil {
				failed = err
			}
		}
	}
	s.uses = s.uses[:0]
	if s.device {
		if err := s.waitGPU(ctx); failed == nil {
			failed = err
		}
	}
	return failed
}

// Query reports whether every operation of the stream has ended; it does no
// work itself. An error is that of Wait.
func (s *Stream) Query() (done bool, err error) {
	for _, u := range s.uses {
		if !u.done() {
			return false, nil
		}
		if err := u.comm.outcome(u.seq); err != nil {
			return true, err
		}
	}
	if s.device {
		return s.queryGPU()
	}
	return true, nil
}
