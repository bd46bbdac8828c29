package executor

import (
	"context"
	"sync"
	"sync/atomic"
)

var background = context.Background()

// role is the right to run a queue's operations. One goroutine at a time has it: a caller of Wait, or
// the worker. The next holder continues the current operation where the last one stopped.
type role struct {
	held    atomic.Uint32 // 1 while a goroutine has the role
	waiters atomic.Int32  // goroutines that wait for the role or for the end of an operation
	mu      sync.Mutex
	changed *sync.Cond
	kick    chan struct{} // wakes the worker
	// ahead is the role of another communicator, whose operations the holder runs first.
	ahead atomic.Pointer[role]
}

func (r *role) init() {
	r.changed = sync.NewCond(&r.mu)
	r.kick = make(chan struct{}, 1)
}

// take takes the role if no goroutine has it.
func (r *role) take() bool { return r.held.CompareAndSwap(0, 1) }

// acquire waits for the role and takes it.
func (r *role) acquire() {
	for !r.take() {
		r.park(background, func() bool { return r.held.Load() == 0 })
	}
}

func (r *role) release() {
	r.held.Store(0)
	r.rouse()
}

// over wakes all goroutines that wait for operations of a communicator that has ended. They may
// sleep for the role of another communicator that is ahead.
func (r *role) over() {
	for ; r != nil; r = r.ahead.Load() {
		r.rouse()
	}
}

// rouse wakes the goroutines that wait for the role or for the end of an operation.
func (r *role) rouse() {
	if r.waiters.Load() > 0 {
		r.mu.Lock()
		r.changed.Broadcast()
		r.mu.Unlock()
	}
}

// park sleeps until cond holds or ctx ends.
func (r *role) park(ctx context.Context, cond func() bool) {
	r.waiters.Add(1)
	defer r.waiters.Add(-1)
	if ctx.Done() != nil {
		defer context.AfterFunc(ctx, func() {
			r.mu.Lock()
			r.changed.Broadcast()
			r.mu.Unlock()
		})()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for !cond() && ctx.Err() == nil {
		r.changed.Wait()
	}
}

// wake makes the worker run what is in the queue.
func (r *role) wake() {
	select {
	case r.kick <- struct{}{}:
	default:
	}
}
