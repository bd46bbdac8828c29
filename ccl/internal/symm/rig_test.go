package symm

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/cudatest"
)

var key = []byte("0123456789abcdef0123456789abcdef")

// gather is an all-gather between goroutines.
func gather(n int) func(rank int) func(context.Context, []byte) ([][]byte, error) {
	blobs := make([][]byte, n)
	var wg sync.WaitGroup
	wg.Add(n)
	return func(rank int) func(context.Context, []byte) ([][]byte, error) {
		return func(_ context.Context, b []byte) ([][]byte, error) {
			blobs[rank] = b
			wg.Done()
			wg.Wait()
			return blobs, nil
		}
	}
}

func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// configs are n ranks of this process, a fake GPU each.
func configs(t testing.TB, n int) []Config {
	all := gather(n)
	dir := filepath.Join(t.TempDir(), "run")
	cs := make([]Config, n)
	for r := range cs {
		cs[r] = Config{Device: cudatest.Device(t, r), Rank: r, Size: n, Exchange: all(r), Key: key, Dir: dir}
	}
	return cs
}

// each runs f as every rank at once and gives the errors by rank.
func each(n int, f func(rank int) error) []error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for r := range n {
		wg.Go(func() { errs[r] = f(r) })
	}
	wg.Wait()
	return errs
}

func join(t testing.TB, n int) []*Group {
	cs, gs := configs(t, n), make([]*Group, n)
	for r, err := range each(n, func(r int) (err error) { gs[r], err = Join(within(t, 2*time.Minute), cs[r]); return }) {
		if err != nil {
			t.Fatalf("rank %d: %v", r, err)
		}
	}
	t.Cleanup(func() {
		for _, g := range gs {
			g.Close()
		}
	})
	return gs
}

func peek(t testing.TB, d *cuda.Device, p cuda.Ptr) (v uint32) {
	t.Helper()
	s := d.StreamOf(0)
	if err := errors.Join(s.CopyOut(unsafe.Pointer(&v), p, 4), s.Synchronize()); err != nil {
		t.Error(err)
	}
	return v
}

func poke(t testing.TB, d *cuda.Device, p cuda.Ptr, v uint32) {
	t.Helper()
	s := d.StreamOf(0)
	if err := errors.Join(s.Set32(p, v, 1), s.Synchronize()); err != nil {
		t.Error(err)
	}
}

func openFiles(t testing.TB) int {
	es, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(es)
}

// allocate is an Alloc of all ranks that works, used and closed.
func allocate(t testing.TB, gs []*Group, bytes uint64) {
	t.Helper()
	ms := make([]*Memory, len(gs))
	for r, err := range each(len(gs), func(r int) (err error) { ms[r], err = gs[r].Alloc(within(t, 2*time.Minute), bytes); return }) {
		if err != nil {
			t.Fatalf("rank %d: %v", r, err)
		}
	}
	for r, m := range ms {
		if m.Size < bytes || m.Size != m.Stride || m.At(r) != m.Own() {
			t.Fatalf("rank %d: %+v", r, m)
		}
		d := gs[r].cfg.Device
		for peer := range gs {
			// Everyone adds its mark to a word of everyone's memory, which begins at zero.
			at := m.At(peer) + cuda.Ptr(m.Size) - 4
			if v := peek(t, d, at); v != 1<<r-1 {
				t.Errorf("rank %d sees %b at rank %d", r, v, peer)
			}
			poke(t, d, at, 1<<(r+1)-1)
		}
	}
	for _, m := range ms {
		for range 2 {
			if err := m.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}
