package ccl_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/cudatest"
	"github.com/lockstep-ccl/lockstep/record"
)

// TestGPURecorderOnDisk: where the driver takes no memory of the recorder's file, ranks
// start all the same and say so once, and their operations are recorded; where it takes
// none at all they go on without.
func TestGPURecorderOnDisk(t *testing.T) {
	_, gpus := gpuRanks(t)
	const n = 2
	if !faked {
		t.Skip("on GPUs LOCKSTEP_RUNTIME_DIR on a disk shows the same")
	}
	for _, tt := range []struct {
		name, says string
		refuse     func()
		stamps     bool
	}{
		{"files are refused", "GPUs cannot write to the flight recorder's file", cudatest.RefuseFiles, true},
		{"all memory is refused", "no flight recorder of what runs on GPUs", func() { cudatest.Fail("cuMemHostRegister", 1, 0) }, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.refuse()
			defer cudatest.Heal()
			var mu sync.Mutex
			var said bytes.Buffer
			recs := map[int]*record.Writer{}
			log := slog.New(slog.NewTextHandler(&said, nil)) // one write a line, under a lock of its own
			keep := func(cfg *ccl.Config) {
				mu.Lock()
				defer mu.Unlock()
				recs[cfg.Rank], cfg.Log = cfg.Recorder, log
			}
			ranks(t, n, onGPUs(t, gpus, keep), func(ctx context.Context, c *ccl.Comm) error {
				m, err := newMemory(ctx, c, 4<<20, true)
				if err != nil {
					return err
				}
				mu.Lock()
				path := recs[c.Rank()].Path()
				mu.Unlock()
				r, err := record.Open(path)
				if err != nil {
					return err
				}
				defer r.Close()
				s, stamps := c.NewStream(), make([]record.Stamp, 64)
				for _, count := range []int{64, 4096} {
					send := m.bytes(ccl.Uint8, c.Rank()*count, count)
					called := record.Now()
					if err := do(ctx, s, c.AllGather(s, send, m.bytes(ccl.Uint8, 0, n*count))); err != nil {
						return err
					}
					if !tt.stamps {
						continue
					}
					st, err := lastStamp(r, stamps, record.AllGather)
					if err != nil {
						return err
					}
					if st.Bytes != uint64(n*count) || st.Start+st.Err < called || st.End < st.Start {
						return fmt.Errorf("%d bytes called at %d: recorded %+v", n*count, called, st)
					}
				}
				return m.free(ctx)
			})
			if got := strings.Count(said.String(), tt.says); got != n {
				t.Errorf("%d ranks said it %d times:\n%s", n, got, said.String())
			}
		})
	}
}
