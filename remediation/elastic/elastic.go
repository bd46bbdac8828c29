// Package elastic restarts jobs whose launcher starts ranks again by itself when they end:
// torchrun with --max-restarts, and whatever else counts its attempts for the ranks to see.
//
// In: a remediation.Fencer, which has the nodes' agents end the ranks of an attempt. Out: an
// Actuator that does no more than that: the launcher's own agents see their workers end, meet
// again, and begin the next attempt. So it needs no right on the launcher or the scheduler,
// only ranks whose environment says LOCKSTEP_FENCE=stop. It cannot take a unit out.
package elastic

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/lockstep-ccl/lockstep/remediation"
)

// Actuator implements remediation.Actuator. Safe for concurrent use.
type Actuator struct {
	Fencer remediation.Fencer
	// Knows says which jobs have such a launcher.
	Knows func(job string) bool
}

// Name implements remediation.Actuator.
func (*Actuator) Name() string { return "elastic" }

// FencesItself implements remediation.SelfFencing: the proof is the action.
func (*Actuator) FencesItself(remediation.ActionKind) bool { return true }

// Inventory implements remediation.Actuator. No unit is known, so none is taken out.
func (a *Actuator) Inventory(_ context.Context, job string) (remediation.Inventory, error) {
	if !a.Knows(job) {
		return remediation.Inventory{}, fmt.Errorf("%w: no launcher is known to start job %q again", remediation.ErrGone, job)
	}
	return remediation.Inventory{Unit: func(int) string { return "" }}, nil
}

// Act implements remediation.Actuator. Ranks of a later attempt are not touched, so asking again does no harm.
func (a *Actuator) Act(ctx context.Context, act remediation.Action) (remediation.Answer, error) {
	switch {
	case !a.Knows(act.Job):
		return remediation.Answer{}, fmt.Errorf("%w: no launcher is known to start job %q again", remediation.ErrGone, act.Job)
	case act.Kind != remediation.ActionRestart:
		return remediation.Answer{}, fmt.Errorf("elastic actuator cannot %q: the launcher places its ranks itself", act.Kind)
	case act.Attempt == nil:
		return remediation.Answer{}, errors.New("elastic actuator: which attempt is to end is not known")
	}
	proof, err := a.Fencer.Fence(ctx, act.Job, *act.Attempt, "")
	switch {
	case err != nil:
		return remediation.Answer{}, err
	case !proof.Proven && !act.ActWithoutProof:
		return remediation.Answer{}, fmt.Errorf("ranks of attempt %d go on, or may: %s", *act.Attempt, proof.How)
	}
	return remediation.Answer{At: time.Now(), Detail: fmt.Sprintf("attempt %d was ended for its launcher to begin the next: %s", *act.Attempt, proof.How)}, nil
}

// First is several actuators, of which the first that knows a job acts.
type First []remediation.Actuator

// Name implements remediation.Actuator.
func (f First) Name() string {
	name := ""
	for i, a := range f {
		if i > 0 {
			name += ", "
		}
		name += a.Name()
	}
	return name
}

// of returns whose a job is, and what is known of its units.
func (f First) of(ctx context.Context, job string) (a remediation.Actuator, inv remediation.Inventory, err error) {
	err = fmt.Errorf("%w: no actuator knows job %q", remediation.ErrGone, job)
	for _, a = range f {
		if inv, err = a.Inventory(ctx, job); !errors.Is(err, remediation.ErrGone) {
			return a, inv, err
		}
	}
	return nil, remediation.Inventory{}, err
}

// Inventory implements remediation.Actuator.
func (f First) Inventory(ctx context.Context, job string) (remediation.Inventory, error) {
	_, inv, err := f.of(ctx, job)
	return inv, err
}

// Act implements remediation.Actuator.
func (f First) Act(ctx context.Context, act remediation.Action) (remediation.Answer, error) {
	a, _, err := f.of(ctx, act.Job)
	if a == nil {
		return remediation.Answer{}, err
	}
	return a.Act(ctx, act)
}

// FencesItself implements remediation.SelfFencing: when all of them do.
func (f First) FencesItself(kind remediation.ActionKind) bool {
	for _, a := range f {
		if s, ok := a.(remediation.SelfFencing); !ok || !s.FencesItself(kind) {
			return false
		}
	}
	return true
}
