package executor

import (
	"context"
	"sync"
	"sync/atomic"
)

var background = context.Background()

// role is the right to run a queue's operations. Whoever takes it (a Wait, or the worker)
// carries on the current operation from where it stands, one goroutine at a time.
type role struct {
	held    atomic.Uint32 // 1 while someone has it
	waiters atomic.Int32  // goroutines that wait for the role or for an end
	mu      sync.Mutex
	changed *sync.Cond
	kick    chan struct{} // to the worker
	// unattended: the sweeper found operations that nobody waited for.
	unattended atomic.Bool
	// ahead is that of the communicator which the holder works on meanwhile.
	ahead atomic.Pointer[role]
}

func (r *role) init() {
	r.changed = sync.NewCond(&r.mu)
	r.kick = make(chan struct{}, 1)
}

func (r *role) take() bool { return r.held.CompareAndSwap(0, 1) }

func (r *role) acquire() {
	for !r.take() {
		r.park(background, func() bool { return r.held.Load() == 0 })
	}
}

func (r *role) release() {
	r.held.Store(0)
	r.rouse()
}

// over wakes goroutines that wait on behalf of a communicator that has ended, including those
// that wait behind another communicator's operation.
func (r *role) over() {
	for ; r != nil; r = r.ahead.Load() {
		r.rouse()
	}
}

// rouse wakes whoever waits for the role or for an operation's end.
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

// wake hands the queue to the worker.
func (r *role) wake() {
	select {
	case r.kick <- struct{}{}:
	default:
	}
}
