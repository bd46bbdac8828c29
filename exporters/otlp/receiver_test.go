package otlp_test

import (
	"compress/gzip"
	"context"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	coltracepb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
)

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
