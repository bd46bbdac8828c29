package main

import (
	"encoding/hex"
	"fmt"
	"iter"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/lockstep-ccl/lockstep/ccl/ccltest"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/train"
	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/prom"
	"github.com/lockstep-ccl/lockstep/record"
)

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
