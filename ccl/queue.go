package ccl

import (
	"sync"
	"sync/atomic"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/engine"
	"github.com/lockstep-ccl/lockstep/record"
)

// queueLen is how many operations of one communicator may be under way; a call
// beyond that works on them first.
const queueLen = 256

// operation is one call in the queue.
type operation struct {
	coll       record.CollKind
	dtype      record.DType
	redop      record.RedOp
	inPlace    bool
	logged     bool  // its enqueue record is written
	root       int32 // root or peer, -1
	count      int   // by the convention of algo.Call
	bytes      uint64
	send, recv []byte
	vector     *algo.Vector // of an AlltoAllv and its like: the caller's slices
	group      *Group
	proxy      proxyOp // of device memory between nodes; nil for others
	stream     uint32
	collective uint64 // number among the communicator's collectives, 0 for others
	after      use
}

// proxyOp is the network's part of an operation on device memory, which the caller's stream
// and the executor carry out together.
type proxyOp interface {
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
	ops        []operation
	collective uint64 // collectives so far
	tail       atomic.Uint64
	_          [56]byte
	finished   atomic.Uint64
	// broken is the first operation that failed; it and all after it did.
	broken atomic.Uint64
	err    atomic.Pointer[Error]

	// calls remembers the signatures of the last collectives, to compare with
	// what other ranks say they are in.
	calls [64]engine.Signature
}

func (q *queue) init() { q.ops = make([]operation, queueLen) }

func (q *queue) at(seq uint64) *operation { return &q.ops[seq%queueLen] }

// last is the number of the last operation called.
func (q *queue) last() uint64 { return q.tail.Load() }

// put appends op to the queue.
func (c *Comm) put(s *Stream, op *operation) error {
	q := &c.queue
	q.mu.Lock()
	for {
		if f := c.failed.Load(); f != nil || c.closing.Load() {
			q.mu.Unlock()
			if f == nil {
				f = &failureClosed
			}
			return &Error{Op: op.coll.String(), Comm: c.name, Rank: c.rank, Peer: f.peer, Err: f.err}
		}
		if q.tail.Load()-q.finished.Load() < queueLen-1 {
			break
		}
		half := q.tail.Load() - queueLen/2
		q.mu.Unlock()
		if err := c.drive(background, half); err != nil {
			return err
		}
		q.mu.Lock()
	}
	seq := q.tail.Load() + 1
	slot := q.at(seq)
	*slot = *op
	slot.stream = s.id
	if slot.proxy != nil {
		slot.proxy.Numbered(seq)
	}
	slot.after = s.note(c, seq)
	if op.coll.Collective() {
		q.collective++
		slot.collective = q.collective
		q.calls[q.collective%uint64(len(q.calls))] = c.signature(slot)
	}
	c.log.enqueue(slot, seq, q.finished.Load()+1 == seq && slot.after.comm == nil && slot.proxy == nil)
	q.tail.Store(seq)
	q.mu.Unlock()
	c.proc.nudge(c, op.bytes)
	return nil
}

// signature is what the ranks that take part in op must agree on.
func (c *Comm) signature(op *operation) engine.Signature {
	s := engine.Signature{Coll: op.coll, DType: op.dtype, Op: op.redop, Root: op.root, Seq: op.collective, Count: uint64(op.count)}
	if op.coll.PointToPoint() { // both ends of a message say the same
		s.Coll, s.Root = record.Send, -1
	}
	if op.coll.Traits().Varies() {
		s.Count = 0
	}
	return s
}

// compare checks what rank says it is in against this rank's own call of the
// same number, and fails the communicator when they differ.
func (c *Comm) compare(rank int, theirs engine.Signature) {
	q := &c.queue
	q.mu.Lock()
	mine := q.calls[theirs.Seq%uint64(len(q.calls))]
	q.mu.Unlock()
	if mine.Seq == theirs.Seq && mine != theirs {
		c.fail(engineFailure(&engine.MismatchError{Peer: rank, Mine: mine, Theirs: &theirs}), true)
	}
}
