package bootstrap

import (
	"errors"
	"fmt"
	"sync"
	"testing"
)

func TestRegroup(t *testing.T) {
	controls := mustJoin(t, 6)
	// Two halves, each in reverse order, that outlive their parent.
	groups := make([]*Control, 6)
	err := each(controls, func(c *Control) error {
		members := []int{4, 2, 0}
		if c.Rank()%2 == 1 {
			members = []int{5, 3, 1}
		}
		for i, m := range members {
			if m == c.Rank() {
				g, err := c.Regroup(testContext(t), members, i, "split")
				if err != nil {
					return err
				}
				groups[m] = g
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	leaveAll(controls)
	err = each(groups, func(g *Control) error {
		blobs, err := g.AllGather(testContext(t), g.Members()[g.Rank()].Info)
		if err != nil {
			return err
		}
		members := []int{4, 2, 0}
		if g.ID() != groups[0].ID() {
			members = []int{5, 3, 1}
		}
		for i, m := range members {
			if want := fmt.Sprintf("rank %d", m); string(blobs[i]) != want {
				return fmt.Errorf("new rank %d: %q, want %q", i, blobs[i], want)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if groups[0].ID() != groups[2].ID() || groups[0].ID().Token == groups[1].ID().Token {
		t.Error("group ids are wrong")
	}
	leaveAll(groups)
}

// TestRegroupNamesTheGone: when a listed member's process is gone, Regroup fails on all ranks long
// before the deadline.
func TestRegroupNamesTheGone(t *testing.T) {
	for _, gone := range []int{0, 2} {
		controls := mustJoin(t, 4)
		controls[gone].Close()
		members := []int{0, 1, 2, 3}
		err := each(controls, func(c *Control) error {
			if c.Rank() == gone {
				return nil
			}
			_, err := c.Regroup(testContext(t), members, c.Rank(), "x")
			var lost *LostError
			if !errors.As(err, &lost) || lost.Rank != gone {
				return fmt.Errorf("rank %d: %v", c.Rank(), err)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		leaveAll(controls)
	}
}

func TestGrow(t *testing.T) {
	controls := mustJoin(t, 2)
	ln := controls[0].Listener()
	id := ln.NewID()
	grown := make([]*Control, 3)
	var wg sync.WaitGroup
	for r := range grown {
		cfg := Config{ID: id, Rank: r, Size: 3, Secret: secret}
		if r < 2 {
			cfg.Listener = ln
			if r == 1 {
				cfg.Listener = controls[1].Listener()
			}
		}
		wg.Go(func() {
			var err error
			if grown[r], err = Join(testContext(t), cfg); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if err := each(grown, func(c *Control) error { return c.Barrier(testContext(t)) }); err != nil {
		t.Fatal(err)
	}
	leaveAll(grown)
}
