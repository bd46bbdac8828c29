package ccl_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/record"
)

// TestGPUStaged runs collectives on buffers in no window, in as many pieces as staging memory
// makes of them: on a stream, and replayed. Staging memory is so small that a fake GPU has
// enough to do.
func TestGPUStaged(t *testing.T) {
	n, gpus := gpuRanks(t)
	counts := []int{40_001, 40_000, 150_001, 150_000} // elements of a share: one piece, short messages, several pieces, messages
	if !faked {
		counts = append(counts, 1_000_003, 6_000_000)
	}
	if testing.Short() { // under the race detector
		counts = counts[2:]
	}
	most := counts[len(counts)-1]
	small := func(cfg *ccl.Config) { cfg.GPU.Staging = 2 }
	for _, captured := range []bool{false, true} {
		name := map[bool]string{false: "stream", true: "graph"}[captured]
		t.Run(name, func(t *testing.T) {
			var list []call
			for _, coll := range kinds {
				if !coll.HasData() {
					continue
				}
				for i, count := range counts {
					if !coll.Traits().Parted() {
						count *= n
					}
					list = append(list, call{coll, ccl.Float32, ccl.Sum, count, i % n, (i+len(list))%2 == 0, len(list)})
				}
			}
			ranks(t, n, onGPUs(t, gpus, small), func(ctx context.Context, c *ccl.Comm) error {
				m, err := newMemory(ctx, c, 2*most*4*n+1<<20, false)
				if err != nil {
					return err
				}
				s := c.NewStream()
				for i, k := range list {
					if err := staged(ctx, c, s, m, k, i%3, captured && k.coll != record.Gather && k.coll != record.Scatter, gpus); err != nil {
						return err
					}
				}
				return m.free(ctx)
			})
		})
	}
}

// TestGPUSkewed moves long shares that are no multiple of 16 bytes: from windows by copy engines, on plain
// buffers in two pieces, and in several that overlap.
func TestGPUSkewed(t *testing.T) {
	_, gpus := gpuRanks(t)
	const n, count = 3, 12<<17 + 3 // elements of eight bytes, of which checking takes long
	gather := call{record.AllGather, ccl.Float64, ccl.Sum, count, 0, false, 1}
	inPlace := call{record.AllGather, ccl.Float64, ccl.Sum, count, 0, true, 2}
	all := call{record.AlltoAll, ccl.Float64, ccl.Sum, count, 0, false, 3}
	for _, w := range []struct {
		name    string
		window  bool
		staging int
		calls   []call
	}{
		{"windows", true, 0, []call{gather, inPlace, all}},
		{"two pieces", false, 0, []call{gather, inPlace, all}},
		{"several pieces", false, 16, []call{gather, all}},
	} {
		t.Run(w.name, func(t *testing.T) {
			if testing.Short() && w.staging == 0 { // under the race detector
				t.Skip("takes long")
			}
			change := func(cfg *ccl.Config) { cfg.GPU.Staging = w.staging }
			ranks(t, n, onGPUs(t, gpus, change), func(ctx context.Context, c *ccl.Comm) error {
				m, err := newMemory(ctx, c, 2*count*8*n+1<<20, w.window)
				if err != nil {
					return err
				}
				s := c.NewStream()
				for i, k := range w.calls {
					if err := staged(ctx, c, s, m, k, i%2, false, gpus); err != nil {
						return err
					}
					if algo, _ := c.GPUAlgo(); (algo == record.AlgoCopyEngine) != (w.window && n <= gpus) {
						return fmt.Errorf("%+v by %v", k, algo)
					}
				}
				return m.free(ctx)
			})
		})
	}
}

// staged runs and checks one call.
func staged(ctx context.Context, c *ccl.Comm, s *ccl.Stream, m *memory, k call, shift int, captured bool, gpus int) error {
	launch := func(f func() error) error { return f() }
	if captured {
		launch = func(f func() error) error {
			g, err := capture(ctx, c, s, gpus, f)
			if err != nil {
				return err
			}
			return errors.Join(g.Launch(s), s.Wait(ctx), g.Close())
		}
	}
	check, err := k.deviceBy(ctx, c, s, m, shift, launch)
	if err := do(ctx, s, err); err != nil {
		return err
	}
	return check()
}
