package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/api"
	promapi "github.com/prometheus/client_golang/api/prometheus/v1"
	"github.com/prometheus/common/model"
	"go.yaml.in/yaml/v3"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/monitoring"
	"github.com/lockstep-ccl/lockstep/deploy/local"
	"github.com/lockstep-ccl/lockstep/internal/browser"
	free "github.com/lockstep-ccl/lockstep/internal/ports"
	"github.com/lockstep-ccl/lockstep/rules"
)

// The two configurations that dashboards are generated for, as those of TestPromtool.
var sites = []struct{ name, file string }{{"defaults", ""}, {"site", "internal/monitoring/testdata/site.yaml"}}

// A sight is a dashboard with its variables chosen.
type sight struct {
	uid  string
	vars map[string]string
}

var sights = []sight{
	{"lockstep-fleet", nil},
	{"lockstep-job", map[string]string{"training_job": "demo"}},
	{"lockstep-job", map[string]string{"training_job": hallJob}},
	{"lockstep-communicator", map[string]string{"training_job": "demo", "communicator": slowOne}},
	{"lockstep-node", map[string]string{"node": "node0:9400"}},
	{"lockstep-node", map[string]string{"node": "gpu-01:9400"}},
	{"lockstep-gpu", map[string]string{"node": "gpu-02:9400"}},
	{"lockstep-fabric", nil},
	{"lockstep-pipeline", nil},
}

// slowOne stands for the communicator of the connection that is slow.
const slowOne = "the slow one"

func (s sight) name() string {
	n := strings.TrimPrefix(s.uid, "lockstep-")
	for _, k := range []string{"training_job", "node"} {
		if v := s.vars[k]; v != "" {
			n += "-" + strings.TrimSuffix(v, ":9400")
		}
	}
	return n
}

// How a dashboard is looked at.
var looks = []struct {
	name string
	browser.View
}{
	{"dark", browser.View{Width: 1440, Height: 900, Dark: true}},
	{"light", browser.View{Width: 1440, Height: 900}},
	{"narrow", browser.View{Width: 400, Height: 800}},
	{"narrow-dark", browser.View{Width: 400, Height: 800, Dark: true}},
}

// TestDashboardsInChromium generates the dashboards of two configurations with lockstep dashboards --config, and has a
// real Chromium draw each with Grafana's own components (dashboards/render) from a real Prometheus, which has watched
// the real demo, healthy and with a slow connection, and hardware that is made up (hall).
func TestDashboardsInChromium(t *testing.T) {
	modules := os.Getenv("LOCKSTEP_TEST_RENDER")
	if modules == "" {
		t.Skip("LOCKSTEP_TEST_RENDER is not set: make test-dashboards-render sets it")
	}
	b, err := browser.Start()
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	bundle := t.TempDir()
	if out, err := exec.CommandContext(t.Context(), "node", "../../dashboards/render/build.cjs", modules, bundle).CombinedOutput(); err != nil {
		t.Fatalf("esbuild: %v\n%s", err, out)
	}
	w := watchDemo(t)
	for _, site := range sites[:min(len(sites), *siteCount)] {
		g := generate(t, site.file)
		g.rules(t)
		srv := httptest.NewServer(g.handler(t, w.url, bundle, modules))
		defer srv.Close()
		full := map[string]bool{} // panels that showed something
		for _, m := range []moment{w.healthy, w.fault} {
			for _, s := range sights {
				if *only != "" && !strings.Contains(s.name(), *only) {
					continue
				}
				t.Run(site.name+"/"+m.name+"/"+s.name(), func(t *testing.T) {
					g.draw(t, b, srv.URL, m, s, full)
				})
			}
		}
		for panel, shown := range full {
			if !shown && *only == "" && !slices.Contains(nobody, panel) {
				t.Errorf("%s: %s never shows anything", site.name, panel)
			}
		}
	}
}

// A moment is an end of what dashboards show, and how much before it.
type moment struct {
	name string
	at   time.Time
	span time.Duration
	red  bool // some of it may be

	communicator string // of the connection that is slow in the end
}

// watched is a Prometheus that holds what happened.
type watched struct {
	url            string
	healthy, fault moment
}

const (
	scraped    = 500 * time.Millisecond
	longHealth = 40 * time.Second
)

// watchDemo runs the demo until its second fault is over, with a Prometheus of its own beside it.
func watchDemo(t *testing.T) watched {
	t.Helper()
	hall := startHall(t)
	term := startDemo(t, "--open-web", "--fault", "communication_slow", "--every", (longHealth + 10*time.Second).String(), "--seed", "7")
	term.await(t, `^fault 1: `)
	targets := map[string][2]string{}
	for instance, addr := range hall.targets {
		targets[instance] = [2]string{"lockstep-hall", addr}
	}
	for _, m := range regexp.MustCompile(`(?m)^  (agent node\d|master|remediator) +http://([\d.:]+)/metrics`).FindAllStringSubmatch(term.all(), -1) {
		instance := map[string]string{"agent node0": "node0:9400", "agent node1": "node1:9400", "master": "demo:9402", "remediator": "remediator:9410"}[m[1]]
		targets[instance] = [2]string{"lockstep-" + strings.Fields(m[1])[0], m[2]}
	}
	if len(targets) != len(hall.targets)+4 {
		t.Fatalf("the demo has printed the addresses of %d processes:\n%s", len(targets)-len(hall.targets), term.all())
	}
	w := watched{url: startPrometheus(t, targets)}
	term.await(t, `^  [✓✗] `)
	quiet := time.Now().Add(longHealth)
	for time.Now().Before(quiet) {
		time.Sleep(time.Second)
	}
	// Between two faults: only what is after the first one's recovery.
	w.healthy = moment{"healthy", time.Now(), longHealth - 5*time.Second, false, ""}
	hall.broken.Store(time.Now().UnixNano())
	term.await(t, `^fault 2: `)
	for term.await(t, `(?s)^fault 2: .*^  [✓✗] `); ; time.Sleep(scraped) {
		first, last, who := w.times(t, `max by (communicator) (lockstep_incident_info{training_job="demo",level="confirmed"}) > 0`, time.Since(w.healthy.at))
		if !last.IsZero() {
			// In the middle: in the end the ranks are on their way out already.
			at := first.Add(last.Sub(first) / 2)
			w.fault = moment{"fault", at, at.Sub(w.healthy.at) + 20*time.Second, true, who}
			w.healthy.communicator = who
			break
		}
		if time.Since(w.healthy.at) > 5*time.Minute {
			t.Fatalf("no incident was confirmed:\n%s", term.all())
		}
	}
	term.end(t)
	return w
}

// times are when an expression first and last had a value, and of which communicator.
func (w watched) times(t *testing.T, expr string, span time.Duration) (first, last time.Time, communicator string) {
	t.Helper()
	client, err := api.NewClient(api.Config{Address: w.url})
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	got, _, _, err := promapi.NewAPI(client).QueryRange(t.Context(), expr, promapi.Range{Start: now.Add(-span), End: now, Step: scraped})
	if err != nil {
		t.Fatal(err)
	}
	m, _ := got.(model.Matrix)
	if len(m) == 0 {
		return first, last, ""
	}
	return m[0].Values[0].Timestamp.Time(), m[0].Values[len(m[0].Values)-1].Timestamp.Time(), string(m[0].Metric["communicator"])
}

// startPrometheus scrapes targets, by instance their job and address, and evaluates the rules.
func startPrometheus(t *testing.T, targets map[string][2]string) string {
	t.Helper()
	path, err := local.Find(t.Context(), local.Prometheus, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	var alerts strings.Builder
	if err := rules.Generate(&alerts, rules.FastConfig()); err != nil {
		t.Fatal(err)
	}
	type object = map[string]any
	var scrapes []object
	for instance, target := range targets {
		scrapes = append(scrapes, object{
			"job_name": target[0] + "/" + instance, "relabel_configs": []object{{"target_label": "job", "replacement": target[0]}},
			"static_configs": []object{{"targets": []string{target[1]}, "labels": object{"instance": instance}}},
		})
	}
	config, err := yaml.Marshal(object{
		"global":     object{"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms", "scrape_native_histograms": true, "always_scrape_classic_histograms": true},
		"rule_files": []string{"rules.yaml"}, "scrape_configs": scrapes,
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"prometheus.yml": string(config), "rules.yaml": alerts.String()} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	held, err := free.Hold("127.0.0.1", 1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = held.Close() })
	ctx, cancel := context.WithCancel(context.Background())
	cmd := exec.CommandContext(ctx, path, "--config.file="+filepath.Join(dir, "prometheus.yml"), "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+held.Addrs[0], "--log.level=warn")
	cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cancel(); _ = cmd.Wait() })
	for range 600 {
		if resp, err := http.Get("http://" + held.Addrs[0] + "/-/ready"); err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return "http://" + held.Addrs[0]
			}
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Fatal("Prometheus is not ready within a minute")
	return ""
}

// generated is what lockstep dashboards and lockstep rules wrote for a configuration.
type generated struct {
	config monitoring.Config
	dir    string
	uids   []string
}

func generate(t *testing.T, file string) *generated {
	t.Helper()
	g := &generated{dir: t.TempDir()}
	var err error
	if g.config, err = monitoring.Load(file); err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{"dashboards", "rules"} {
		args := []string{command, "--dir", g.dir}
		if file != "" {
			args = append(args, "--config", file)
		}
		if out, err := exec.CommandContext(t.Context(), "lockstep", args...).CombinedOutput(); err != nil {
			t.Fatalf("lockstep %v: %v\n%s", args, err, out)
		}
	}
	files, err := filepath.Glob(filepath.Join(g.dir, "dashboards", "*.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		g.uids = append(g.uids, strings.TrimSuffix(filepath.Base(f), ".json"))
	}
	for _, uid := range g.uids {
		if !slices.ContainsFunc(sights, func(s sight) bool { return s.uid == uid }) {
			t.Errorf("nobody looks at dashboard %s: add it to sights", uid)
		}
	}
	return g
}

// rules: each alert leads to a dashboard that there is, at this site's Grafana, and to a page of its runbooks.
func (g *generated) rules(t *testing.T) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(g.dir, "lockstep.rules.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Groups []struct {
			Rules []struct {
				Alert       string
				Annotations map[string]string
			}
		}
	}
	if err := yaml.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	alerts := 0
	for _, group := range file.Groups {
		for _, r := range group.Rules {
			if r.Alert == "" {
				continue
			}
			alerts++
			{
				to := r.Annotations["dashboard"]
				rest, ok := strings.CutPrefix(to, strings.TrimSuffix(g.config.Rules.GrafanaURL, "/")+"/d/")
				if uid, _, _ := strings.Cut(rest, "?"); !ok || !slices.Contains(g.uids, uid) {
					t.Errorf("%s leads to %s, of %s and dashboards %v", r.Alert, to, g.config.Rules.GrafanaURL, g.uids)
				}
			}
			g.runbook(t, r.Alert, r.Annotations["runbook_url"])
		}
	}
	if alerts == 0 {
		t.Error("no alerts")
	}
}

// runbook checks that a link leads to a page that there is, where the configuration says.
func (g *generated) runbook(t *testing.T, where, link string) {
	t.Helper()
	rest, ok := strings.CutPrefix(link, strings.TrimSuffix(g.config.Rules.RunbookBase, "/")+"/")
	page, suffixed := strings.CutSuffix(rest, g.config.Rules.RunbookSuffix)
	if _, err := os.Stat("../../docs/runbooks/" + page + ".md"); !ok || !suffixed || err != nil || page == "" {
		t.Errorf("%s leads to %q: want a page of docs/runbooks at %q with the end %q (%v)", where, link, g.config.Rules.RunbookBase, g.config.Rules.RunbookSuffix, err)
	}
}

// handler serves the page, the dashboards and what Prometheus says.
func (g *generated) handler(t *testing.T, prometheus, bundle, modules string) http.Handler {
	t.Helper()
	to, err := url.Parse(prometheus)
	if err != nil {
		t.Fatal(err)
	}
	type entry struct {
		UID   string   `json:"uid"`
		Title string   `json:"title"`
		Tags  []string `json:"tags"`
	}
	var all []entry
	for _, uid := range g.uids {
		text, err := os.ReadFile(filepath.Join(g.dir, "dashboards", uid+".json"))
		if err != nil {
			t.Fatal(err)
		}
		var e entry
		if err := json.Unmarshal(text, &e); err != nil {
			t.Fatal(err)
		}
		all = append(all, e)
	}
	static := func(dir string) http.Handler {
		files := http.FileServer(http.Dir(dir))
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Cache-Control", "max-age=3600")
			files.ServeHTTP(w, r)
		})
	}
	mux := http.NewServeMux()
	mux.Handle("/api/", httputil.NewSingleHostReverseProxy(to))
	mux.Handle("/app/", http.StripPrefix("/app", static(bundle)))
	mux.Handle("/public/build/", http.StripPrefix("/public/build", static(filepath.Join(modules, "@grafana/ui/dist/public"))))
	for name, weight := range map[string]string{"Regular": "400", "Medium": "500"} {
		mux.HandleFunc("/public/fonts/inter/Inter-"+name+".woff2", func(w http.ResponseWriter, r *http.Request) {
			http.ServeFile(w, r, filepath.Join(modules, "@fontsource/inter/files/inter-latin-"+weight+"-normal.woff2"))
		})
	}
	mux.Handle("/dashboards/", http.StripPrefix("/dashboards", static(filepath.Join(g.dir, "dashboards"))))
	mux.HandleFunc("/dashboards", func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(all) })
	mux.HandleFunc("/favicon.ico", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_, _ = io.WriteString(w, `<!doctype html><html lang="en"><title>dashboard</title><link rel="stylesheet" href="/app/app.css"><body><div id="root"></div>`+
			`<script>window.__grafana_public_path__="/public/";window.grafanaBootData={settings:{}}</script><script type="module" src="/app/app.js"></script>`)
	})
	return mux
}

// address is the page that shows a sight at a moment.
func (s sight) address(base string, m moment) string {
	q := url.Values{"dashboard": {"/dashboards/" + s.uid + ".json"}}
	for k, v := range map[string]int64{"to": m.at.UnixMilli(), "range": m.span.Milliseconds(), "step": scraped.Milliseconds(), "rate": 4 * scraped.Milliseconds()} {
		q.Set(k, strconv.FormatInt(v, 10))
	}
	for k, v := range s.vars {
		if v == slowOne {
			v = m.communicator
		}
		q.Set("var-"+k, v)
	}
	return fmt.Sprintf("%s/?%s", base, q.Encode())
}
