package rules_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
	"go.yaml.in/yaml/v3"

	"github.com/lockstep-ccl/lockstep/deploy/local"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/rules"
	"github.com/lockstep-ccl/lockstep/rules/promcheck"
)

const (
	file     = "lockstep.rules.yaml"
	runbooks = "../docs/runbooks"
)

func generate(t *testing.T, c rules.Config) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := rules.Generate(&b, c); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func parse(t *testing.T, data []byte) (alerts []rulefmt.Rule, recorded []rulefmt.Rule) {
	t.Helper()
	groups, errs := rulefmt.Parse(data, false, model.UTF8Validation, parser.NewParser(parser.Options{}), nil)
	for _, err := range errs {
		t.Error(err)
	}
	if t.Failed() {
		t.FailNow()
	}
	for _, g := range groups.Groups {
		for _, r := range g.Rules {
			if r.Alert != "" {
				alerts = append(alerts, r)
			} else {
				recorded = append(recorded, r)
			}
		}
	}
	return alerts, recorded
}

func TestFileIsNotStale(t *testing.T) {
	committed, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(committed), string(generate(t, rules.DefaultConfig()))); diff != "" {
		t.Errorf("%s is stale, run go generate ./rules (-committed +generated):\n%s", file, diff)
	}
}

var labelRef = regexp.MustCompile(`\$labels\.(\w+)`)

// Every expression parses and names only metrics and labels that exist, and
// every label that an annotation prints is one that the alert carries.
func TestExpressions(t *testing.T) {
	for name, c := range map[string]rules.Config{"defaults": rules.DefaultConfig(), "fast": rules.FastConfig()} {
		t.Run(name, func(t *testing.T) {
			alerts, records := parse(t, generate(t, c))
			var recorded []promcheck.Recorded
			for _, r := range records {
				labels, err := promcheck.Labels(r.Expr)
				if err != nil {
					t.Errorf("%s: %v", r.Record, err)
				}
				recorded = append(recorded, promcheck.Recorded{Name: r.Record, Labels: labels})
			}
			for _, a := range alerts {
				labels, err := promcheck.Labels(a.Expr, recorded...)
				if err != nil {
					t.Errorf("%s: %v", a.Alert, err)
					continue
				}
				for l := range a.Labels {
					labels = append(labels, l)
				}
				for key, text := range a.Annotations {
					for _, ref := range labelRef.FindAllStringSubmatch(text, -1) {
						if !slices.Contains(labels, ref[1]) {
							t.Errorf("%s: annotation %s prints $labels.%s, which the alert has not: %v", a.Alert, key, ref[1], labels)
						}
					}
				}
			}
		})
	}
}

// What receivers read of an alert: a severity, and from a verdict all that a
// remediation policy decides on, at once and under labels that do not change
// while the incident is the same.
func TestLabels(t *testing.T) {
	alerts, _ := parse(t, generate(t, rules.DefaultConfig()))
	verdicts := 0
	for _, a := range alerts {
		if !slices.Contains([]string{"critical", "warning", "info"}, a.Labels["severity"]) {
			t.Errorf("%s has severity %q", a.Alert, a.Labels["severity"])
		}
		for _, key := range []string{"summary", "description", "runbook_url", "dashboard"} {
			if a.Annotations[key] == "" {
				t.Errorf("%s has no %s", a.Alert, key)
			}
		}
		if strings.HasPrefix(a.Alert, "LockstepFallback") && (a.Labels["level"] != names.LevelSuspected || !slices.Contains(names.Classes, a.Labels["class"])) {
			t.Errorf("%s has level %q and class %q", a.Alert, a.Labels["level"], a.Labels["class"])
		}
		if !strings.Contains(a.Expr, names.IncidentInfo.Name) {
			continue
		}
		verdicts++
		labels, err := promcheck.Labels(a.Expr)
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range names.IncidentInfo.Labels {
			want := l != names.LabelTraceID && (l != names.LabelReason || strings.Contains(a.Expr, names.LevelConfirmed))
			if has := slices.Contains(labels, l); has != want {
				t.Errorf("%s carries label %s: %v, want %v", a.Alert, l, has, want)
			}
		}
		if strings.Contains(a.Expr, names.LevelConfirmed) && a.For != 0 {
			t.Errorf("%s waits for %v: the master has debounced it", a.Alert, a.For)
		}
	}
	if want := len(names.Classes) + 2; verdicts != want {
		t.Errorf("%d alerts on incidents, want %d: one of each class, two of suspicions", verdicts, want)
	}
	classes := regexp.MustCompile(`class=~"([^"]*)"`)
	for _, class := range names.Classes {
		for alert, level := range map[string]string{names.VerdictAlerts[class]: names.LevelConfirmed, names.AlertFaultSuspected: names.LevelSuspected} {
			told := 0
			for _, a := range alerts {
				m := classes.FindStringSubmatch(a.Expr)
				if a.Alert == alert && strings.Contains(a.Expr, `level="`+level+`"`) && m != nil && slices.Contains(strings.Split(m[1], "|"), class) {
					told++
				}
			}
			if told != 1 {
				t.Errorf("%d alerts %q tell of a %s %s, want 1", told, alert, level, class)
			}
		}
	}
}

func alertNames(t *testing.T) []string {
	alerts, _ := parse(t, generate(t, rules.DefaultConfig()))
	var all []string
	for _, a := range alerts {
		all = append(all, a.Alert)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

func TestRunbooks(t *testing.T) {
	var pages []string
	entries, err := os.ReadDir(runbooks)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), ".md"); ok && name != "README" {
			pages = append(pages, name)
		}
	}
	if diff := cmp.Diff(alertNames(t), pages); diff != "" {
		t.Fatalf("alerts and pages of %s differ (-alerts +pages):\n%s", runbooks, diff)
	}
	index, err := os.ReadFile(filepath.Join(runbooks, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range pages {
		if !strings.Contains(string(index), "("+page+".md)") {
			t.Errorf("%s/README.md does not list %s", runbooks, page)
		}
		text, err := os.ReadFile(filepath.Join(runbooks, page+".md"))
		if err != nil {
			t.Fatal(err)
		}
		for _, heading := range []string{"# " + page + "\n", "## Impact", "## Confirm", "## Do now", "## By itself", "## Over when", "## False alarms"} {
			if !strings.Contains(string(text), heading) {
				t.Errorf("%s.md has no %q", page, heading)
			}
		}
		for _, query := range regexp.MustCompile("(?s)```promql\n(.*?)```").FindAllStringSubmatch(string(text), -1) {
			for _, q := range strings.Split(strings.TrimSpace(query[1]), "\n") {
				if err := promcheck.Check(q); err != nil {
					t.Errorf("%s.md: %v", page, err)
				}
			}
		}
	}
}

func promtool(t *testing.T) string {
	t.Helper()
	if path := os.Getenv("PROMTOOL"); path != "" {
		return path
	}
	if testing.Short() {
		t.Skip("may build promtool")
	}
	path, err := local.Find(t.Context(), "promtool", t.Output())
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func tests(t *testing.T) []string {
	files, err := filepath.Glob("testdata/*.test.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no tests in testdata: %v", err)
	}
	return files
}

func TestPromtool(t *testing.T) {
	path := promtool(t)
	fast := filepath.Join(t.TempDir(), "fast.rules.yaml")
	if err := os.WriteFile(fast, generate(t, rules.FastConfig()), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"check", "rules", "--lint-fatal", file, fast},
		append([]string{"test", "rules"}, tests(t)...),
	} {
		if out, err := exec.CommandContext(t.Context(), path, args...).CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args[:2], " "), err, out)
		}
	}
}

// The tests in testdata show each alert silent, firing and silent again.
func TestEveryAlertIsTested(t *testing.T) {
	type step struct {
		at     time.Duration
		firing bool
	}
	found := map[string]bool{}
	for _, path := range tests(t) {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var f struct {
			Tests []struct {
				Exprs []struct {
					Expr string         `yaml:"expr"`
					At   model.Duration `yaml:"eval_time"`
					Exp  []any          `yaml:"exp_samples"`
				} `yaml:"promql_expr_test"`
			} `yaml:"tests"`
		}
		if err := yaml.Unmarshal(data, &f); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		for _, test := range f.Tests {
			steps := map[string][]step{}
			for _, e := range test.Exprs {
				if m := regexp.MustCompile(`^ALERTS{alertname="(\w+)", alertstate="firing"}$`).FindStringSubmatch(e.Expr); m != nil {
					steps[m[1]] = append(steps[m[1]], step{time.Duration(e.At), len(e.Exp) > 0})
				}
			}
			for name, s := range steps {
				slices.SortFunc(s, func(a, b step) int { return int(a.at - b.at) })
				i := slices.IndexFunc(s, func(s step) bool { return s.firing })
				found[name] = found[name] || i > 0 && !s[len(s)-1].firing
			}
		}
	}
	for _, name := range alertNames(t) {
		if !found[name] {
			t.Errorf("no test shows %s silent, firing and silent again", name)
		}
	}
}
