package ccl_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/cudatest"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/kernels/kernelstest"
)

// Tests of GPU ranks run on the GPUs there are (several ranks share one, where there
// are too few: see defaultRanks, which LOCKSTEP_TEST_GPU_RANKS overrides), or on fake ones,
// whose kernels are the real ones on CPU threads.

// faked says that the GPUs are not real.
var faked bool

// fakeGPUs puts fake GPUs in place where there is no real one.
func fakeGPUs(dir string) (stop func(), err error) {
	none := func() {}
	for _, lib := range []string{"libcuda.so.1", "/usr/local/nvidia/lib64/libcuda.so.1"} {
		if exec.Command("sh", "-c", "ldconfig -p | grep -q "+lib+" || test -e "+lib).Run() == nil {
			return none, nil
		}
	}
	objects, err := kernelstest.Build(dir)
	if errors.Is(err, kernelstest.ErrUnavailable) {
		return none, nil
	}
	if err != nil {
		return none, err
	}
	stop, err = cudatest.Start(cudatest.Options{GPUs: 4, Major: 8, Kernels: objects})
	if errors.Is(err, cudatest.ErrUnavailable) {
		return none, nil
	}
	faked = err == nil
	return stop, err
}

// defaultRanks is how many ranks tests have on so many GPUs: of real ones two on each at most, since
// the streams of more need more hardware queues than there are.
func defaultRanks(gpus int, faked bool) int {
	if faked {
		return 4
	}
	return max(2, min(4, 2*gpus))
}

// wantedRanks is how many ranks there are on how many GPUs; no GPUs is an error.
func wantedRanks() (n, gpus int, err error) {
	if gpus, err = ccl.Devices(); err != nil || gpus == 0 {
		return 0, 0, cmp.Or(err, errors.New("there is none"))
	}
	if v := os.Getenv("LOCKSTEP_TEST_GPU_RANKS"); v != "" {
		n, err := strconv.Atoi(v)
		return n, gpus, err
	}
	return defaultRanks(gpus, faked), gpus, nil
}

// tellRanks says what tests on GPUs run on, before the first test.
func tellRanks() {
	switch n, gpus, err := wantedRanks(); {
	case err != nil: // gpuRanks says so
	case faked:
		fmt.Printf("GPU tests: %d ranks on %d fake GPUs\n", n, gpus)
	default:
		fmt.Printf("GPU tests: %d ranks on %d GPUs\n", n, gpus)
	}
}

func gpuRanks(t *testing.T) (n, gpus int) {
	t.Helper()
	n, gpus, err := wantedRanks()
	switch {
	case gpus == 0:
		t.Skipf("no GPU: %v", err)
	case err != nil:
		t.Fatal(err)
	}
	return n, gpus
}

func TestGPURanksByDefault(t *testing.T) {
	for gpus, want := range []int{1: 2, 2: 4, 3: 4, 8: 4} {
		if got := defaultRanks(gpus, false); want > 0 && got != want {
			t.Errorf("%d ranks on %d GPUs, want %d", got, gpus, want)
		}
		if got := defaultRanks(gpus, true); got != 4 {
			t.Errorf("%d ranks on %d fake GPUs, want 4", got, gpus)
		}
	}
}

// meeting is of the ranks that ranks runs: goroutines, which need no communicator for it.
type meeting struct {
	mu   sync.Mutex
	of   int
	here int
	all  chan struct{} // closed when they are, and made anew
}

type meetingKey struct{}

// meet waits until all ranks of ranks have called it.
func meet(ctx context.Context) error {
	m := ctx.Value(meetingKey{}).(*meeting)
	m.mu.Lock()
	all := m.all
	if m.here++; m.here == m.of {
		m.here, m.all = 0, make(chan struct{})
		close(all)
	}
	m.mu.Unlock()
	select {
	case <-all:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("the other ranks do not come: %w", ctx.Err())
	}
}

// capture captures what all ranks do alike. Ranks that share a GPU go on together: the driver may make a
// graph ready only while nothing runs in the context (cuGraphInstantiate did not return on an H200), and
// another rank's, launched already, would wait for this one's.
func capture(ctx context.Context, c *ccl.Comm, s *ccl.Stream, gpus int, f func() error) (*ccl.Graph, error) {
	g, err := s.Capture(ccl.GPU(c.Rank()%gpus), f)
	if err == nil && gpus < c.Size() {
		err = meet(ctx)
	}
	return g, err
}

// returns is what a call returns, or that it has not for long: the driver may hold a thread up for good.
func returns(call func() error) error {
	done := make(chan error, 1)
	go func() { done <- call() }()
	select {
	case err := <-done:
		return err
	case <-time.After(patience / 4):
		return errors.New("the call does not return")
	}
}
