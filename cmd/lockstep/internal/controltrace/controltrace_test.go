package controltrace

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	coltracepb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/remediation"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// receiver is an OTLP/HTTP backend in this process.
type receiver struct {
	mu    sync.Mutex
	spans []*tracepb.Span
}

func (r *receiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	var m coltracepb.ExportTraceServiceRequest
	b, err := io.ReadAll(req.Body)
	if err != nil || proto.Unmarshal(b, &m) != nil {
		http.Error(w, "not OTLP", http.StatusBadRequest)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, rs := range m.ResourceSpans {
		for _, ss := range rs.ScopeSpans {
			r.spans = append(r.spans, ss.Spans...)
		}
	}
	w.Header().Set("Content-Type", "application/x-protobuf")
}

func TestIncidentAndActionsMeetInOneTrace(t *testing.T) {
	r := &receiver{}
	srv := httptest.NewServer(r)
	defer srv.Close()
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", srv.URL)
	log := slog.New(slog.DiscardHandler)
	now := time.Now()

	master, err := New("lockstep-master", log)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	calls := 0
	master.Follow(ctx, func() *collector.MasterSnapshot {
		if calls++; calls == 1 {
			cancel()
			return &collector.MasterSnapshot{Job: "llm"}
		}
		return &collector.MasterSnapshot{Job: "llm", Incidents: []collector.Incident{{ID: "llm-1-1", Opened: now, Confirmed: now, Closed: now}}}
	})
	master.Close()

	remediator, err := New("lockstep-remediator", log)
	if err != nil {
		t.Fatal(err)
	}
	attempt := 3
	e := remediation.Entry{
		Seq: 9, Action: "id", Alert: remediation.Alert{Job: "llm", Incident: "llm-1-1", Class: names.ClassCommunicationHang, Attempt: &attempt},
		Received: now, Started: now, Effective: now, Finished: now.Add(time.Second), State: remediation.Closed, Kind: remediation.ActionRestart, Outcome: remediation.OutcomeDone,
	}
	for _, change := range []func(*remediation.Entry){
		func(e *remediation.Entry) { e.State = remediation.Running },
		func(e *remediation.Entry) {},
		func(e *remediation.Entry) { e.Outcome, e.Detail = remediation.OutcomeFailed, "no supervisor" },
		func(e *remediation.Entry) { e.Outcome = remediation.OutcomeSuperseded },
		func(e *remediation.Entry) { e.Kind, e.Outcome = remediation.ActionNone, remediation.OutcomeNone },
	} {
		x := e
		change(&x)
		remediator.Action(x)
	}
	remediator.Close()

	r.mu.Lock()
	defer r.mu.Unlock()
	var got []string
	for _, s := range r.spans {
		got = append(got, s.Name)
		if !bytes.Equal(s.TraceId, r.spans[0].TraceId) {
			t.Errorf("%s is in a trace of its own", s.Name)
		}
	}
	if want := []string{"detection healthy", "incident healthy", "action restart", "action restart"}; !slices.Equal(got, want) {
		t.Fatalf("spans %q, want %q", got, want)
	}
	root, done, failed := r.spans[1], r.spans[2], r.spans[3]
	if !bytes.Equal(done.ParentSpanId, root.SpanId) || len(done.Events) != 2 || done.EndTimeUnixNano != uint64(now.Add(time.Second).UnixNano()) {
		t.Errorf("action %v", done)
	}
	if failed.Status.GetCode() != tracepb.Status_STATUS_CODE_ERROR || failed.Status.GetMessage() != "no supervisor" {
		t.Errorf("failed action %v", failed)
	}
}

func TestWithoutAnEndpoint(t *testing.T) {
	x, err := New("lockstep-master", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	x.Follow(context.Background(), nil) // returns at once
	x.Action(remediation.Entry{State: remediation.Closed})
	x.Close()
}

// TestABackendThatIsGone delays the end of a component, but not for long.
func TestABackendThatIsGone(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
	x, err := New("lockstep-remediator", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	x.Action(remediation.Entry{State: remediation.Closed, Kind: remediation.ActionRestart})
	ended := make(chan struct{})
	go func() { x.Close(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(30 * time.Second):
		t.Fatal("Close does not return")
	}
}
