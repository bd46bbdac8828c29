package otlp_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	coltracepb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/lockstep-ccl/lockstep/collector/wire/wiretest"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/otlp"
)

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

// A backend that asks for a longer pause than a batch is kept for gets it, whatever number it names: it is neither
// asked again at once, nor never again.
func TestALongPauseIsKept(t *testing.T) {
	t.Parallel()
	overGRPC := func(pause *durationpb.Duration) func(*testing.T, *receiver) otlp.Config {
		return func(t *testing.T, r *receiver) otlp.Config {
			r.answer = func(int) (*coltracepb.ExportTraceServiceResponse, error) {
				s, _ := status.New(codes.ResourceExhausted, "busy").WithDetails(&errdetails.RetryInfo{RetryDelay: pause})
				return nil, s.Err()
			}
			return config(r.serveGRPC(t))
		}
	}
	overHTTP := func(after string) func(*testing.T, *receiver) otlp.Config {
		return func(t *testing.T, r *receiver) otlp.Config {
			web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				r.mu.Lock()
				r.requests++
				r.mu.Unlock()
				w.Header().Set("Retry-After", after)
				w.WriteHeader(http.StatusServiceUnavailable)
			}))
			t.Cleanup(web.Close)
			return otlp.Config{Endpoint: web.URL + "/v1/traces", Protocol: otlp.HTTP, Timeout: bound}
		}
	}
	for name, backend := range map[string]func(*testing.T, *receiver) otlp.Config{
		"grpc":                           overGRPC(durationpb.New(2 * time.Minute)),
		"grpc, longer than a Duration":   overGRPC(&durationpb.Duration{Seconds: 315_576_000_000}),
		"http":                           overHTTP("120"),
		"http, longer than a Duration":   overHTTP("10000000000"),
		"http, more than 64 bits":        overHTTP("99999999999999999999"),
		"http, a date":                   overHTTP(time.Now().Add(time.Hour).UTC().Format(http.TimeFormat)),
		"http, a date beyond a Duration": overHTTP("Fri, 31 Dec 9999 23:59:59 GMT"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newReceiver()
			tracer := newTracer(t, backend(t, r), otlp.Options{})
			tracer.Collective(collective(1, true))
			for deadline := time.Now().Add(bound); ; time.Sleep(5 * time.Millisecond) {
				if _, dropped := counts(t, tracer); dropped[names.DropExportFailed] == spansOf {
					break
				}
				if time.Now().After(deadline) {
					r.mu.Lock()
					defer r.mu.Unlock()
					t.Fatalf("the first batch is not given up after %d requests", r.requests)
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
		})
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

// A backend's words are logged in short, whatever their length, and a warning is no loss.
func TestLogsAreShort(t *testing.T) {
	t.Parallel()
	words := strings.Repeat("no\n", 1<<17)
	for name, tt := range map[string]struct {
		answer func(int) (*coltracepb.ExportTraceServiceResponse, error)
		want   string
	}{
		"error": {func(int) (*coltracepb.ExportTraceServiceResponse, error) {
			return nil, status.Error(codes.InvalidArgument, words)
		}, "traces not exported"},
		"rejected": {func(int) (*coltracepb.ExportTraceServiceResponse, error) {
			return &coltracepb.ExportTraceServiceResponse{PartialSuccess: &coltracepb.ExportTracePartialSuccess{RejectedSpans: 1, ErrorMessage: words}}, nil
		}, "the backend rejected spans"},
		"warning": {func(int) (*coltracepb.ExportTraceServiceResponse, error) {
			return &coltracepb.ExportTraceServiceResponse{PartialSuccess: &coltracepb.ExportTracePartialSuccess{ErrorMessage: words}}, nil
		}, "the backend took the spans"},
	} {
		r := newReceiver()
		r.answer = tt.answer
		var log bytes.Buffer
		tracer, err := otlp.New(config(r.serveGRPC(t)), otlp.Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
		if err != nil {
			t.Fatal(err)
		}
		tracer.Collective(collective(1, true))
		shutdown(t, tracer)
		if s := log.String(); !strings.Contains(s, tt.want) || !strings.Contains(s, "no no") || len(s) > 2000 {
			t.Errorf("%s: logged %d bytes: %.300s", name, len(s), s)
		}
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
