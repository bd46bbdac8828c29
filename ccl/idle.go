package ccl

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/engine"
	"github.com/lockstep-ccl/lockstep/record"
)

// idleness is how long the holder of the role has had nothing to do.
type idleness struct {
	waits int
	since int64
	told  bool
}

const (
	// A wait is worth recording, and ranks compare what they are in, only when
	// it has lasted.
	tellAfter    = int64(100 * time.Microsecond)
	compareAfter = int64(300 * time.Millisecond)
	compareEvery = int64(500 * time.Millisecond)
	// leftAfter is how long bytes of a rank that has closed may take to arrive.
	leftAfter = int64(500 * time.Millisecond)
	// hearsay is how long the control plane may take to say why a link broke.
	hearsay = int64(time.Second)
	// nap bounds one sleep, so that a context's end is noticed.
	nap = 20 * time.Millisecond
)

// idle waits for something to do.
func (c *Comm) idle(ctx context.Context, i *idleness, seq uint64) error {
	if x := &c.executor; x.suspect != nil {
		time.Sleep(time.Millisecond)
		if record.Now()-x.since > hearsay {
			c.fail(x.suspect, true)
		}
		return nil
	}
	if x := &c.executor; x.current == nil && c.queue.at(c.queue.finished.Load()+1).proxy == nil {
		time.Sleep(min(time.Duration(max(x.entry-record.Now(), 0)), nap))
		if ctx.Err() != nil {
			return c.interrupted(ctx, seq)
		}
		return nil
	}
	if i.waits++; i.waits == 1 {
		c.eng.Late()
	}
	if c.executor.current == nil || c.eng.Gated() {
		c.attend(i) // what the GPU does, no link tells
	} else if polled := c.mesh.Wait(nap); polled && i.waits&63 != 0 && !i.told {
		return nil // no clock yet
	}
	now := record.Now()
	if i.since == 0 {
		i.since = now
	}
	if ctx.Err() != nil {
		return c.interrupted(ctx, seq)
	}
	waited := now - i.since
	if waited > tellAfter && !i.told {
		i.told = true
		c.eng.Idle(now)
		if x := &c.executor; x.current != nil {
			c.log.lasts(x.current, x.seq, x.plans.last)
		}
	}
	if waited > compareAfter {
		c.announce(now)
	}
	if waited > leftAfter {
		c.missLeavers()
	}
	return nil
}

const (
	// A rank whose GPU has not come so far polls for a while, then sleeps for longer and
	// longer: the GPU may be busy for as long as it likes.
	attendBusy = 200 * time.Microsecond
	attendMost = 200 * time.Microsecond
)

// attend waits a little for the GPU, and for the network if something is under way.
func (c *Comm) attend(i *idleness) {
	now := record.Now()
	if i.since == 0 {
		i.since = now
	}
	waited := time.Duration(now - i.since)
	if c.executor.current != nil {
		c.mesh.Wait(0)
	}
	if waited < attendBusy {
		runtime.Gosched()
		return
	}
	time.Sleep(min(waited/8, attendMost))
}

// announce tells rank 0 which collective this rank is stuck in: ranks that
// disagree on a call may be waiting for messages that nobody sends.
func (c *Comm) announce(now int64) {
	x := &c.executor
	if x.current == nil || x.current.collective == 0 || x.saidSeq == x.seq && now-x.said < compareEvery {
		return
	}
	x.said, x.saidSeq = now, x.seq
	var b [engine.SignatureSize]byte
	x.op.Encode(b[:])
	c.ctl.Tell(b[:])
}

// missLeavers fails the communicator when this rank waits for one that has closed it.
func (c *Comm) missLeavers() {
	left := c.leavers()
	if len(left) == 0 || c.executor.current == nil {
		return
	}
	for _, p := range c.eng.Waiting(nil) {
		if slices.Contains(left, int(p)) {
			c.fail(&failure{int(p), fmt.Errorf("%w: rank %d has closed the communicator", ErrPeerLost, p)}, true)
			return
		}
	}
}
