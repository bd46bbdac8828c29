package bootstrap

import (
	"testing"
	"time"
)

// TestCrowdLeaves: when many ranks leave at once, a rank that stays keeps its session. It gets
// a Left event for each, and none is reported lost.
func TestCrowdLeaves(t *testing.T) {
	const n = 300 // more than maxQueue
	controls := mustJoin(t, n)
	last := controls[n-1]
	if err := each(controls[1:n-1], (*Control).Close); err != nil {
		t.Fatal(err)
	}
	ctx := testContext(t)
	for range n - 2 {
		select {
		case e := <-last.Events():
			if e.Kind != Left {
				t.Fatalf("event %d of rank %d: %v", e.Kind, e.Rank, e.Err)
			}
		case <-ctx.Done():
			t.Fatal("not all were seen to leave")
		}
	}
}

// TestLeftBeforeItIsHeard: the hub reads the frames that a rank sent before it left, even late
// and after a write to that rank has failed.
func TestLeftBeforeItIsHeard(t *testing.T) {
	controls := mustJoin(t, 2)
	hub := controls[0]
	hub.mu.Lock() // the hub handles no frame meanwhile
	controls[1].Tell([]byte("busy"))
	controls[1].Close()
	p := hub.peers[1]
	for deadline, broken := time.Now().Add(time.Minute), false; !broken && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		p.mu.Lock()
		broken = p.broken != nil
		written := p.written == len(p.out)
		p.mu.Unlock()
		if written {
			p.send(seal(frame(frameBye)))
		}
	}
	hub.mu.Unlock()
	if e := next(hub, time.Minute); e == nil || e.Kind != Left || e.Rank != 1 {
		t.Errorf("%+v, want that rank 1 has left", e)
	}
}
