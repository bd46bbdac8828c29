package remediation

import (
	"cmp"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/prom"
)

type metrics struct {
	webhooks    *prometheus.CounterVec
	actions     *prometheus.CounterVec
	duration    *prometheus.HistogramVec
	pending     prometheus.Gauge
	disbelieved *prometheus.CounterVec
	writable    prometheus.Gauge
	fences      *prometheus.CounterVec

	fenceDuration *prometheus.HistogramVec
	breaker       scopes
	remaining     scopes
}

// Results of a webhook. Those of single alerts (stale, incomplete_alert) are
// counted once an alert, the others once a request.
const (
	resultAccepted     = "accepted"
	resultDuplicate    = "duplicate"
	resultResolved     = "resolved"
	resultStale        = "stale"
	resultIncomplete   = "incomplete_alert"
	resultTruncated    = "truncated"
	resultMalformed    = "malformed"
	resultVersion      = "version"
	resultUnauthorized = "unauthorized"
	resultJournalError = "journal_error"
	resultJobFull      = "job_full"
)

func newMetrics(reg prometheus.Registerer, dryRun, believeAlerts bool) (*metrics, error) {
	dry, pending, trust, writable := prom.GaugeVec(names.DryRun), prom.GaugeVec(names.ActionsPending), prom.GaugeVec(names.RemediatorTrust), prom.GaugeVec(names.StateWritable)
	m := &metrics{
		webhooks:    prom.CounterVec(names.Webhooks),
		actions:     prom.CounterVec(names.Actions),
		duration:    prom.HistogramVec(names.ActionDuration, .1, .5, 1, 2, 5, 10, 30, 60, 120),
		disbelieved: prom.CounterVec(names.Disbelieved),
		fences:      prom.CounterVec(names.FenceProofs),

		fenceDuration: prom.HistogramVec(names.FenceDuration, .1, .5, 1, 2, 5, 10, 30, 60, 120),

		pending:   pending.WithLabelValues(),
		writable:  writable.WithLabelValues(),
		breaker:   scopes{vec: prom.GaugeVec(names.BreakerOpen)},
		remaining: scopes{vec: prom.GaugeVec(names.BreakerRemaining)},
	}
	dry.WithLabelValues().Set(0)
	if dryRun {
		dry.WithLabelValues().Set(1)
	}
	trust.WithLabelValues().Set(0)
	if believeAlerts {
		trust.WithLabelValues().Set(1)
	}
	for _, reason := range []string{disbeliefUnknown, disbeliefClosed, disbeliefAttempt, disbeliefSilent, disbeliefStale} {
		m.disbelieved.WithLabelValues(reason)
	}
	for _, result := range []string{fenceProven, fenceUnproven, fenceError} {
		m.fences.WithLabelValues(result)
	}
	// A result that has not happened yet is 0, not absent: rate() sees its first step.
	for _, result := range []string{resultAccepted, resultDuplicate, resultResolved, resultStale, resultIncomplete, resultTruncated,
		resultMalformed, resultVersion, resultUnauthorized, resultJournalError, resultJobFull} {
		m.webhooks.WithLabelValues(result)
	}
	if reg == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.webhooks, m.actions, m.duration, pending, m.breaker.vec, m.remaining.vec, dry, m.disbelieved, trust, writable, m.fences, m.fenceDuration} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// closed counts a closed entry. The class comes from outside, so only known
// ones become label values.
func (m *metrics) closed(e *Entry) {
	class := e.Alert.Class
	if !slices.Contains(names.Classes, class) {
		class = "unknown"
	}
	kind := cmp.Or(e.Kind, ActionNone) // stale before it was decided on
	m.actions.WithLabelValues(string(kind), string(e.Outcome), class).Inc()
	if !e.Started.IsZero() {
		m.duration.WithLabelValues(string(e.Kind)).Observe(e.Finished.Sub(e.Started).Seconds())
	}
}

// scopes is a gauge by breaker scope. A scrape at any moment sees a scope's
// old value or its new one: alerts must not flap because a set is being replaced.
type scopes struct {
	vec *prometheus.GaugeVec
	old map[string]int
}

// set replaces all values. It is for one goroutine.
func (s *scopes) set(values map[string]int) {
	for scope, v := range values {
		s.vec.WithLabelValues(scope).Set(float64(v))
	}
	for scope := range s.old {
		if _, still := values[scope]; !still {
			s.vec.DeleteLabelValues(scope)
		}
	}
	s.old = values
}
