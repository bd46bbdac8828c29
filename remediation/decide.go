package remediation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"
)

// notToAct says why an entry leads to nothing whatever else is known, "" when it may.
func (r *Remediator) notToAct(p Policy, e *Entry) Outcome {
	switch {
	case !r.current(r.o.Now(), e):
		return OutcomeStale
	case p.Action == ActionNone:
		return OutcomeNone
	case p.DryRun:
		return OutcomeDryRun
	}
	return ""
}

// unit finds what an exclusion would take out, and of how many. Without
// knowing that, restarting in place is the smaller step. The error is ErrGone, since
// a job that is not the actuator's is not to count against the breakers, or ErrAway.
func (r *Remediator) unit(ctx context.Context, e *Entry) (total int, err error) {
	ctx, cancel := context.WithTimeout(ctx, inventoryTimeout)
	defer cancel()
	inv, err := r.o.Actuator.Inventory(ctx, e.Alert.Job)
	e.Made = inv.Made
	switch {
	case errors.Is(err, ErrGone):
		return 0, err
	case e.Kind != ActionExclude:
		return 0, nil
	case errors.Is(err, ErrAway): // restarted in place, it would be slow again
		return 0, err
	case errors.Is(err, context.DeadlineExceeded), err != nil && r.postponed(e.Seq) < maxTries: // one that has just started knows no rights yet
		return 0, fmt.Errorf("%w: %w", ErrAway, err)
	}
	if err == nil {
		if e.Unit = inv.unit(e.Alert.Rank, e.Alert.Node); e.Unit == "" {
			err = fmt.Errorf("rank %d runs on no unit of the job", e.Alert.Rank)
		}
	}
	if err != nil {
		r.o.Logger.Warn("unit to exclude is not known, restarting in place", "job", e.Alert.Job, "err", err)
		e.Kind = ActionRestart
	}
	return inv.Units, nil
}

// decide writes the decision to act to the journal, or returns the outcome
// that closes the entry. Decisions are made one at a time: each counts against the next.
func (r *Remediator) decide(e *Entry, p Policy, units int) (o Outcome, detail string, err error) {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	var history []past
	superseded := ""
	if err := r.j.each(func(o *Entry) {
		if !o.Started.IsZero() {
			history = append(history, o.past())
			superseded = cmp.Or(superseded, e.supersededBy(o))
		}
	}); err != nil {
		return "", "", err
	}
	if superseded != "" {
		return OutcomeSuperseded, superseded, nil
	}
	if p.DryRun {
		return OutcomeDryRun, "", nil
	}
	now := r.o.Now()
	scope, why, err := r.refuse(now, history, e, units)
	if err != nil {
		return "", "", err
	}
	if scope != "" {
		e.Breaker = scope
		return OutcomeRefused, scope + ": " + why, nil
	}
	e.State, e.Started = Running, now
	return "", "", r.j.update(e)
}

// refuse names a breaker that is open, or opens the one that the action would go over.
func (r *Remediator) refuse(now time.Time, history []past, e *Entry, units int) (scope, why string, err error) {
	open, err := r.j.breakers()
	if err != nil {
		return "", "", err
	}
	for _, b := range open {
		if b.Scope == ScopeTotal || b.Scope == scopeJob+e.Alert.Job || (b.Scope == ScopeUnits && e.Unit != "") {
			return b.Scope, b.Why, nil
		}
	}
	closed, err := r.j.closedAt()
	if err != nil {
		return "", "", err
	}
	b := r.o.Config.Breaker
	scope, why = b.allow(b.count(now, history, func(s string) time.Time { return closed[s] }), e.Alert.Job, e.Unit, units)
	if scope != "" {
		if err := r.j.openBreaker(BreakerState{Scope: scope, Since: now, Why: why}); err != nil {
			return "", "", err
		}
		r.o.Logger.Error("breaker opened; a person must close it", "scope", scope, "why", why)
	}
	return scope, why, nil
}
