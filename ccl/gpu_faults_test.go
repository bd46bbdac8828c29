package ccl_test

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/ccl/ccltest"
	"github.com/lockstep-ccl/lockstep/record"
)

// A rank whose GPU another kernel keeps busy enters late, and the stamps say so: the
// others wait for it, and it waits for nobody.
func TestGPUDelayRank(t *testing.T) {
	n, gpus := gpuRanks(t)
	const late, ops = 1, 5
	paths := make([]string, n)
	delay := func(cfg *ccl.Config) {
		inj := ccltest.New()
		if cfg.Rank == late {
			inj.DelayRank(50 * time.Millisecond)
		}
		cfg.Faults, paths[cfg.Rank] = inj, cfg.Recorder.Path()
	}
	waited := make([]time.Duration, n) // in the median: on busy processors any rank may be late for once
	ranks(t, n, onGPUs(t, gpus, delay), func(ctx context.Context, c *ccl.Comm) error {
		s := c.NewStream()
		m, err := newMemory(ctx, c, 4096, true)
		if err != nil {
			return err
		}
		buf := m.bytes(ccl.Float32, 0, 4096)
		for range ops {
			if err := do(ctx, s, c.AllReduce(s, buf, buf, ccl.Sum)); err != nil {
				return err
			}
		}
		if err := m.free(ctx); err != nil {
			return err
		}
		r, err := record.Open(paths[c.Rank()])
		if err != nil {
			return err
		}
		defer r.Close()
		var stamps []record.Stamp
		for buf := make([]record.Stamp, 64); len(stamps) < ops; time.Sleep(time.Millisecond) {
			// In a recorder on a disk the host brings them, a moment later.
			if stamps = append(stamps, buf[:r.Stamps(buf)]...); ctx.Err() != nil {
				return fmt.Errorf("%d stamps of %d operations", len(stamps), ops)
			}
		}
		slices.SortFunc(stamps, func(a, b record.Stamp) int { return cmp.Compare(a.Wait, b.Wait) })
		waited[c.Rank()] = time.Duration(stamps[ops/2].Wait)
		return nil
	})
	for r, w := range waited {
		if r != late && w <= waited[late] {
			t.Errorf("rank %d waited for %v as a rule, rank %d, which was late, for %v", r, w, late, waited[late])
		}
	}
}
