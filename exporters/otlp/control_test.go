package otlp_test

import (
	"context"
	"encoding/hex"
	"maps"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
	coltracepb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/otlp"
	"github.com/lockstep-ccl/lockstep/record"
)

// collected is what a control tracer counts: exported spans under "", dropped ones by reason.
func collected(t *testing.T, c prometheus.Collector) map[string]float64 {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(c)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	n := map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			reason := ""
			if len(m.Label) > 0 {
				reason = m.Label[0].GetValue()
			}
			n[reason] += m.Counter.GetValue()
		}
	}
	return n
}

// counted has a control plane send spans to a backend, ends it, and returns what it has counted.
func counted(t *testing.T, backend *receiver, spans int) map[string]float64 {
	t.Helper()
	tracer, err := otlp.NewControl(config(backend.serveGRPC(t)), "lockstep/master")
	if err != nil {
		t.Fatal(err)
	}
	for range spans {
		_, span := tracer.Start(context.Background(), "x")
		span.End()
	}
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	if err := tracer.Shutdown(ctx); err != nil {
		t.Error(err)
	}
	return collected(t, tracer)
}

// Whatever a backend that refuses, or is away at the end, costs of the control plane's spans is counted.
func TestControlCountsWhatIsLost(t *testing.T) {
	r := newReceiver()
	r.answer = func(int) (*coltracepb.ExportTraceServiceResponse, error) {
		return nil, status.Error(codes.InvalidArgument, "no")
	}
	const spans = 5000 // more than the queue holds
	n := counted(t, r, spans)
	if n[""] != 0 || n[names.DropExportFailed] == 0 || sum(n) != spans {
		t.Errorf("of %d spans counted %v", spans, n)
	}
}

// What a backend accepts is exported, though it rejects some spans, or has something to say.
func TestControlCountsPartialSuccess(t *testing.T) {
	for name, tt := range map[string]struct {
		rejected int64
		want     map[string]float64
	}{
		"a warning":      {0, map[string]float64{"": 5}},
		"rejected spans": {2, map[string]float64{"": 3, names.DropRejected: 2}},
		"more than sent": {99, map[string]float64{names.DropRejected: 5}},
	} {
		r := newReceiver()
		r.answer = func(int) (*coltracepb.ExportTraceServiceResponse, error) {
			return &coltracepb.ExportTraceServiceResponse{PartialSuccess: &coltracepb.ExportTracePartialSuccess{RejectedSpans: tt.rejected, ErrorMessage: "deprecated"}}, nil
		}
		n := counted(t, r, 5)
		maps.DeleteFunc(n, func(_ string, v float64) bool { return v == 0 })
		if r.requests != 1 || !maps.Equal(n, tt.want) {
			t.Errorf("%s: counted %v in %d requests, want %v", name, n, r.requests, tt.want)
		}
	}
}

func TestControlTracer(t *testing.T) {
	r := newReceiver()
	setenv(t, map[string]string{"ENDPOINT": "http://" + r.serveGRPC(t), "PROTOCOL": "grpc"})
	t.Setenv("OTEL_TRACES_SAMPLER", "traceidratio") // of collectives: what is rare is kept
	t.Setenv("OTEL_TRACES_SAMPLER_ARG", "0")
	c, err := otlp.ConfigFromEnv("lockstep-master", "1.2.3", "head-01")
	if err != nil {
		t.Fatal(err)
	}
	tracer, err := otlp.NewControl(c, "lockstep/master")
	if err != nil {
		t.Fatal(err)
	}
	shown := collector.TraceID("llama", 7, record.AllReduce, 5)
	ctx, parent := tracer.Start(context.Background(), "incident", trace.WithLinks(otlp.CollectiveLink(shown)))
	_, action := tracer.Start(ctx, "action restart")
	action.End()
	parent.End()
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	if err := tracer.Shutdown(ctx); err != nil {
		t.Error(err)
	}
	spans := r.await(t, 2)
	link := spans[1].Links[0]
	root := collector.SpanID(shown, -1)
	if spans[1].Name != "incident" || hex.EncodeToString(link.TraceId) != hex.EncodeToString(shown[:]) || hex.EncodeToString(link.SpanId) != hex.EncodeToString(root[:]) {
		t.Errorf("span %v", spans[1])
	}
	if n := collected(t, tracer); n[""] != 2 || n[names.DropQueueFull] != 0 {
		t.Errorf("counted %v", n)
	}
	if off, err := otlp.NewControl(otlp.Config{}, "x"); err != nil || off.Shutdown(ctx) != nil || collected(t, off)[""] != 0 {
		t.Errorf("without an endpoint: %v", err)
	} else if _, span := off.Start(ctx, "nothing"); span.IsRecording() {
		t.Error("a span is recorded without an endpoint")
	}
}
