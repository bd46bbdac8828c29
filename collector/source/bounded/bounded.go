// Package bounded asks what may never answer: a driver, a file of sysfs.
//
// A Prober runs one probe at a time on a goroutine of its own. Its owner looks in now and then,
// takes what has come, and never waits: a probe that takes longer than its bound is told of, with
// the call that it is in, and goes on. Go cannot end a thread that a driver holds, so none is
// begun beside it.
package bounded

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"
)

// closeWithin is how long Close waits for calls to return.
const closeWithin = 2 * time.Second

// Options of a Prober; all are needed.
type Options struct {
	Period time.Duration // between two probes
	Bound  time.Duration // how long one may take
	What   string        // is asked: "the GPU driver"
	Log    *slog.Logger
}

// Prober asks for a T again and again. All methods but At, Call and Go are for one goroutine.
type Prober[T any] struct {
	o       Options
	ask     func() T
	ctx     context.Context
	cancel  context.CancelFunc
	running sync.WaitGroup
	answers chan T                 // capacity 1: of the probe in flight
	call    atomic.Pointer[string] // the one that the probe is in

	began int64 // of the probe in flight, 0 when none is
	next  int64 // when the next one is due
	hangs string
}

// New makes a Prober whose first probe is due at once. Close it.
func New[T any](o Options, ask func() T) *Prober[T] {
	p := &Prober[T]{o: o, ask: ask, answers: make(chan T, 1)}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.At("its start")
	return p
}

// At notes the call that the probe makes next: it may be the one that hangs.
func (p *Prober[T]) At(call string) { p.call.Store(&call) }

// Call is what At noted last.
func (p *Prober[T]) Call() string { return *p.call.Load() }

// Context ends with Stop and Close.
func (p *Prober[T]) Context() context.Context { return p.ctx }

// Stop ends Context, and waits for nothing: what Go began may then be woken by other means.
func (p *Prober[T]) Stop() { p.cancel() }

// Go runs f, for which Close waits. f ends when Context does.
func (p *Prober[T]) Go(f func()) { p.running.Go(f) }

// Take is the answer that has come since the last call, if one has, and when it was asked for
// (ns, as now).
func (p *Prober[T]) Take() (answer T, began int64, ok bool) {
	select {
	case answer = <-p.answers:
	default:
		return answer, 0, false
	}
	if p.hangs != "" {
		p.o.Log.Info(p.o.What+" answers again", "call", p.hangs)
		p.hangs = ""
	}
	began, p.began = p.began, 0
	return answer, began, true
}

// Busy reports whether a probe is under way.
func (p *Prober[T]) Busy() bool { return p.began != 0 }

// Next makes the next probe due at a time.
func (p *Prober[T]) Next(at int64) { p.next = at }

// Soon makes it due at a time, if it is due later.
func (p *Prober[T]) Soon(at int64) { p.next = min(p.next, at) }

// Ask begins the next probe if it is due.
func (p *Prober[T]) Ask(now int64) {
	if p.began != 0 || now < p.next || p.ctx.Err() != nil {
		return
	}
	p.began = max(now, 1)
	p.next = p.began + p.o.Period.Nanoseconds()
	p.running.Go(func() { p.answers <- p.ask() })
}

// Hangs is since when a probe has not come back within its bound, and in which call it is; 0 and
// "" when it has.
func (p *Prober[T]) Hangs(now int64) (since int64, call string) {
	if p.began == 0 || now-p.began < p.o.Bound.Nanoseconds() {
		return 0, ""
	}
	if p.hangs == "" {
		p.hangs = p.Call()
		p.o.Log.Error(p.o.What+" does not answer", "call", p.hangs)
	}
	return p.began, p.hangs
}

// Close ends what Go began, and then calls end. Calls that do not return within 2 s are left
// behind, with end.
func (p *Prober[T]) Close(end func()) error {
	p.cancel()
	done := make(chan struct{})
	go func() {
		p.running.Wait()
		end()
		close(done)
	}()
	timer := time.NewTimer(closeWithin)
	defer timer.Stop()
	select {
	case <-done:
		return nil
	case <-timer.C:
		return fmt.Errorf("stop asking %s: a call does not return, the last one of a probe was %s", p.o.What, p.Call())
	}
}
