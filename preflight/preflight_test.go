package preflight

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/ccl/ccltest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// run runs a check of ranks on a node each, all in this process, and returns rank 0's report and
// what the ranks returned.
func run(t *testing.T, ranks int, faults ccl.Faults, o Options) (*Report, []error) {
	t.Helper()
	t.Setenv("LOCKSTEP_RECORDER", "off")
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	id, err := ccl.NewUniqueID(l.Addr().String())
	l.Close()
	if err != nil {
		t.Fatal(err)
	}
	reports, errs := make([]*Report, ranks), make([]error, ranks)
	var wg sync.WaitGroup
	for rank := range ranks {
		wg.Go(func() {
			cfg := ccl.Config{ID: id, Rank: rank, Size: ranks, Secret: []byte("a secret of a check's ranks"), Node: string(rune('a' + rank)), Faults: faults}
			reports[rank], errs[rank] = Run(ctx, cfg, o)
		})
	}
	wg.Wait()
	for rank, r := range reports {
		if (r != nil) != (rank == 0) {
			t.Errorf("rank %d has the report %+v", rank, r)
		}
	}
	if reports[0] == nil {
		t.Fatal(errs)
	}
	return reports[0], errs
}

// quick has a tolerance that noise of a shared machine is far from.
var quick = Options{Size: 1 << 20, Time: 10 * time.Millisecond, Trips: 20, Limits: Limits{Tolerance: 1000}, JoinTimeout: time.Minute, PairTimeout: time.Minute}

func TestRun(t *testing.T) {
	o, steps := quick, map[string]int{}
	o.Together = true
	o.Progress = func(what string, done, total int) { steps[what] = total - done }
	r, errs := run(t, 3, nil, o)
	if err := errors.Join(errs...); err != nil || r.Verdict != VerdictGood || len(r.Good) != 3 {
		t.Errorf("%v: %+v", err, r)
	}
	if left, ok := steps["pairs"]; !ok || left != 0 {
		t.Errorf("rank 0 was told of %v", steps)
	}
}

func TestRunNamesAThrottledEdge(t *testing.T) {
	in := ccltest.New()
	in.Throttle("preflight 1-2", 1, 0, 8e4)
	o := quick
	o.Size, o.Time, o.Limits.Tolerance = 16<<20, 200*time.Millisecond, 300
	r, errs := run(t, 3, in, o)
	if r.Verdict != VerdictBad || len(r.Findings) != 1 || r.Faults[2][1]&LowBandwidth == 0 || r.BadEdges != 1 {
		t.Errorf("%+v", r)
	}
	for rank, err := range errs {
		if rank == 0 && err != nil || rank > 0 && !errors.Is(err, ErrBad) {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
}
