package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	coltracepb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/lockstep-ccl/lockstep/ccl/ccltest"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/train"
	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/agent"
	"github.com/lockstep-ccl/lockstep/collector/master"
	"github.com/lockstep-ccl/lockstep/deploy/local"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/otlp"
	"github.com/lockstep-ccl/lockstep/exporters/prom"
	"github.com/lockstep-ccl/lockstep/record"
)

// apart is how far the wall clocks of the two nodes' agents are apart.
const apart = 50 * time.Millisecond

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

// TestTracing follows real collectives of real ranks on two logical nodes, whose agents' wall clocks
// are apart, through agents and OTLP, over both protocols, into a backend.
func TestTracing(t *testing.T) {
	b := newBackend(t)
	w := newTraced(t, b)

	t.Run("one trace a collective", w.wholeTraces)
	t.Run("link events", w.linkEvents)
	t.Run("windows", w.windows)
	t.Run("incident", w.incident)
	t.Run("exemplars", w.exemplars)
}

// traced is a job with its agents and its master.
type traced struct {
	b        *backend
	m        *master.Master
	runtime  string
	faults   string
	seen     [2]*seen
	registry [2]*prometheus.Registry // of the agents
}

// seen is a sink that notes what a tracer before it exports.
type seen struct {
	mu  sync.Mutex
	all []collector.Collective
}

func (s *seen) Collective(c *collector.Collective) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.Traced {
		k := *c
		if c.Peers != nil {
			peers := *c.Peers
			k.Peers = &peers
		}
		s.all = append(s.all, k)
	}
}

func newTraced(t *testing.T, b *backend) *traced {
	t.Helper()
	dir := t.TempDir()
	w := &traced{b: b, runtime: filepath.Join(dir, "rt"), faults: filepath.Join(dir, "faults")}
	for _, d := range []string{w.faults, filepath.Join(dir, "train"), filepath.Join(dir, "run")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	log := slog.New(slog.DiscardHandler)
	m, err := master.New(master.Options{Job: "traced", Listen: "127.0.0.1:0", Log: log})
	if err != nil {
		t.Fatal(err)
	}
	w.m = m
	background(t, m.Run)
	for i := range 2 {
		c := otlp.Config{Endpoint: b.grpc, Protocol: otlp.GRPC, Ratio: 1, Timeout: bound}
		if i == 1 {
			c.Endpoint, c.Protocol = b.http+"/v1/traces", otlp.HTTP
		}
		tracer, err := otlp.New(c, otlp.Options{SpansPerSecond: 1 << 20, Log: log})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), bound)
			defer cancel()
			if err := tracer.Shutdown(ctx); err != nil {
				t.Error(err)
			}
		})
		w.seen[i] = &seen{}
		var a *agent.Agent
		metrics := prom.NewAgent(func() *collector.AgentSnapshot { return a.Snapshot() }, prom.Options{ExemplarEvery: time.Millisecond})
		w.registry[i] = prometheus.NewRegistry()
		w.registry[i].MustRegister(metrics)
		node := fmt.Sprint("node", i)
		a, err = agent.New(agent.Options{
			Node: node, Dir: filepath.Join(w.runtime, node), Master: func(string) string { return m.Addr().String() }, Log: log,
			Sinks: []collector.Sink{tracer, metrics, w.seen[i]}, Now: func() time.Time { return time.Now().Add(time.Duration(i) * apart) },
			Workload: otlp.WorkloadOf,
		})
		if err != nil {
			t.Fatal(err)
		}
		background(t, a.Run)
	}
	cmd := exec.Command("lockstep", "run", "--job", "traced", "--ranks", "4", "--nodes", "2", "--dir", filepath.Join(dir, "run"), "--runtime-dir", w.runtime, "--quiet", "--grace", "500ms", "--",
		"lockstep", "train", "--dp", "2", "--tp", "2", "--dir", filepath.Join(dir, "train"), "--pace", "20ms")
	cmd.Env = append(os.Environ(), "LOCKSTEP_FAULT_DIR="+w.faults, "SLURM_JOB_ID=4711")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
	})
	return w
}

// background runs a component until the test ends.
func background(t *testing.T, run func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// eventually polls, for as long as anything here may take.
func becomes(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * bound); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("never: %s", what)
}

func traceID(c *collector.Collective) string {
	id := collector.TraceID(c.Job, c.CommID, c.Kind, c.Seq)
	return hex.EncodeToString(id[:])
}

// last is the last collective of a node's agent that fits.
func (w *traced) last(node int, fits func(*collector.Collective) bool) (c collector.Collective, ok bool) {
	s := w.seen[node]
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := len(s.all) - 1; i >= 0; i-- {
		if fits(&s.all[i]) {
			return s.all[i], true
		}
	}
	return c, false
}

// whole waits for a trace with its root and all that this covers.
func (w *traced) whole(t *testing.T, id string, ranks int) []span {
	t.Helper()
	var spans []span
	becomes(t, "trace "+id+" with its root", func() bool {
		spans = w.b.trace(id)
		covered, there := 0.0, 0.0
		for i := range spans {
			covered = max(covered, spans[i].number(names.AttrTracedRanks))
			if strings.HasPrefix(spans[i].name, "rank ") {
				there++
			}
		}
		return covered >= float64(ranks) && there >= covered // batches come in any order
	})
	return spans
}

func (w *traced) wholeTraces(t *testing.T) {
	// An agent drains one rank after the other: a collective may be on the job's clock for one and not yet for the next.
	known := func(node int, rank int32, of *collector.Collective) (c collector.Collective, ok bool) {
		return w.last(node, func(o *collector.Collective) bool {
			return o.Rank == rank && o.Size == 4 && o.Kind == record.AllReduce && o.JobClock && o.MapErr < int64(apart)/4 &&
				(of == nil || o.CommID == of.CommID && o.Seq == of.Seq)
		})
	}
	for range 5 {
		var c collector.Collective
		becomes(t, "an AllReduce of all ranks on a job clock that is known well", func() (ok bool) {
			c, ok = known(1, 3, nil)
			for r := int32(0); ok && r < 3; r++ {
				_, ok = known(int(r/2), r, &c)
			}
			return ok
		})
		w.checkTrace(t, w.whole(t, traceID(&c), 4))
	}
}

// checkTrace checks the trace of an AllReduce of four ranks.
func (w *traced) checkTrace(t *testing.T, spans []span) {
	t.Helper()
	var root *span
	var ranks []*span
	ids := map[string]bool{}
	for i := range spans {
		s := &spans[i]
		ids[s.id] = true
		switch {
		case s.parent == "" && s.attrs[names.AttrLate] == nil:
			root = s
		case strings.HasPrefix(s.name, "rank "):
			ranks = append(ranks, s)
		}
	}
	if root == nil || len(ranks) != 4 {
		t.Fatalf("%d spans, root %v, %d ranks", len(spans), root, len(ranks))
	}
	for i := range spans {
		s := &spans[i]
		if s.start < root.start || s.end > root.end {
			t.Errorf("%s, %d to %d, lies outside of its root, %d to %d", s.name, s.start, s.end, root.start, root.end)
		}
		if s.parent != "" && !ids[s.parent] {
			t.Errorf("%s has the missing parent %s", s.name, s.parent)
		}
	}
	corrections := map[string]float64{}
	for _, a := range ranks {
		node := fmt.Sprintf("node%.0f", math.Floor(a.number(names.AttrWorldRank)/2))
		if want := fmt.Sprintf("rank %.0f (%s) AllReduce", a.number(names.AttrWorldRank), node); a.name != want {
			t.Errorf("a span is called %q, not %q", a.name, want)
		}
		if a.attrs[names.AttrClock] != "host" || a.attrs[names.AttrClockScale] != "job" || a.attrs[names.AttrClockError] == nil || a.attrs["slurm.job.id"] != "4711" {
			t.Errorf("%s: attributes %v", a.name, a.attrs)
		}
		corrections[node] = a.number(names.AttrClockCorrection)
		for _, b := range ranks {
			if stated := a.number(names.AttrClockError) + b.number(names.AttrClockError); float64(a.start-b.end)/1e9 > stated {
				t.Errorf("%s begins %.6f s after %s has ended, the stated error is %.6f s", a.name, float64(a.start-b.end)/1e9, b.name, stated)
			}
		}
	}
	// The corrections differ by what the wall clocks do, as far as a loaded machine reads two clocks at once.
	if off := corrections["node0"] - corrections["node1"] - apart.Seconds(); math.Abs(off) > apart.Seconds()/2 {
		t.Errorf("corrections %v, the clocks are %v apart", corrections, apart)
	}
}

// A connection between nodes whose sockets the kernel kills comes back, and the collectives that it hit say so.
func (w *traced) linkEvents(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("sockets are root's to kill")
	}
	// Both ends: sockets of others, of tests that run meanwhile, may have the same local port.
	local, remote := w.interNodeConn(t)
	if out, err := exec.Command("ss", "--kill", "state", "established", "src", local, "dst", remote).CombinedOutput(); err != nil {
		t.Skipf("ss --kill: %v: %s", err, out)
	}
	hit := func(c *collector.Collective) bool { return c.NLinks > 0 }
	var c collector.Collective
	becomes(t, "a collective with a link event", func() (ok bool) {
		if c, ok = w.last(0, hit); !ok {
			c, ok = w.last(1, hit)
		}
		return ok
	})
	states := map[any]bool{}
	for _, s := range w.whole(t, traceID(&c), 1) {
		for _, e := range s.events {
			if e.name == "link" {
				states[e.attrs[names.AttrLinkState]] = true
				if e.attrs[names.AttrTransport] != "tcp" || !strings.Contains(fmt.Sprint(e.attrs[names.AttrConnection]), "->") {
					t.Errorf("link event %v", e.attrs)
				}
			}
		}
	}
	if !states["down"] && !states["up"] {
		t.Errorf("link states %v", states)
	}
}

// interNodeConn returns the ends of a connection between the nodes.
func (w *traced) interNodeConn(t *testing.T) (local, remote string) {
	t.Helper()
	becomes(t, "a TCP connection", func() bool {
		files, _ := record.List(filepath.Join(w.runtime, "node0"))
		for _, f := range files {
			r, err := record.Open(f)
			if err != nil {
				continue
			}
			for _, k := range r.Conns(nil) {
				if name, ok := strings.CutPrefix(k.Name, "tcp "); ok && k.Transport == record.TransportTCP && k.Posted > 0 && local == "" {
					local, remote, _ = strings.Cut(name, "->")
				}
			}
			r.Close()
		}
		return local != "" && remote != ""
	})
	return local, remote
}

// inject has a connection between the nodes fail in some way.
func (w *traced) inject(t *testing.T, fault func(r *ccltest.Remote, comm string, src, dst int) error) {
	t.Helper()
	r, err := ccltest.Dial(train.FaultSocket(w.faults, 2))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := fault(r, "dp0", 1, 0); err != nil {
		t.Fatal(err)
	}
}

// Abnormal windows of a throttled connection are events of the collectives that it slows down, with its identity.
func (w *traced) windows(t *testing.T) {
	w.inject(t, func(r *ccltest.Remote, comm string, src, dst int) error { return r.Throttle(comm, src, dst, 256<<10) })
	defer w.inject(t, func(r *ccltest.Remote, _ string, _, _ int) error { return r.Clear() })
	var c collector.Collective
	becomes(t, "a collective with a window", func() (ok bool) {
		c, ok = w.last(1, func(c *collector.Collective) bool { return c.NWindows > 0 && c.Comm == "dp0" })
		return ok
	})
	found := 0
	for _, s := range w.whole(t, traceID(&c), 1) {
		for _, e := range s.events {
			if e.name == "window" {
				found++
				if e.attrs[names.AttrTransport] == nil || e.attrs[names.AttrConnection] == nil || e.attrs[names.AttrCause] == nil || e.attrs[names.AttrChannel] == nil {
					t.Errorf("window event %v", e.attrs)
				}
			}
		}
	}
	if found == 0 {
		t.Error("the trace shows no window")
	}
	w.peers(t)
}

// What the throttled connection brings is waited for, and the receiver's spans say by phase that it is from that peer.
func (w *traced) peers(t *testing.T) {
	t.Helper()
	waited := func(l *collector.Leg) bool { return l.Peer == 1 && l.Last-l.First+l.Wait >= int64(time.Millisecond) }
	var c collector.Collective
	becomes(t, "a collective that took long to receive from rank 1", func() (ok bool) {
		c, ok = w.last(0, func(c *collector.Collective) bool {
			for _, l := range c.Peers.All() {
				if c.Comm == "dp0" && waited(&l) {
					return true
				}
			}
			return false
		})
		return ok
	})
	spans := w.whole(t, traceID(&c), 1)
	own := slices.IndexFunc(spans, func(s span) bool {
		return strings.HasPrefix(s.name, "rank ") && s.number(names.AttrWorldRank) == float64(c.World)
	})
	if own < 0 {
		t.Fatalf("no span of rank %d: %+v", c.World, spans)
	}
	for _, l := range c.Peers.All() {
		name := map[bool]string{true: "reduce", false: "receive"}[l.Reduce]
		if !slices.ContainsFunc(spans, func(s span) bool {
			return s.name == name && s.parent == spans[own].id && s.number(names.AttrPeer) == float64(l.Peer) && s.number(names.AttrPeerWait) == float64(l.Wait)/1e9 &&
				s.start >= spans[own].start && s.end <= spans[own].end
		}) {
			t.Errorf("%s of rank %d, %+v, is not in the trace", name, c.World, l)
		}
	}
}

// An incident names a trace that the backend has.
func (w *traced) incident(t *testing.T) {
	w.inject(t, func(r *ccltest.Remote, comm string, src, dst int) error { return r.Stall(comm, src, dst) })
	defer w.inject(t, func(r *ccltest.Remote, _ string, _, _ int) error { return r.Clear() })
	var ids []string
	becomes(t, "a confirmed incident with a trace", func() bool {
		ids = ids[:0]
		confirmed := false
		for _, in := range w.m.Snapshot().Incidents {
			confirmed = confirmed || !in.Confirmed.IsZero() && in.TraceID != [16]byte{}
			if in.TraceID != ([16]byte{}) {
				ids = append(ids, hex.EncodeToString(in.TraceID[:]))
			}
		}
		return confirmed
	})
	w.checkAlerts(t)
	for _, id := range ids {
		becomes(t, "the trace "+id+" that an incident names", func() bool { return len(w.b.trace(id)) > 0 })
	}
}

// Alerts have their trace from the incident's metric: it has what the incident has.
func (w *traced) checkAlerts(t *testing.T) {
	t.Helper()
	snapshot := w.m.Snapshot()
	registry := prometheus.NewRegistry()
	registry.MustRegister(prom.NewMaster(func() *collector.MasterSnapshot { return snapshot }, prom.Options{}))
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	told := map[string]bool{}
	for _, f := range families {
		for _, m := range f.Metric {
			for _, l := range m.Label {
				if l.GetName() == names.LabelTraceID && l.GetValue() != "" {
					told[l.GetValue()] = true
				}
			}
		}
	}
	for _, in := range snapshot.Incidents {
		id := hex.EncodeToString(in.TraceID[:])
		if in.Closed.IsZero() && in.TraceID != ([16]byte{}) && !told[id] {
			t.Errorf("no metric has the trace %s of incident %s, only %v", id, in.ID, told)
		}
	}
	for id := range told {
		becomes(t, "the trace "+id+" that an alert carries", func() bool { return len(w.b.trace(id)) > 0 })
	}
}

// Every exemplar names a trace that the backend has. The collectives with windows, of the second node, have left one;
// whether any of the first node's was slow is up to the machine.
func (w *traced) exemplars(t *testing.T) {
	for i, r := range w.registry {
		families, err := r.Gather()
		if err != nil {
			t.Fatal(err)
		}
		found := 0
		for id := range exemplarTraces(families) {
			found++
			becomes(t, "the trace "+id+" of an exemplar", func() bool { return len(w.b.trace(id)) > 0 })
		}
		if found == 0 && i == 1 {
			t.Error("the agent whose collectives had windows has no exemplar")
		}
	}
}

// exemplarTraces yields the traces that exemplars of histograms name.
func exemplarTraces(families []*dto.MetricFamily) iter.Seq[string] {
	return func(yield func(string) bool) {
		for _, f := range families {
			for _, m := range f.Metric {
				for _, b := range m.GetHistogram().GetBucket() {
					for _, l := range b.GetExemplar().GetLabel() {
						if l.GetName() == names.LabelTraceID && !yield(l.GetValue()) {
							return
						}
					}
				}
			}
		}
	}
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
