package otlp_test

import (
	"bytes"
	"context"
	"slices"
	"testing"
	"time"

	"go.opentelemetry.io/otel/trace"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/otlp"
	"github.com/lockstep-ccl/lockstep/record"
)

// controlSpans returns what a control tracer sends of work.
func controlSpans(t *testing.T, work func(trace.Tracer)) []*tracepb.Span {
	t.Helper()
	r := newReceiver()
	tracer, err := otlp.NewControl(config(r.serveGRPC(t)), "lockstep/master")
	if err != nil {
		t.Fatal(err)
	}
	work(tracer)
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	if err := tracer.Shutdown(ctx); err != nil {
		t.Fatal(err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.spans
}

func spanNames(spans []*tracepb.Span) (names []string) {
	for _, s := range spans {
		names = append(names, s.Name)
	}
	return names
}

func TestIncidentsAreTraced(t *testing.T) {
	began := time.Unix(1_800_000_000, 0)
	in := collector.Incident{
		ID: "llama-1-1", Opened: began.Add(time.Second), Attempt: 2, TraceID: collector.TraceID("llama", 7, record.AllReduce, 5),
		Verdict: diagnosis.Verdict{
			Class: diagnosis.CommunicationHang, Culprits: []diagnosis.Culprit{{Kind: diagnosis.CulpritConnection, Rank: 2, Peer: 6, Node: "b", Reason: "stalled"}},
			Comm: 7, CommName: "dp", Coll: record.AllReduce, Seq: 5, Since: began.UnixNano(), Victims: 3, Why: []string{"no byte moved"},
		},
	}
	snap := func(changes ...func(*collector.Incident)) *collector.MasterSnapshot {
		for _, c := range changes {
			c(&in)
		}
		return &collector.MasterSnapshot{Job: "llama", Incidents: []collector.Incident{in}}
	}
	confirm := func(i *collector.Incident) { i.Confirmed = began.Add(2 * time.Second) }
	closes := func(i *collector.Incident) { i.Closed = began.Add(9 * time.Second) }
	spans := controlSpans(t, func(tracer trace.Tracer) {
		x := otlp.NewIncidents(tracer)
		x.Observe(&collector.MasterSnapshot{Job: "llama"})
		for _, s := range []*collector.MasterSnapshot{snap(), snap(), snap(confirm), snap(), snap(closes), snap()} {
			x.Observe(s)
		}
		_, action := tracer.Start(otlp.IncidentContext(context.Background(), in.ID), "action restart") // another process
		action.End()
	})
	if got := spanNames(spans); !slices.Equal(got, []string{"detection communication_hang", "incident communication_hang", "action restart"}) {
		t.Fatalf("spans %q", got)
	}
	found, root, action := spans[0], spans[1], spans[2]
	if !bytes.Equal(found.TraceId, root.TraceId) || !bytes.Equal(action.TraceId, root.TraceId) ||
		!bytes.Equal(found.ParentSpanId, root.SpanId) || !bytes.Equal(action.ParentSpanId, root.SpanId) || len(root.ParentSpanId) != 0 {
		t.Errorf("not one trace under the incident: %v\n%v\n%v", root, found, action)
	}
	if bytes.Equal(root.TraceId, in.TraceID[:]) || len(root.Links) != 1 || !bytes.Equal(root.Links[0].TraceId, in.TraceID[:]) {
		t.Errorf("not a trace of its own that links to the collective's: %v", root)
	}
	at := func(s int) uint64 { return uint64(began.Add(time.Duration(s) * time.Second).UnixNano()) }
	if root.StartTimeUnixNano != at(0) || root.EndTimeUnixNano != at(9) || found.StartTimeUnixNano != at(0) || found.EndTimeUnixNano != at(2) {
		t.Errorf("times: incident %v, detection %v", root, found)
	}
	if len(root.Events) != 2 || root.Events[0].TimeUnixNano != at(1) || root.Events[1].Name != "confirmed" || root.Events[1].TimeUnixNano != at(2) {
		t.Errorf("events %v", root.Events)
	}
	have := map[string]string{}
	for _, kv := range root.Attributes {
		have[kv.Key] = kv.Value.GetStringValue()
	}
	for k, want := range map[string]string{
		names.AttrJob: "llama", names.AttrIncident: in.ID, names.AttrClass: "communication_hang", names.AttrCulprit: "rank 2 → rank 6",
		names.AttrReason: "stalled", names.AttrCommunicator: "dp", names.AttrCollective: "AllReduce",
	} {
		if have[k] != want {
			t.Errorf("%s is %q, want %q", k, have[k], want)
		}
	}
}

// TestIncidentsOfAFormerMaster: a master that is started again has its
// predecessor's incidents in its first snapshot.
func TestIncidentsOfAFormerMaster(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	in := func(id string, confirmed, closed bool) collector.Incident {
		i := collector.Incident{ID: id, Opened: now}
		if confirmed {
			i.Confirmed = now
		}
		if closed {
			i.Closed = now
		}
		return i
	}
	spans := controlSpans(t, func(tracer trace.Tracer) {
		x := otlp.NewIncidents(tracer)
		for _, open := range []bool{true, false} {
			x.Observe(&collector.MasterSnapshot{Incidents: []collector.Incident{
				in("told in full", true, true), in("open", true, !open), in("never confirmed", false, !open), in("confirmed here", !open, !open),
			}})
		}
	})
	var told []string
	for _, s := range spans {
		for _, kv := range s.Attributes {
			if kv.Key == names.AttrIncident {
				told = append(told, s.Name+": "+kv.Value.GetStringValue())
			}
		}
	}
	want := []string{"incident healthy: open", "detection healthy: confirmed here", "incident healthy: confirmed here"}
	if !slices.Equal(told, want) {
		t.Errorf("told %q, want %q", told, want)
	}
}
