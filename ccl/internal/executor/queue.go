package executor

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/engine"
	"github.com/lockstep-ccl/lockstep/ccl/internal/failure"
	"github.com/lockstep-ccl/lockstep/record"
)

// queueLen is how many operations of one communicator may be in the queue. Put runs operations if
// there are more.
const queueLen = 256

// Operation is one call.
type Operation struct {
	algo.Call         // Root is the root or the peer, -1 if there is none
	Bytes      uint64 // for records
	Send, Recv []byte
	Vector     *algo.Vector // for an AlltoAllv, from Executor.Vector; its slices are the caller's
	Messages   *Messages    // for a group, from Executor.Messages
	Proxy      Proxy        // for device memory between nodes, else nil

	logged     bool // its enqueue record is written
	stream     uint32
	collective uint64 // number among the communicator's collectives, 0 if it is none
	after      use    // the operation on another communicator that must end first
}

// sign sets s to what the ranks of op must agree on. It writes each field where it stays: a copy of
// fields just written waits for them.
func (op *Operation) sign(s *engine.Signature) {
	s.Coll, s.DType, s.Op, s.Root = op.Coll, op.DType, op.Op, op.Root
	s.Seq, s.Count = op.collective, uint64(op.Count)
	if op.Coll.PointToPoint() { // both ends of a message have the same signature
		s.Coll, s.Root = record.Send, -1
	}
	if op.Coll.Traits().Varies() {
		s.Count = 0
	}
}

// Proxy is a proxy operation: the network's part of an operation on device memory. The caller's
// stream runs the kernels, and the executor moves the bytes between nodes.
type Proxy interface {
	// Numbered tells the proxy operation its number in the queue.
	Numbered(seq uint64)
	// Ready reports whether the stream has reached the operation.
	Ready() bool
	// Schedule returns what the engine runs. It uses Parts, and its gates are Gate's.
	Schedule() *algo.Schedule
	Parts() []engine.Part
	Gate(number int) bool
	// Returned frees the bounce buffers that peers have consumed, and reports whether there were
	// any.
	Returned() bool
	// Met returns the rank of the member that entered last, from its index on this node in the
	// GPU's stamp. rank is -1 if no member entered after this rank. told is false if the stamp
	// does not say.
	Met(local int32) (rank int32, told bool)
}

// queue holds the operations of a communicator in the order of the calls, numbered from 1. Callers
// put operations in under mu, and the holder of the role takes them out.
type queue struct {
	mu         sync.Mutex
	ops        []Operation
	collective uint64        // number of collectives so far
	tail       atomic.Uint64 // number of the last operation called
	_          [56]byte      // callers write tail, the role's holder finished: two cache lines
	finished   atomic.Uint64 // number of the last operation that has ended
	// broken is the number of the first operation that failed. All later ones fail, too.
	broken atomic.Uint64
	err    atomic.Pointer[failure.Error]

	// calls has the signatures of the last collectives, for Compare.
	calls [64]engine.Signature

	role  role
	run   runner
	swept uint64 // tail at the last sweep, for the sweeper only
}

// runner runs a queue's operations. It is the queue's Executor.
type runner interface {
	// drive returns when operation seq has ended, running operations meanwhile.
	drive(ctx context.Context, seq uint64) error
	// look notices completions, and reports whether bytes are outstanding. The caller has the role.
	look() (due bool)
}

func (q *queue) init() {
	q.ops = make([]Operation, queueLen)
	q.role.init()
}

// at returns the slot of operation seq.
func (q *queue) at(seq uint64) *Operation { return &q.ops[seq%queueLen] }

// outcome returns the error of operation seq, which has ended.
func (q *queue) outcome(seq uint64) error {
	if broken := q.broken.Load(); broken != 0 && seq >= broken {
		if err := q.err.Load(); err != nil {
			return err
		}
	}
	return nil
}

// use names an operation that a stream has called. The zero value is none.
type use struct {
	of  *queue
	seq uint64
}

func (u use) done() bool { return u.of == nil || u.of.finished.Load() >= u.seq }
