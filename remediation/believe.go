package remediation

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Incident is an incident as its job's master tells it when asked.
type Incident struct {
	Class, Level         string
	CulpritKind, Culprit string
	Node, Reason         string
	Rank                 int  // to blame; -1 when it is no rank
	Attempt              int  // of the job, that it is about
	AttemptNow           int  // that the job is in by now
	Closed               bool // it is over
	Opened               time.Time
}

// Masters asks a job's master. An alert is a hint that anybody who can post to
// Alertmanager can give; what the master says decides.
type Masters interface {
	// Incident returns ErrUnknownIncident when the master has none of that id, and
	// ErrNoMaster when no master of the job is known. Other errors may pass.
	Incident(ctx context.Context, job, id string) (Incident, error)
}

var (
	// ErrUnknownIncident says that the master has never had an incident of that id, or has forgotten it.
	ErrUnknownIncident = errors.New("the master has no such incident")
	// ErrNoMaster says that nobody can be asked about a job.
	ErrNoMaster = errors.New("no master of the job is configured")
)

const askTimeout = 5 * time.Second

// Why an alert is not acted on, as label values.
const (
	disbeliefUnknown = "unknown_incident"
	disbeliefClosed  = "closed"
	disbeliefAttempt = "other_attempt"
	disbeliefSilent  = "no_answer"
	disbeliefStale   = "stale"
)

// believe replaces what an alert says by what the job's master says. An outcome
// closes the entry; ok is false when nothing can be said now: ctx ended, or the entry was postponed.
func (r *Remediator) believe(ctx context.Context, e *Entry) (outcome Outcome, detail string, ok bool) {
	if r.o.BelieveAlerts {
		return "", "", true
	}
	a := &e.Alert
	disbelieve := func(reason string, o Outcome, format string, args ...any) (Outcome, string, bool) {
		r.m.disbelieved.WithLabelValues(reason).Inc()
		return o, fmt.Sprintf(format, args...), true
	}
	actx, cancel := context.WithTimeout(ctx, askTimeout)
	in, err := r.o.Masters.Incident(actx, a.Job, a.Incident)
	cancel()
	switch {
	case err == nil:
	case ctx.Err() != nil:
		return "", "", false
	case errors.Is(err, ErrUnknownIncident), errors.Is(err, ErrNoMaster):
		return disbelieve(disbeliefUnknown, OutcomeUnknown, "incident %.80q of job %.80q: %v", a.Incident, a.Job, err)
	default: // a master that was killed is started again, and knows its open incidents
		asked, again := r.postpone(e)
		if !again {
			return disbelieve(disbeliefSilent, OutcomeFailed, "asked the master of job %.80q %d times: %v", a.Job, asked, err)
		}
		r.o.Logger.Warn("the master does not answer, it is asked again", "job", a.Job, "incident", a.Incident, "times", asked, "err", err)
		return "", "", false
	}
	if !in.Opened.IsZero() {
		a.Opened = in.Opened
	}
	switch {
	case in.Closed:
		return disbelieve(disbeliefClosed, OutcomeStale, "its master has closed the incident")
	case !r.current(r.o.Now(), e):
		return disbelieve(disbeliefStale, OutcomeStale, "its master opened the incident at %v", in.Opened)
	case in.AttemptNow != in.Attempt:
		return disbelieve(disbeliefAttempt, OutcomeSuperseded, "the incident is about attempt %d, and the job is in attempt %d", in.Attempt, in.AttemptNow)
	}
	attempt := in.Attempt
	a.Class, a.Level, a.CulpritKind, a.Culprit = in.Class, in.Level, in.CulpritKind, in.Culprit
	a.Node, a.Reason, a.Rank, a.Attempt = in.Node, in.Reason, in.Rank, &attempt
	return "", "", true
}
