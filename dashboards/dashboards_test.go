package dashboards_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lockstep-ccl/lockstep/dashboards"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/rules/promcheck"
)

func all(t *testing.T) []dashboards.Dashboard {
	t.Helper()
	all, err := dashboards.All()
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestJSONIsNotStale(t *testing.T) {
	var want []string
	for _, d := range all(t) {
		file := filepath.Join("json", d.UID+".json")
		want = append(want, file)
		committed, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(committed), string(d.JSON)); diff != "" {
			t.Errorf("%s is stale, run go generate ./dashboards (-committed +generated):\n%s", file, diff)
		}
	}
	got, err := filepath.Glob("json/*")
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(want)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("files in json (-want +got):\n%s", diff)
	}
}

// model is what the tests read of a dashboard as Grafana would.
type model struct {
	UID         string
	Panels      []panel
	Annotations struct{ List []struct{ Expr string } }
	Templating  struct {
		List []struct{ Name, Type, Definition string }
	}
}

type panel struct {
	ID          int
	Type, Title string
	Description string
	GridPos     struct{ X, Y, W, H int }
	Targets     []struct{ Expr, LegendFormat string }
	Links       []struct{ URL string }
}

func parse(t *testing.T, d dashboards.Dashboard) model {
	t.Helper()
	var m model
	if err := json.Unmarshal(d.JSON, &m); err != nil {
		t.Fatalf("%s: %v", d.UID, err)
	}
	return m
}

var (
	variable    = regexp.MustCompile(`\$\{?([a-z_]+)`)
	legendLabel = regexp.MustCompile(`\{\{(\w+)\}\}`)
	labelValues = regexp.MustCompile(`^label_values\((.+), (\w+)\)$`)
)

// Every expression parses and names only metrics and labels that exist, and
// every label that a legend prints is one that the result carries.
func TestExpressions(t *testing.T) {
	check := func(where, expr string) []string {
		labels, err := promcheck.Labels(dashboards.Vars{}.Fill(expr))
		if err != nil {
			t.Errorf("%s: %v", where, err)
		}
		return labels
	}
	var queries int
	for _, d := range all(t) {
		m := parse(t, d)
		for _, a := range m.Annotations.List {
			check(m.UID+", annotation", a.Expr)
		}
		for _, v := range m.Templating.List {
			if v.Type != "query" {
				continue
			}
			match := labelValues.FindStringSubmatch(v.Definition)
			if match == nil {
				t.Errorf("%s, variable %s: %q is no label_values query", m.UID, v.Name, v.Definition)
				continue
			}
			if labels := check(m.UID+", variable "+v.Name, match[1]); !slices.Contains(labels, match[2]) {
				t.Errorf("%s, variable %s: no label %s", m.UID, v.Name, match[2])
			}
		}
		for _, p := range m.Panels {
			for _, target := range p.Targets {
				queries++
				labels := check(m.UID+", panel "+p.Title, target.Expr)
				for _, ref := range legendLabel.FindAllStringSubmatch(target.LegendFormat, -1) {
					if !slices.Contains(labels, ref[1]) {
						t.Errorf("%s, panel %s: the legend prints %s, the result has %v", m.UID, p.Title, ref[1], labels)
					}
				}
			}
		}
	}
	if want := len(dashboards.Queries()); queries != want {
		t.Errorf("the JSON has %d queries, Queries %d", queries, want)
	}
}

// What makes a dashboard usable: panels that explain themselves, fill the
// grid without holes, use only variables that are there, and do not repeat
// each other.
func TestPanels(t *testing.T) {
	seen := map[string]string{}
	runbooks := map[string]bool{}
	for _, d := range all(t) {
		m := parse(t, d)
		var declared []string
		for _, v := range m.Templating.List {
			declared = append(declared, v.Name)
		}
		for _, ref := range variable.FindAllStringSubmatch(string(d.JSON), -1) {
			if !strings.HasPrefix(ref[1], "__") && !slices.Contains(declared, ref[1]) {
				t.Errorf("%s uses $%s, which is not one of its variables %v", m.UID, ref[1], declared)
			}
		}
		ids, titles, filled := map[int]bool{}, map[string]bool{}, map[int]int{}
		for _, p := range m.Panels {
			where := m.UID + ", panel " + p.Title
			if ids[p.ID] {
				t.Errorf("%s: id %d twice", where, p.ID)
			}
			ids[p.ID] = true
			if p.Type == "row" {
				continue
			}
			if titles[p.Title] {
				t.Errorf("%s: title twice", where)
			}
			titles[p.Title] = true
			filled[p.GridPos.Y] += p.GridPos.W
			if p.Description == "" || len(p.Targets) == 0 {
				t.Errorf("%s has no description or shows nothing", where)
			}
			for _, target := range p.Targets {
				if other, ok := seen[target.Expr]; ok {
					t.Errorf("%s shows the same as %s", where, other)
				}
				seen[target.Expr] = where
			}
			for _, l := range p.Links {
				page, ok := strings.CutPrefix(l.URL, names.RunbookBase+"/")
				if _, err := os.Stat("../docs/runbooks/" + page); !ok || err != nil {
					t.Errorf("%s links to %s: %v", where, l.URL, err)
				}
				runbooks[page] = true
			}
		}
		for y, w := range filled {
			if w != 24 {
				t.Errorf("%s: the panels at y=%d are %d of 24 wide", m.UID, y, w)
			}
		}
	}
	pages, err := filepath.Glob("../docs/runbooks/Lockstep*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range pages {
		if !runbooks[filepath.Base(page)] {
			t.Errorf("no panel links to %s", page)
		}
	}
}

// Every metric is on some panel, or is known to be for queries by hand.
func TestEveryMetricIsShown(t *testing.T) {
	var exprs strings.Builder
	for _, q := range dashboards.Queries() {
		exprs.WriteString(q.Expr + "\n")
	}
	for _, m := range names.Metrics() {
		if m == names.AgentLostInfo { // an alert; its count is among the agents by state
			continue
		}
		if m.From == names.Preflight { // of before a job: its own report shows them
			continue
		}
		if !regexp.MustCompile(`\b` + m.Name + `(_bucket|_sum|_count)?\b`).MatchString(exprs.String()) {
			t.Errorf("%s is on no panel", m.Name)
		}
	}
}
