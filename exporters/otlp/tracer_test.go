package otlp_test

import (
	"context"
	"encoding/hex"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/otlp"
	"github.com/lockstep-ccl/lockstep/record"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bound is far beyond what any of these tests takes.
const bound = 30 * time.Second

func config(addr string) otlp.Config {
	return otlp.Config{Endpoint: addr, Protocol: otlp.GRPC, Timeout: bound}
}

func newTracer(t testing.TB, c otlp.Config, o otlp.Options) *otlp.Tracer {
	t.Helper()
	o.Log = slog.New(slog.DiscardHandler)
	tracer, err := otlp.New(c, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shutdown(t, tracer) })
	return tracer
}

func shutdown(t testing.TB, tracer *otlp.Tracer) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	if err := tracer.Shutdown(ctx); err != nil {
		t.Error(err)
	}
}

func collective(seq uint64, anomalous bool) *collector.Collective {
	return &collector.Collective{
		Job: "llama", Comm: "dp", CommID: 7, Rank: 0, Size: 2, Kind: record.AllReduce, Seq: seq, Root: -1,
		Enqueued: 900, Started: 1000, Ended: 3000, Wait: 500, Transfer: 1500, RealOffset: 1_700_000_000_000_000_000, Anomalous: anomalous,
	}
}

// spansOf is how many spans collective makes: rank, wait, transfer.
const spansOf = 3

// counts returns exported and dropped spans as /metrics has them.
func counts(t testing.TB, tracer *otlp.Tracer) (exported float64, dropped map[string]float64) {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(tracer)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	dropped = map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			switch f.GetName() {
			case names.SpansExported.Name:
				exported = m.Counter.GetValue()
			case names.SpansDropped.Name:
				dropped[m.Label[0].GetValue()] = m.Counter.GetValue()
			}
		}
	}
	return exported, dropped
}

func TestExportOverEachTransport(t *testing.T) {
	r := newReceiver()
	dir := t.TempDir()
	cert := selfSigned(t, dir)
	plain := r.serveGRPC(t)
	secure := r.serveGRPC(t, grpc.Creds(credentials.NewServerTLSFromCert(&cert)))
	web := httptest.NewServer(r)
	t.Cleanup(web.Close)
	for name, env := range map[string]map[string]string{
		"grpc":      {"ENDPOINT": "http://" + plain, "PROTOCOL": "grpc"},
		"grpc gzip": {"ENDPOINT": plain, "PROTOCOL": "grpc", "INSECURE": "true", "COMPRESSION": "gzip"},
		"grpc tls":  {"ENDPOINT": "https://" + secure, "PROTOCOL": "grpc", "CERTIFICATE": dir + "/cert.pem"},
		"http":      {"ENDPOINT": web.URL},
		"http gzip": {"TRACES_ENDPOINT": web.URL + "/v1/traces", "PROTOCOL": "http/protobuf", "TRACES_COMPRESSION": "gzip"},
	} {
		t.Run(name, func(t *testing.T) {
			setenv(t, env)
			t.Setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=blue%20team")
			t.Setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=trainer-0,service.name=overridden")
			t.Setenv("OTEL_SERVICE_NAME", "trainers")
			c, err := otlp.ConfigFromEnv("lockstep-agent", "1.2.3", "gpu-01")
			if err != nil {
				t.Fatal(err)
			}
			tracer := newTracer(t, c, otlp.Options{})
			before := len(r.spans)
			tracer.Collective(collective(1, true))
			spans := r.await(t, spansOf)[before:]
			if spans[0].Name != "rank 0 AllReduce" || r.headers.Get("X-Tenant") != "blue team" {
				t.Errorf("span %q, headers %v", spans[0].Name, r.headers)
			}
			resource := map[string]string{}
			for _, kv := range r.bundles[len(r.bundles)-1].Resource.Attributes {
				resource[kv.Key] = kv.Value.GetStringValue()
			}
			for key, want := range map[string]string{"service.name": "trainers", "host.name": "gpu-01", "k8s.pod.name": "trainer-0", names.AttrJob: "llama"} {
				if resource[key] != want {
					t.Errorf("resource has %s=%q, want %q", key, resource[key], want)
				}
			}
			shutdown(t, tracer)
			if exported, dropped := counts(t, tracer); exported != spansOf || sum(dropped) != 0 {
				t.Errorf("exported %v, dropped %v", exported, dropped)
			}
		})
	}
}

func sum(m map[string]float64) (n float64) {
	for _, v := range m {
		n += v
	}
	return n
}

func TestJobsOfOneNodeAreSeparateResources(t *testing.T) {
	r := newReceiver()
	tracer := newTracer(t, config(r.serveGRPC(t)), otlp.Options{})
	for seq := range uint64(10) {
		c := collective(seq, true)
		c.Job = fmt.Sprint("job", seq%2)
		tracer.Collective(c)
	}
	r.await(t, 10*spansOf)
	spans := map[string]int{}
	for _, b := range r.bundles {
		for _, kv := range b.Resource.Attributes {
			if kv.Key == names.AttrJob {
				spans[kv.Value.GetStringValue()] += len(b.ScopeSpans[0].Spans)
			}
		}
	}
	if spans["job0"] != 5*spansOf || spans["job1"] != 5*spansOf {
		t.Errorf("spans by job: %v", spans)
	}
}

func TestWithoutAnEndpointNothingHappens(t *testing.T) {
	setenv(t, nil)
	c, err := otlp.ConfigFromEnv("lockstep-agent", "1.2.3", "")
	if err != nil || c.Enabled() {
		t.Fatalf("enabled %v, %v", c.Enabled(), err)
	}
	tracer := newTracer(t, c, otlp.Options{})
	tracer.Collective(collective(1, true))
	if n := tracer.Retroactive("llama", 7, record.AllReduce, 1, nil); n != 0 || tracer.Enabled() {
		t.Errorf("found %d spans", n)
	}
	exported, dropped := counts(t, tracer)
	if exported != 0 || len(dropped) == 0 {
		t.Errorf("exported %v, dropped %v: want both present, and 0", exported, dropped)
	}
	for reason, n := range dropped {
		if n != 0 {
			t.Errorf("dropped %v for %s", n, reason)
		}
	}
}

// Healthy collectives are sampled exactly as the SDK's ratio sampler would, so
// that agents and anybody else's SDK agree.
func TestHealthySamplingAgreesWithTheSDK(t *testing.T) {
	const n, ratio = 2000, 0.1
	r := newReceiver()
	c := config(r.serveGRPC(t))
	c.Ratio = ratio
	tracer := newTracer(t, c, otlp.Options{SpansPerSecond: 1 << 20})
	sdk := sdktrace.TraceIDRatioBased(ratio)
	want := map[string]bool{}
	for seq := range uint64(n) {
		id := collector.TraceID("llama", 7, record.AllReduce, seq)
		if sdk.ShouldSample(sdktrace.SamplingParameters{TraceID: trace.TraceID(id)}).Decision == sdktrace.RecordAndSample {
			want[hex.EncodeToString(id[:])] = true
		}
		tracer.Collective(collective(seq, false))
	}
	got := map[string]bool{}
	for _, s := range r.await(t, len(want)*spansOf) {
		got[hex.EncodeToString(s.TraceId)] = true
	}
	shutdown(t, tracer)
	if len(r.spans) != len(want)*spansOf || len(want) < n*ratio/2 {
		t.Errorf("%d spans of %d sampled collectives", len(r.spans), len(want))
	}
	for id := range got {
		if !want[id] {
			t.Errorf("trace %s is not in the sample", id)
		}
	}
}

func TestRetroactive(t *testing.T) {
	r := newReceiver()
	tracer := newTracer(t, config(r.serveGRPC(t)), otlp.Options{Remember: 64})
	for seq := uint64(1); seq <= 100; seq++ {
		for rank := range int32(2) {
			c := collective(seq, false)
			c.Rank = rank
			tracer.Collective(c)
		}
	}
	told := 0
	ask := func(job string, seq uint64) int {
		return tracer.Retroactive(job, 7, record.AllReduce, seq, func(x collector.Traced) {
			told++
			if x.First != 1_700_000_000_000_001_000 || x.Last != 1_700_000_000_000_003_000 {
				t.Errorf("told %+v", x)
			}
		})
	}
	if kind, seq, ok := tracer.Held("llama", 7); kind != record.AllReduce || seq != 100 || !ok {
		t.Errorf("the newest one held is %v %d", kind, seq)
	}
	if _, _, ok := tracer.Held("llama", 8); ok {
		t.Error("holds something of an unknown communicator")
	}
	if n := ask("llama", 50); n != 0 {
		t.Errorf("found %d spans of a collective that memory has overwritten", n)
	}
	if n := ask("gpt", 99); n != 0 {
		t.Errorf("found %d spans of another job's collective", n)
	}
	for range 2 { // asking again finds them again and sends nothing again
		if n := ask("llama", 99); n != 2*spansOf || told != 2 {
			t.Errorf("found %d spans, and told of %d; want those of two ranks", n, told)
		}
	}
	r.await(t, 2*spansOf)
	shutdown(t, tracer)
	if len(r.spans) != 2*spansOf {
		t.Errorf("%d spans were sent", len(r.spans))
	}
	if n := ask("llama", 100); n != 0 {
		t.Errorf("found %d spans after shutdown", n)
	}
}

func TestOpenCollectiveIsSentWhenNamedAndAgainWhenItEnds(t *testing.T) {
	r := newReceiver()
	tracer := newTracer(t, config(r.serveGRPC(t)), otlp.Options{})
	open := collective(5, true)
	open.Ended, open.Wait, open.Transfer = 0, 0, 0
	for range 3 { // an agent hands over its snapshot each time it is asked
		tracer.Collective(open)
		if n := tracer.Retroactive("llama", 7, record.AllReduce, 5, func(collector.Traced) {}); n != 1 {
			t.Fatalf("found %d spans, want the open one", n)
		}
	}
	root := collective(5, false)
	root.Rank = -1
	for range 2 {
		tracer.Root(root, 2)
	}
	last := collective(5, false) // what ends later is exported too, sampled or not, and lies beyond the root
	tracer.Collective(last)
	spans := r.await(t, 2+3)
	if last.Traced || len(spans[2].ParentSpanId) != 0 || len(spans[2].Links) != 1 {
		t.Errorf("the late span %v", spans[2])
	}
	shutdown(t, tracer)
	ids := map[string]int{}
	for _, s := range spans {
		ids[hex.EncodeToString(s.SpanId)]++
	}
	if len(spans) != 5 || len(ids) != 5 {
		t.Errorf("%d spans with %d ids, want root, open, rank, wait, transfer once each", len(spans), len(ids))
	}
}

// A trace whose root nobody sends has no span that names one as its parent, whatever else was asked of it.
func TestRootless(t *testing.T) {
	r := newReceiver()
	tracer := newTracer(t, config(r.serveGRPC(t)), otlp.Options{})
	c := collective(5, true)
	c.Rootless = true
	tracer.Collective(c)
	spans := r.await(t, spansOf)
	if len(spans[0].ParentSpanId) != 0 || len(spans[0].Links) != 0 || string(spans[1].ParentSpanId) != string(spans[0].SpanId) {
		t.Errorf("%v", spans)
	}
}

func TestAbnormalWindowsBecomeEvents(t *testing.T) {
	r := newReceiver()
	tracer := newTracer(t, config(r.serveGRPC(t)), otlp.Options{})
	c := collective(1, true)
	c.NWindows = 2
	c.Windows[0] = collector.Window{Peer: 1, Bytes: 4096, First: 1000, Last: 2000, Cause: record.CauseNetwork}
	c.Windows[1] = collector.Window{Peer: 1, Cause: record.CauseReceiverNotReady}
	tracer.Collective(c)
	events := r.await(t, spansOf)[0].Events
	if len(events) != 2 || events[0].Name != "window" || events[0].Attributes[0].Value.GetStringValue() != "network" {
		t.Errorf("events %v", events)
	}
}

func TestACollectiveWithoutAnyTimeHasNoSpans(t *testing.T) {
	r := newReceiver()
	tracer := newTracer(t, config(r.serveGRPC(t)), otlp.Options{})
	c := collective(1, true)
	c.Enqueued, c.Started, c.Ended = 0, 0, 0
	tracer.Collective(c) // open, and never named
	if n := tracer.Retroactive("llama", 7, record.AllReduce, 1, func(collector.Traced) {}); n != 0 {
		t.Errorf("%d spans without a time", n)
	}
}

// BenchmarkCollective is what the fold goroutine pays for each collective.
func BenchmarkCollective(b *testing.B) {
	for _, bench := range []struct {
		name      string
		anomalous bool
	}{{"healthy", false}, {"anomalous", true}} {
		b.Run(bench.name, func(b *testing.B) {
			r := newReceiver()
			c := config(r.serveGRPC(b))
			c.Ratio = otlp.DefaultRatio
			tracer := newTracer(b, c, otlp.Options{})
			x := collective(0, bench.anomalous)
			b.ReportAllocs()
			for b.Loop() {
				x.Seq++
				tracer.Collective(x)
			}
		})
	}
}

// The windows around a collective go out once for each rank of which spans are out, below
// that rank's span, with times of their own.
func TestHistory(t *testing.T) {
	r := newReceiver()
	tracer := newTracer(t, config(r.serveGRPC(t)), otlp.Options{Remember: 64})
	for rank := range int32(2) {
		c := collective(7, false)
		c.Rank = rank
		tracer.Collective(c)
	}
	read := 0
	ask := func() int {
		return tracer.History("llama", 7, record.AllReduce, 7, func(rank int32, first, last int64) (h collector.Around) {
			if read++; first != 1_000 || last != 3_000 {
				t.Errorf("asked for %d to %d", first, last)
			}
			if rank == 1 {
				return h
			}
			h.Windows = []collector.Window{
				{Peer: 1, First: 100, Last: 200, Bytes: 8, WRs: 8},
				{Peer: 1, First: 900, Last: 2_000, Bytes: 8, WRs: 8, Cause: record.CauseNetwork, State: record.CauseNetwork, Overlaps: true},
			}
			h.Links, h.LeftOut = []collector.LinkEvent{{Peer: 1, State: record.LinkDown, At: 500}}, 5
			return h
		})
	}
	if n := ask(); n != 0 || read != 0 {
		t.Errorf("%d spans of a collective that is not exported", n)
	}
	tracer.Retroactive("llama", 7, record.AllReduce, 7, func(collector.Traced) {})
	if a, b := ask(), ask(); a != 1 || b != 0 {
		t.Errorf("%d spans, then %d", a, b)
	}
	r.await(t, 2*spansOf+1)
	shutdown(t, tracer)
	found := false
	for _, s := range r.spans {
		if s.Name != "windows" {
			continue
		}
		found = true
		parent := slices.IndexFunc(r.spans, func(p *tracepb.Span) bool { return string(p.SpanId) == string(s.ParentSpanId) })
		if parent < 0 || r.spans[parent].StartTimeUnixNano != s.StartTimeUnixNano || len(s.Events) != 3 {
			t.Fatalf("%v", s)
		}
		if s.DroppedEventsCount != 5 {
			t.Errorf("the span says that %d windows found no room", s.DroppedEventsCount)
		}
		if at := s.Events[0].TimeUnixNano; at != s.StartTimeUnixNano-800 {
			t.Errorf("the first window is at %d, its span begins at %d", at, s.StartTimeUnixNano)
		}
		if e := s.Events[2]; e.Name != "link" || e.TimeUnixNano != s.StartTimeUnixNano-500 {
			t.Errorf("%v", e)
		}
		if e := s.Events[1].String(); !strings.Contains(e, "ccl.window.overlaps") || !strings.Contains(e, "ccl.window.state") {
			t.Error(e)
		}
	}
	if !found {
		t.Error("no span has the windows")
	}
	if err := testutil.CollectAndCompare(tracer, strings.NewReader(`
# HELP lockstep_trace_events_dropped_total Windows and changes of connections that spans had no room for. Each span says how many (dropped events).
# TYPE lockstep_trace_events_dropped_total counter
lockstep_trace_events_dropped_total 5
`), names.TraceEventsDropped.Name); err != nil {
		t.Error(err)
	}
}
