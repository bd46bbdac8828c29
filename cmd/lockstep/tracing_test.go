package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"log/slog"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/agent"
	"github.com/lockstep-ccl/lockstep/collector/master"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/otlp"
	"github.com/lockstep-ccl/lockstep/exporters/prom"
	"github.com/lockstep-ccl/lockstep/record"
)

// apart is how far the wall clocks of the two nodes' agents are apart.
const apart = 50 * time.Millisecond

// TestTracing follows real collectives of real ranks on two logical nodes, whose agents' wall clocks
// are apart, through agents and OTLP, over both protocols, into a backend.
func TestTracing(t *testing.T) {
	w := newTraced(t, "traced")
	w.train(t)

	t.Run("one trace a collective", w.wholeTraces)
	t.Run("link events", w.linkEvents)
	t.Run("windows", w.windows)
	t.Run("incident", w.incident)
	t.Run("exemplars", w.exemplars)
}

// traced is a job of two nodes with its agents and its master.
type traced struct {
	b        *backend
	m        *master.Master
	job      string
	runtime  string // has node0 and node1
	faults   string
	workload string // Slurm's name of it, "" for none
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

// newTraced watches a job whose ranks are yet to start.
func newTraced(t *testing.T, job string) *traced {
	t.Helper()
	b := newBackend(t)
	w := &traced{b: b, job: job, runtime: t.TempDir()}
	log := slog.New(slog.DiscardHandler)
	m, err := master.New(master.Options{Job: job, Listen: "127.0.0.1:0", Log: log})
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
	return w
}

// train starts four processes that train, two on each node.
func (w *traced) train(t *testing.T) {
	t.Helper()
	dir := t.TempDir()
	w.faults, w.workload = filepath.Join(dir, "faults"), "4711"
	for _, d := range []string{w.faults, filepath.Join(dir, "train"), filepath.Join(dir, "run")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("lockstep", "run", "--job", w.job, "--ranks", "4", "--nodes", "2", "--dir", filepath.Join(dir, "run"), "--runtime-dir", w.runtime, "--quiet", "--grace", "500ms", "--",
		"lockstep", "train", "--dp", "2", "--tp", "2", "--dir", filepath.Join(dir, "train"), "--pace", "20ms")
	cmd.Env = append(os.Environ(), "LOCKSTEP_FAULT_DIR="+w.faults, "SLURM_JOB_ID="+w.workload)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
	})
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
		if a.attrs[names.AttrClock] != "host" || a.attrs[names.AttrClockScale] != "job" || a.attrs[names.AttrClockError] == nil || w.workload != "" && a.attrs["slurm.job.id"] != w.workload {
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
