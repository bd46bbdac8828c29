package otlp

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// IncidentContext is the parent of every span about an incident. Its ids derive
// from the incident's, so that the master's spans and the remediator's meet in
// one trace with nothing exchanged, as the ranks' spans of a collective do.
func IncidentContext(ctx context.Context, incident string) context.Context {
	id := IncidentTrace(incident)
	return trace.ContextWithRemoteSpanContext(ctx, trace.NewSpanContext(trace.SpanContextConfig{
		TraceID:    id,
		SpanID:     collector.SpanID(id, rootRank),
		TraceFlags: trace.FlagsSampled,
	}))
}

// IncidentTrace is the trace of an incident.
func IncidentTrace(incident string) (id [16]byte) {
	h := sha256.Sum256([]byte("incident\x00" + incident))
	copy(id[:], h[:])
	return id
}

// Incidents traces a master's incidents: when one is confirmed, a span of the
// time that it took to find out, and when it closes, the incident's own span,
// parent of that one and of the remediator's actions. Only what happens under
// its eyes is traced: a master that is started again repeats nothing, and the
// incidents that outlived it end in its successor's traces. It is for one goroutine.
type Incidents struct {
	tracer trace.Tracer
	told   map[string]stage // by incident; nil before the first Observe
}

// stage is how far an incident's story has been told.
type stage uint8

const (
	toldFound stage = iota + 1
	toldAll
)

// NewIncidents returns an Incidents that sends its spans through tracer.
func NewIncidents(tracer trace.Tracer) *Incidents { return &Incidents{tracer: tracer} }

// Observe compares a snapshot with the one before and sends what is new. What
// is remembered is bounded by collector.MaxIncidents. A snapshot a second is
// enough: spans carry the incidents' times, not those of the calls.
func (t *Incidents) Observe(s *collector.MasterSnapshot) {
	told := make(map[string]stage, len(s.Incidents))
	for i := range s.Incidents {
		in := &s.Incidents[i]
		now := stage(0)
		switch {
		case in.Confirmed.IsZero():
		case in.Closed.IsZero():
			now = toldFound
		default:
			now = toldAll
		}
		told[in.ID] = now
		if t.told == nil {
			continue
		}
		before := t.told[in.ID]
		if before < toldFound && now >= toldFound {
			t.found(s.Job, in)
		}
		if before < toldAll && now == toldAll {
			t.incident(s.Job, in)
		}
	}
	t.told = told
}

func (t *Incidents) found(job string, in *collector.Incident) {
	_, span := t.tracer.Start(IncidentContext(context.Background(), in.ID), "detection "+in.Verdict.Class.String(),
		trace.WithTimestamp(onset(in)), trace.WithAttributes(attributes(job, in)...), trace.WithLinks(links(in)...))
	span.AddEvent("opened", trace.WithTimestamp(in.Opened))
	span.End(trace.WithTimestamp(in.Confirmed))
}

func (t *Incidents) incident(job string, in *collector.Incident) {
	_, span := t.tracer.Start(context.WithValue(context.Background(), incidentKey{}, in.ID), "incident "+in.Verdict.Class.String(),
		trace.WithTimestamp(onset(in)), trace.WithAttributes(attributes(job, in)...), trace.WithLinks(links(in)...))
	span.AddEvent("opened", trace.WithTimestamp(in.Opened))
	span.AddEvent("confirmed", trace.WithTimestamp(in.Confirmed))
	span.SetStatus(codes.Error, blame(in))
	span.End(trace.WithTimestamp(in.Closed))
}

// links lead to the collective that shows the incident, if its trace is there.
func links(in *collector.Incident) []trace.Link {
	if in.TraceID == ([16]byte{}) {
		return nil
	}
	return []trace.Link{CollectiveLink(in.TraceID)}
}

// onset is when the fault began, as far as is known.
func onset(in *collector.Incident) time.Time {
	if in.Verdict.Since == 0 {
		return in.Opened
	}
	return time.Unix(0, in.Verdict.Since)
}

func attributes(job string, in *collector.Incident) []attribute.KeyValue {
	v := &in.Verdict
	kv := []attribute.KeyValue{
		attribute.String(names.AttrJob, job),
		attribute.String(names.AttrIncident, in.ID),
		attribute.String(names.AttrClass, v.Class.String()),
		attribute.String(names.AttrCulprit, blame(in)),
		attribute.Int(names.AttrAttempt, int(in.Attempt)),
		attribute.String(names.AttrCommunicator, v.CommName),
		attribute.String(names.AttrCommID, fmt.Sprintf("%016x", v.Comm)),
		attribute.String(names.AttrCollective, v.Coll.String()),
		attribute.Int64(names.AttrSequence, int64(v.Seq)),
		attribute.Int(names.AttrVictims, v.Victims),
		attribute.StringSlice(names.AttrEvidence, v.Why),
	}
	if len(v.Culprits) > 0 {
		c := v.Culprits[0]
		kv = append(kv, attribute.String(names.AttrCulpritKind, c.Kind.String()), attribute.String(names.AttrReason, c.Reason), attribute.String(names.AttrNode, c.Node))
	}
	return kv
}

// blame names the first culprit.
func blame(in *collector.Incident) string {
	if len(in.Verdict.Culprits) == 0 {
		return "unknown"
	}
	return in.Verdict.Culprits[0].String()
}

type incidentKey struct{}

// ids gives the span of an incident its derived ids, and all others random ones.
type ids struct{}

func (ids) NewIDs(ctx context.Context) (t trace.TraceID, s trace.SpanID) {
	if incident, ok := ctx.Value(incidentKey{}).(string); ok {
		id := IncidentTrace(incident)
		return id, collector.SpanID(id, rootRank)
	}
	rand.Read(t[:])
	rand.Read(s[:])
	return t, s
}

func (ids) NewSpanID(context.Context, trace.TraceID) (s trace.SpanID) {
	rand.Read(s[:])
	return s
}
