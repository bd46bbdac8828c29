package otlp_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	coltracepb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"go.uber.org/goleak"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/wire/wiretest"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/otlp"
	"github.com/lockstep-ccl/lockstep/record"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bound is far beyond what any of these tests takes.
const bound = 30 * time.Second

// receiver is a real OTLP backend in this process. answer, when set, decides
// on each request by its number from 0.
type receiver struct {
	coltracepb.UnimplementedTraceServiceServer
	answer func(n int) (*coltracepb.ExportTraceServiceResponse, error)

	mu       sync.Mutex
	requests int
	headers  http.Header
	spans    []*tracepb.Span
	bundles  []*tracepb.ResourceSpans
	arrived  chan struct{}
}

func newReceiver() *receiver { return &receiver{arrived: make(chan struct{}, 1<<16)} }

func (r *receiver) take(req *coltracepb.ExportTraceServiceRequest, headers http.Header) (*coltracepb.ExportTraceServiceResponse, error) {
	r.mu.Lock()
	n := r.requests
	r.requests++
	r.headers = headers
	r.mu.Unlock()
	response := &coltracepb.ExportTraceServiceResponse{}
	if r.answer != nil {
		var err error
		if response, err = r.answer(n); err != nil {
			return nil, err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, rs := range req.ResourceSpans {
		r.bundles = append(r.bundles, rs)
		for _, ss := range rs.ScopeSpans {
			r.spans = append(r.spans, ss.Spans...)
			for range ss.Spans {
				r.arrived <- struct{}{}
			}
		}
	}
	return response, nil
}

func (r *receiver) Export(ctx context.Context, req *coltracepb.ExportTraceServiceRequest) (*coltracepb.ExportTraceServiceResponse, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	headers := http.Header{}
	for k, vs := range md {
		headers[http.CanonicalHeaderKey(k)] = vs
	}
	return r.take(req, headers)
}

func (r *receiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	body := io.Reader(req.Body)
	if req.Header.Get("Content-Encoding") == "gzip" {
		z, err := gzip.NewReader(body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		body = z
	}
	b, err := io.ReadAll(body)
	var decoded coltracepb.ExportTraceServiceRequest
	if err != nil || req.URL.Path != "/v1/traces" || req.Header.Get("Content-Type") != "application/x-protobuf" || proto.Unmarshal(b, &decoded) != nil {
		http.Error(w, "not OTLP", http.StatusBadRequest)
		return
	}
	response, err := r.take(&decoded, req.Header)
	if err != nil {
		w.Header().Set("Retry-After", "1")
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	out, _ := proto.Marshal(response)
	w.Header().Set("Content-Type", "application/x-protobuf")
	w.Write(out)
}

// await returns once n spans have arrived in all.
func (r *receiver) await(t *testing.T, n int) []*tracepb.Span {
	t.Helper()
	timeout := time.After(bound)
	for range n {
		select {
		case <-r.arrived:
		case <-timeout:
			r.mu.Lock()
			defer r.mu.Unlock()
			t.Fatalf("%d spans arrived, want %d", len(r.spans), n)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.spans
}

func (r *receiver) serveGRPC(t testing.TB, opts ...grpc.ServerOption) (addr string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer(opts...)
	coltracepb.RegisterTraceServiceServer(s, r)
	done := make(chan struct{})
	go func() { defer close(done); s.Serve(l) }()
	t.Cleanup(func() { s.Stop(); <-done })
	return l.Addr().String()
}

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

func TestRetries(t *testing.T) {
	t.Parallel()
	unavailable := func(n int) (*coltracepb.ExportTraceServiceResponse, error) {
		if n == 0 {
			s, _ := status.New(codes.ResourceExhausted, "busy").WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(time.Millisecond)})
			return nil, s.Err()
		}
		return &coltracepb.ExportTraceServiceResponse{}, nil
	}
	t.Run("grpc", func(t *testing.T) {
		t.Parallel()
		r := newReceiver()
		r.answer = unavailable
		tracer := newTracer(t, config(r.serveGRPC(t)), otlp.Options{})
		tracer.Collective(collective(1, true))
		r.await(t, spansOf)
		if r.requests != 2 {
			t.Errorf("%d requests", r.requests)
		}
	})
	t.Run("http", func(t *testing.T) {
		t.Parallel()
		r := newReceiver()
		r.answer = unavailable
		web := httptest.NewServer(r)
		t.Cleanup(web.Close)
		tracer := newTracer(t, otlp.Config{Endpoint: web.URL + "/v1/traces", Protocol: otlp.HTTP}, otlp.Options{})
		tracer.Collective(collective(1, true))
		r.await(t, spansOf)
		if r.requests != 2 {
			t.Errorf("%d requests", r.requests)
		}
	})
}

func TestRefusalIsFinal(t *testing.T) {
	t.Parallel()
	for _, code := range []codes.Code{codes.InvalidArgument, codes.Unauthenticated, codes.Unimplemented, codes.ResourceExhausted} {
		r := newReceiver()
		r.answer = func(int) (*coltracepb.ExportTraceServiceResponse, error) { return nil, status.Error(code, "no") }
		tracer := newTracer(t, config(r.serveGRPC(t)), otlp.Options{})
		tracer.Collective(collective(1, true))
		shutdown(t, tracer)
		if exported, dropped := counts(t, tracer); exported != 0 || dropped[names.DropExportFailed] != spansOf || r.requests != 1 {
			t.Errorf("%v: exported %v, dropped %v in %d requests", code, exported, dropped, r.requests)
		}
	}
}

// A backend that asks for a longer pause than a batch is kept for gets it.
func TestALongPauseIsKept(t *testing.T) {
	t.Parallel()
	r := newReceiver()
	r.answer = func(int) (*coltracepb.ExportTraceServiceResponse, error) {
		s, _ := status.New(codes.ResourceExhausted, "busy").WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(2 * time.Minute)})
		return nil, s.Err()
	}
	tracer := newTracer(t, config(r.serveGRPC(t)), otlp.Options{})
	tracer.Collective(collective(1, true))
	for deadline := time.Now().Add(bound); ; time.Sleep(5 * time.Millisecond) {
		if _, dropped := counts(t, tracer); dropped[names.DropExportFailed] == spansOf {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the first batch is not given up")
		}
	}
	tracer.Collective(collective(2, true))
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if err := tracer.Shutdown(ctx); err == nil {
		t.Error("nothing left behind")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, dropped := counts(t, tracer); r.requests != 1 || dropped[names.DropShutdown] != spansOf {
		t.Errorf("%d requests, dropped %v", r.requests, dropped)
	}
}

// The log says why a backend refuses, and nothing that its address may hold.
func TestRefusalsAreExplained(t *testing.T) {
	t.Parallel()
	words, _ := proto.Marshal(&rpcstatus.Status{Code: 7, Message: "no such tenant"})
	for name, answer := range map[string]http.HandlerFunc{
		"text": func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no such\ntenant", http.StatusForbidden) },
		"protobuf": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/x-protobuf")
			w.WriteHeader(http.StatusForbidden)
			w.Write(words)
		},
	} {
		web := httptest.NewServer(answer)
		t.Cleanup(web.Close)
		var log bytes.Buffer
		c := otlp.Config{Endpoint: strings.Replace(web.URL, "//", "//user:s3cret@", 1) + "/v1/traces?key=s3cret", Protocol: otlp.HTTP}
		tracer, err := otlp.New(c, otlp.Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
		if err != nil {
			t.Fatal(err)
		}
		tracer.Collective(collective(1, true))
		shutdown(t, tracer)
		if s := log.String(); !strings.Contains(s, "403 Forbidden: no such tenant") || !strings.Contains(s, "endpoint="+web.URL+"/v1/traces ") || strings.Contains(s, "s3cret") || strings.Contains(s, "user") {
			t.Errorf("%s: logged %s", name, s)
		}
	}
}

// A client certificate that was replaced is used from the next connection on.
func TestClientCertificateIsReadAgain(t *testing.T) {
	authority := wiretest.NewAuthority(t)
	server, client := authority.Master("llm"), authority.Agent("gpu-01")
	pair, err := tls.LoadX509KeyPair(server.CertFile, server.KeyFile)
	if err != nil {
		t.Fatal(err)
	}
	r := newReceiver()
	seen := make(chan string, 10)
	web := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		seen <- req.TLS.PeerCertificates[0].SerialNumber.String()
		r.ServeHTTP(w, req)
	}))
	web.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAnyClientCert}
	web.StartTLS()
	t.Cleanup(web.Close)
	setenv(t, map[string]string{"ENDPOINT": web.URL, "CERTIFICATE": server.CAFile, "CLIENT_CERTIFICATE": client.CertFile, "CLIENT_KEY": client.KeyFile})
	c, err := otlp.ConfigFromEnv("lockstep-agent", "1.2.3", "gpu-01")
	if err != nil {
		t.Fatal(err)
	}
	tracer := newTracer(t, c, otlp.Options{})
	tracer.Collective(collective(1, true))
	r.await(t, spansOf)
	first := <-seen
	authority.Agent("gpu-01")
	web.CloseClientConnections()
	tracer.Collective(collective(2, true))
	r.await(t, spansOf)
	if second := <-seen; second == first {
		t.Error("the old certificate is shown still")
	}
}

func TestPartialSuccessIsCounted(t *testing.T) {
	t.Parallel()
	r := newReceiver()
	r.answer = func(int) (*coltracepb.ExportTraceServiceResponse, error) {
		return &coltracepb.ExportTraceServiceResponse{PartialSuccess: &coltracepb.ExportTracePartialSuccess{RejectedSpans: 3, ErrorMessage: "too old"}}, nil
	}
	tracer := newTracer(t, config(r.serveGRPC(t)), otlp.Options{})
	tracer.Collective(collective(1, true))
	shutdown(t, tracer)
	if exported, dropped := counts(t, tracer); exported != spansOf-3 || dropped[names.DropRejected] != 3 {
		t.Errorf("exported %v, dropped %v", exported, dropped)
	}
}

// Whatever happens, every span that the policy chose is exported or counted.
func TestEverySpanIsAccountedFor(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name    string
		options otlp.Options
		reason  string
		stuck   bool // the backend does not answer
	}{
		{"limit", otlp.Options{SpansPerSecond: 10}, names.DropOverLimit, false},
		{"queue", otlp.Options{Queue: 4, SpansPerSecond: 1 << 20}, names.DropQueueFull, false},
		{"memory", otlp.Options{Remember: 4, SpansPerSecond: 1 << 20}, names.DropEvicted, false},
		{"shutdown", otlp.Options{SpansPerSecond: 1 << 20}, names.DropShutdown, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r := newReceiver()
			release := make(chan struct{})
			if tt.stuck {
				r.answer = func(int) (*coltracepb.ExportTraceServiceResponse, error) {
					<-release
					return nil, status.Error(codes.Unavailable, "stuck")
				}
			}
			tracer := newTracer(t, config(r.serveGRPC(t)), tt.options)
			offered := 0
			for seq := range uint64(3000) {
				tracer.Collective(collective(seq, true))
				offered += spansOf
			}
			ctx, cancel := context.WithTimeout(context.Background(), bound)
			defer cancel()
			if tt.stuck {
				cancel()
			}
			if err := tracer.Shutdown(ctx); (err != nil) != tt.stuck {
				t.Errorf("Shutdown: %v", err)
			}
			close(release)
			exported, dropped := counts(t, tracer)
			if dropped[tt.reason] == 0 || exported+sum(dropped) != float64(offered) {
				t.Errorf("offered %d, exported %v, dropped %v", offered, exported, dropped)
			}
			tracer.Collective(collective(1, true))
			if _, again := counts(t, tracer); sum(again) != sum(dropped) {
				t.Error("a collective after shutdown is counted")
			}
		})
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

// Whatever a backend that refuses, or is away at the end, costs of the control plane's spans is counted.
func TestControlCountsWhatIsLost(t *testing.T) {
	r := newReceiver()
	r.answer = func(int) (*coltracepb.ExportTraceServiceResponse, error) {
		return nil, status.Error(codes.InvalidArgument, "no")
	}
	tracer, err := otlp.NewControl(config(r.serveGRPC(t)), "lockstep/master")
	if err != nil {
		t.Fatal(err)
	}
	const spans = 5000 // more than the queue holds
	for range spans {
		_, span := tracer.Start(context.Background(), "x")
		span.End()
	}
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	if err := tracer.Shutdown(ctx); err != nil {
		t.Error(err)
	}
	n := collected(t, tracer)
	if n[""] != 0 || n[names.DropExportFailed] == 0 || sum(n) != spans {
		t.Errorf("of %d spans counted %v", spans, n)
	}
}

// A gRPC endpoint that is spoken to in HTTP, and the other way round: the error says what to change.
func TestWrongProtocolSaysWhatToChange(t *testing.T) {
	r := newReceiver()
	web := httptest.NewServer(r)
	t.Cleanup(web.Close)
	for _, tt := range []struct {
		c    otlp.Config
		want string
	}{
		{otlp.Config{Endpoint: "http://" + r.serveGRPC(t) + "/v1/traces", Protocol: otlp.HTTP, Timeout: bound}, "set OTEL_EXPORTER_OTLP_PROTOCOL=grpc"},
		{otlp.Config{Endpoint: web.Listener.Addr().String(), Protocol: otlp.GRPC, Timeout: bound}, "set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"},
	} {
		if err := otlp.Send(tt.c); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.c.Protocol, err, tt.want)
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
