package executor

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/engine"
	"github.com/lockstep-ccl/lockstep/ccl/internal/failure"
	"github.com/lockstep-ccl/lockstep/record"
)

// idleness says how long the holder of the role has had nothing to do. Times are in ns.
type idleness struct {
	waits int
	since int64 // when the wait began, as far as it is known
	told  bool  // the wait was recorded
	seen  int64 // when idle last read the clock
	quiet int64 // time without progress, without the time in which this process did not run
}

const (
	// A wait is recorded after tellAfter. After compareAfter, and every compareEvery, ranks
	// compare their calls.
	tellAfter    = int64(100 * time.Microsecond)
	compareAfter = int64(300 * time.Millisecond)
	compareEvery = int64(500 * time.Millisecond)
	// leftAfter is how long bytes of a rank that has closed may take to arrive.
	leftAfter = int64(500 * time.Millisecond)
	// suspectFor is how long the control plane may take to say why a link broke.
	suspectFor = int64(time.Second)
	// stallMost bounds the time between two readings of the clock that counts as silence. The
	// rest is time in which this process was not scheduled and could not notice bytes.
	stallMost = int64(2 * nap)
	// nap bounds one sleep, so that the end of a context is noticed.
	nap = 20 * time.Millisecond
)

// idle waits a little for something to do. It returns an error if ctx ends, and also fails the
// communicator when a wait has lasted too long.
func (x *Executor) idle(ctx context.Context, i *idleness, seq uint64) error {
	if x.suspect != nil {
		time.Sleep(time.Millisecond)
		now := record.Now()
		if x.doubt += min(now-x.since, stallMost); x.doubt > suspectFor {
			x.Fail(x.suspect, true)
		}
		x.since = now
		return nil
	}
	if x.current == nil && x.queue.at(x.queue.finished.Load()+1).Proxy == nil {
		time.Sleep(min(time.Duration(max(x.entry-record.Now(), 0)), nap))
		if ctx.Err() != nil {
			return x.Interrupted(ctx, seq)
		}
		return nil
	}
	if i.waits++; i.waits == 1 {
		x.eng.Late()
	}
	if x.current == nil || x.eng.Gated() {
		x.attend(i) // links do not show what the GPU does
	} else if polled := x.mesh.Wait(nap); polled && i.waits&63 != 0 && !i.told {
		return nil // only every 64th poll reads the clock
	}
	now := record.Now()
	if i.since == 0 {
		i.since = now
	}
	if ctx.Err() != nil {
		return x.Interrupted(ctx, seq)
	}
	if i.seen != 0 {
		i.quiet += min(now-i.seen, stallMost)
	}
	i.seen = now
	waited := now - i.since
	if waited > tellAfter && !i.told {
		i.told = true
		x.eng.Idle(now)
		if x.current != nil {
			x.Log.lasts(x.current, x.seq, x.plans.last)
		}
	}
	if waited > compareAfter {
		x.announce(now)
	}
	if i.quiet > leftAfter {
		x.missLeavers()
	}
	return nil
}

const (
	// While the GPU has not reached the operation, the rank polls for attendBusy. Then it sleeps
	// for longer and longer, up to attendMost, because the GPU may be busy for any time.
	attendBusy = 200 * time.Microsecond
	attendMost = 200 * time.Microsecond
)

// attend waits a little for the GPU. It also polls the network if an operation is running.
func (x *Executor) attend(i *idleness) {
	now := record.Now()
	if i.since == 0 {
		i.since = now
	}
	waited := time.Duration(now - i.since)
	if x.current != nil {
		x.mesh.Wait(0)
	}
	if waited < attendBusy {
		runtime.Gosched()
		return
	}
	time.Sleep(min(waited/8, attendMost))
}

// announce tells rank 0 which collective this rank is stuck in. Ranks that disagree on a call may
// wait for messages that nobody sends, so no header shows the mismatch.
func (x *Executor) announce(now int64) {
	if x.current == nil || x.current.collective == 0 || x.saidSeq == x.seq && now-x.said < compareEvery {
		return
	}
	x.said, x.saidSeq = now, x.seq
	var b [engine.SignatureSize]byte
	x.op.Encode(b[:])
	x.Control.Tell(b[:])
}

// missLeavers fails the communicator if this rank waits for a rank that has closed it.
func (x *Executor) missLeavers() {
	left := x.left.Load()
	if left == nil || x.current == nil {
		return
	}
	for _, p := range x.eng.Waiting(nil) {
		if slices.Contains(*left, int(p)) {
			x.Fail(&failure.Failure{Peer: int(p), Err: fmt.Errorf("%w: rank %d has closed the communicator", failure.ErrPeerLost, p)}, true)
			return
		}
	}
}
