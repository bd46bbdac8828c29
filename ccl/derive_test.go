package ccl_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl"
)

// sum checks that c works: it adds the ranks' numbers.
func sum(ctx context.Context, c *ccl.Comm) error {
	s, x := c.NewStream(), []int64{int64(c.Rank())}
	if err := do(ctx, s, c.AllReduce(s, ccl.Of(x), ccl.Of(x), ccl.Sum)); err != nil {
		return err
	}
	if want := int64(c.Size() * (c.Size() - 1) / 2); x[0] != want {
		return fmt.Errorf("%s of %d ranks: sum %d, want %d", c.Name(), c.Size(), x[0], want)
	}
	return nil
}

func TestSplit(t *testing.T) {
	ranks(t, 5, nodes(2), func(ctx context.Context, world *ccl.Comm) error {
		r := world.Rank()
		color := r % 2
		if r == 4 {
			color = ccl.NoColor
		}
		// Other operations go on meanwhile.
		s, x := world.NewStream(), []int64{1}
		if err := world.AllReduce(s, ccl.Of(x), ccl.Of(x), ccl.Sum); err != nil {
			return err
		}
		c, err := world.Split(ctx, color, -r, fmt.Sprintf("half%d", color))
		if err != nil {
			return err
		}
		if err := s.Wait(ctx); err != nil {
			return err
		}
		if r == 4 {
			if c != nil {
				return errors.New("NoColor got a communicator")
			}
			return nil
		}
		defer c.Close()
		if want := []int{1, 1, 0, 0}[r]; c.Size() != 2 || c.Rank() != want || c.Name() != fmt.Sprintf("half%d", color) || c.ID() == world.ID() {
			return fmt.Errorf("rank %d of the world is rank %d of %d in %s", r, c.Rank(), c.Size(), c.Name())
		}
		return sum(ctx, c)
	})
}

func TestShrink(t *testing.T) {
	for _, mode := range []ccl.ShrinkMode{ccl.ShrinkDefault, ccl.ShrinkAbort} {
		ranks(t, 4, nodes(2), func(ctx context.Context, c *ccl.Comm) error {
			if err := sum(ctx, c); err != nil {
				return err
			}
			if c.Rank() == 2 {
				return nil
			}
			s, x := c.NewStream(), []int64{1}
			if mode == ccl.ShrinkAbort {
				// Never to end: rank 2 does not call it.
				if err := c.AllReduce(s, ccl.Of(x), ccl.Of(x), ccl.Sum); err != nil && !errors.Is(err, ccl.ErrPeerLost) {
					return err
				}
			}
			small, err := c.Shrink(ctx, []int{2}, mode, "small")
			if err != nil {
				return err
			}
			defer small.Close()
			if want := []int{0, 1, -1, 2}[c.Rank()]; small.Rank() != want || small.Size() != 3 {
				return fmt.Errorf("rank %d became %d of %d", c.Rank(), small.Rank(), small.Size())
			}
			if err := sum(ctx, small); err != nil {
				return err
			}
			if mode == ccl.ShrinkAbort {
				if err := s.Wait(ctx); err == nil {
					return errors.New("an abandoned operation ended well")
				}
				return errExpected
			}
			return nil
		})
	}
}

func TestGrow(t *testing.T) {
	ids := make(chan ccl.UniqueID, 1)
	var newcomer sync.WaitGroup
	newcomer.Go(func() {
		id, ok := <-ids
		if !ok {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		c, err := ccl.Init(ctx, ccl.Config{ID: id, Rank: 2, Size: 3, Name: "large", Secret: secret, Node: "node"})
		if err != nil {
			t.Error(err)
			return
		}
		if err := errors.Join(sum(ctx, c), c.Close()); err != nil {
			t.Error(err)
		}
	})
	ranks(t, 2, nil, func(ctx context.Context, c *ccl.Comm) error {
		var id ccl.UniqueID
		if c.Rank() == 0 {
			var err error
			if id, err = c.GrowID(); err != nil {
				return err
			}
			ids <- id
		}
		large, err := c.Grow(ctx, id, 3, "large")
		if err != nil {
			return err
		}
		defer large.Close()
		if large.Rank() != c.Rank() || large.Size() != 3 {
			return fmt.Errorf("rank %d became %d of %d", c.Rank(), large.Rank(), large.Size())
		}
		return errors.Join(sum(ctx, large), sum(ctx, c))
	})
	close(ids)
	newcomer.Wait()
}
