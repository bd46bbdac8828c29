package demo

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"time"

	"github.com/lockstep-ccl/lockstep/deploy/local"
	"github.com/lockstep-ccl/lockstep/exporters/otlp"
	"github.com/lockstep-ccl/lockstep/exporters/web"
)

// traceWithin is how long after the story a trace may take to be in the backend: batches,
// the agents' word on how far the ranks' spans reach, and the backend's own batches.
const traceWithin = 20 * time.Second

// trace starts the tracing backend.
func (c *cluster) trace(ctx context.Context, progress io.Writer) (err error) {
	c.tracing, err = local.StartTracing(ctx, local.Config{Dir: filepath.Join(c.dir, "tracing"), Progress: progress})
	return err
}

// traceEnv has a part send its traces: agents over gRPC, the others over HTTP.
func (c *cluster) traceEnv(part string) []string {
	switch {
	case c.tracing == nil || part == "job":
		return nil
	case part == "master" || part == "remediator":
		return []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + c.tracing.HTTP, "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"}
	}
	return []string{"OTEL_EXPORTER_OTLP_ENDPOINT=http://" + c.tracing.GRPC, "OTEL_EXPORTER_OTLP_PROTOCOL=grpc"}
}

// showTrace says where the traces of a fault are, once the backend has them.
func (w *watcher) showTrace(ctx context.Context) {
	if w.c.tracing == nil || w.o.Incident == "" {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, traceWithin)
	defer cancel()
	for {
		id, spans := w.traceOf(ctx), 0
		if id != "" {
			spans = w.c.spansOf(ctx, id)
		}
		if spans > 0 {
			w.o.Trace = w.c.tracing.TracePage(id)
			w.out.line(w.elapsed(), "trace", fmt.Sprintf("%s (%d spans)", w.o.Trace, spans))
			incident := otlp.IncidentTrace(w.o.Incident)
			w.out.more("the incident's own: " + w.c.tracing.TracePage(hex.EncodeToString(incident[:])))
			return
		}
		select {
		case <-ctx.Done():
			w.o.Wrong = append(w.o.Wrong, fmt.Sprintf("the backend has no trace of incident %s (it names %q)", w.o.Incident, id))
			return
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// traceOf is the trace that the incident names, "" when it names none.
func (w *watcher) traceOf(ctx context.Context) string {
	var st web.Status
	if w.c.get(ctx, w.c.web.URL(w.c.master)+"/api/v1/status", &st) != nil {
		return ""
	}
	for _, in := range append(st.Open, st.Closed...) {
		if in.ID == w.o.Incident {
			return in.TraceID
		}
	}
	return ""
}

// spansOf counts the spans of a trace that the backend has.
func (c *cluster) spansOf(ctx context.Context, id string) (n int) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.tracing.URL+"/api/v3/traces/"+id, nil)
	if err != nil {
		return 0
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<20))
	if err != nil || resp.StatusCode != http.StatusOK {
		return 0
	}
	for dec := json.NewDecoder(bytes.NewReader(body)); ; { // a line for each part of the answer
		var part struct {
			Result struct {
				ResourceSpans []struct {
					ScopeSpans []struct{ Spans []json.RawMessage }
				}
			}
		}
		if dec.Decode(&part) != nil {
			return n
		}
		for _, rs := range part.Result.ResourceSpans {
			for _, ss := range rs.ScopeSpans {
				n += len(ss.Spans)
			}
		}
	}
}
