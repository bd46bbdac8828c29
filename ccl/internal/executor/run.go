package executor

import (
	"context"
	"errors"
	"fmt"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/failure"
	"github.com/lockstep-ccl/lockstep/record"
)

// Start starts the worker and makes the sweeper look after the queue. gpu is nil on a CPU rank.
func (x *Executor) Start(gpu GPU) {
	x.gpu, x.queue.run = gpu, x
	x.worker.Add(1)
	go x.work()
	x.Process.add(&x.queue)
}

// Stop waits until the worker has ended; End must have been called. Operations in the queue end
// with the communicator's failure. After Stop nothing uses links or pinned memory.
func (x *Executor) Stop() {
	x.worker.Wait()
	x.queue.role.acquire() // it is not released, so no operation runs again
	x.drain(x.failed.Load())
}

// Drive runs operations until operation seq has ended, and returns its error. If ctx ends first, it
// returns the error of Interrupted.
func (x *Executor) Drive(ctx context.Context, seq uint64) error { return x.drive(ctx, seq) }

// work is the communicator's worker. It runs what is in the queue each time it is woken.
func (x *Executor) work() {
	defer x.worker.Done()
	for {
		select {
		case <-x.closed:
			return
		case <-x.queue.role.kick:
			// The Wait of the operation's stream reports a failure.
			_ = x.drive(background, x.queue.tail.Load())
		}
	}
}

// look notices completions between operations. The caller has the role.
func (x *Executor) look() bool { return x.mesh.Look() }

// drive is Drive.
func (x *Executor) drive(ctx context.Context, seq uint64) error {
	q := &x.queue
	for q.finished.Load() < seq {
		if !q.role.take() {
			q.role.park(ctx, func() bool { return q.role.held.Load() == 0 || q.finished.Load() >= seq })
			if q.finished.Load() < seq && ctx.Err() != nil {
				return x.Interrupted(ctx, seq)
			}
			continue
		}
		err := x.execute(ctx, seq)
		q.role.release()
		if err != nil {
			return err
		}
	}
	return q.outcome(seq)
}

// execute runs operations until seq has ended. The caller has the role.
func (x *Executor) execute(ctx context.Context, seq uint64) error {
	var idle idleness
	for {
		if x.progress(seq) {
			idle = idleness{}
		}
		if idle.waits == 0 && x.closing.Load() {
			x.moves.Add(1)
		}
		if x.queue.finished.Load() >= seq {
			return nil
		}
		if x.dep.of != nil {
			if x.follow(ctx); ctx.Err() != nil {
				return x.Interrupted(ctx, seq)
			}
			continue
		}
		if err := x.idle(ctx, &idle, seq); err != nil {
			return err
		}
	}
}

// follow runs the other communicator until dep has ended. It returns early if ctx ends or this
// communicator fails.
func (x *Executor) follow(ctx context.Context) {
	x.behind = behind{ctx, x}
	x.queue.role.ahead.Store(&x.dep.of.role)
	// The stream's Wait reports a failure of dep. Only the order matters here.
	_ = x.dep.of.run.drive(&x.behind, x.dep.seq)
	x.queue.role.ahead.Store(nil)
	x.behind = behind{}
}

// progress does what can be done now, up to the end of operation seq. It reports whether anything
// moved.
func (x *Executor) progress(seq uint64) (moved bool) {
	q := &x.queue
	for q.finished.Load() < seq {
		if f := x.failed.Load(); f != nil {
			x.drain(f)
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
			if op.Proxy != nil {
				if !op.Proxy.Ready() {
					return moved
				}
			} else if x.Faults != nil && op.Coll.Collective() && x.held(next) {
				return moved
			}
			if err := x.begin(op, next); err != nil {
				x.Fail(&failure.Failure{Peer: -1, Err: fmt.Errorf("%w: %w", failure.ErrInternal, err)}, true)
				continue
			}
		}
		if x.suspect != nil {
			return moved
		}
		var err error
		if !x.entered {
			// The record is written while the first bytes travel. Its time is taken before they
			// leave, since the peer may finish before this thread runs again.
			x.entered = true
			if x.Log.rec != nil {
				at := record.Now()
				err = x.eng.Launch()
				x.Log.start(x.current, x.seq, at)
			}
		}
		if err == nil {
			var m bool
			m, err = x.eng.Step()
			moved = moved || m
			if p := x.current.Proxy; p != nil && p.Returned() {
				moved = true
			}
		}
		switch {
		case err != nil:
			x.broke(failure.FromEngine(err))
		case x.eng.Done() && x.mesh.Settled():
			x.finish(record.ResultOK)
		default:
			return moved
		}
	}
	return moved
}

// held reports whether an injected fault still delays operation seq.
func (x *Executor) held(seq uint64) bool {
	now := record.Now()
	if x.heldSeq != seq {
		x.heldSeq, x.entry = seq, now+int64(x.Faults.Entry(x.Name))
	}
	return now < x.entry
}

// broke handles a failure of the engine. A link also breaks when its peer has learnt of a failure
// first and closed the link. The control plane will then say which failure, so idle waits for
// suspectFor before it blames the link.
func (x *Executor) broke(f *failure.Failure) {
	if errors.Is(f.Err, failure.ErrPeerLost) {
		x.suspect, x.since, x.doubt = f, record.Now(), 0
		return
	}
	x.Fail(f, true)
}

// begin makes op, which has number seq, the current operation.
func (x *Executor) begin(op *Operation, seq uint64) error {
	op.sign(&x.op.Signature)
	x.op.Send, x.op.Recv, x.op.Divisor = op.Send, op.Recv, x.Size
	x.op.Parts, x.op.Gate, x.op.Arrivals, x.op.Legs = nil, nil, x.Log.asksEngine(op), x.Log.asksLegs(op)
	var sched *algo.Schedule
	switch {
	case op.Proxy != nil:
		sched = op.Proxy.Schedule()
		x.op.Parts, x.op.Gate = op.Proxy.Parts(), op.Proxy.Gate
	case op.Coll == record.Send:
		sched = x.pairs.Single(algo.Message{Peer: op.Root, Send: true, Len: len(op.Send)})
	case op.Coll == record.Recv:
		sched = x.pairs.Single(algo.Message{Peer: op.Root, Len: len(op.Recv)})
	case op.Coll == record.Group:
		sched = x.pairs.Group(x.Rank, x.Size, op.Messages.Msgs)
		x.op.Parts = op.Messages.Parts
	case op.Vector != nil:
		sched = x.pairs.AlltoAllv(x.Rank, x.Size, op.Vector, op.DType.Size())
	default:
		var err error
		if sched, err = x.plans.of(op); err != nil {
			return err
		}
	}
	x.current, x.seq, x.entered = op, seq, false
	x.plans.last = sched
	x.eng.Begin(sched, &x.op)
	return nil
}

// finish ends the current operation.
func (x *Executor) finish(result record.Result) {
	op, seq := x.current, x.seq
	if x.entered {
		x.Log.end(op, seq, x.plans.last, result)
	}
	x.eng.End()
	x.op.Send, x.op.Recv, x.op.Parts, x.op.Gate = nil, nil, nil, nil
	x.current = nil
	x.forget(op)
	x.queue.finished.Store(seq)
	x.queue.role.rouse()
}

// forget drops the references to an operation's buffers, and recycles its Messages and Vector.
func (x *Executor) forget(op *Operation) {
	op.Send, op.Recv, op.Proxy, op.after = nil, nil, nil, use{}
	if op.Messages != nil {
		x.Discard(op.Messages)
		op.Messages = nil
	}
	if op.Vector != nil {
		*op.Vector = algo.Vector{}
		x.vectors.put(op.Vector)
		op.Vector = nil
	}
}

// drain ends all operations in the queue with f, because the communicator has failed.
func (x *Executor) drain(f *failure.Failure) {
	q := &x.queue
	// Put checks for a failure under mu, so nothing enters the queue after this.
	q.mu.Lock()
	defer q.mu.Unlock()
	next := q.finished.Load() + 1
	tail := q.tail.Load()
	if next <= tail && q.broken.Load() == 0 {
		q.err.Store(x.Error(q.at(next).Coll.String(), next, f))
		q.broken.Store(next)
	}
	if x.current != nil {
		x.mesh.Abandon()
		x.finish(f.Result())
		next++
	}
	for ; next <= tail; next++ {
		x.forget(q.at(next))
	}
	if x.gpu != nil {
		x.gpu.Release()
	}
	q.finished.Store(tail)
	x.dep = use{}
	x.queue.role.rouse()
}
