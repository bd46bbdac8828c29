package remediation

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// Fencer makes sure that nothing of an attempt that is over goes on beside the next one:
// what a node that was cut off still runs would write into the new attempt's checkpoints.
//
// Fence asks whoever can end the ranks of a job's attempt on a node, "" for wherever they
// are, and waits until that is proven or ctx ends. It is called again with the
// same arguments when the remediator was killed or had no answer: an implementation
// answers as it did then, or asks again. Attempts below attempt are fenced with it;
// those above it are never touched.
//
// That there is no proof is an answer, not an error: whether to act without one is the
// caller's policy. An error says that nobody could be asked.
type Fencer interface {
	Fence(ctx context.Context, job string, attempt int, node string) (Proof, error)
}

// Proof is what is known of a fenced attempt's processes.
type Proof struct {
	// Proven is true when none of them runs, nor can start again, or what they write is refused.
	Proven bool
	// How says who saw it and in which way, or why it is not known; for the
	// journal and for people: at most a line.
	How string
	// In is the time after which it will be proven when nothing happens meanwhile: a lease is
	// over then. 0: that is not known.
	In time.Duration
}

// SelfFencing is an Actuator that makes sure by itself that nothing of the old attempt goes
// on: as a supervisor does, that has reaped its processes before it starts others, or one that
// asks the Fencer between its own steps. The remediator asks nobody before such an action.
type SelfFencing interface {
	FencesItself(kind ActionKind) bool
}

// Fencing is what was asked before an action, and what came of it.
type Fencing struct {
	Asked   time.Time `json:"asked"`
	Ended   time.Time `json:"ended,omitzero"`
	Attempt int       `json:"attempt"`
	Proven  bool      `json:"proven"`
	How     string    `json:"how"`
}

// Results of asking, as label values.
const (
	fenceProven   = "proven"
	fenceUnproven = "unproven"
	fenceError    = "error"
)

// fence waits for proof that the attempt to be ended does not go on, and journals what is
// known. An outcome closes the entry: there is no proof, and the policy wants one. ok is
// false when ctx ended first.
func (r *Remediator) fence(ctx context.Context, e *Entry) (o Outcome, detail string, ok bool) {
	if r.o.Fencer == nil || e.Alert.Attempt == nil || e.Fence != nil && e.Fence.Proven {
		return "", "", true
	}
	if f, is := r.o.Actuator.(SelfFencing); is && f.FencesItself(e.Kind) {
		return "", "", true
	}
	policy := r.o.Config.decide(&e.Alert)
	e.Fence = &Fencing{Asked: r.o.Now(), Attempt: *e.Alert.Attempt}
	fctx, cancel := context.WithTimeout(ctx, r.o.Config.FenceTimeout)
	proof, err := r.o.Fencer.Fence(fctx, e.Alert.Job, *e.Alert.Attempt, "")
	cancel()
	if ctx.Err() != nil && !proof.Proven {
		return "", "", false
	}
	result := fenceUnproven
	switch {
	case err != nil && !proof.Proven:
		result, proof.How = fenceError, fmt.Sprintf("nobody could be asked: %v", err)
	case proof.Proven:
		result = fenceProven
	}
	e.Fence.Ended, e.Fence.Proven, e.Fence.How = r.o.Now(), proof.Proven, cut(proof.How)
	r.m.fences.WithLabelValues(result).Inc()
	r.m.fenceDuration.WithLabelValues().Observe(e.Fence.Ended.Sub(e.Fence.Asked).Seconds())
	if err := r.j.update(e); err != nil {
		r.o.Logger.Error("journal: cannot write what is known of the old attempt, not acting", "action", e.Action, "job", e.Alert.Job, "err", err)
		return "", "", false
	}
	log := r.o.Logger.With("job", e.Alert.Job, "action", e.Action, "attempt", e.Fence.Attempt, "how", e.Fence.How)
	switch {
	case proof.Proven:
		log.Info("the old attempt is fenced")
	case policy.actsWithoutProof(e.Kind):
		log.Warn("there is no proof that nothing of the old attempt goes on; acting all the same, as the policy says", "policy", policy.Name)
	default:
		e.Started = time.Time{} // nothing was done: no breaker counts it
		return OutcomeUnfenced, "not acted: no proof that nothing of attempt " + fmt.Sprint(e.Fence.Attempt) + " goes on: " + e.Fence.How, true
	}
	return "", "", true
}

// cut bounds text that comes from elsewhere.
func cut(s string) string {
	if len(s) > maxDetail {
		s = strings.ToValidUTF8(s[:maxDetail], "") + "…"
	}
	return s
}

// actsWithoutProof reports what a policy says of acting when there is no proof.
func (p *Policy) actsWithoutProof(ActionKind) bool {
	return p.ActWithoutProof != nil && *p.ActWithoutProof
}

// Fencers asks several, all at once: each knows another part of where an attempt may run. Proven is
// what all have proven, and whoever could not be asked has proven nothing.
type Fencers []Fencer

// Fence implements Fencer.
func (f Fencers) Fence(ctx context.Context, job string, attempt int, node string) (Proof, error) {
	type answer struct {
		Proof
		err error
	}
	answers := make([]chan answer, len(f))
	for i, one := range f {
		answers[i] = make(chan answer, 1)
		go func() {
			p, err := one.Fence(ctx, job, attempt, node)
			answers[i] <- answer{p, err}
		}()
	}
	all := Proof{Proven: len(f) > 0}
	var errs []error
	var how []string
	known := true
	for _, c := range answers {
		a := <-c
		errs = append(errs, a.err)
		proven := a.Proven && a.err == nil
		known = known && (proven || a.In > 0)
		all.Proven, all.In = all.Proven && proven, max(all.In, a.In)
		if a.How != "" {
			how = append(how, a.How)
		}
	}
	if all.How = strings.Join(how, "; "); all.Proven || !known {
		all.In = 0
	}
	return all, errors.Join(errs...)
}
