package ccl_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/ccl/ccltest"
)

// TestPeerLostInClose: a rank that dies while the others' Close waits for operations with it
// is named, and at once.
func TestPeerLostInClose(t *testing.T) {
	t.Parallel()
	for _, per := range []int{3, 1} {
		id := freeID(t)
		var ps []*rankProcess
		for r, role := range []string{"closer", "closer", "victim"} {
			ps = append(ps, startRank(t, id, r, 3, per, role))
		}
		for r, p := range ps {
			p.expect(t, r, "ready")
		}
		ps[0].expect(t, 0, "closing")
		ps[1].expect(t, 1, "closing")
		ps[2].cmd.Process.Kill()
		ps[0].expect(t, 0, "lost 2")
		ps[1].expect(t, 1, "lost 2")
	}
}

// TestCloseOfSlowOperation: Close finishes an operation that takes long, as long as it moves.
func TestCloseOfSlowOperation(t *testing.T) {
	t.Parallel()
	inj := []*ccltest.Injector{ccltest.New(), ccltest.New()}
	ranks(t, 2, func(cfg *ccl.Config) {
		nodes(1)(cfg)
		cfg.Faults = inj[cfg.Rank]
	}, func(ctx context.Context, c *ccl.Comm) error {
		s, x := c.NewStream(), make([]int64, 1<<20)
		for i := range x {
			x[i] = int64(i)
		}
		if err := do(ctx, s, c.Barrier(s)); err != nil {
			return err
		}
		inj[c.Rank()].Throttle("", c.Rank(), 1-c.Rank(), 1<<20) // 8 s
		begun := time.Now()
		if err := errors.Join(c.AllReduce(s, ccl.Of(x), ccl.Of(x), ccl.Sum), c.Close()); err != nil {
			return fmt.Errorf("after %v: %w", time.Since(begun), err)
		}
		for i := range x {
			if x[i] != 2*int64(i) {
				return fmt.Errorf("element %d is %d", i, x[i])
			}
		}
		return nil
	})
}

// TestShrinkAgain: ranks whose tries to shrink did not meet may try again.
func TestShrinkAgain(t *testing.T) {
	t.Parallel()
	for _, early := range []int{0, 1} {
		gaveUp := make(chan struct{})
		ranks(t, 3, nil, func(ctx context.Context, c *ccl.Comm) error {
			switch c.Rank() {
			case 2:
				return nil
			case early:
				soon, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
				defer cancel()
				if _, err := c.Shrink(soon, []int{2}, ccl.ShrinkDefault, "small"); !errors.Is(err, context.DeadlineExceeded) {
					return fmt.Errorf("a Shrink to which nobody came: %w", err)
				}
				close(gaveUp)
			default:
				<-gaveUp
			}
			for range 2 {
				small, err := c.Shrink(ctx, []int{2}, ccl.ShrinkDefault, "small")
				if err != nil {
					return err
				}
				if err := errors.Join(sum(ctx, small), small.Close()); err != nil {
					return err
				}
			}
			return nil
		})
	}
}
