package diagnosis_test

import (
	"fmt"
	"runtime"
	"slices"
	"testing"

	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// TestLargeJob: a job whose passes are divided among cores has the verdicts that it has on one.
func TestLargeJob(t *testing.T) {
	const ranks, late = 9_000, 4321
	passes, from := 50, 25
	if testing.Short() { // with the race detector
		passes, from = 6, 3
	}
	play := func(cores int) (said [][]diagnosis.Verdict) {
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(cores))
		ev, e := bigJob(ranks), diagnosis.New(diagnosis.Config{})
		for pass := range passes {
			advance(ev)
			if pass > from { // one rank spends more than half of the time with itself
				for ci := range ev.Comms {
					for i := range ev.Comms[ci].Members {
						if m := &ev.Comms[ci].Members[i]; m.World == late {
							m.OwnNs += 20e6
						} else {
							m.WaitNs += 20e6
						}
					}
				}
			}
			said = append(said, slices.Clone(e.Diagnose(ev)))
		}
		return said
	}
	one, many := play(1), play(4)
	if last := one[len(one)-1]; !testing.Short() && (len(last) != 1 || len(last[0].Culprits) != 1 || last[0].Culprits[0].Rank != late) {
		t.Fatalf("%+v: want rank %d", last, late)
	}
	for i := range one {
		if a, b := fmt.Sprintf("%+v", one[i]), fmt.Sprintf("%+v", many[i]); a != b {
			t.Fatalf("pass %d: %s on one core, %s on four", i, a, b)
		}
	}
}
