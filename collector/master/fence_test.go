package master

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// fenceRank is a rank's entry of an attempt, with a lease.
func fenceRank(rank int, attempt uint32, lease time.Duration) *wire.Rank {
	return &wire.Rank{
		WorldRank: int32(rank), WorldSize: 2, Pid: int32(100 + rank), Attempt: attempt, CreatedUnixNs: time.Now().Add(-time.Minute).UnixNano() + int64(attempt),
		Proc: uint32(diagnosis.ProcRunning), FenceLeaseNs: lease.Nanoseconds(),
	}
}

// fenceMaster is a master with two nodes of a rank each, no agent of which is really there. It
// makes no passes: one between two lines of a test would send orders and give nodes up.
func fenceMaster(t *testing.T, dir string, leases ...time.Duration) (*Master, *fence) {
	t.Helper()
	m := start(t, Options{StateDir: dir, Patience: time.Hour, Interval: time.Hour})
	m.mu.Lock()
	for i, lease := range leases {
		n := m.state.node([]string{"n0", "n1"}[i])
		m.state.nodes[n].stream = &stream{out: make(chan *wire.MasterMessage, outbox), done: make(chan error, 1)}
		m.state.merge(n, &wire.Report{Ranks: []*wire.Rank{fenceRank(i, 4, lease)}}, m.now())
	}
	m.mu.Unlock()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	f, err := m.order(ctx, &wire.FenceRequest{Job: "job", Attempt: 4})
	if err != nil {
		t.Fatal(err)
	}
	return m, f
}

func (m *Master) said(f *fence, node string, r *wire.FenceResult) {
	m.mu.Lock()
	m.sendFences()
	n := m.nodeIndex(node)
	s := m.state.nodes[n].stream
	m.mu.Unlock()
	r.Id = f.ID
	m.fenced(n, s, r)
}

func (m *Master) isProven(f *fence) (bool, string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	proven, how, _ := m.proof(f)
	return proven, how
}

func TestWhoseWordIsProof(t *testing.T) {
	m, f := fenceMaster(t, "", 0, 0)
	want := func(proven bool, texts ...string) {
		t.Helper()
		for _, text := range texts {
			if p, how := m.isProven(f); p != proven || !strings.Contains(how, text) {
				t.Errorf("proven %v: %s; want %v, %q", p, how, proven, text)
			}
		}
	}
	want(false, "node n0 has not answered yet; node n1 has not answered yet")
	m.said(f, "n0", &wire.FenceResult{Living: 1, Detail: "rank 0 lives"})
	want(false, "node n0: 1 processes live: rank 0 lives")
	m.said(f, "n0", &wire.FenceResult{Stopped: 1})
	want(false, "node n1 has not answered yet")
	// An answer on a stream that was not asked, or to another order, is none.
	m.fenced(m.nodeIndex("n1"), &stream{}, &wire.FenceResult{Id: f.ID})
	m.fenced(m.nodeIndex("n1"), m.state.nodes[m.nodeIndex("n1")].stream, &wire.FenceResult{Id: f.ID + 1})
	want(false, "node n1 has not answered yet")
	// A node that cannot be heard, and has no lease, has proven nothing, however long it is silent.
	m.silence("n1", 24*time.Hour)
	want(false, "node n1 is not heard for 24h")
	want(false, "and its ranks have no lease")
	m.unsilence("n1")
	m.said(f, "n1", &wire.FenceResult{Ended: 1})
	want(true, "the agents of 2 nodes say that nothing of attempt 4 is left: 1 processes had ended, 1 ended when told to")
}

func (m *Master) silence(node string, d time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.nodeIndex(node)
	m.state.nodes[n].stream = nil
	m.state.ev.Nodes[n].Lost, m.state.ev.Nodes[n].LastSeen = true, m.now()-int64(d)
}

func (m *Master) unsilence(node string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.nodeIndex(node)
	m.state.nodes[n].stream = &stream{out: make(chan *wire.MasterMessage, outbox), done: make(chan error, 1)}
	m.state.ev.Nodes[n].Lost, m.state.ev.Nodes[n].LastSeen = false, m.now()
}

func TestProofByLease(t *testing.T) {
	m, f := fenceMaster(t, "", 0, 30*time.Second)
	m.said(f, "n0", &wire.FenceResult{Stopped: 1})
	m.silence("n1", 10*time.Second) // the test may take some of the other 40
	m.mu.Lock()
	f.Expected["n1"] = expected{Ranks: 1, Lease: f.Expected["n1"].Lease} // known from before
	m.mu.Unlock()
	if p, how := m.isProven(f); p || !strings.Contains(how, "its lease is over in ") {
		t.Errorf("%v, %s", p, how)
	}
	m.mu.Lock()
	if _, _, in := m.proof(f); in <= 0 || in > 20*time.Second+wire.FormerLeaseMargin {
		t.Errorf("it will be proven in %v", in)
	}
	m.mu.Unlock()
	m.silence("n1", 30*time.Second+wire.FormerLeaseMargin+time.Second)
	if p, how := m.isProven(f); !p || !strings.Contains(how, "by the lease that the job has asked for, so have those of n1") {
		t.Errorf("%v, %s", p, how)
	}
}

// TestLeaseMargin: an agent whose leases outlive it is waited for as long as that takes, one that does
// not say so for longer, also where an order of a former master does not say.
func TestLeaseMargin(t *testing.T) {
	const lease = 30 * time.Second
	m, f := fenceMaster(t, "", 0, lease)
	m.said(f, "n0", &wire.FenceResult{Stopped: 1})
	kept := wire.LeaseMargin(lease)
	for _, tt := range []struct {
		kept, stored bool
		silent       time.Duration
		proven       bool
	}{
		{false, false, lease + wire.FormerLeaseMargin - 5*time.Second, false},
		{false, false, lease + wire.FormerLeaseMargin, true},
		{true, false, lease + kept - 5*time.Second, false}, // the test may take the rest
		{true, false, lease + kept, true},
		{true, true, lease + kept, false},
		{true, true, lease + wire.FormerLeaseMargin, true},
	} {
		r := fenceRank(1, 4, lease)
		r.FenceLeaseKept = tt.kept
		m.mu.Lock()
		m.state.merge(m.nodeIndex("n1"), &wire.Report{Ranks: []*wire.Rank{r}}, m.now())
		m.mu.Unlock()
		m.silence("n1", tt.silent)
		m.mu.Lock()
		m.expect(f)
		if tt.stored { // the job is in a later attempt, and nothing is known but what the file says
			e := f.Expected["n1"]
			e.Margin = 0
			f.Expected["n1"] = e
			m.state.attempt = 5
		}
		m.mu.Unlock()
		if p, how := m.isProven(f); p != tt.proven {
			t.Errorf("%+v: %s", tt, how)
		}
		m.state.attempt = 4
		m.unsilence("n1")
	}
}

// TestFormerMasterHeardLater: a master that is started again does not know until when the last one
// heard a node, so a lease counts from its own start.
func TestFormerMasterHeardLater(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	m, f := fenceMaster(t, dir, 30*time.Second, 30*time.Second)
	m.mu.Lock()
	for name, e := range f.Expected {
		e.LastSeen -= int64(time.Hour)
		f.Expected[name] = e
	}
	began := m.now()
	err := errors.Join(m.saveFences(), m.loadFences())
	m.mu.Unlock()
	if err != nil || len(m.fences.all) != 1 {
		t.Fatalf("%d orders, %v", len(m.fences.all), err)
	}
	for name, e := range m.fences.all[0].Expected {
		if e.LastSeen < began {
			t.Errorf("node %s was heard %v before", name, time.Duration(began-e.LastSeen))
		}
	}
}

// TestOrdersOutliveTheMaster: what was ordered is on disk first, and the next master sends it to
// a node that comes back, but not before the job is in a later attempt.
func TestOrdersOutliveTheMaster(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	m, f := fenceMaster(t, dir, 0, 0)
	b, err := os.ReadFile(filepath.Join(dir, fenceFile))
	if err != nil {
		t.Fatal(err)
	}
	all, err := parseFences(b, "job")
	if err != nil || len(all) != 1 || all[0].ID != f.ID || all[0].Attempt != 4 || len(all[0].Expected) != 2 {
		t.Fatalf("%s, %v", b, err)
	}
	if _, err := parseFences(b, "other"); err == nil {
		t.Error("another job's orders are taken")
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fences.all, f = all, all[0]
	for i := range m.state.nodes { // the next master's streams: a pass of this one may have sent the order, for somebody waited then
		m.state.nodes[i].stream.fences = nil
	}
	ordered := func(node string) bool { m.sendFences(); return m.state.nodes[m.nodeIndex(node)].stream.fences[f.ID] }
	if ordered("n1") {
		t.Error("sent while the job is in that attempt, and nobody waits")
	}
	for i := range 2 {
		m.state.merge(int32(i), &wire.Report{Ranks: []*wire.Rank{fenceRank(i, 5, 0)}}, m.now())
	}
	if m.state.attempt != 5 || !ordered("n1") {
		t.Errorf("attempt %d, and it was not sent", m.state.attempt)
	}
	m.dropFences()
	if len(m.fences.all) != 0 {
		t.Error("orders outlive the run of the job that they are about")
	}
}

func TestOrdersAreBounded(t *testing.T) {
	m, _ := fenceMaster(t, "", 0, 0)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for a := range uint32(4) {
		for n := range maxFences {
			f, err := m.order(ctx, &wire.FenceRequest{Job: "job", Attempt: a, Node: strings.Repeat("n", n%60+1)})
			if err != nil {
				if status.Code(err) != codes.ResourceExhausted {
					t.Fatal(err)
				}
				continue
			}
			if n%2 == 0 { // its caller has gone
				f.waiting--
				m.fences.waiting--
			}
		}
	}
	if len(m.fences.all) > maxFences || m.fences.waiting > maxWaiting {
		t.Errorf("%d orders, %d wait", len(m.fences.all), m.fences.waiting)
	}
	if _, err := m.order(ctx, &wire.FenceRequest{Job: "job", Attempt: 5}); err == nil {
		t.Error("an attempt that has not begun is fenced")
	}
}

func FuzzFences(f *testing.F) {
	f.Add([]byte(`{"version":1,"job":"job","fences":[{"id":1,"attempt":4,"by":"x","at":1,"expected":{"n0":{"ranks":1,"last_seen":1}}}]}`))
	f.Add([]byte(`{"version":1,"job":"job","fences":[null]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		all, err := parseFences(b, "job")
		for _, o := range all {
			if err == nil && (o == nil || o.results == nil || o.Expected == nil) {
				t.Errorf("%+v", o)
			}
		}
	})
}

// TestFormerLeases: a master that is started while a node is cut off knows by its predecessor's word
// until when that node's ranks live.
func TestFormerLeases(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	const lease = 30 * time.Second
	t.Run("the last master", func(t *testing.T) {
		m, _ := fenceMaster(t, dir, lease, lease)
		m.mu.Lock()
		m.state.decide()
		m.keepLeases(m.now() + leaseLook)
		m.mu.Unlock()
	})
	again := func(t *testing.T) *Master { // n1 is not heard
		m := start(t, Options{StateDir: dir, Patience: time.Hour, Interval: time.Hour})
		m.mu.Lock()
		defer m.mu.Unlock()
		m.fences.all = nil // had the last one died before it had an order
		n := m.state.node("n0")
		m.state.nodes[n].stream = &stream{out: make(chan *wire.MasterMessage, outbox), done: make(chan error, 1)}
		m.state.merge(n, &wire.Report{Ranks: []*wire.Rank{fenceRank(0, 4, lease)}}, m.now())
		m.state.decide()
		m.keepLeases(m.now() + leaseLook)
		return m
	}
	t.Run("one between", func(t *testing.T) { again(t) })
	m := again(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for _, tt := range []struct {
		attempt uint32
		node    string
		lease   bool // is known
	}{{4, "n1", true}, {4, "n2", false}, {3, "n1", false}} {
		f, err := m.order(ctx, &wire.FenceRequest{Job: "job", Attempt: tt.attempt, Node: tt.node})
		if err != nil {
			t.Fatal(err)
		}
		if p, how := m.isProven(f); p || strings.Contains(how, "its lease is over in") != tt.lease {
			t.Errorf("%+v: %v, %s", tt, p, how)
		}
		if !tt.lease {
			continue
		}
		m.mu.Lock()
		e := f.Expected[tt.node]
		e.LastSeen -= e.Lease + e.Margin + int64(time.Second)
		f.Expected[tt.node] = e
		m.mu.Unlock()
		if p, how := m.isProven(f); !p {
			t.Errorf("%+v, later: %s", tt, how)
		}
	}
}

func FuzzLeases(f *testing.F) {
	f.Add([]byte(`{"version":1,"job":"job","attempt":4,"nodes":{"n1":{"ranks":1,"lease_ns":5000000000,"margin_ns":7000000000,"last_seen":0}}}`))
	f.Add([]byte(`{"version":1,"job":"job","nodes":{"n1":{"lease_ns":-1}}}`))
	f.Add([]byte(`{"version":2}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := parseLeases(b, "job")
		if err != nil {
			return
		}
		for name, e := range l.Nodes {
			if e.Lease <= 0 || e.Margin <= 0 {
				t.Errorf("%q: %+v", name, e)
			}
		}
	})
}
