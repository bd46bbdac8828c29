package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
)

// TestGathersAhead: a rank may have maxAhead gathers in flight. One more fails at once. All complete
// when the other rank calls, and then the rank can gather again.
func TestGathersAhead(t *testing.T) {
	for ahead := range 2 {
		controls := mustJoin(t, 2)
		early, late := controls[ahead], controls[1-ahead]
		over, cancel := context.WithCancel(t.Context())
		cancel()
		for i := range maxAhead {
			if _, err := early.AllGather(over, fmt.Append(nil, i)); !errors.Is(err, context.Canceled) {
				t.Fatalf("rank %d, gather %d: %v", ahead, i, err)
			}
		}
		if _, err := early.AllGather(testContext(t), nil); err == nil || !strings.Contains(err.Error(), "64 before it") {
			t.Fatalf("rank %d, one more: %v", ahead, err)
		}
		for i := range maxAhead {
			blobs, err := late.AllGather(testContext(t), nil)
			if err != nil || string(blobs[ahead]) != fmt.Sprint(i) {
				t.Fatalf("rank %d, gather %d: %q, %v", 1-ahead, i, blobs, err)
			}
		}
		for end := time.Now().Add(10 * time.Second); early.pending() > 0; time.Sleep(time.Millisecond) { // results may be in flight
			if time.Now().After(end) {
				t.Fatalf("rank %d: %d gathers are still under way", ahead, early.pending())
			}
		}
		if err := each(controls, func(c *Control) error { return c.Barrier(testContext(t)) }); err != nil {
			t.Fatal(err)
		}
	}
}

func (c *Control) pending() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.underWay()
}

func TestBroadcastFromNobody(t *testing.T) {
	c := mustJoin(t, 1)[0]
	for _, root := range []int{-1, 1} {
		if _, err := c.Broadcast(testContext(t), root, nil); err == nil {
			t.Errorf("from rank %d: no error", root)
		}
	}
}

// TestMaxBlob: the largest blobs of all ranks fit into one frame, and a longer blob is refused.
func TestMaxBlob(t *testing.T) {
	for _, n := range []int{1, 2, 255, 256, 257, 4096, maxSize} {
		if all := n*(4+MaxBlob(n)) + 64; all > maxFrame || MaxBlob(n) < 2048 {
			t.Errorf("%d ranks of %d bytes are %d, and a frame has %d", n, MaxBlob(n), all, maxFrame)
		}
	}
	c := mustJoin(t, 1)[0]
	long := make([]byte, MaxBlob(1)+1)
	if _, err := c.AllGather(testContext(t), long); err == nil {
		t.Error("a blob beyond the limit is taken")
	}
	if c.contribute(0, 0, long) {
		t.Error("a peer's blob beyond the limit is taken")
	}
}
