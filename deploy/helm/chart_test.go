package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

var update = flag.Bool("update", false, "write what the charts render to (with make test-chart)")

// helm runs the real one, which make test-chart builds.
func helm(t *testing.T, args ...string) ([]byte, error) {
	t.Helper()
	program := os.Getenv("LOCKSTEP_TEST_CHART")
	if program == "" {
		t.Skip("make test-chart runs this: helm takes three minutes of a core to build once")
	}
	cmd := exec.CommandContext(t.Context(), program, args...)
	home := t.TempDir()
	cmd.Env = append(os.Environ(), "HELM_CACHE_HOME="+home, "HELM_CONFIG_HOME="+home, "HELM_DATA_HOME="+home, "KUBECONFIG="+filepath.Join(home, "none"))
	var out, complaint bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaint
	err := cmd.Run()
	if err != nil {
		t.Logf("helm %s: %s", strings.Join(args, " "), complaint.Bytes())
		return complaint.Bytes(), err
	}
	return out.Bytes(), nil
}

// random is what helm makes anew each time that it renders without a cluster.
var (
	random = regexp.MustCompile(`(?m)^(  (?:operator-)?token: ).*$`)
	blank  = regexp.MustCompile(`(?m)[ \t]+$`)
)

func render(t *testing.T, chart string, args ...string) []byte {
	t.Helper()
	out, err := helm(t, append([]string{"template", "lockstep", chart, "-n", release, "--kube-version", "1.36.0"}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	return blank.ReplaceAll(random.ReplaceAll(out, []byte("${1}bWFkZSBvbmNl")), nil)
}

// TestChart renders every file of values and compares with the golden file, and lints.
func TestChart(t *testing.T) {
	for _, values := range cases(t) {
		chart := filepath.Base(filepath.Dir(values))
		if out, err := helm(t, "lint", "--strict", "-n", release, chart, "-f", values); err != nil {
			t.Errorf("helm lint: %s", out)
		}
		got := append([]byte(sources(t, values)), render(t, chart, "-f", values)...)
		if *update {
			if err := os.WriteFile(golden(values), got, 0o644); err != nil {
				t.Fatal(err)
			}
		} else if want, err := os.ReadFile(golden(values)); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: it renders to something else (%v): look at it, then make test-chart ARGS=-update", values, err)
		}
		objects(t, got)
	}
}

// TestBadValues: each is refused, with the value's name.
func TestBadValues(t *testing.T) {
	for _, c := range []struct{ chart, set, want string }{
		{"lockstep", "agent.prot=9400", "prot"},
		{"lockstep", "agent.port=0", "port"},
		{"lockstep", "tls.mode=none", "mode"},
		{"lockstep", "tls.mode=certManager,tls.certManager.issuer.name=x", "tls.agents.nodes"},
		{"lockstep", "namespaces=null", "namespaces"},
		{"lockstep", "jobs.Not_A_Label=training", "Not_A_Label"},
		{"lockstep", "jobs.llm=elsewhere", "jobs.llm"},
		{"lockstep", "remediator.config.dry_run=maybe", "dry_run"},
		{"lockstep", "image.digest=sha256:abc", "digest"},
		{"lockstep", "remediator.whenPoolEmpty=panic", "whenPoolEmpty"},
		{"lockstep", "agent.runtimeDir=/etc", "runtimeDir"},
		{"lockstep", "planner.enabled=true", "planner.fabricConfigMap"},
		{"lockstep-master", "image.tag=1", "job"},
		{"lockstep-master", "job=Not_A_Label", "job"},
		{"lockstep-master", "job=llm,tls.mode=certManager", "tls.certManager.issuer.name"},
	} {
		if out, err := helm(t, "template", "x", c.chart, "-n", release, "--set", c.set); err == nil || !bytes.Contains(out, []byte(c.want)) {
			t.Errorf("%s with %s: %v, want %q", c.chart, c.set, err, c.want)
		}
	}
	if out, err := helm(t, "template", "x", "lockstep", "-n", "default"); err == nil || !bytes.Contains(out, []byte("one of its own")) {
		t.Errorf("in namespace default: %v", err)
	}
}

// TestMonitoringIsTheSame: rules and dashboards come out of the chart as they went in.
func TestMonitoringIsTheSame(t *testing.T) {
	out := render(t, "lockstep", "--set", "monitoring.rules.enabled=true,monitoring.dashboards.enabled=true", "-s", "templates/monitoring.yaml")
	var rules, source any
	text, err := os.ReadFile("../../rules/lockstep.rules.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(text, &source); err != nil {
		t.Fatal(err)
	}
	boards := 0
	for doc := range strings.SplitSeq("\n"+string(out), "\n---") {
		var o struct {
			Kind string
			Spec any
			Data map[string]string
		}
		if err := yaml.Unmarshal([]byte(doc), &o); err != nil {
			t.Fatal(err)
		}
		switch o.Kind {
		case "PrometheusRule":
			rules = o.Spec
		case "ConfigMap":
			for name, got := range o.Data {
				boards++
				want, err := os.ReadFile("../../dashboards/json/" + name)
				if err != nil || !json.Valid([]byte(got)) || strings.TrimSpace(got) != strings.TrimSpace(string(want)) {
					t.Errorf("%s differs (%v)", name, err)
				}
			}
		}
	}
	if rules == nil || !reflect.DeepEqual(rules, source) {
		t.Error("the rules differ")
	}
	if want, _ := filepath.Glob("../../dashboards/json/*.json"); boards != len(want) {
		t.Errorf("%d dashboards, want %d", boards, len(want))
	}
}
