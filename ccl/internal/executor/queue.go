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

// queueLen is how many operations of one communicator may be under way; a call
// beyond that works on them first.
const queueLen = 256

// Operation is one call.
type Operation struct {
	Coll       record.CollKind
	DType      record.DType
	Op         record.RedOp
	InPlace    bool
	Root       int32 // root or peer, -1
	Count      int   // by the convention of algo.Call
	Bytes      uint64
	Send, Recv []byte
	Vector     *algo.Vector // of an AlltoAllv and its like: the caller's slices, in a Vector of Executor.Vector
	Messages   *Messages    // of a group, from Executor.Messages
	Proxy      Proxy        // of device memory between nodes; nil for others

	logged     bool // its enqueue record is written
	stream     uint32
	collective uint64 // number among the communicator's collectives, 0 for others
	after      use
}

// signature is what the ranks that take part in op must agree on.
func (op *Operation) signature() engine.Signature {
	s := engine.Signature{Coll: op.Coll, DType: op.DType, Op: op.Op, Root: op.Root, Seq: op.collective, Count: uint64(op.Count)}
	if op.Coll.PointToPoint() { // both ends of a message say the same
		s.Coll, s.Root = record.Send, -1
	}
	if op.Coll.Traits().Varies() {
		s.Count = 0
	}
	return s
}

// Proxy is the network's part of an operation on device memory. The caller's stream and the
// executor carry such an operation out together.
type Proxy interface {
	// Numbered tells it its number in the queue.
	Numbered(seq uint64)
	// Ready: the stream has come to the operation.
	Ready() bool
	// Schedule is what the engine runs, on Parts, between gates.
	Schedule() *algo.Schedule
	Parts() []engine.Part
	Gate(number int) bool
	// Returned looks which bounce buffers have come back from peers, and reports whether any have.
	Returned() bool
	// Met is the member that the GPU's stamp says came last, by its index on this node.
	Met(local int32) (rank int32, told bool)
}

// queue holds the operations of a communicator in the order of the calls. Its
// sequence numbers count from 1. Callers put operations in under mu; the executor
// takes them out.
type queue struct {
	mu         sync.Mutex
	ops        []Operation
	collective uint64 // collectives so far
	tail       atomic.Uint64
	_          [56]byte
	finished   atomic.Uint64
	// broken is the first operation that failed; it and all after it did.
	broken atomic.Uint64
	err    atomic.Pointer[failure.Error]

	// calls remembers the signatures of the last collectives, to compare with
	// what other ranks say they are in.
	calls [64]engine.Signature

	role role   // of whom runs them
	run  runner // what runs them
	// swept is the tail at the last sweep; the sweeper's own.
	swept uint64
}

// runner is what a queue's operations are run by.
type runner interface {
	// drive returns when operation seq has ended, running operations meanwhile.
	drive(ctx context.Context, seq uint64) error
	// look notices completions; the caller has the role. It reports whether bytes are outstanding.
	look() (due bool)
}

func (q *queue) init() {
	q.ops = make([]Operation, queueLen)
	q.role.init()
}

func (q *queue) at(seq uint64) *Operation { return &q.ops[seq%queueLen] }

// outcome is the error of operation seq, which has ended.
func (q *queue) outcome(seq uint64) error {
	if broken := q.broken.Load(); broken != 0 && seq >= broken {
		if err := q.err.Load(); err != nil {
			return err
		}
	}
	return nil
}

// use names an operation that a stream has called.
type use struct {
	of  *queue
	seq uint64
}

func (u use) done() bool { return u.of == nil || u.of.finished.Load() >= u.seq }
