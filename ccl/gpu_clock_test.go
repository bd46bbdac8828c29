package ccl_test

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/record"
)

// TestGPUClock holds the error that the recorder states of a GPU's times against
// what is certain of them: an operation begins after its call, and has ended when
// Wait returns. LOCKSTEP_TEST_CLOCK_FOR (1 s) is how long; it prints a line a minute,
// and in every other minute the GPU is kept busy between the operations.
func TestGPUClock(t *testing.T) {
	n, gpus := gpuRanks(t)
	length := time.Second
	if v := os.Getenv("LOCKSTEP_TEST_CLOCK_FOR"); v != "" {
		var err error
		if length, err = time.ParseDuration(v); err != nil {
			t.Fatal(err)
		}
	}
	const every = 100 * time.Millisecond
	var mu sync.Mutex
	path := ""
	keep := func(cfg *ccl.Config) {
		mu.Lock()
		defer mu.Unlock()
		if cfg.Rank == 0 {
			path = cfg.Recorder.Path()
		}
	}
	ranks(t, n, onGPUs(t, gpus, keep), func(_ context.Context, c *ccl.Comm) error {
		ctx, cancel := context.WithTimeout(t.Context(), 2*length+patience)
		defer cancel()
		s := c.NewStream()
		m, err := newMemory(ctx, c, 1<<20, true)
		if err != nil {
			return err
		}
		small, large := m.bytes(ccl.Float32, 0, 64), m.bytes(ccl.Float32, 0, 1<<20)
		if err := do(ctx, s, c.AllReduce(s, small, small, ccl.Sum)); err != nil {
			return err
		}
		var r *record.Reader
		stamps := make([]record.Stamp, 64)
		if c.Rank() == 0 {
			mu.Lock()
			r, err = record.Open(path)
			mu.Unlock()
			if err != nil {
				return err
			}
			defer r.Close()
		}
		var first record.DeviceAnchor
		if r != nil {
			first = r.Devices(nil)[0].Anchor
		}
		perMinute := int(time.Minute / every)
		var stated, early, late []int64
		for i := range int(length / every) {
			if busy := i/perMinute%2 == 1; busy && !faked {
				for range 100 {
					if err := c.AllReduce(s, large, large, ccl.Sum); err != nil {
						return err
					}
				}
			}
			time.Sleep(every)
			if err := s.Wait(ctx); err != nil {
				return err
			}
			for r != nil && r.Stamps(stamps) > 0 {
			}
			called := record.Now()
			if err := do(ctx, s, c.AllReduce(s, small, small, ccl.Sum)); err != nil {
				return err
			}
			seen := record.Now()
			if r == nil {
				continue
			}
			st, err := lastStamp(r, stamps, record.AllReduce)
			if err != nil {
				return err
			}
			before, after := st.Start+st.Err-called, seen-(st.End-st.Err)
			if before < 0 || after < 0 {
				return fmt.Errorf("after %v: an operation began %d ns before its call or ended %d ns after it was seen to have ended, by a clock said to be known to ±%d ns; %s",
					time.Duration(i)*every, -before, -after, st.Err, gained(first, r.Devices(nil)[0].Anchor))
			}
			stated, early, late = append(stated, st.Err), append(early, before), append(late, after)
			if (i+1)%perMinute == 0 || i+1 == int(length/every) {
				slices.Sort(stated)
				t.Logf("minute %2d, busy %5v: %4d operations; error stated: median %d ns, worst %d ns; least room before %d ns, after %d ns; %s",
					i/perMinute+1, i/perMinute%2 == 1, len(stated), stated[len(stated)/2], stated[len(stated)-1], slices.Min(early), slices.Min(late), gained(first, r.Devices(nil)[0].Anchor))
				stated, early, late = nil, nil, nil
			}
		}
		return m.free(ctx)
	})
}
