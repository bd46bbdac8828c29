package remediation

import (
	"fmt"
	"math"
	"time"
)

// past is one action that a breaker counts.
type past struct {
	At   time.Time
	Job  string
	Unit string // the unit taken out, "" when none was
}

// Scope names a breaker: one for all jobs, one for units, one for each job.
const (
	ScopeTotal = "total"
	ScopeUnits = "units"
	scopeJob   = "job:"
)

// tally is what past actions add up to in the window that ends now.
type tally struct {
	total int
	jobs  map[string]int
	units map[string]bool            // taken out
	of    map[string]map[string]bool // the same by job
}

// count adds up past actions. closed tells when a scope's breaker was last
// closed, zero when it never was: closing starts the count of its scope anew,
// or the same history would open it at once. An action from the future (the
// clock was set back) counts: forgetting it would lift the bounds.
func (b BreakerConfig) count(now time.Time, history []past, closed func(scope string) time.Time) tally {
	t := tally{jobs: map[string]int{}, units: map[string]bool{}, of: map[string]map[string]bool{}}
	for _, p := range history {
		if now.Sub(p.At) >= b.Window {
			continue
		}
		if p.At.After(closed(ScopeTotal)) {
			t.total++
		}
		n := t.jobs[p.Job]
		if p.At.After(closed(scopeJob + p.Job)) {
			n++
		}
		t.jobs[p.Job] = n // also when 0: it is shown
		if p.Unit != "" && p.At.After(closed(ScopeUnits)) {
			t.units[p.Unit] = true
			if t.of[p.Job] == nil {
				t.of[p.Job] = map[string]bool{}
			}
			t.of[p.Job][p.Unit] = true
		}
	}
	return t
}

// allow decides on one more action. It returns the scope that refuses it, ""
// when none does. It is pure: what is open, and stays open until a person
// closes it, is the journal's business.
//
// Units are bounded by a share of what the job has and by an absolute number for all
// jobs, both, since a share alone lets a large cluster lose hundreds of nodes to one
// wrong rule, and a number alone lets a small one lose all of them.
func (b BreakerConfig) allow(t tally, job, unit string, totalUnits int) (scope, why string) {
	if t.total >= b.Total {
		return ScopeTotal, fmt.Sprintf("%d actions in the last %v, at most %d", t.total, b.Window, b.Total)
	}
	if n := t.jobs[job]; n >= b.Job {
		return scopeJob + job, fmt.Sprintf("job %s has seen %d actions in the last %v, at most %d", job, n, b.Window, b.Job)
	}
	if unit == "" {
		return "", ""
	}
	if n := len(t.units); !t.units[unit] && n >= b.Units {
		return ScopeUnits, fmt.Sprintf("%d units taken out in the last %v, at most %d", n, b.Window, b.Units)
	}
	if n, limit := len(t.of[job]), b.share(totalUnits); !t.of[job][unit] && n >= limit {
		return ScopeUnits, fmt.Sprintf("%d of %d units of job %s taken out in the last %v, at most %d", n, totalUnits, job, b.Window, limit)
	}
	return "", ""
}

// share is how many of a job's units may be taken out.
func (b BreakerConfig) share(total int) int {
	share := int(math.Floor(b.UnitShare * float64(total)))
	if share < 1 && b.UnitShare > 0 && total > 1 {
		share = 1
	}
	return share
}

// remaining returns how many more actions are allowed now, in all and for each
// job that was acted on: 0 while the scope's breaker is open.
func (b BreakerConfig) remaining(t tally, open []BreakerState) map[string]int {
	left := map[string]int{ScopeTotal: max(0, b.Total-t.total)}
	for job, n := range t.jobs {
		left[scopeJob+job] = max(0, b.Job-n)
	}
	for _, s := range open {
		if s.Scope != ScopeUnits { // how many of them are left depends on the job
			left[s.Scope] = 0
		}
	}
	return left
}
