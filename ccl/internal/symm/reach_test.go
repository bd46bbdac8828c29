package symm

import (
	"bytes"
	"context"
	"encoding/json"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/cudatest"
)

// rounds is an all-gather of many calls, whose blobs change may alter.
func rounds(n int, change func(round, rank int, blob []byte) []byte) func(rank int) func(context.Context, []byte) ([][]byte, error) {
	var mu sync.Mutex
	var calls []func(rank int) func(context.Context, []byte) ([][]byte, error)
	return func(rank int) func(context.Context, []byte) ([][]byte, error) {
		round := 0
		return func(ctx context.Context, b []byte) ([][]byte, error) {
			mu.Lock()
			if round == len(calls) {
				calls = append(calls, gather(n))
			}
			all := calls[round](rank)
			mu.Unlock()
			if change != nil {
				b = change(round, rank, b)
			}
			round++
			return all(ctx, b)
		}
	}
}

func TestReach(t *testing.T) {
	hidden := func(rank int) func(round, r int, blob []byte) []byte { // its socket is in another container
		return func(round, r int, blob []byte) []byte {
			if round == 0 && r == rank {
				return bytes.Replace(blob, []byte("symm-"), []byte("gone-"), 1)
			}
			return blob
		}
	}
	lies := func(round, r int, blob []byte) []byte { // what it wrote is not what is read
		if round == 1 && r == 2 {
			blob, _ = json.Marshal([]seen{{0, "what is read is not what it wrote"}})
		}
		return blob
	}
	for name, c := range map[string]struct {
		apart  [][2]int
		near   [][]int
		change func(round, rank int, blob []byte) []byte
		want   [][2]int
		reason string
	}{
		"all":              {near: [][]int{{0, 1, 2, 3}}},
		"no peer access":   {apart: [][2]int{{0, 2}, {3, 1}}, near: [][]int{{0, 1, 2, 3}}, want: [][2]int{{0, 2}, {1, 3}}, reason: "the driver says"},
		"two nodes":        {apart: [][2]int{{0, 2}, {0, 1}}, near: [][]int{{0, 1}, {2, 3}}, want: [][2]int{{0, 1}}, reason: "the driver says"},
		"nodes of one":     {apart: [][2]int{{0, 1}}, near: [][]int{{0}, {1}, {2}, {3}}},
		"other containers": {near: [][]int{{0, 1, 2, 3}}, change: hidden(1), want: [][2]int{{0, 1}, {1, 2}, {1, 3}}, reason: "no such file"},
		"one side sees it": {near: [][]int{{0, 1, 2, 3}}, change: lies, want: [][2]int{{0, 2}}, reason: "what is read"},
	} {
		t.Run(name, func(t *testing.T) {
			const n = 4
			cs := configs(t, n)
			all := rounds(n, c.change)
			for _, p := range c.apart {
				cudatest.Separate(p[0], p[1])
			}
			files := openFiles(t)
			got := make([][]Barrier, n)
			for r, err := range each(n, func(r int) (err error) {
				cfg := cs[r]
				cfg.Exchange = all(r)
				for _, near := range c.near {
					for _, p := range near {
						if p == r {
							got[r], err = Reach(within(t, 2*time.Minute), cfg, near)
						}
					}
				}
				return err
			}) {
				if err != nil {
					t.Fatalf("rank %d: %v", r, err)
				}
			}
			for r := range n {
				var pairs [][2]int
				for _, b := range got[r] {
					pairs = append(pairs, [2]int{b.A, b.B})
					if !strings.Contains(b.Reason, c.reason) {
						t.Errorf("rank %d: ranks %d and %d: %s", r, b.A, b.B, b.Reason)
					}
				}
				if len(pairs) != len(c.want) {
					t.Fatalf("rank %d: %v apart, want %v", r, pairs, c.want)
				}
				for i := range pairs {
					if pairs[i] != c.want[i] {
						t.Errorf("rank %d: %v apart, want %v", r, pairs, c.want)
					}
				}
			}
			if now := openFiles(t); now != files {
				t.Errorf("%d files open, %d before", now, files)
			}
		})
	}
}

// TestReachMaps: what the driver does not say, mapping shows.
func TestReachMaps(t *testing.T) {
	const n = 2
	cs := configs(t, n)
	all := rounds(n, nil)
	cudatest.Fail("cuMemSetAccess", 217, 4) // each rank's own memory, then the first peer's, then the second
	errs := each(n, func(r int) error {
		cfg := cs[r]
		cfg.Exchange = all(r)
		list, err := Reach(within(t, 2*time.Minute), cfg, []int{0, 1})
		if err == nil && (len(list) != 1 || !strings.Contains(list[0].Reason, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")) {
			t.Errorf("rank %d: %v", r, list)
		}
		return err
	})
	for r, err := range errs {
		if err != nil {
			t.Errorf("rank %d: %v", r, err)
		}
	}
}

// TestReachFails: a rank that has nothing to show is an error on all, not one that is apart.
func TestReachFails(t *testing.T) {
	const n = 3
	cs := configs(t, n)
	all := rounds(n, nil)
	cudatest.Fail("cuMemExportToShareableHandle", 999, 1)
	for r, err := range each(n, func(r int) error {
		cfg := cs[r]
		cfg.Exchange = all(r)
		_, err := Reach(within(t, 2*time.Minute), cfg, []int{0, 1, 2})
		return err
	}) {
		if err == nil || !strings.Contains(err.Error(), "cuMemExportToShareableHandle") {
			t.Errorf("rank %d: %v", r, err)
		}
	}
}
