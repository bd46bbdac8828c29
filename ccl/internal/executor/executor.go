package executor

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/bootstrap"
	"github.com/lockstep-ccl/lockstep/ccl/internal/engine"
	"github.com/lockstep-ccl/lockstep/ccl/internal/failure"
	"github.com/lockstep-ccl/lockstep/ccl/internal/transport"
)

// Config is what New needs.
type Config struct {
	failure.Member
	Size    int
	Place   algo.Place
	Force   algo.Overrides
	Process *Process
	Log     *Log
	Control *bootstrap.Control
	Faults  transport.Faults // injected faults, nil for none
}

// GPU is what the executor tells a communicator's GPU when the communicator ends.
type GPU interface {
	// Abort makes running kernels return early.
	Abort()
	// Release lets streams continue that wait for operations. No operation sends any more.
	Release()
}

// Executor runs a communicator's operations, and keeps its failure. Its methods are safe for
// concurrent use, except Connect and Start.
type Executor struct {
	Config
	model algo.Model
	mesh  *transport.Mesh
	eng   *engine.Engine
	gpu   GPU // nil on a CPU rank

	queue    queue
	messages pool[Messages]
	vectors  pool[algo.Vector]

	failed  atomic.Pointer[failure.Failure]
	telling sync.Mutex // held while failed is set and the other ranks are told
	closing atomic.Bool
	moves   atomic.Uint64         // counts progress while closing
	closed  chan struct{}         // ends the worker
	left    atomic.Pointer[[]int] // members that have closed
	worker  sync.WaitGroup

	// Only the holder of the role uses the fields below. Times are in ns of CLOCK_MONOTONIC.
	current *Operation
	seq     uint64 // of current
	entered bool   // Launch has sent current's first bytes
	dep     use    // the stream's operation on another communicator that must end first
	behind  behind // context of the wait for dep
	op      engine.Op
	plans   plans
	pairs   algo.Messages
	entry   int64 // when an injected delay lets operation heldSeq begin
	heldSeq uint64
	suspect *failure.Failure // a link broke, and the control plane may still say why
	since   int64            // when idle last looked at suspect
	doubt   int64            // ns for which suspect has been set
	said    int64            // when announce last told rank 0 about operation saidSeq
	saidSeq uint64
}

// behind is the context in which x runs another communicator's operations. It also ends when x's
// communicator fails. It needs no allocation; role.over wakes a goroutine that sleeps under it.
type behind struct {
	context.Context
	x *Executor
}

func (b *behind) Err() error {
	if b.x.failed.Load() != nil {
		return context.Canceled
	}
	return b.Context.Err()
}

// New returns an executor. The caller must call Connect and Start before Put.
func New(cfg Config) *Executor {
	x := &Executor{Config: cfg, model: algo.DefaultModel(), closed: make(chan struct{})}
	x.plans = plans{place: &x.Place, choose: x.Choose, all: make(map[algo.Call]*algo.Schedule)}
	x.queue.init()
	return x
}

// Connect gives the executor its links.
func (x *Executor) Connect(mesh *transport.Mesh) {
	x.mesh, x.eng = mesh, engine.New(mesh, x.Size)
	x.Log.connect(x.Rank, &x.Place, mesh, x.eng)
}

// Choose returns how a collective runs among the ranks of place.
func (x *Executor) Choose(call algo.Call, place *algo.Place) algo.Choice {
	return x.model.Choose(call, place, x.Force)
}

// Last returns the number of the last operation that was called.
func (x *Executor) Last() uint64 { return x.queue.tail.Load() }

// Finished returns the number of the last operation that has ended.
func (x *Executor) Finished() uint64 { return x.queue.finished.Load() }

// Wake makes the worker run what is in the queue.
func (x *Executor) Wake() { x.queue.role.wake() }

// Messages returns an empty Messages for an Operation, which then owns it.
func (x *Executor) Messages() *Messages { return x.messages.get() }

// Vector returns an empty Vector for an Operation, which then owns it.
func (x *Executor) Vector() *algo.Vector { return x.vectors.get() }

// Discard takes back a Messages that no Operation owns.
func (x *Executor) Discard(m *Messages) {
	m.clear()
	x.messages.put(m)
}

// Failed returns why Put refuses operations, nil while it does not.
func (x *Executor) Failed() *failure.Failure {
	if f := x.failed.Load(); f != nil {
		return f
	}
	if x.closing.Load() {
		return &failure.Closed
	}
	return nil
}

// Over returns why operations no longer run, nil while they do. While the communicator closes,
// Put refuses new operations (Failed) and those in the queue still run.
func (x *Executor) Over() *failure.Failure { return x.failed.Load() }

// Err returns Over as a *failure.Error for callers.
func (x *Executor) Err() error {
	f := x.failed.Load()
	if f == nil {
		return nil
	}
	return x.Error("communicator", 0, f)
}

// Lost returns the failure after which peers no longer need bytes from this rank. It is Err, but
// nil after a close in good order.
func (x *Executor) Lost() error {
	if x.failed.Load() == &failure.Closed {
		return nil
	}
	return x.Err()
}

// Fail ends the communicator with f, unless it has ended already. tell makes it abort the other
// ranks, too.
func (x *Executor) Fail(f *failure.Failure, tell bool) {
	x.telling.Lock()
	first := x.failed.Load() == nil
	if first {
		// The record comes first. A caller that sees the failure may end the process at once, and
		// the diagnosis must not take that for the cause.
		x.Log.Aborted(f)
		x.failed.Store(f)
		if tell {
			x.Control.Abort(f.Encode())
		}
	}
	x.telling.Unlock()
	if !first {
		return
	}
	x.mesh.Wake()
	x.queue.role.over()
	if x.gpu != nil {
		x.gpu.Abort()
	}
}

// Gone notes that rank has closed the communicator in good order. Its bytes may still be in
// flight, so only missLeavers decides whether an operation waits for it in vain.
func (x *Executor) Gone(rank int) {
	var left []int
	if old := x.left.Load(); old != nil {
		left = append(left, *old...)
	}
	left = append(left, rank)
	x.left.Store(&left)
	x.mesh.Wake()
}

// Compare compares the collective that rank says it is in with this rank's collective of the same
// number. It fails the communicator if they differ.
func (x *Executor) Compare(rank int, theirs engine.Signature) {
	q := &x.queue
	q.mu.Lock()
	mine := q.calls[theirs.Seq%uint64(len(q.calls))]
	q.mu.Unlock()
	if mine.Seq == theirs.Seq && mine != theirs {
		x.Fail(failure.FromEngine(&engine.MismatchError{Peer: rank, Mine: mine, Theirs: &theirs}), true)
	}
}

// Interrupted returns the error of a wait for operation seq that ctx has ended. It wraps ErrTimeout
// if ctx's deadline has passed.
func (x *Executor) Interrupted(ctx context.Context, seq uint64) error {
	err := context.Cause(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("%w: %w", failure.ErrTimeout, err)
	}
	return x.Error("Wait", seq, &failure.Failure{Peer: -1, Err: err})
}

// Moves returns a number that changes while the operations that Close waits for make progress.
func (x *Executor) Moves() uint64 { return x.moves.Load() + x.queue.finished.Load() }

// BeginClose makes Put refuse operations. It returns false if it was called before.
func (x *Executor) BeginClose() bool { return !x.closing.Swap(true) }

// Closing reports whether BeginClose was called.
func (x *Executor) Closing() bool { return x.closing.Load() }

// End ends the communicator. It returns the communicator's failure, nil if there was none.
func (x *Executor) End() error {
	x.telling.Lock() // a Fail in progress tells the other ranks first
	failed := x.Err()
	x.failed.CompareAndSwap(nil, &failure.Closed)
	x.telling.Unlock()
	close(x.closed)
	x.mesh.Wake()
	x.queue.role.over()
	x.Process.remove(&x.queue)
	return failed
}
