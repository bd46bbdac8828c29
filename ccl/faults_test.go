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

// faulty runs two ranks that each have an injector.
func faulty(t *testing.T, per int, body func(ctx context.Context, c *ccl.Comm, inj *ccltest.Injector) error) {
	t.Helper()
	inj := []*ccltest.Injector{ccltest.New(), ccltest.New()}
	ranks(t, 2, func(cfg *ccl.Config) { nodes(per)(cfg); cfg.Faults = inj[cfg.Rank] }, func(ctx context.Context, c *ccl.Comm) error {
		return body(ctx, c, inj[c.Rank()])
	})
}

func eachTransport(t *testing.T, test func(t *testing.T, per int)) {
	for name, per := range map[string]int{"shm": 2, "tcp": 1} {
		t.Run(name, func(t *testing.T) { test(t, per) })
	}
}

// TestStall: what a stall holds back arrives once it is over, and nothing ends before.
func TestStall(t *testing.T) {
	eachTransport(t, func(t *testing.T, per int) {
		faulty(t, per, func(ctx context.Context, c *ccl.Comm, inj *ccltest.Injector) error {
			s := c.NewStream()
			for _, n := range []int{1, 100_000} {
				if err := do(ctx, s, c.Barrier(s)); err != nil {
					return err
				}
				if c.Rank() == 0 {
					inj.Stall("", 0, 1)
				}
				x := make([]float32, n)
				for i := range x {
					x[i] = 1
				}
				if err := c.AllReduce(s, ccl.Of(x), ccl.Of(x), ccl.Sum); err != nil {
					return err
				}
				if c.Rank() == 0 {
					short, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
					err := s.Wait(short)
					cancel()
					if !errors.Is(err, ccl.ErrTimeout) {
						return fmt.Errorf("%d elements: want a timeout while stalled, got %v", n, err)
					}
					inj.Clear()
				}
				if err := s.Wait(ctx); err != nil {
					return err
				}
				if x[0] != 2 || x[n-1] != 2 {
					return fmt.Errorf("%d elements: got %v and %v", n, x[0], x[n-1])
				}
			}
			return nil
		})
	})
}

// TestDrop: a cut connection is an error on both sides.
func TestDrop(t *testing.T) {
	eachTransport(t, func(t *testing.T, per int) {
		faulty(t, per, func(ctx context.Context, c *ccl.Comm, inj *ccltest.Injector) error {
			s, x := c.NewStream(), ccl.Of(make([]float32, 10_000))
			if err := do(ctx, s, c.Barrier(s)); err != nil {
				return err
			}
			begun := time.Now()
			if c.Rank() == 0 {
				inj.Drop("", 0, 1)
			}
			var err error
			for err == nil {
				err = do(ctx, s, c.AllReduce(s, x, x, ccl.Sum))
			}
			if err := wantError(c, err, ccl.ErrPeerLost, begun); err != nil {
				return err
			}
			return errExpected
		})
	})
}

// TestDelayRank: a rank that is made late enters late, and all goes well.
func TestDelayRank(t *testing.T) {
	const delay = 20 * time.Millisecond
	faulty(t, 2, func(ctx context.Context, c *ccl.Comm, inj *ccltest.Injector) error {
		s := c.NewStream()
		if err := do(ctx, s, c.Barrier(s)); err != nil {
			return err
		}
		if c.Rank() == 1 {
			inj.DelayRank(delay)
		}
		begun := time.Now()
		for range 3 {
			if err := sum(ctx, c); err != nil {
				return err
			}
		}
		if took := time.Since(begun); c.Rank() == 1 && took < 3*delay {
			return fmt.Errorf("three collectives took %v, each was to be %v late", took, delay)
		}
		return nil
	})
}
