package ccl_test

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/record"
)

// The tests of this file spread ranks of one machine over logical nodes.

// layouts are the nodes of ranks.
var layouts = []struct {
	name  string
	nodes []int
}{
	{"2 nodes of 2", []int{0, 0, 1, 1}},
	{"2 nodes of 1", []int{0, 1}},
	{"3 uneven nodes", []int{0, 0, 1, 2}},
	{"2 nodes in turn", []int{0, 1, 0, 1}},
}

func onNodes(nodes []int) func(*ccl.Config) {
	return func(cfg *ccl.Config) { cfg.Node = fmt.Sprintf("node%d", nodes[cfg.Rank]) }
}

// TestGPUNodes runs every collective × type × operator × size between nodes, in place
// and not, in windows and not.
func TestGPUNodes(t *testing.T) {
	_, gpus := gpuRanks(t)
	for _, l := range layouts {
		for _, window := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, window %v", l.name, window), func(t *testing.T) {
				n := len(l.nodes)
				counts := []int{1, 3, 1000, 40_000, 3_000_001}
				ranks(t, n, onGPUs(t, gpus, onNodes(l.nodes)), func(ctx context.Context, c *ccl.Comm) error {
					s := c.NewStream()
					m, err := newMemory(ctx, c, 2*(slices.Max(counts)*8*n)+1<<20, window)
					if err != nil {
						return err
					}
					for i, k := range nodeCalls(n, counts) {
						check, err := k.device(ctx, c, s, m, i%3)
						if err != nil {
							return err
						}
						if err := s.Wait(ctx); err != nil {
							return err
						}
						if err := check(); err != nil {
							return err
						}
					}
					return m.free(ctx)
				})
			})
		}
	}
}

// nodeCalls is gpuCalls, and for fake GPUs some of more than one chunk.
func nodeCalls(n int, counts []int) (list []call) {
	list = gpuCalls(n, counts)
	if faked {
		for _, coll := range kinds {
			list = append(list, call{coll, ccl.Float32, ccl.Sum, 200_003, len(list) % n, false, len(list)})
		}
	}
	return slices.DeleteFunc(list, func(k call) bool {
		return k.coll == record.AlltoAll || k.coll == record.Gather || k.coll == record.Scatter
	})
}
