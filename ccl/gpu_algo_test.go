package ccl_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/record"
)

// TestGPURecordsAlgo: an option's name, what the communicator says that it ran, and
// what its stamps say, are one word.
func TestGPURecordsAlgo(t *testing.T) {
	n, gpus := gpuRanks(t)
	for _, name := range []string{"ll", "ll2", "ll12", "sym", "ce"} {
		if testing.Short() && (name == "ll" || name == "ll2") { // under the race detector: the host does for them what it does for ll12
			continue
		}
		t.Run(name, func(t *testing.T) {
			if name == "ce" && n > gpus {
				t.Skip("ranks that share a GPU take no copy engines")
			}
			var mu sync.Mutex
			paths := map[int]string{}
			force := func(cfg *ccl.Config) {
				mu.Lock()
				defer mu.Unlock()
				cfg.GPU.Algo, paths[cfg.Rank] = name, cfg.Recorder.Path()
			}
			ranks(t, n, onGPUs(t, gpus, force), func(ctx context.Context, c *ccl.Comm) error {
				m, err := newMemory(ctx, c, 4<<20, true)
				if err != nil {
					return err
				}
				s, buf := c.NewStream(), m.bytes(ccl.Float32, 0, 4096)
				if err := do(ctx, s, c.AllReduce(s, buf, buf, ccl.Sum)); err != nil {
					return err
				}
				mu.Lock()
				path := paths[c.Rank()]
				mu.Unlock()
				r, err := record.Open(path)
				if err != nil {
					return err
				}
				defer r.Close()
				st, err := lastStamp(r, make([]record.Stamp, 8), record.AllReduce)
				if err != nil {
					return err
				}
				if ran, _ := c.GPUAlgo(); ran.String() != name || st.Algo != ran {
					return fmt.Errorf("asked for %s, ran %v, recorded %v", name, ran, st.Algo)
				}
				return m.free(ctx)
			})
		})
	}
}
