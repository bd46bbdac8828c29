package master

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// incidents gives verdicts a life: opened when first suspected, confirmed
// once, closed when the verdict has been gone for a while or the job has
// restarted. One fault is one incident, also across a restart of the master.
type incidents struct {
	job        string
	closeAfter time.Duration

	open   []*openIncident      // oldest first
	closed []collector.Incident // latest first
	number uint64               // of incidents ever opened, for ids

	opened, confirmed [diagnosis.NumClasses]uint64
}

type openIncident struct {
	collector.Incident
	stopping time.Time // when the master heard that a restart for it is under way or done, zero for none
	lastSeen time.Time // when a verdict last said so, or judgement was last withheld; in the future when it is withheld until then
}

// maxOpen bounds open incidents; the engine's own bound is lower.
const maxOpen = collector.MaxIncidents

// change is what became of an incident in one pass.
type change uint8

const (
	opened change = iota
	confirmed
	closed
)

// event is one change, for the log and for retroactive tracing.
type event struct {
	change
	collector.Incident
}

// update takes in the verdicts of one pass. With hold, evidence is incomplete: a verdict that
// is absent proves nothing, and no incident is closed.
func (t *incidents) update(now time.Time, verdicts []diagnosis.Verdict, attempt uint32, hold bool) (events []event) {
	t.open = slices.DeleteFunc(t.open, func(i *openIncident) bool {
		if i.Attempt >= attempt {
			return false
		}
		events = append(events, t.close(i, now))
		return true
	})
	seen := map[*openIncident]bool{}
	stopping := t.stopping(now)
	for _, v := range verdicts {
		i := t.find(&v, seen)
		if i == nil {
			// Ranks that end are how a restart begins.
			if len(t.open) == maxOpen || !stopping.IsZero() && v.Since >= stopping.UnixNano() {
				continue
			}
			t.number++
			i = &openIncident{Incident: collector.Incident{
				ID:      fmt.Sprintf("%s-%d-%d", t.job, now.UnixMilli(), t.number),
				Opened:  now,
				Attempt: attempt,
				Verdict: v,
			}}
			t.open = append(t.open, i)
			t.opened[v.Class]++
			events = append(events, event{opened, i.Incident})
		}
		seen[i] = true
		i.lastSeen = now
		if i.restarting(now) && !alike(&i.Verdict, &v) {
			continue // it keeps its name: what the restart ends is not what broke step
		}
		if v.Since == 0 || i.Verdict.Since != 0 && i.Verdict.Since < v.Since {
			v.Since = i.Verdict.Since
		}
		confirms := i.Confirmed.IsZero() && v.Level == diagnosis.Confirmed
		if confirms {
			i.Confirmed = now
			t.confirmed[v.Class]++
		} else if !i.Confirmed.IsZero() {
			v.Level = diagnosis.Confirmed // a doubt after the fact takes nothing back: alerts would flap
		}
		i.Verdict = v
		if confirms {
			events = append(events, event{confirmed, i.Incident})
		}
	}
	t.open = slices.DeleteFunc(t.open, func(i *openIncident) bool {
		if hold && i.lastSeen.Before(now) {
			i.lastSeen = now
		}
		if now.Sub(i.lastSeen) < t.closeAfter {
			return false
		}
		events = append(events, t.close(i, now))
		return true
	})
	return events
}

// restartTakes bounds for how long a restart that was decided on explains what happens to a
// job. Pods have a grace period to end in, 30 s by default, and the next ones have to start.
const restartTakes = 3 * time.Minute

func (i *openIncident) restarting(now time.Time) bool {
	return !i.stopping.IsZero() && now.Sub(i.stopping) < restartTakes
}

// stopping returns since when the job is being restarted for one of the incidents, zero when it is not.
func (t *incidents) stopping(now time.Time) (first time.Time) {
	for _, i := range t.open {
		if i.restarting(now) && (first.IsZero() || i.stopping.Before(first)) {
			first = i.stopping
		}
	}
	return first
}

// alike reports whether two verdicts are of one class and have the same first culprit.
func alike(a, b *diagnosis.Verdict) bool {
	return a.Class == b.Class && len(a.Culprits) > 0 && len(b.Culprits) > 0 && same(&a.Culprits[0], &b.Culprits[0])
}

// find returns the open incident that v continues: the one with its key, else
// one with its class and first culprit. (The engine forgets when the
// master restarts, and may then see the same fault from its other end.)
func (t *incidents) find(v *diagnosis.Verdict, taken map[*openIncident]bool) *openIncident {
	for _, i := range t.open {
		if !taken[i] && i.Verdict.Key == v.Key {
			return i
		}
	}
	for _, i := range t.open {
		if !taken[i] && alike(&i.Verdict, v) {
			return i
		}
	}
	return nil
}

// same reports whether two culprits are one; a rank may have moved to another node.
func same(a, b *diagnosis.Culprit) bool {
	return a.Kind == b.Kind && a.Rank == b.Rank && a.Peer == b.Peer && (a.Kind != diagnosis.CulpritNode || a.Node == b.Node)
}

// closeAll closes what is open: it was about a job that is no more.
func (t *incidents) closeAll(now time.Time) (events []event) {
	for _, i := range t.open {
		events = append(events, t.close(i, now))
	}
	t.open = nil
	return events
}

func (t *incidents) close(i *openIncident, now time.Time) event {
	i.Closed = now
	t.closed = slices.Insert(t.closed, 0, i.Incident)
	t.closed = t.closed[:min(len(t.closed), collector.MaxIncidents)]
	return event{closed, i.Incident}
}

// list returns the open incidents, the confirmed and older ones first, then the last closed.
func (t *incidents) list() []collector.Incident {
	out := make([]collector.Incident, 0, len(t.open)+len(t.closed))
	for _, i := range t.open {
		out = append(out, i.Incident)
	}
	slices.SortStableFunc(out, func(a, b collector.Incident) int { return -cmp.Compare(a.Verdict.Level, b.Verdict.Level) })
	out = append(out, t.closed...)
	return out[:min(len(out), collector.MaxIncidents)]
}
