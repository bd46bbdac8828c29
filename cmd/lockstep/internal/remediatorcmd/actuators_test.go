package remediatorcmd

import (
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// TestEveryActuatorIsBuilt: build knows each name of the enum.
func TestEveryActuatorIsBuilt(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	field, _ := reflect.TypeFor[Actuators]().FieldByName("Actuator")
	for _, name := range strings.Split(field.Tag.Get("enum"), ",") {
		a := Actuators{Actuator: name}
		a.Slurm.Journal = t.TempDir()
		act, err := a.build(slog.New(slog.DiscardHandler), prometheus.NewRegistry(), nil)
		switch {
		case err != nil && strings.Contains(err.Error(), "there is no such"):
			t.Errorf("build has no case for %q", name)
		case err == nil && act.Name() != name:
			t.Errorf("%q builds %q", name, act.Name())
		case err == nil && act.release != nil:
			_ = act.release()
		}
	}
}

func TestActuators(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	file := func(name, text string) string {
		path := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	config := file("kubeconfig", `{apiVersion: v1, kind: Config, current-context: x, clusters: [{name: c, cluster: {server: "https://127.0.0.1:1"}}], users: [{name: u}],
  contexts: [{name: x, context: {cluster: c, user: u, namespace: training}}]}`)
	for _, c := range []struct {
		name string
		a    Actuators
		want string // of the error
	}{
		{"process", Actuators{Actuator: "process"}, ""},
		{"kubernetes", Actuators{Actuator: "kubernetes", Kubernetes: kubernetesOptions{Kubeconfig: config, Lead: true}}, ""},
		{"kubernetes", Actuators{Actuator: "kubernetes"}, "this is no pod: --kubernetes.kubeconfig is missing"},
		{"kubernetes", Actuators{Actuator: "kubernetes", Kubernetes: kubernetesOptions{Kubeconfig: config, Preflight: file("p.yaml", "kind: Pod")}}, "want a Job of batch/v1"},
		{"kubernetes", Actuators{Actuator: "kubernetes", Kubernetes: kubernetesOptions{Kubeconfig: config, Namespace: []string{""}}}, "name each"},
		{"", Actuators{Actuator: "pigeon"}, "there is no such"},
	} {
		act, err := c.a.build(slog.New(slog.DiscardHandler), prometheus.NewRegistry(), nil)
		switch {
		case c.want != "":
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%+v: %v, want %q", c.a, err, c.want)
			}
		case err != nil || act.Name() != c.name || (act.lead != nil) != c.a.Kubernetes.Lead:
			t.Errorf("%+v: %v", c.a, err)
		}
	}
}
