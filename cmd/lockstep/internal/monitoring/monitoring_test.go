package monitoring

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
	"k8s.io/kube-openapi/pkg/validation/spec"
	"k8s.io/kube-openapi/pkg/validation/strfmt"
	"k8s.io/kube-openapi/pkg/validation/validate"

	"github.com/lockstep-ccl/lockstep/deploy/local"
	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// configurations are the two that everything here is generated for.
var configurations = map[string]string{"defaults": "", "site": "testdata/site.yaml"}

// written generates all files of a configuration.
func written(t *testing.T, config string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	var said bytes.Buffer
	for _, c := range []interface{ Run(w *bytes.Buffer) error }{
		run{func(w *bytes.Buffer) error { return (&RulesCmd{common: common{Config: config, Dir: dir}}).Run(w) }},
		run{func(w *bytes.Buffer) error { return (&DashboardsCmd{common: common{Config: config, Dir: dir}}).Run(w) }},
	} {
		if err := c.Run(&said); err != nil {
			t.Fatal(err)
		}
	}
	for line := range strings.Lines(said.String()) {
		if _, err := os.Stat(strings.TrimSpace(line)); err != nil {
			t.Errorf("it says that it has written %s: %v", line, err)
		}
	}
	return dir
}

type run struct{ f func(*bytes.Buffer) error }

func (r run) Run(w *bytes.Buffer) error { return r.f(w) }

func tool(t *testing.T, name string) string {
	t.Helper()
	path, err := local.Find(t.Context(), name, os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func check(t *testing.T, program string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), program, args...).CombinedOutput()
	if err != nil {
		t.Errorf("%s %s: %v\n%s", filepath.Base(program), strings.Join(args, " "), err, out)
	}
	return string(out)
}

func TestPromtool(t *testing.T) {
	if testing.Short() {
		t.Skip("promtool is not under the race detector")
	}
	promtool := tool(t, "promtool")
	for name, config := range configurations {
		t.Run(name, func(t *testing.T) {
			dir := written(t, config)
			check(t, promtool, "check", "rules", "--lint=all", "--lint-fatal", filepath.Join(dir, rulesFile))
			check(t, promtool, "check", "config", filepath.Join(dir, prometheusFile))
		})
	}
}

// The defaults are the rules and dashboards that are committed.
func TestDefaults(t *testing.T) {
	dir := written(t, "")
	same := func(file, committed string) {
		got, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			t.Fatal(err)
		}
		want, err := os.ReadFile(committed)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s is not %s", file, committed)
		}
	}
	same(rulesFile, "../../../../rules/"+rulesFile)
	all, err := filepath.Glob("../../../../dashboards/json/*.json")
	if err != nil || len(all) == 0 {
		t.Fatal(all, err)
	}
	for _, committed := range all {
		same("dashboards/"+filepath.Base(committed), committed)
	}
	// What --defaults prints is a configuration, and says the same.
	var b bytes.Buffer
	if err := Default().write(&b); err != nil {
		t.Fatal(err)
	}
	var c Config
	if err := c.decode(b.Bytes()); err != nil {
		t.Fatal(err)
	}
	var again bytes.Buffer
	if err := c.write(&again); err != nil || again.String() != b.String() {
		t.Errorf("%v: read and printed again it is\n%s", err, again.String())
	}
}

// What a site has said is in what is written.
func TestSite(t *testing.T) {
	dir := written(t, "testdata/site.yaml")
	for file, wants := range map[string][]string{
		rulesFile:                           {"team: ml-infra", `https://wiki.example.com/x?page="lockstep"/LockstepGPULost`, "https://grafana.example.com/d/lockstep-gpu", "for: 30s", ">= 10", "> 250.5", `(.+)\\.gpu\\.example\\.com:\\d+`},
		ruleFile:                            {"namespace: observability", "prometheus: main", "cluster: eu-1"},
		alertmanagerFile:                    {"https://remediator.lockstep.svc:9410/webhook", "credentials_file: /etc/alertmanager/secrets/lockstep/token", "repeat_interval: 2m"},
		prometheusFile:                      {"lockstep-planner", "planner.fabric.example.com:9412", "n2.gpu.example.com:9400", "am-1:9093", "scrape_interval: 15s"},
		"dashboards/lockstep-gpu.json":      {`"on call"`, `https://wiki.example.com/x?page=\"lockstep\"/LockstepGPULost"`},
		"dashboards-configmaps.yaml":        {"k8s-sidecar-target-directory: /tmp/dashboards/training", `grafana_dashboard: "1"`},
		"dashboards-provider.yaml":          {"folder: Training"},
		"dashboards/lockstep-node.json":     {`"lockstep-node"`},
		"dashboards/lockstep-job.json":      {`"lockstep-job"`},
		"dashboards/lockstep-pipeline.json": {`"lockstep-pipeline"`},
	} {
		b, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range wants {
			if !bytes.Contains(b, []byte(want)) {
				t.Errorf("%s has no %s", file, want)
			}
		}
		for _, not := range []string{"release: kube-prometheus-stack", names.RunbookBase, "lockstep-remediator"} {
			if bytes.Contains(b, []byte(not)) && file != "dashboards/lockstep-pipeline.json" {
				t.Errorf("%s has %s", file, not)
			}
		}
		if strings.HasSuffix(file, ".json") && !json.Valid(b) {
			t.Errorf("%s is no JSON", file)
		}
	}
}

// The PrometheusRule is one by the schema of the operator's own definition, in which
// the API server would drop what it does not know.
func TestPrometheusRule(t *testing.T) {
	text, err := os.ReadFile("testdata/monitoring.coreos.com_prometheusrules.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var crd struct {
		Spec struct {
			Versions []struct {
				Schema struct {
					Open any `yaml:"openAPIV3Schema"`
				}
			}
		}
	}
	if err := yaml.Unmarshal(text, &crd); err != nil {
		t.Fatal(err)
	}
	asJSON, err := json.Marshal(crd.Spec.Versions[0].Schema.Open)
	if err != nil {
		t.Fatal(err)
	}
	var schema spec.Schema
	if err := json.Unmarshal(asJSON, &schema); err != nil {
		t.Fatal(err)
	}
	valid := func(rule any) []error {
		r := validate.NewSchemaValidator(&schema, nil, "", strfmt.Default).Validate(rule)
		errs := r.Errors
		for _, path := range unknown(&schema, rule, "") {
			errs = append(errs, os.NewSyscallError("unknown field "+path, os.ErrInvalid))
		}
		return errs
	}
	for name, config := range configurations {
		rule := object0(t, filepath.Join(written(t, config), ruleFile))[0]
		if errs := valid(rule); len(errs) > 0 {
			t.Errorf("%s: %v", name, errs)
		}
		// The test can fail.
		group := rule["spec"].(map[string]any)["groups"].([]any)[0].(map[string]any)
		first := group["rules"].([]any)[0].(map[string]any)
		for key, wrong := range map[string]any{"for": "soon", "expr": nil, "summary": "x", "labels": "none"} {
			was, had := first[key]
			if first[key] = wrong; wrong == nil {
				delete(first, key)
			}
			if errs := valid(rule); len(errs) == 0 {
				t.Errorf("%s: a rule with %s=%v is good", name, key, wrong)
			}
			if first[key] = was; !had {
				delete(first, key)
			}
		}
	}
}

// unknown lists fields that the schema does not have; metadata is the API server's own.
func unknown(s *spec.Schema, v any, path string) (all []string) {
	switch v := v.(type) {
	case map[string]any:
		for k, e := range v {
			p, ok := s.Properties[k]
			switch {
			case path == "" && k == "metadata":
			case ok:
				all = append(all, unknown(&p, e, path+"."+k)...)
			case s.AdditionalProperties == nil:
				all = append(all, path+"."+k)
			}
		}
	case []any:
		for _, e := range v {
			if s.Items != nil && s.Items.Schema != nil {
				all = append(all, unknown(s.Items.Schema, e, path+"[]")...)
			}
		}
	}
	return all
}

// object0 reads the documents of a file as Kubernetes does: as JSON.
func object0(t *testing.T, file string) (all []map[string]any) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	dec := yaml.NewDecoder(bytes.NewReader(text))
	for {
		var doc map[string]any
		if err := dec.Decode(&doc); err != nil {
			return all
		}
		b, err := json.Marshal(doc)
		if err != nil {
			t.Fatal(err)
		}
		var o map[string]any
		if err := json.Unmarshal(b, &o); err != nil {
			t.Fatal(err)
		}
		all = append(all, o)
	}
}

func TestConfigMaps(t *testing.T) {
	for name, config := range configurations {
		dir := written(t, config)
		maps := object0(t, filepath.Join(dir, "dashboards-configmaps.yaml"))
		files, err := filepath.Glob(filepath.Join(dir, "dashboards", "*.json"))
		if err != nil || len(maps) != len(files) || len(files) < 5 {
			t.Fatalf("%s: %d objects of %d dashboards (%v)", name, len(maps), len(files), err)
		}
		for _, m := range maps {
			if m["apiVersion"] != "v1" || m["kind"] != "ConfigMap" || len(m) != 4 {
				t.Errorf("%s: %v %v with %d fields", name, m["apiVersion"], m["kind"], len(m))
			}
			for file, text := range m["data"].(map[string]any) {
				on, err := os.ReadFile(filepath.Join(dir, "dashboards", file))
				if err != nil || string(on) != text {
					t.Errorf("%s: %s in the ConfigMap is not the file (%v)", name, file, err)
				}
			}
		}
	}
}

func TestBadConfigurations(t *testing.T) {
	for text, want := range map[string]string{
		"rule: {}":                                     "field rule not found",
		"rules: {suspected: 1s}":                       "field suspected not found",
		"rules: {suspected_for: soon}":                 "soon",
		"rules: {window: 0s}":                          "window",
		"rules: {window: 10s}":                         "four scrape intervals",
		"rules: {nic_flaps: 0}":                        "nic_flaps",
		"rules: {fallback: {slow_ratio: 1}}":           "slow_ratio",
		"rules: {trace_drop_ratio: 2}":                 "trace_drop_ratio",
		"rules: {node_pattern: '('}":                   "node_pattern",
		"rules: {node_pattern: 'a'}":                   "with a group",
		"rules: {labels: {incident: x}}":               "labels: incident",
		"rules: {labels: {severity: x}}":               "labels: severity",
		"rules: {labels: {'a-b': x}}":                  "labels: a-b",
		"rules: {grafana_url: grafana}":                "rules.grafana_url",
		"rules: {runbook_base: 'javascript:alert(1)'}": "rules.runbook_base",
		"kubernetes: {namespace: Big}":                 "kubernetes.namespace",
		"kubernetes: {rule_labels: {'a b': c}}":        "kubernetes.rule_labels",
		"kubernetes: {dashboard_annotations: {'': c}}": "kubernetes.dashboard_annotations",
		"alertmanager: {remediator: ftp://x}":          "alertmanager.remediator",
		"alertmanager: {token_file: ''}":               "alertmanager.token_file",
		"alertmanager: {repeat_interval: 1ms}":         "repeat_interval",
		"prometheus: {agents: [n1]}":                   "prometheus.agents",
		"prometheus: {scrape_interval: 1ms}":           "scrape_interval",
		"rules: {}\n---\nrules: {}":                    "more than one",
		"- a":                                          "cannot unmarshal",
	} {
		c := Default()
		if err := c.decode([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
	for _, good := range []string{"", "# nothing", "rules: {}", "rules: {node_pattern: ''}", "alertmanager: {remediator: '', token_file: ''}"} {
		c := Default()
		if err := c.decode([]byte(good)); err != nil {
			t.Errorf("%q: %v", good, err)
		}
	}
}

func FuzzConfig(f *testing.F) {
	site, err := os.ReadFile("testdata/site.yaml")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(site)
	f.Add([]byte("rules: {fallback: {for: 9999999h}}"))
	f.Fuzz(func(t *testing.T, text []byte) {
		c := Default()
		if c.decode(text) != nil {
			return
		}
		files, err := c.rulesFiles()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if err := yaml.Unmarshal(f.data, new(any)); err != nil {
				t.Errorf("%s: %v", f.name, err)
			}
		}
	})
}

// bound is far beyond what anything here takes.
const bound = 60 * time.Second
