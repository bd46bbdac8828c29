package ccl

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/engine"
	"github.com/lockstep-ccl/lockstep/record"
)

var background = context.Background()

// executor runs a communicator's operations. Whoever takes the role (a Wait, or
// the worker) carries on the current operation from where it stands, one
// goroutine at a time; the fields below role are the holder's.
type executor struct {
	role atomic.Uint32 // 1 while someone has it

	waiters atomic.Int32 // goroutines that wait for the role or for an end
	mu      sync.Mutex
	changed *sync.Cond
	kick    chan struct{} // to the worker
	// unattended: the sweeper found operations that nobody waited for.
	unattended atomic.Bool
	// ahead is that of the communicator which the holder of the role works on meanwhile.
	ahead atomic.Pointer[executor]

	current *operation
	seq     uint64 // of current
	entered bool   // current's first bytes have gone out
	dep     use    // what the next operation must wait for
	behind  behind // while its communicator is worked on
	op      engine.Op
	plans   plans
	pairs   algo.Messages
	entry   int64 // when an injected delay lets operation heldSeq begin
	heldSeq uint64
	suspect *failure // a link broke: why is the control plane's to say, for a while
	since   int64    // when it broke
	said    int64    // when this rank last told the others what it is in
	saidSeq uint64
}

func (x *executor) init(c *Comm) {
	x.changed = sync.NewCond(&x.mu)
	x.kick = make(chan struct{}, 1)
	x.plans.init(c)
}

func (x *executor) acquire() {
	for !x.role.CompareAndSwap(0, 1) {
		x.park(background, func() bool { return x.role.Load() == 0 })
	}
}

func (x *executor) release() {
	x.role.Store(0)
	x.rouse()
}

// over wakes whoever waits on behalf of a communicator that has come to its end, also
// where that is behind another's operation.
func (x *executor) over() {
	for ; x != nil; x = x.ahead.Load() {
		x.rouse()
	}
}

// rouse wakes whoever waits for the role or for an operation's end.
func (x *executor) rouse() {
	if x.waiters.Load() > 0 {
		x.mu.Lock()
		x.changed.Broadcast()
		x.mu.Unlock()
	}
}

// park sleeps until cond holds or ctx ends.
func (x *executor) park(ctx context.Context, cond func() bool) {
	x.waiters.Add(1)
	defer x.waiters.Add(-1)
	if ctx.Done() != nil {
		defer context.AfterFunc(ctx, func() {
			x.mu.Lock()
			x.changed.Broadcast()
			x.mu.Unlock()
		})()
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	for !cond() && ctx.Err() == nil {
		x.changed.Wait()
	}
}

// drive returns when operation seq has ended, running operations meanwhile.
func (c *Comm) drive(ctx context.Context, seq uint64) error {
	q, x := &c.queue, &c.executor
	for q.finished.Load() < seq {
		if !x.role.CompareAndSwap(0, 1) {
			x.park(ctx, func() bool { return x.role.Load() == 0 || q.finished.Load() >= seq })
			if q.finished.Load() < seq && ctx.Err() != nil {
				return c.interrupted(ctx, seq)
			}
			continue
		}
		err := c.execute(ctx, seq)
		x.release()
		if err != nil {
			return err
		}
	}
	return c.outcome(seq)
}

// outcome is the error of operation seq, which has ended.
func (c *Comm) outcome(seq uint64) error {
	if broken := c.queue.broken.Load(); broken != 0 && seq >= broken {
		if err := c.queue.err.Load(); err != nil {
			return err
		}
	}
	return nil
}

func (c *Comm) interrupted(ctx context.Context, seq uint64) error {
	err := context.Cause(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("%w: %w", ErrTimeout, err)
	}
	return &Error{Op: "Wait", Comm: c.name, Seq: seq, Rank: c.rank, Peer: -1, Err: err}
}

// execute runs operations until seq has ended. The caller has the role.
func (c *Comm) execute(ctx context.Context, seq uint64) error {
	var idle idleness
	for {
		if c.progress(seq) {
			idle = idleness{}
		}
		if c.queue.finished.Load() >= seq {
			return nil
		}
		if c.executor.dep.comm != nil {
			if c.follow(ctx); ctx.Err() != nil {
				return c.interrupted(ctx, seq)
			}
			continue
		}
		if err := c.idle(ctx, &idle, seq); err != nil {
			return err
		}
	}
}

// behind is the context of work on another communicator: it ends with its own's end, too,
// and costs no allocation. Who is asleep then is woken by executor.over.
type behind struct {
	context.Context
	c *Comm
}

func (b *behind) Err() error {
	if b.c.failed.Load() != nil {
		return context.Canceled
	}
	return b.Context.Err()
}

// follow returns when what the next operation comes after has ended, or c is over.
func (c *Comm) follow(ctx context.Context) {
	x := &c.executor
	x.behind = behind{ctx, c}
	x.ahead.Store(&x.dep.comm.executor)
	// A failure there is that stream's to report; here only order counts.
	_ = x.dep.comm.drive(&x.behind, x.dep.seq)
	x.ahead.Store(nil)
	x.behind = behind{}
}

// progress does what can be done now, up to the end of operation seq, and
// reports whether that was anything.
func (c *Comm) progress(seq uint64) (moved bool) {
	q, x := &c.queue, &c.executor
	for q.finished.Load() < seq {
		if f := c.failed.Load(); f != nil {
			c.drain(f)
			return true
		}
		if x.current == nil {
			next := q.finished.Load() + 1
			if next > q.tail.Load() {
				return moved
			}
			op := q.at(next)
			if x.dep = (use{}); !op.after.done() {
				x.dep = op.after
				return moved
			}
			if op.proxy != nil {
				if !op.proxy.Ready() {
					return moved
				}
			} else if c.cfg.Faults != nil && op.coll.Collective() && c.held(next) {
				return moved
			}
			if err := c.begin(op, next); err != nil {
				c.fail(&failure{-1, fmt.Errorf("%w: %w", ErrInternal, err)}, true)
				continue
			}
		}
		if x.suspect != nil {
			return moved
		}
		var err error
		if !x.entered {
			// Recording overlaps the flight of the first bytes, but its time is before them:
			// who has them may end before this thread runs again.
			x.entered = true
			if c.log.rec != nil {
				at := record.Now()
				err = c.eng.Launch()
				c.log.start(x.current, x.seq, at)
			}
		}
		if err == nil {
			var m bool
			m, err = c.eng.Step()
			moved = moved || m
			if p := x.current.proxy; p != nil && p.Returned() {
				moved = true
			}
		}
		switch {
		case err != nil:
			c.broke(engineFailure(err))
		case c.eng.Done() && c.mesh.Settled():
			c.finish(record.ResultOK)
		default:
			return moved
		}
	}
	return moved
}

// held reports whether an injected fault keeps operation seq from beginning yet.
func (c *Comm) held(seq uint64) bool {
	x, now := &c.executor, record.Now()
	if x.heldSeq != seq {
		x.heldSeq, x.entry = seq, now+int64(c.cfg.Faults.Entry(c.name))
	}
	return now < x.entry
}

// broke takes a failure of the engine. A link also breaks when its peer has learnt
// of a failure first and closed: then the control plane is about to tell that one.
func (c *Comm) broke(f *failure) {
	if errors.Is(f.err, ErrPeerLost) {
		c.executor.suspect, c.executor.since = f, record.Now()
		return
	}
	c.fail(f, true)
}

// begin makes op, number seq, the current operation.
func (c *Comm) begin(op *operation, seq uint64) error {
	x := &c.executor
	x.op.Signature = c.signature(op)
	x.op.Send, x.op.Recv, x.op.Divisor = op.send, op.recv, c.size
	x.op.Parts, x.op.Gate, x.op.Arrivals, x.op.Legs = nil, nil, c.log.asksEngine(op), c.log.asksLegs(op)
	var sched *algo.Schedule
	switch {
	case op.proxy != nil:
		sched = op.proxy.Schedule()
		x.op.Parts, x.op.Gate = op.proxy.Parts(), op.proxy.Gate
	case op.coll == record.Send:
		sched = x.pairs.Single(algo.Message{Peer: op.root, Send: true, Len: len(op.send)})
	case op.coll == record.Recv:
		sched = x.pairs.Single(algo.Message{Peer: op.root, Len: len(op.recv)})
	case op.coll == record.Group:
		sched = x.pairs.Group(c.rank, c.size, op.group.msgs)
		x.op.Parts = op.group.parts
	case op.vector != nil:
		sched = x.pairs.AlltoAllv(c.rank, c.size, op.vector, op.dtype.Size())
	default:
		var err error
		if sched, err = x.plans.of(op); err != nil {
			return err
		}
	}
	x.current, x.seq, x.entered = op, seq, false
	x.plans.last = sched
	c.eng.Begin(sched, &x.op)
	return nil
}

// finish ends the current operation.
func (c *Comm) finish(result record.Result) {
	x := &c.executor
	op, seq := x.current, x.seq
	if x.entered {
		c.log.end(c, op, seq, result)
	}
	c.eng.End()
	x.op.Send, x.op.Recv, x.op.Parts, x.op.Gate = nil, nil, nil, nil
	x.current = nil
	c.forget(op)
	c.queue.finished.Store(seq)
	x.rouse()
}

// forget lets go of an operation's buffers.
func (c *Comm) forget(op *operation) {
	op.send, op.recv, op.proxy, op.after = nil, nil, nil, use{}
	if op.group != nil {
		c.groups.put(op.group)
		op.group = nil
	}
	if op.vector != nil {
		c.groups.putVector(op.vector)
		op.vector = nil
	}
}

// drain ends everything in the queue, since the communicator is over.
func (c *Comm) drain(f *failure) {
	q, x := &c.queue, &c.executor
	// Calls check failed under mu before they put something in the queue.
	q.mu.Lock()
	defer q.mu.Unlock()
	next := q.finished.Load() + 1
	tail := q.tail.Load()
	if next <= tail && q.broken.Load() == 0 {
		q.err.Store(&Error{Op: q.at(next).coll.String(), Comm: c.name, Seq: next, Rank: c.rank, Peer: f.peer, Err: f.err})
		q.broken.Store(next)
	}
	if x.current != nil {
		c.mesh.Abandon()
		c.finish(f.result())
		next++
	}
	for ; next <= tail; next++ {
		c.forget(q.at(next))
	}
	c.gpu.over()
	q.finished.Store(tail)
	x.dep = use{}
	x.rouse()
}
