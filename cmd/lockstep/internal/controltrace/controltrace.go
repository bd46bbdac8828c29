// Package controltrace sends what the control plane did as OpenTelemetry
// traces: the master's incidents and the remediator's actions, one trace an
// incident. It is configured by the OTEL_* variables; without an endpoint it
// does nothing.
package controltrace

import (
	"context"
	"log/slog"
	"os"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/buildinfo"
	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/otlp"
	"github.com/lockstep-ccl/lockstep/remediation"
)

const (
	pollEvery  = time.Second // of a master's snapshot; spans carry the incidents' own times
	flushGrace = 3 * time.Second
)

// Tracer is one component's, and a prometheus.Collector of what it exported and lost. Its methods are safe for concurrent use, and
// none of them waits for the backend, save Close.
type Tracer struct {
	*otlp.Control
	enabled bool
	log     *slog.Logger
}

// New reads the environment. service is lockstep-master and the like.
func New(service string, log *slog.Logger) (*Tracer, error) {
	host, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	cfg, err := otlp.ConfigFromEnv(service, buildinfo.Version(), host)
	if err != nil {
		return nil, err
	}
	control, err := otlp.NewControl(cfg, "github.com/lockstep-ccl/lockstep")
	if err != nil {
		return nil, err
	}
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Warn("traces are not sent", "err", err) }))
	return &Tracer{Control: control, enabled: cfg.Enabled(), log: log}, nil
}

// Close sends what is left, for at most three seconds. That a backend is gone
// is logged and no failure of the component.
func (t *Tracer) Close() {
	ctx, cancel := context.WithTimeout(context.Background(), flushGrace)
	defer cancel()
	if err := t.Shutdown(ctx); err != nil {
		t.log.Warn("the last traces are lost", "err", err)
	}
}

// Follow traces a master's incidents until ctx ends.
func (t *Tracer) Follow(ctx context.Context, snapshot func() *collector.MasterSnapshot) {
	if !t.enabled {
		return
	}
	incidents := otlp.NewIncidents(t)
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		incidents.Observe(snapshot())
		select {
		case <-ctx.Done():
			incidents.Observe(snapshot())
			return
		case <-tick.C:
		}
	}
}

// Action traces a journal entry once it is closed, from the webhook to the
// actuator's answer, if its policy wanted something done. It is a
// remediation.Options.OnEvent.
func (t *Tracer) Action(e remediation.Entry) {
	switch {
	case e.State != remediation.Closed || e.Kind == remediation.ActionNone:
		return
	case e.Outcome == remediation.OutcomeStale || e.Outcome == remediation.OutcomeSuperseded:
		return // nothing was done for it, nor would it have been
	}
	a := &e.Alert
	kv := []attribute.KeyValue{
		attribute.String(names.AttrJob, a.Job),
		attribute.String(names.AttrIncident, a.Incident),
		attribute.String(names.AttrClass, a.Class),
		attribute.String(names.AttrCulprit, a.Culprit),
		attribute.String(names.AttrReason, a.Reason),
		attribute.String(names.AttrActionID, e.Action),
		attribute.String(names.AttrActionKind, string(e.Kind)),
		attribute.String(names.AttrPolicy, e.Policy),
		attribute.String(names.AttrOutcome, string(e.Outcome)),
		attribute.String(names.AttrUnit, e.Unit),
		attribute.Int(names.AttrTries, e.Tries),
		attribute.Int64(names.AttrEntry, int64(e.Seq)),
	}
	if a.Attempt != nil {
		kv = append(kv, attribute.Int(names.AttrAttempt, *a.Attempt))
	}
	_, span := t.Start(otlp.IncidentContext(context.Background(), a.Incident), "action "+string(e.Kind),
		trace.WithTimestamp(e.Received), trace.WithAttributes(kv...))
	if !e.Started.IsZero() {
		span.AddEvent("decided", trace.WithTimestamp(e.Started))
	}
	if !e.Effective.IsZero() {
		span.AddEvent("job runs again", trace.WithTimestamp(e.Effective))
	}
	switch e.Outcome {
	case remediation.OutcomeFailed, remediation.OutcomeRefused:
		span.SetStatus(codes.Error, e.Detail)
	}
	span.End(trace.WithTimestamp(e.Finished))
}
