package prom_test

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/prom"
	"github.com/lockstep-ccl/lockstep/record"
)

// While a NIC's driver hangs, states and counters are not told; links are.
func TestUnresponsiveNICDriver(t *testing.T) {
	s := agentSnapshot()
	s.NICs.UnresponsiveAt = 1
	_, reg := newAgent(t, s, prom.Options{})
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]float64{}
	for _, f := range families {
		seen[f.GetName()] = f.Metric[0].GetGauge().GetValue()
	}
	if seen[names.NICDriverUnresponsive.Name] != 1 {
		t.Error("the driver is not unresponsive")
	}
	for _, m := range []*names.Metric{names.NICInfo, names.NICPortFlaps, names.NICLinkUp, names.NICLinkFlaps, names.NICReadErrors} {
		if _, ok := seen[m.Name]; !ok {
			t.Errorf("%s is missing", m)
		}
	}
	for _, m := range []*names.Metric{names.NICPortUp, names.NICPortState, names.NICPortRate, names.NICErrors, names.NICRetransmissions, names.NICReceived} {
		if _, ok := seen[m.Name]; ok {
			t.Errorf("%s is told", m)
		}
	}
}

// While the driver hangs, what it said before is not told as if it were true;
// what is counted here is.
func TestUnresponsiveGPUDriver(t *testing.T) {
	s := agentSnapshot()
	s.GPUs.UnresponsiveAt = 1
	_, reg := newAgent(t, s, prom.Options{})
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, f := range families {
		seen[f.GetName()] = true
		if f.GetName() == names.GPUDriverUnresponsive.Name && f.Metric[0].GetGauge().GetValue() != 1 {
			t.Error("the driver is not unresponsive")
		}
	}
	for _, m := range []*names.Metric{names.GPUDriverUnresponsive, names.GPUInfo, names.GPUXids, names.GPUXidsDropped} {
		if !seen[m.Name] {
			t.Errorf("%s is missing", m)
		}
	}
	for _, m := range []*names.Metric{names.GPUUp, names.GPUTemperature, names.GPUThrottled, names.GPUNVLinkUp, names.GPUProcesses} {
		if seen[m.Name] {
			t.Errorf("%s is told", m)
		}
	}
}

func newAgent(t testing.TB, s *collector.AgentSnapshot, o prom.Options) (*prom.Agent, *prometheus.Registry) {
	t.Helper()
	a := prom.NewAgent(func() *collector.AgentSnapshot { return s }, o)
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(a)
	return a, reg
}

func TestEveryAgentAndMasterMetricIsExposed(t *testing.T) {
	a, agents := newAgent(t, agentSnapshot(), prom.Options{})
	a.Collective(allReduce(1, time.Millisecond))
	masters := prometheus.NewPedanticRegistry()
	masters.MustRegister(prom.NewMaster(masterSnapshot, prom.Options{}), prom.State(func() string { return "" }),
		prom.Certificates(func() []prom.Certificate { return []prom.Certificate{{Expires: time.Unix(1, 0)}} }),
		prom.Crowded(names.ListenerAgents, func() uint64 { return 0 }), prom.Web(turnedAway{}))
	agents.MustRegister(prom.Node("node0")) // beside it, as an agent has it
	planners := prometheus.NewPedanticRegistry()
	planners.MustRegister(prom.NewPlanner(fabric, prom.Options{}))
	supervisors := prometheus.NewPedanticRegistry()
	supervisors.MustRegister(prom.NewSupervisor(supervision, prom.Options{}))
	_, capped := newAgent(t, agentSnapshot(), prom.Options{SeriesPerFamily: 1}) // for what is counted then only
	exposed := map[string]bool{}
	for _, reg := range []*prometheus.Registry{agents, masters, planners, supervisors, capped, prom.NewRegistry(names.Agent, prom.Build{})} {
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			exposed[f.GetName()] = true
		}
	}
	for _, m := range names.Metrics() {
		if m == names.SpansDropped || m == names.SpansExported || m == names.TraceEventsDropped { // the tracer's
			continue
		}
		if m.From != names.Remediator && m.From != names.Preflight && !exposed[m.Name] {
			t.Errorf("%s is defined and never exposed", m)
		}
	}
}

func TestNoSnapshotYet(t *testing.T) {
	_, reg := newAgent(t, nil, prom.Options{})
	reg.MustRegister(noOverflow{prom.NewMaster(func() *collector.MasterSnapshot { return nil }, prom.Options{})})
	if _, err := reg.Gather(); err != nil {
		t.Error(err)
	}
}

// noOverflow hides lockstep_series_overflow_total, which every component has
// once, so that two components fit in one registry.
type noOverflow struct{ c prometheus.Collector }

func (n noOverflow) Describe(ch chan<- *prometheus.Desc) {
	n.filter(func(all chan *prometheus.Desc) { n.c.Describe(all) }, func(d *prometheus.Desc) { ch <- d })
}

func (n noOverflow) filter(produce func(chan *prometheus.Desc), use func(*prometheus.Desc)) {
	all := make(chan *prometheus.Desc)
	go func() { produce(all); close(all) }()
	for d := range all {
		if !strings.Contains(d.String(), names.SeriesOverflow.Name) {
			use(d)
		}
	}
}

func (n noOverflow) Collect(ch chan<- prometheus.Metric) {
	all := make(chan prometheus.Metric)
	go func() { n.c.Collect(all); close(all) }()
	for m := range all {
		if !strings.Contains(m.Desc().String(), names.SeriesOverflow.Name) {
			ch <- m
		}
	}
}

func TestExemplarsOnlyOnAnomaliesAndRateBounded(t *testing.T) {
	a, reg := newAgent(t, agentSnapshot(), prom.Options{ExemplarEvery: time.Second})
	a.Collective(allReduce(1, time.Millisecond))
	if got := exemplars(t, reg); len(got) != 0 {
		t.Errorf("healthy collective has exemplars %v", got)
	}
	for seq := uint64(2); seq < 10; seq++ { // within one millisecond of each other
		c := allReduce(seq, 50*time.Millisecond+time.Duration(seq))
		c.Anomalous, c.Traced = true, true
		a.Collective(c)
	}
	trace := collector.TraceID("llama", 7, record.AllReduce, 2)
	want := []string{fmt.Sprintf("%x", trace[:])}
	if diff := cmp.Diff(want, exemplars(t, reg)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	text := scrape(t, prom.Handler(reg, slog.New(slog.DiscardHandler)), http.Header{"Accept": {"application/openmetrics-text;version=1.0.0"}})
	if !strings.Contains(text, `# {trace_id="`+want[0]+`"} 0.05`) {
		t.Errorf("OpenMetrics carries no exemplar:\n%s", text)
	}
}

func exemplars(t *testing.T, g prometheus.Gatherer) []string {
	t.Helper()
	families, err := g.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, f := range families {
		for _, m := range f.Metric {
			for _, e := range m.GetHistogram().GetExemplars() {
				ids = append(ids, e.Label[0].GetValue())
			}
		}
	}
	return ids
}

// An agent that is started again finds in the recorders what its predecessor has counted.
func TestFormerCollectivesAreNotCountedAgain(t *testing.T) {
	a, reg := newAgent(t, agentSnapshot(), prom.Options{})
	c := allReduce(1, time.Millisecond)
	c.Former = true
	a.Collective(c)
	if n, err := testutil.GatherAndCount(reg, names.Collectives.Name); err != nil || n != 0 {
		t.Errorf("%d series, %v", n, err)
	}
}

func TestHostileNamesDoNotBreakAScrape(t *testing.T) {
	s := agentSnapshot()
	s.Jobs = append(s.Jobs, collector.AgentJob{Job: "a\xffb", Comms: []collector.AgentComm{{Name: "\x00\n\"\\", Members: 1}}},
		collector.AgentJob{Job: "a\xfeb", Comms: []collector.AgentComm{{Name: "\x00\n\"\\", Members: 1}}}, collector.AgentJob{})
	a, reg := newAgent(t, s, prom.Options{})
	for _, name := range []string{"a\xffb", "a\xfeb", ""} {
		c := allReduce(1, time.Millisecond)
		c.Job, c.Comm, c.Kind, c.Result = name, name, 200, 200
		c.Ended = c.Started - 5
		a.Collective(c)
	}
	if _, err := reg.Gather(); err != nil {
		t.Error(err)
	}
}

func TestDetectionLatencyIsCountedOnceAnIncident(t *testing.T) {
	s := masterSnapshot()
	m := prom.NewMaster(func() *collector.MasterSnapshot { return s }, prom.Options{})
	count := func() (n uint64) {
		reg := prometheus.NewRegistry()
		reg.MustRegister(m)
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			if f.GetName() == names.IncidentLatency.Name {
				for _, m := range f.Metric {
					n += m.Histogram.GetSampleCount()
				}
			}
		}
		return n
	}
	if a, b := count(), count(); a != 2 || b != 2 {
		t.Errorf("counted %d then %d incidents, want 2 and 2", a, b)
	}
	s = masterSnapshot()
	s.At = s.At.Add(time.Second)
	s.Incidents[1].Confirmed, s.Incidents[1].Verdict.Since = s.At, s.At.Add(-time.Second).UnixNano()
	if n := count(); n != 3 {
		t.Errorf("counted %d incidents after another was confirmed, want 3", n)
	}
}

func TestHandlerNegotiates(t *testing.T) {
	a, agents := newAgent(t, agentSnapshot(), prom.Options{})
	a.Collective(allReduce(1, time.Millisecond))
	h := prom.Handler(agents, slog.New(slog.DiscardHandler))

	om := scrape(t, h, http.Header{"Accept": {"application/openmetrics-text;version=1.0.0"}})
	for _, want := range []string{"# EOF", "# UNIT lockstep_collective_duration_seconds seconds"} {
		if !strings.Contains(om, want) {
			t.Errorf("OpenMetrics lacks %q", want)
		}
	}
	if strings.Contains(om, "_created") {
		t.Error("OpenMetrics has created samples")
	}

	proto := httptest.NewRequest(http.MethodGet, "/metrics", nil)
	proto.Header.Set("Accept", `application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited`)
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, proto)
	dec := expfmt.NewDecoder(rec.Body, expfmt.ResponseFormat(rec.Header()))
	native := false
	for {
		var f dto.MetricFamily
		if err := dec.Decode(&f); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if f.GetName() == names.CollectiveDuration.Name {
			native = f.Metric[0].Histogram.Schema != nil && f.Metric[0].Histogram.GetSchema() == 3 && len(f.Metric[0].Histogram.PositiveSpan) > 0
		}
	}
	if !native {
		t.Error("protobuf carries no native histogram of factor 1.1")
	}

	zipped := httptest.NewRequest(http.MethodGet, "/metrics", nil)
	zipped.Header.Set("Accept-Encoding", "gzip")
	rec = httptest.NewRecorder()
	h.ServeHTTP(rec, zipped)
	if z, err := gzip.NewReader(rec.Body); err != nil {
		t.Errorf("not gzip: %v", err)
	} else if text, err := io.ReadAll(z); err != nil || !bytes.Contains(text, []byte(names.Collectives.Name)) {
		t.Errorf("gzip body: %v", err)
	}
}

func scrape(t *testing.T, h http.Handler, header http.Header) string {
	t.Helper()
	req := httptest.NewRequest(http.MethodGet, "/metrics", nil)
	req.Header = header
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, req)
	if rec.Code != http.StatusOK {
		t.Fatalf("status %d: %s", rec.Code, rec.Body)
	}
	return rec.Body.String()
}

func TestRegistryHasBuildInfoAndRuntime(t *testing.T) {
	reg := prom.NewRegistry(names.Master, prom.Build{Version: "1.2.3", Revision: "abc"})
	for _, name := range []string{names.BuildInfo.Name, "go_goroutines", "process_resident_memory_bytes"} {
		if n, err := testutil.GatherAndCount(reg, name); err != nil || n != 1 {
			t.Errorf("%s: %d series, %v", name, n, err)
		}
	}
}

func TestBuildersRefuseAnotherType(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("a counter was built from a gauge")
		}
	}()
	prom.CounterVec(names.DryRun)
}

func TestScrapesWhileFolding(t *testing.T) {
	now := time.Now()
	s := agentSnapshot()
	a, reg := newAgent(t, s, prom.Options{IdleExpiry: time.Nanosecond, Now: func() time.Time { return now }})
	var wg sync.WaitGroup
	stop := make(chan struct{})
	wg.Go(func() {
		for i := uint64(0); ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			c := allReduce(i, time.Millisecond)
			c.Job, c.CommID, c.Anomalous = fmt.Sprint(i%3), i%7, i%5 == 0
			a.Collective(c)
		}
	})
	for range 50 {
		if _, err := reg.Gather(); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	wg.Wait()
}

// BenchmarkCollective is one Observe set: two native histograms, two counters.
// The budget is 300 ns, and no allocation.
func BenchmarkCollective(b *testing.B) {
	for _, bench := range []struct {
		name      string
		comms     uint64
		anomalous bool
	}{{"healthy", 1, false}, {"healthy_48_communicators", 48, false}, {"anomalous", 1, true}} {
		b.Run(bench.name, func(b *testing.B) {
			a, _ := newAgent(b, agentSnapshot(), prom.Options{})
			var cs [1024]collector.Collective
			for i := range cs {
				cs[i] = *allReduce(uint64(i), time.Duration(20+i*7)*time.Microsecond)
				cs[i].CommID = uint64(i) % bench.comms * 0x1234567
				cs[i].Comm = fmt.Sprint("dp", uint64(i)%bench.comms/8)
				cs[i].Kind = record.AllReduce + record.CollKind(i%4)
				cs[i].Anomalous = bench.anomalous
				a.Collective(&cs[i])
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				a.Collective(&cs[i&1023])
			}
		})
	}
}
