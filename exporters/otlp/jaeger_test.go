package otlp_test

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/otlp"
	"github.com/lockstep-ccl/lockstep/record"
)

// TestJaeger sends a collective of four ranks, from four tracers, to a real
// Jaeger and reads the trace back. Set LOCKSTEP_JAEGER_BIN to a Jaeger v2
// binary to run it.
func TestJaeger(t *testing.T) {
	bin := os.Getenv("LOCKSTEP_JAEGER_BIN")
	if bin == "" {
		t.Skip("LOCKSTEP_JAEGER_BIN is not set")
	}
	grpcAddr, httpAddr, query := startJaeger(t, bin)
	for seq, env := range map[uint64]map[string]string{
		1: {"ENDPOINT": "http://" + grpcAddr, "PROTOCOL": "grpc", "COMPRESSION": "gzip"},
		2: {"ENDPOINT": "http://" + httpAddr, "PROTOCOL": "http/protobuf"},
	} {
		t.Run(env["PROTOCOL"], func(t *testing.T) {
			setenv(t, env)
			now := time.Now().UnixNano()
			for rank := range int32(4) {
				c, err := otlp.ConfigFromEnv("lockstep-agent", "1.2.3", fmt.Sprint("node-", rank))
				if err != nil {
					t.Fatal(err)
				}
				tracer := newTracer(t, c, otlp.Options{})
				x := collective(seq, true)
				x.Rank, x.World, x.Size, x.RealOffset = rank, rank, 4, now
				x.NWindows, x.Windows[0] = 1, collector.Window{Peer: (rank + 1) % 4, Bytes: 1 << 20, First: 1500, Last: 2900, Cause: record.CauseNetwork}
				tracer.Collective(x)
				shutdown(t, tracer)
			}
			id := collector.TraceID("llama", 7, record.AllReduce, seq)
			spans := fetchTrace(t, query, hex.EncodeToString(id[:]), 1+4*3)
			checkTree(t, spans)
		})
	}
}

type jaegerAttrs []struct {
	Key   string `json:"key"`
	Value struct {
		StringValue string `json:"stringValue"`
	} `json:"value"`
}

func (as jaegerAttrs) text(key string) string {
	for _, a := range as {
		if a.Key == key {
			return a.Value.StringValue
		}
	}
	return ""
}

type jaegerSpan struct {
	Name         string      `json:"name"`
	SpanID       string      `json:"spanId"`
	ParentSpanID string      `json:"parentSpanId"`
	Attributes   jaegerAttrs `json:"attributes"`
	Events       []struct {
		Name       string      `json:"name"`
		Attributes jaegerAttrs `json:"attributes"`
	} `json:"events"`
	host string
}

// jaegerPart is one line of the query service's answer.
type jaegerPart struct {
	Result struct {
		ResourceSpans []struct {
			Resource struct {
				Attributes jaegerAttrs `json:"attributes"`
			} `json:"resource"`
			ScopeSpans []struct {
				Spans []jaegerSpan `json:"spans"`
			} `json:"scopeSpans"`
		} `json:"resourceSpans"`
	} `json:"result"`
}

func checkTree(t *testing.T, spans []jaegerSpan) {
	t.Helper()
	byID := map[string]jaegerSpan{}
	for _, s := range spans {
		byID[s.SpanID] = s
	}
	roots, hosts := 0, map[string]bool{}
	for _, s := range spans {
		hosts[s.host] = true
		if s.ParentSpanID == "" {
			roots++
		} else if _, ok := byID[s.ParentSpanID]; !ok {
			t.Errorf("span %s %q has the missing parent %s", s.SpanID, s.Name, s.ParentSpanID)
		}
		if s.Name == "AllReduce dp" && s.ParentSpanID != "" {
			if s.Attributes.text(names.AttrCommunicator) != "dp" {
				t.Errorf("attributes %+v", s.Attributes)
			}
			if len(s.Events) != 1 || s.Events[0].Name != "window" || s.Events[0].Attributes.text(names.AttrCause) != "network" {
				t.Errorf("events %+v", s.Events)
			}
		}
	}
	if roots != 1 || len(byID) != len(spans) || len(hosts) != 4 {
		t.Errorf("%d roots, %d ids of %d spans, from %d hosts", roots, len(byID), len(spans), len(hosts))
	}
}

// fetchTrace polls Jaeger's query service until the trace has n spans.
func fetchTrace(t *testing.T, query, id string, n int) []jaegerSpan {
	t.Helper()
	var last []byte
	for deadline := time.Now().Add(bound); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		resp, err := http.Get("http://" + query + "/api/v3/traces/" + id)
		if err != nil {
			continue
		}
		last, err = io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusOK {
			continue
		}
		var spans []jaegerSpan
		for dec := json.NewDecoder(bytes.NewReader(last)); ; {
			var part jaegerPart
			if dec.Decode(&part) != nil {
				break
			}
			for _, rs := range part.Result.ResourceSpans {
				for _, ss := range rs.ScopeSpans {
					for _, s := range ss.Spans {
						s.host = rs.Resource.Attributes.text("host.name")
						spans = append(spans, s)
					}
				}
			}
		}
		if len(spans) >= n {
			return spans
		}
	}
	t.Fatalf("Jaeger has no trace %s of %d spans; its last answer was %s", id, n, last)
	return nil
}

func startJaeger(t *testing.T, bin string) (grpcAddr, httpAddr, query string) {
	t.Helper()
	addrs := freeAddrs(t, 5)
	config := filepath.Join(t.TempDir(), "jaeger.yaml")
	if err := os.WriteFile(config, fmt.Appendf(nil, `
service:
  extensions: [jaeger_storage, jaeger_query, healthcheckv2]
  pipelines:
    traces: {receivers: [otlp], processors: [batch], exporters: [jaeger_storage_exporter]}
  telemetry:
    resource: {service.name: jaeger}
    metrics: {level: none}
    logs: {level: warn}
extensions:
  healthcheckv2: {use_v2: true, http: {endpoint: %s}}
  jaeger_query:
    storage: {traces: mem}
    http: {endpoint: %s}
    grpc: {endpoint: %s}
  jaeger_storage: {backends: {mem: {memory: {max_traces: 100}}}}
receivers:
  otlp: {protocols: {grpc: {endpoint: %s}, http: {endpoint: %s}}}
processors: {batch: {timeout: 100ms}}
exporters: {jaeger_storage_exporter: {trace_storage: mem}}
`, addrs[0], addrs[1], addrs[2], addrs[3], addrs[4]), 0o600); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	cmd := exec.Command(bin, "--config", config)
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		http.DefaultClient.CloseIdleConnections()
		if t.Failed() {
			t.Logf("jaeger:\n%s", log.Bytes())
		}
	})
	return addrs[3], addrs[4], addrs[1]
}

func freeAddrs(t *testing.T, n int) []string {
	t.Helper()
	var addrs []string
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		addrs = append(addrs, l.Addr().String())
	}
	return addrs
}
