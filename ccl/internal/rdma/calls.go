package rdma

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

// errStalled means that the kernel has not returned from a call.
var errStalled = errors.New("the kernel has not returned from a call")

// callFor bounds how long anybody waits for a call into the kernel. Those that make
// and end objects take microseconds to milliseconds; a device that is being reset, or
// an interface that is being removed, was seen to hold them for ever.
const callFor = time.Second

// calls are the calls into the kernel for one object that may stall: each is made
// by a goroutine of its own, and waited for by the caller for a bounded time. Once
// one was given up, no other is made until it has returned.
type calls struct {
	stalled atomic.Pointer[string]
}

// call makes a call. When it does not return in time the error is errStalled, and
// late, which may be nil, gets the result that nobody waits for any more.
func call[T any](k *calls, what string, f func() (T, error), late func(T, error)) (T, error) {
	type result struct {
		v   T
		err error
	}
	var none T
	if s := k.stalled.Load(); s != nil {
		return none, fmt.Errorf("%s: not tried: %w (%s)", what, errStalled, *s)
	}
	done := make(chan result, 1)
	var left atomic.Bool // whoever is first: the result, or the end of patience
	go func() {
		var r result
		if r.v, r.err = f(); left.CompareAndSwap(false, true) {
			done <- r
			return
		}
		if late != nil {
			late(r.v, r.err)
		}
		k.stalled.Store(nil)
	}()
	t := time.NewTimer(callFor)
	defer t.Stop()
	select {
	case r := <-done:
		return r.v, r.err
	case <-t.C:
	}
	k.stalled.Store(&what)
	if !left.CompareAndSwap(false, true) {
		k.stalled.Store(nil)
		r := <-done
		return r.v, r.err
	}
	return none, fmt.Errorf("%s: %w for %v", what, errStalled, callFor)
}

// do is call where nothing but an error comes back.
func (k *calls) do(what string, f func() error) error {
	_, err := call(k, what, func() (struct{}, error) { return struct{}{}, f() }, nil)
	return err
}
