package gpu

import (
	"context"
	"strings"
	"sync"
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/cudatest"
	"github.com/lockstep-ccl/lockstep/record"
)

// exchange is an all-gather between goroutines, as often as all of them call it.
func exchange(n int) func(rank int) func(context.Context, []byte) ([][]byte, error) {
	var mu sync.Mutex
	type call struct {
		blobs [][]byte
		all   sync.WaitGroup
	}
	var calls []*call
	return func(rank int) func(context.Context, []byte) ([][]byte, error) {
		turn := 0
		return func(_ context.Context, b []byte) ([][]byte, error) {
			mu.Lock()
			if turn == len(calls) {
				calls = append(calls, &call{blobs: make([][]byte, n)})
				calls[turn].all.Add(n)
			}
			k := calls[turn]
			turn++
			mu.Unlock()
			k.blobs[rank] = b
			k.all.Done()
			k.all.Wait()
			return k.blobs, nil
		}
	}
}

// TestLinks: all ranks know alike whether NVLink joins all of their GPUs, though each has asked
// about its own alone, and what is not known counts as PCIe.
func TestLinks(t *testing.T) {
	cudatest.Device(t, 0) // or skip; heals at the end
	for name, w := range map[string]struct {
		gpus []int
		with func()
		want string // in the reason
	}{
		"all joined":   {[]int{0, 1, 2, 3}, func() {}, ""},
		"in any order": {[]int{2, 0, 3}, func() { cudatest.Unlink(1, 2) }, ""},
		"one pair":     {[]int{0, 1, 2, 3}, func() { cudatest.Unlink(1, 2) }, "NVLink does not join GPU 0000:02:00.0 of rank 1 and GPU 0000:03:00.0 of rank 2"},
		"two":          {[]int{0, 1}, func() { cudatest.Unlink(1, 0) }, "NVLink does not join GPU 0000:01:00.0 of rank 0"},
		"one GPU":      {[]int{1, 0, 1}, func() {}, "of rank 0 and GPU 0000:02:00.0 of rank 2 are one"},
		"not told":     {[]int{3, 0}, func() { cudatest.Fail("cuDeviceGetP2PAttribute", 999, 1) }, "cuDeviceGetP2PAttribute(3, GPU"},
		"alone":        {[]int{1}, func() { cudatest.Unlink(1, 2) }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			defer cudatest.Heal()
			w.with()
			n := len(w.gpus)
			all, comms, errs := exchange(n), make([]*Comm, n), make([]error, n)
			var wg sync.WaitGroup
			for r := range n {
				c := chooser(n, 0)
				c.cfg, c.rank = Config{Rank: r, Size: n, Exchange: all(r), Force: record.AlgoChain}, r
				var err error
				if c.dev, err = open(w.gpus[r]); err != nil {
					t.Fatal(err)
				}
				defer c.dev.release()
				comms[r] = c
				wg.Go(func() { errs[r] = c.agree(t.Context()) })
			}
			wg.Wait()
			for r, c := range comms {
				if errs[r] != nil || c.unlinked != comms[0].unlinked || !strings.Contains(c.unlinked, w.want) || (w.want == "") != (c.unlinked == "") {
					t.Errorf("rank %d: %q, %v; want %q", r, c.unlinked, errs[r], w.want)
				}
				if want := name == "one GPU"; c.shared != want || c.has(record.AllGather, record.AlgoCopyEngine) == want {
					t.Errorf("rank %d shares a GPU: %v", r, c.shared)
				}
				if p := c.choose(call{coll: record.Broadcast, bytes: 1 << 20}); (p.algo == record.AlgoChain) != (w.want == "" && n > 1) || c.Refused() != c.unlinked {
					t.Errorf("rank %d: %v, refused %q", r, p.algo, c.Refused())
				}
			}
		})
	}
}

// TestLinksUnseen: of a GPU that the process does not see NVML tells. What NVML does not know nobody does.
func TestLinksUnseen(t *testing.T) {
	const bus = "0000:0a:00.0" // GPU 9
	cudatest.Device(t, 0)
	dev, err := open(0)
	if err != nil {
		t.Fatal(err)
	}
	defer dev.release()
	for name, w := range map[string]struct {
		bus  string
		with func()
		want []string // in the reason
	}{
		"joined":       {bus, func() {}, nil},
		"by PCIe":      {bus, func() { cudatest.Unlink(9, 0) }, []string{"NVLink does not join GPU 0000:01:00.0 of rank 0 and GPU 0000:0a:00.0 of rank 1"}},
		"another pair": {bus, func() { cudatest.Unlink(9, 8) }, nil},
		"unseen":       {"0000:aa:00.0", func() {}, []string{"is not known", "CUDA_VISIBLE_DEVICES", "nvmlDeviceGetHandleByPciBusId(0000:aa:00.0): error 6"}},
		"no answer":    {bus, func() { cudatest.Fail("nvmlDeviceGetP2PStatus", 999, 1) }, []string{"is not known", "nvmlDeviceGetP2PStatus(0000:01:00.0, 0000:0a:00.0, 2): error 999"}},
	} {
		t.Run(name, func(t *testing.T) {
			defer cudatest.Heal()
			w.with()
			c := &Comm{size: 2, dev: dev}
			why := c.lacksLink([]string{dev.PCIBus, w.bus})
			if (why == "") != (w.want == nil) {
				t.Errorf("%q, want %q", why, w.want)
			}
			for _, text := range w.want {
				if !strings.Contains(why, text) {
					t.Errorf("%q, want %q", why, text)
				}
			}
		})
	}
}
