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

// allow decides on one more action given all past ones. It returns the scope
// that refuses it, "" when none does. It is pure: what is open, and stays open
// until a person closes it, is the journal's business. Closing a breaker starts
// its count anew, or the same history would open it at once: closed gives the
// time for a scope, zero when it never was.
//
// Units are bounded by a share of what there is and by an absolute number, both,
// since a share alone lets a large cluster lose hundreds of nodes to one wrong
// rule, and a number alone lets a small one lose all of them.
func (b BreakerConfig) allow(now time.Time, history []past, closed func(scope string) time.Time, job, unit string, totalUnits int) (scope, why string) {
	var jobN, totalN int
	units := map[string]bool{}
	closedTotal, closedUnits, closedJob := closed(ScopeTotal), closed(ScopeUnits), closed(scopeJob+job)
	for _, p := range history {
		if now.Sub(p.At) >= b.Window || p.At.After(now) {
			continue
		}
		if p.At.After(closedTotal) {
			totalN++
		}
		if p.Job == job && p.At.After(closedJob) {
			jobN++
		}
		if p.Unit != "" && p.At.After(closedUnits) {
			units[p.Unit] = true
		}
	}
	if totalN >= b.Total {
		return ScopeTotal, fmt.Sprintf("%d actions in the last %v, at most %d", totalN, b.Window, b.Total)
	}
	if jobN >= b.Job {
		return scopeJob + job, fmt.Sprintf("job %s has seen %d actions in the last %v, at most %d", job, jobN, b.Window, b.Job)
	}
	if unit != "" && !units[unit] {
		if limit := b.unitLimit(totalUnits); len(units) >= limit {
			return ScopeUnits, fmt.Sprintf("%d of %d units taken out in the last %v, at most %d", len(units), totalUnits, b.Window, limit)
		}
	}
	return "", ""
}

func (b BreakerConfig) unitLimit(total int) int {
	share := int(math.Floor(b.UnitShare * float64(total)))
	if share < 1 && b.UnitShare > 0 && total > 1 {
		share = 1
	}
	return min(share, b.Units)
}

// remaining returns how many more actions the total breaker allows now.
func (b BreakerConfig) remaining(now time.Time, history []past) int {
	n := 0
	for _, p := range history {
		if now.Sub(p.At) < b.Window && !p.At.After(now) {
			n++
		}
	}
	return max(0, b.Total-n)
}
