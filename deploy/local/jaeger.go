package local

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/internal/ports"
)

// Jaeger is the tracing backend: OTLP in, over gRPC and HTTP, and a page and an API to look at
// traces, which it keeps in memory.
const Jaeger = "jaeger"

// maxTraces is how many traces Jaeger keeps; older ones go.
const maxTraces = 100_000

// Tracing is a running Jaeger.
type Tracing struct {
	GRPC string // host:port of the OTLP receiver over gRPC
	HTTP string // URL of that over HTTP
	URL  string // of its pages and API

	stack *Stack
	bare  bool // it has no pages
}

// TracePage is where a person sees a trace: a server that was built from its module has no
// pages, and answers in JSON only.
func (t *Tracing) TracePage(id string) string {
	if t.bare {
		return t.URL + "/api/v3/traces/" + id
	}
	return t.URL + "/trace/" + id
}

// Page is where a person begins to look at traces.
func (t *Tracing) Page() string {
	if t.bare {
		return t.URL + "/api/v3/services"
	}
	return t.URL
}

// placeholder is what Jaeger has in its pages' place when it was built without them.
const placeholder = "not the Jaeger UI"

// look finds out whether there are pages.
func (t *Tracing) look(ctx context.Context) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, t.URL, nil)
	if err != nil {
		return err
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: readyTimeout}
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("look at jaeger's pages: %w", err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return fmt.Errorf("look at jaeger's pages: %w", err)
	}
	t.bare = resp.StatusCode != http.StatusOK || strings.Contains(string(text), placeholder)
	return nil
}

// Failed delivers an error, with the end of the log, when Jaeger ends by itself.
func (t *Tracing) Failed() <-chan error { return t.stack.Failed() }

// Stop ends it: asked first, killed after 5 s.
func (t *Tracing) Stop() { t.stack.Stop() }

// StartTracing finds Jaeger, or builds it, which takes minutes the first time, and returns when it is ready.
// Of cfg it uses Dir, ReadyTimeout and Progress. ctx bounds the start only; the caller calls Stop.
func StartTracing(ctx context.Context, cfg Config) (*Tracing, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	path, err := Find(ctx, Jaeger, cfg.Progress)
	if err != nil {
		return nil, err
	}
	return startTracing(ctx, cfg, path)
}

func startTracing(ctx context.Context, cfg Config, path string) (*Tracing, error) {
	held, err := ports.Hold("127.0.0.1", 5)
	if err != nil {
		return nil, fmt.Errorf("ports for jaeger: %w", err)
	}
	at := held.Addrs
	t := &Tracing{GRPC: at[0], HTTP: "http://" + at[1], URL: "http://" + at[2], stack: &Stack{cfg: cfg, held: held, failed: make(chan error, 8)}}
	config := filepath.Join(cfg.Dir, "jaeger.yaml")
	if err := writeYAML(config, jaegerConfig(at)); err != nil {
		t.stack.Stop()
		return nil, err
	}
	srv := &server{
		name: Jaeger, path: path, url: t.URL, health: "http://" + at[4] + "/status", log: filepath.Join(cfg.Dir, "jaeger.log"),
		args: []string{"--config=" + config},
	}
	t.stack.servers = []*server{srv}
	if err := t.stack.launch(ctx, srv); err != nil {
		t.stack.Stop()
		return nil, err
	}
	if t.look(ctx) != nil {
		t.bare = true // the API is there in any case
	}
	return t, nil
}

// jaegerConfig is an OpenTelemetry collector's whose one pipeline ends in memory.
func jaegerConfig(at []string) object {
	endpoint := func(i int) object { return object{"endpoint": at[i]} }
	return object{
		"service": object{
			"extensions": []string{"jaeger_storage", "jaeger_query", "healthcheckv2"},
			"pipelines":  object{"traces": object{"receivers": []string{"otlp"}, "processors": []string{"batch"}, "exporters": []string{"jaeger_storage_exporter"}}},
			"telemetry":  object{"resource": object{"service.name": "jaeger"}, "metrics": object{"level": "none"}, "logs": object{"level": "warn"}},
		},
		"extensions": object{
			"healthcheckv2":  object{"use_v2": true, "http": endpoint(4)},
			"jaeger_query":   object{"storage": object{"traces": "memory"}, "http": endpoint(2), "grpc": endpoint(3)},
			"jaeger_storage": object{"backends": object{"memory": object{"memory": object{"max_traces": maxTraces}}}},
		},
		"receivers":  object{"otlp": object{"protocols": object{"grpc": endpoint(0), "http": endpoint(1)}}},
		"processors": object{"batch": object{"timeout": (100 * time.Millisecond).String()}},
		"exporters":  object{"jaeger_storage_exporter": object{"trace_storage": "memory"}},
	}
}
