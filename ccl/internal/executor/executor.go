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
	Faults  transport.Faults // nil for none
}

// GPU is what a communicator of GPU ranks does at its end.
type GPU interface {
	// Abort ends what runs there.
	Abort()
	// Release lets go of streams, when nothing is sent any more.
	Release()
}

// Executor runs a communicator's operations, and holds why it is over. Its methods may be
// called from several goroutines.
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
	telling sync.Mutex // held while failed is set and the others are told
	closing atomic.Bool
	moves   atomic.Uint64 // counted while closing
	closed  chan struct{}
	left    atomic.Pointer[[]int] // members that have closed
	worker  sync.WaitGroup

	// The rest is the role's holder's.
	current *Operation
	seq     uint64 // of current
	entered bool   // current's first bytes have gone out
	dep     use    // what the next operation must wait for
	behind  behind // while its communicator is worked on
	op      engine.Op
	plans   plans
	pairs   algo.Messages
	entry   int64 // when an injected delay lets operation heldSeq begin
	heldSeq uint64
	suspect *failure.Failure // a link broke: why is the control plane's to say, for a while
	since   int64            // when this was looked at last
	doubt   int64            // for how long it has lasted
	said    int64            // when this rank last told the others what it is in
	saidSeq uint64
}

// behind is the context of work on another communicator. It also ends when its own communicator
// does, and costs no allocation; role.over wakes a goroutine that sleeps under it.
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

// New makes an executor; Connect and Start must follow before it takes operations.
func New(cfg Config) *Executor {
	x := &Executor{Config: cfg, model: algo.DefaultModel(), closed: make(chan struct{})}
	x.plans = plans{place: &x.Place, choose: x.Choose, all: make(map[algo.Call]*algo.Schedule)}
	x.queue.init()
	return x
}

// Connect gives it the links.
func (x *Executor) Connect(mesh *transport.Mesh) {
	x.mesh, x.eng = mesh, engine.New(mesh, x.Size)
	x.Log.connect(x.Rank, &x.Place, mesh, x.eng)
}

// Choose picks how a collective runs among the ranks of a place.
func (x *Executor) Choose(call algo.Call, place *algo.Place) algo.Choice {
	return x.model.Choose(call, place, x.Force)
}

// Last is the number of the last operation called, Finished of the last that has ended.
func (x *Executor) Last() uint64     { return x.queue.tail.Load() }
func (x *Executor) Finished() uint64 { return x.queue.finished.Load() }

// Wake has the worker look at the queue.
func (x *Executor) Wake() { x.queue.role.wake() }

// Messages and Vector are empty ones for an Operation.
func (x *Executor) Messages() *Messages  { return x.messages.get() }
func (x *Executor) Vector() *algo.Vector { return x.vectors.get() }

// Discard takes back what no operation was made of.
func (x *Executor) Discard(m *Messages) {
	m.clear()
	x.messages.put(m)
}

// Failed is why the communicator takes no calls, nil while it does.
func (x *Executor) Failed() *failure.Failure {
	if f := x.failed.Load(); f != nil {
		return f
	}
	if x.closing.Load() {
		return &failure.Closed
	}
	return nil
}

// Over is why operations no longer run, nil while they do. After Close, Failed is set before
// Over is.
func (x *Executor) Over() *failure.Failure { return x.failed.Load() }

// Err is Over as callers see it.
func (x *Executor) Err() error {
	f := x.failed.Load()
	if f == nil {
		return nil
	}
	return x.Error("communicator", 0, f)
}

// Lost is why peers no longer need bytes from this rank: Err, or nil where the communicator was
// merely closed.
func (x *Executor) Lost() error {
	if x.failed.Load() == &failure.Closed {
		return nil
	}
	return x.Err()
}

// Fail ends the communicator with f unless it has ended already. tell says whether other ranks
// must hear of it.
func (x *Executor) Fail(f *failure.Failure, tell bool) {
	x.telling.Lock()
	first := x.failed.Load() == nil
	if first {
		// The recorder comes first. A caller that sees the failure may end the process at once,
		// and that death must not be taken for the cause.
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

// Gone notes that a member has closed the communicator in good order. Bytes it sent may still
// be under way; idle notices when an operation needs more from it.
func (x *Executor) Gone(rank int) {
	var left []int
	if old := x.left.Load(); old != nil {
		left = append(left, *old...)
	}
	left = append(left, rank)
	x.left.Store(&left)
	x.mesh.Wake()
}

// Compare checks what rank says it is in against this rank's own call of the
// same number, and fails the communicator when they differ.
func (x *Executor) Compare(rank int, theirs engine.Signature) {
	q := &x.queue
	q.mu.Lock()
	mine := q.calls[theirs.Seq%uint64(len(q.calls))]
	q.mu.Unlock()
	if mine.Seq == theirs.Seq && mine != theirs {
		x.Fail(failure.FromEngine(&engine.MismatchError{Peer: rank, Mine: mine, Theirs: &theirs}), true)
	}
}

// Interrupted is the error of a wait for operation seq that ctx has ended.
func (x *Executor) Interrupted(ctx context.Context, seq uint64) error {
	err := context.Cause(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("%w: %w", failure.ErrTimeout, err)
	}
	return x.Error("Wait", seq, &failure.Failure{Peer: -1, Err: err})
}

// Moves changes while operations go on that Close waits for.
func (x *Executor) Moves() uint64 { return x.moves.Load() + x.queue.finished.Load() }

// BeginClose has no call accepted any more; it reports whether that is new, Closing whether it
// has been.
func (x *Executor) BeginClose() bool { return !x.closing.Swap(true) }
func (x *Executor) Closing() bool    { return x.closing.Load() }

// End is the end of the communicator, in good order unless it has had another: that is returned.
func (x *Executor) End() error {
	x.telling.Lock() // who closes for a failure has it told first
	failed := x.Err()
	x.failed.CompareAndSwap(nil, &failure.Closed)
	x.telling.Unlock()
	close(x.closed)
	x.mesh.Wake()
	x.queue.role.over()
	x.Process.remove(&x.queue)
	return failed
}
