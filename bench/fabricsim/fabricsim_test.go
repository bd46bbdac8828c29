package fabricsim

import (
	"math"
	"testing"

	"github.com/lockstep-ccl/lockstep/pathplan"
)

// TestRates: a job that is held up elsewhere leaves what it does not take to others.
func TestRates(t *testing.T) {
	flows := []Flow{
		{Job: 0, Links: []int32{0}, Share: 0.5}, {Job: 0, Links: []int32{1}, Share: 0.5},
		{Job: 1, Links: []int32{1}, Share: 1},
		{Job: 2, Links: []int32{2}, Share: 1}, {Job: 2, Links: []int32{1}, Share: 0.25},
	}
	// Link 0 holds job 0 to 2, link 2 holds job 2 to 4: on link 1, job 1 has what is left.
	got := Rates(3, flows, []float64{1, 10, 4})
	for j, want := range []float64{2, 8, 4} {
		if math.Abs(got[j]-want) > 1e-9 {
			t.Errorf("job %d: %v, want %v", j, got[j], want)
		}
	}
}

// TestPaperTables: what C4P's paper shows, at its own size: the ideal with a plan, all jobs
// alike, half as much again as hashing at least.
func TestPaperTables(t *testing.T) {
	for _, c := range []struct {
		name string
		jobs func(lanes int) []Job
	}{
		{"one job", func(lanes int) []Job { return OneJob(16, lanes) }},
		{"eight jobs", func(lanes int) []Job { return PairJobs(16, lanes) }},
	} {
		for _, lanes := range []int{2, 4, 16} {
			row, err := Compare(Paper(16), func(uint64) []Job { return c.jobs(lanes) }, 2)
			if err != nil {
				t.Fatal(err)
			}
			if row.Planned.Least < 0.97*360 || row.Even < 0.95 || row.Total < 1.5*row.HashedTotal {
				t.Errorf("%s, %d lanes: %+v", c.name, lanes, row)
			}
		}
	}
}

// TestFailure: within 3 s of a link's death jobs have 0.97 of what is left, within 10 s of
// its return all of it; without moves they do not.
func TestFailure(t *testing.T) {
	cable := pathplan.Link{From: "leaf0", To: "spine3"}
	for _, lanes := range []int{4, 8} {
		moving, err := Failure(Paper(16), PairJobs(16, lanes), 1, cable, true)
		if err != nil {
			t.Fatal(err)
		}
		static, err := Failure(Paper(16), PairJobs(16, lanes), 1, cable, false)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range moving {
			if p.At >= Dies+Known*3 && p.At < Back && p.Least < 0.97*315 || p.At >= Back+Known+9e9 && p.Least < 0.97*360 {
				t.Errorf("%d lanes, after %s: %+v", lanes, p.At, p)
			}
		}
		if a, b := Mean(static, Dies, Back), Mean(moving, Dies+3*Known, Back); a > 0.95*b {
			t.Errorf("%d lanes: %.1f without moves, %.1f with", lanes, a, b)
		}
	}
}

// TestScattered: jobs that come one by one, anywhere in a larger fabric.
func TestScattered(t *testing.T) {
	row, err := Compare(Paper(64), func(seed uint64) []Job { return ScatteredJobs(64, 2, seed) }, 2)
	if err != nil {
		t.Fatal(err)
	}
	if row.Even < 0.95 || row.Total < 1.5*row.HashedTotal {
		t.Errorf("%+v", row)
	}
}
