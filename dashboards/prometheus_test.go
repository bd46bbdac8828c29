package dashboards_test

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/api"
	promapi "github.com/prometheus/client_golang/api/prometheus/v1"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/goleak"

	"github.com/lockstep-ccl/lockstep/dashboards"
	"github.com/lockstep-ccl/lockstep/deploy/local"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/rules"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// demo starts a real Prometheus that scrapes processes of each component and
// evaluates the rules.
func demo(t *testing.T, native bool) (url string, vars dashboards.Vars) {
	if testing.Short() {
		t.Skip("starts Prometheus, and builds it when it must")
	}
	vars = dashboards.Vars{Job: "llm", Communicator: "dp", GPUs: true, NICs: true, Fabric: true, Hosts: true, Range: 10 * time.Second, RateInterval: 2 * time.Second}
	var targets []local.Target
	for i, c := range []names.Component{names.Agent, names.Agent, names.Master, names.Remediator, names.Planner, names.Supervisor} {
		srv := httptest.NewServer(component(c, native))
		t.Cleanup(srv.Close)
		addr := srv.Listener.Addr().String()
		if c == names.Agent {
			vars.Node = addr
		}
		targets = append(targets, local.Target{Job: fmt.Sprint("any-", i), Addresses: []string{addr}})
	}
	dir := t.TempDir()
	file, err := os.Create(filepath.Join(dir, "rules.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := rules.Generate(file, rules.FastConfig()); err != nil {
		t.Fatal(err)
	}
	stack, err := local.Start(t.Context(), local.Config{Dir: dir, Targets: targets, RuleFiles: []string{file.Name()}, Interval: 200 * time.Millisecond, Progress: t.Output()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stack.Stop)
	return stack.PrometheusURL, vars
}

// await checks until Check returns what ok accepts.
func await(t *testing.T, url string, vars dashboards.Vars, ok func(error) bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(250 * time.Millisecond) {
		err := dashboards.Check(t.Context(), url, nil, vars)
		if ok(err) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

func TestEveryPanelShowsData(t *testing.T) {
	url, vars := demo(t, true)
	await(t, url, vars, func(err error) bool { return err == nil })

	client, err := api.NewClient(api.Config{Address: url})
	if err != nil {
		t.Fatal(err)
	}
	prom := promapi.NewAPI(client)
	// The rules see the same data, of two agents: an ambiguous join fails here.
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		loaded, err := prom.Rules(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		good, all := 0, 0
		for _, g := range loaded.Groups {
			for _, r := range g.Rules {
				all++
				var name, health, problem any
				switch r := r.(type) {
				case promapi.AlertingRule:
					name, health, problem = r.Name, r.Health, r.LastError
				case promapi.RecordingRule:
					name, health, problem = r.Name, r.Health, r.LastError
				}
				switch health {
				case promapi.RuleHealth(promapi.RuleHealthGood):
					good++
				case promapi.RuleHealth(promapi.RuleHealthBad):
					t.Fatalf("rule %v fails: %v", name, problem)
				}
			}
		}
		if all > 0 && good == all {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d rules were evaluated", good, all)
		}
	}

	exemplars := 0
	for _, q := range dashboards.Queries() {
		if !q.Exemplars {
			continue
		}
		exemplars++
		found, err := prom.QueryExemplars(t.Context(), vars.Fill(q.Expr), time.Now().Add(-time.Minute), time.Now())
		if err != nil {
			t.Errorf("panel %q: %v", q.Panel, err)
		}
		if !slices.ContainsFunc(found, func(r promapi.ExemplarQueryResult) bool {
			return len(r.Exemplars) > 0 && r.Exemplars[0].Labels[names.LabelTraceID] != ""
		}) {
			t.Errorf("panel %q shows no exemplar with a trace id", q.Panel)
		}
	}
	if exemplars == 0 {
		t.Error("no panel shows exemplars")
	}

	vars.Job = "nobody"
	err = dashboards.Check(t.Context(), url, nil, vars)
	if err == nil || !strings.Contains(err.Error(), `panel "Step": no data`) {
		t.Errorf("Check of a job that is not there: %v", err)
	}
}

// Without native histograms only the panel that draws their buckets is empty.
func TestClassicHistograms(t *testing.T) {
	url, vars := demo(t, false)
	await(t, url, vars, func(err error) bool {
		return err != nil && !strings.Contains(err.Error(), "\n") && strings.Contains(err.Error(), `panel "Distribution": no data`)
	})
}

// values that a label takes in the demo data; several where panels tell them apart.
var values = map[string][]string{
	names.LabelJob:          {"llm"},
	names.LabelCommunicator: {"dp", "tp"},
	names.LabelCollective:   {"AllReduce", "AllGather"},
	names.LabelResult:       {"ok", "peer_lost"},
	names.LabelTransport:    {"shm", "tcp"},
	names.LabelCause:        {"none", "network", "cpu_starved"},
	names.LabelState:        {names.StateRunning, names.StateGone, names.StateConnected, names.StateLost},
	names.LabelClass:        names.Classes,
	names.LabelLevel:        {names.LevelSuspected, names.LevelConfirmed},
	names.LabelGPU:          {"0", "1"},
	names.LabelDevice:       {"mlx5_0", "mlx5_1"},
	names.LabelPort:         {"1"},
	names.LabelCounter:      {"packet_seq_err", "np_cnp_sent"},
	names.LabelEffect:       {names.EffectGPU, names.EffectInfo},
	names.LabelKind:         {names.KindCorrected, names.KindUncorrected},
	names.LabelLifetime:     {names.LifetimeVolatile, names.LifetimeAggregate},
	names.LabelSrc:          {"0", "1", "2"},
	names.LabelDst:          {"0", "1", "2"},
	names.LabelLeaf:         {"leaf0", "leaf1"},
	names.LabelDirection:    {"up", "down"},
}

// component serves every metric of one component, moving with each scrape.
func component(c names.Component, native bool) http.Handler {
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	var move []func()
	for _, m := range names.Metrics() {
		if m.From != c && m.From != names.All {
			continue
		}
		for _, labels := range combinations(m.Labels, c) {
			move = append(move, mover(reg, m, labels, native))
		}
	}
	metrics := promhttp.HandlerFor(reg, promhttp.HandlerOpts{EnableOpenMetrics: true})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for _, f := range move {
			f()
		}
		metrics.ServeHTTP(w, r)
	})
}

func combinations(labels []string, c names.Component) []prometheus.Labels {
	all := []prometheus.Labels{{}}
	for _, l := range labels {
		vs := values[l]
		if l == names.LabelComponent {
			vs = []string{string(c)}
		}
		if vs == nil {
			vs = []string{"some"}
		}
		var next []prometheus.Labels
		for _, ls := range all {
			for _, v := range vs {
				with := prometheus.Labels{l: v}
				for k, v := range ls {
					with[k] = v
				}
				next = append(next, with)
			}
		}
		all = next
	}
	return all
}

// mover registers one series and returns what makes it move.
func mover(reg prometheus.Registerer, m *names.Metric, labels prometheus.Labels, native bool) func() {
	switch m.Type {
	case names.Counter:
		v := prometheus.NewCounter(prometheus.CounterOpts{Name: m.Name, Help: m.Help, ConstLabels: labels})
		reg.MustRegister(v)
		return func() { v.Add(float64(rand.IntN(100))) }
	case names.Histogram:
		opts := prometheus.HistogramOpts{Name: m.Name, Help: m.Help, ConstLabels: labels, Buckets: []float64{.001, .01, .1}}
		if native {
			opts.NativeHistogramBucketFactor = 1.1
		}
		v := prometheus.NewHistogram(opts)
		reg.MustRegister(v)
		return func() {
			for range 10 {
				v.(prometheus.ExemplarObserver).ObserveWithExemplar(rand.ExpFloat64()/100, prometheus.Labels{names.LabelTraceID: "4bf92f3577b34da6a3ce929d0e0e4736"})
			}
		}
	default:
		v := prometheus.NewGauge(prometheus.GaugeOpts{Name: m.Name, Help: m.Help, ConstLabels: labels})
		reg.MustRegister(v)
		return func() {
			if strings.HasSuffix(m.Name, "_info") {
				v.Set(1)
			} else {
				v.Add(rand.Float64())
			}
		}
	}
}
