package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"sync"
	"testing"

	coltracepb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/lockstep-ccl/lockstep/deploy/local"
)

// span is a span as a backend returns it.
type span struct {
	name, id, parent string
	start, end       int64
	attrs            map[string]any
	events           []span
	links            int
}

func (s *span) number(key string) float64 { n, _ := s.attrs[key].(float64); return n }

// backend keeps traces: a real Jaeger, or a receiver in this process.
type backend struct {
	grpc, http string
	trace      func(id string) []span // nil while it has none
}

// newBackend starts a real Jaeger where LOCKSTEP_TEST_TRACING is set, and else receives OTLP itself.
func newBackend(t *testing.T) *backend {
	t.Helper()
	if os.Getenv("LOCKSTEP_TEST_TRACING") == "" {
		return newReceiver(t)
	}
	jaeger, err := local.StartTracing(t.Context(), local.Config{Dir: t.TempDir(), Progress: t.Output()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(jaeger.Stop)
	return &backend{grpc: jaeger.GRPC, http: jaeger.HTTP, trace: func(id string) []span { return fromJaeger(t, jaeger.URL+"/api/v3/traces/"+id) }}
}

// receiver is an OTLP backend in this process, over both protocols.
type receiver struct {
	coltracepb.UnimplementedTraceServiceServer
	mu     sync.Mutex
	traces map[string][]span
}

func newReceiver(t *testing.T) *backend {
	r := &receiver{traces: map[string][]span{}}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	coltracepb.RegisterTraceServiceServer(s, r)
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		body, err := io.ReadAll(req.Body)
		var msg coltracepb.ExportTraceServiceRequest
		if err != nil || proto.Unmarshal(body, &msg) != nil {
			http.Error(w, "not OTLP", http.StatusBadRequest)
			return
		}
		_, _ = r.Export(req.Context(), &msg)
	}))
	t.Cleanup(func() { web.Close(); s.Stop(); <-done })
	return &backend{grpc: l.Addr().String(), http: web.URL, trace: func(id string) []span {
		r.mu.Lock()
		defer r.mu.Unlock()
		return append([]span(nil), r.traces[id]...)
	}}
}

func (r *receiver) Export(_ context.Context, req *coltracepb.ExportTraceServiceRequest) (*coltracepb.ExportTraceServiceResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, rs := range req.ResourceSpans {
		for _, ss := range rs.ScopeSpans {
			for _, s := range ss.Spans {
				id := hex.EncodeToString(s.TraceId)
				r.traces[id] = append(r.traces[id], fromProto(s))
			}
		}
	}
	return &coltracepb.ExportTraceServiceResponse{}, nil
}

func fromProto(s *tracepb.Span) span {
	attrs := func(kvs []*commonpb.KeyValue) map[string]any {
		m := map[string]any{}
		for _, kv := range kvs {
			switch v := kv.Value.Value.(type) {
			case *commonpb.AnyValue_StringValue:
				m[kv.Key] = v.StringValue
			case *commonpb.AnyValue_IntValue:
				m[kv.Key] = float64(v.IntValue)
			case *commonpb.AnyValue_DoubleValue:
				m[kv.Key] = v.DoubleValue
			case *commonpb.AnyValue_BoolValue:
				m[kv.Key] = v.BoolValue
			}
		}
		return m
	}
	out := span{
		name: s.Name, id: hex.EncodeToString(s.SpanId), parent: hex.EncodeToString(s.ParentSpanId),
		start: int64(s.StartTimeUnixNano), end: int64(s.EndTimeUnixNano), attrs: attrs(s.Attributes), links: len(s.Links),
	}
	for _, e := range s.Events {
		out.events = append(out.events, span{name: e.Name, start: int64(e.TimeUnixNano), attrs: attrs(e.Attributes)})
	}
	return out
}

// fromJaeger reads a trace from Jaeger's API; nil while it has none.
func fromJaeger(t *testing.T, url string) (spans []span) {
	resp, err := http.Get(url)
	if err != nil {
		return nil
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return nil
	}
	type attributes []struct {
		Key   string
		Value struct {
			StringValue *string
			IntValue    *json.Number
			DoubleValue *float64
			BoolValue   *bool
		}
	}
	attrs := func(as attributes) map[string]any {
		m := map[string]any{}
		for _, a := range as {
			switch v := a.Value; {
			case v.StringValue != nil:
				m[a.Key] = *v.StringValue
			case v.IntValue != nil:
				m[a.Key], _ = v.IntValue.Float64()
			case v.DoubleValue != nil:
				m[a.Key] = *v.DoubleValue
			case v.BoolValue != nil:
				m[a.Key] = *v.BoolValue
			}
		}
		return m
	}
	for dec := json.NewDecoder(bytes.NewReader(body)); ; {
		var part struct {
			Result struct {
				ResourceSpans []struct {
					ScopeSpans []struct {
						Spans []struct {
							Name, SpanID, ParentSpanID         string
							StartTimeUnixNano, EndTimeUnixNano json.Number
							Attributes                         attributes
							Links                              []json.RawMessage
							Events                             []struct {
								Name       string
								Attributes attributes
							}
						}
					}
				}
			}
		}
		if err := dec.Decode(&part); err != nil {
			if err != io.EOF {
				t.Logf("%s: %v", url, err)
			}
			return spans
		}
		for _, rs := range part.Result.ResourceSpans {
			for _, ss := range rs.ScopeSpans {
				for _, s := range ss.Spans {
					out := span{name: s.Name, id: plainID(s.SpanID), parent: plainID(s.ParentSpanID), attrs: attrs(s.Attributes), links: len(s.Links)}
					out.start, _ = strconv.ParseInt(s.StartTimeUnixNano.String(), 10, 64)
					out.end, _ = strconv.ParseInt(s.EndTimeUnixNano.String(), 10, 64)
					for _, e := range s.Events {
						out.events = append(out.events, span{name: e.Name, attrs: attrs(e.Attributes)})
					}
					spans = append(spans, out)
				}
			}
		}
	}
}

// plainID is an id in hexadecimal, as some versions of the API give it in base64.
func plainID(s string) string {
	if b, err := base64.StdEncoding.DecodeString(s); err == nil && len(b) == 8 && len(s) != 16 {
		return hex.EncodeToString(b)
	}
	return s
}
