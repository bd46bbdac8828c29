package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/lockstep-ccl/lockstep/collector/wire/pki"
)

const fiveNodes = `{"items":[
 {"metadata":{"name":"n1"},"status":{"conditions":[{"type":"Ready","status":"True"}],"addresses":[{"type":"Hostname","address":"n1"},{"type":"InternalIP","address":"127.0.0.1"}]}},
 {"metadata":{"name":"control"},"spec":{"taints":[{"key":"node-role.kubernetes.io/control-plane","effect":"NoSchedule"}]},"status":{"conditions":[{"type":"Ready","status":"True"}],"addresses":[{"type":"InternalIP","address":"127.0.0.9"}]}},
 {"metadata":{"name":"n2"},"spec":{"taints":[{"key":"x","effect":"PreferNoSchedule"}]},"status":{"conditions":[{"type":"MemoryPressure","status":"False"},{"type":"Ready","status":"True"}],"addresses":[{"type":"InternalIP","address":"127.0.0.2"}]}},
 {"metadata":{"name":"cordoned"},"spec":{"unschedulable":true},"status":{"conditions":[{"type":"Ready","status":"True"}],"addresses":[{"type":"InternalIP","address":"127.0.0.8"}]}},
 {"metadata":{"name":"dead"},"status":{"conditions":[{"type":"Ready","status":"Unknown"}],"addresses":[{"type":"InternalIP","address":"127.0.0.7"}]}},
 {"metadata":{"name":"n3"},"status":{"conditions":[{"type":"Ready","status":"True"}],"addresses":[{"type":"InternalIP","address":"127.0.0.3"}]}}]}`

func TestKubeNodes(t *testing.T) {
	nodes, err := kubeNodes(fiveNodes)
	if err != nil || !slices.Equal(nodes, []kubeNode{{"n1", "127.0.0.1"}, {"n2", "127.0.0.2"}, {"n3", "127.0.0.3"}}) {
		t.Errorf("%v, %v", nodes, err)
	}
	if _, err := kubeNodes("no nodes"); err == nil {
		t.Error("what is no JSON is a list of nodes")
	}
}

func TestRankNodes(t *testing.T) {
	pod := func(attempt, node, phase, more string) string {
		return `{"metadata":{` + more + `"labels":{"` + restartAttempt + `":"` + attempt + `"}},"spec":{"nodeName":"` + node + `"},"status":{"phase":"` + phase + `"}}`
	}
	for _, c := range []struct {
		pods []string
		want string
	}{
		{nil, ""},
		{[]string{pod("0", "n2", "Running", ""), pod("0", "n1", "Running", "")}, "n1 n2"},
		{[]string{pod("0", "n2", "Running", ""), pod("1", "n3", "Running", ""), pod("1", "", "Pending", "")}, "n3"},
		{[]string{pod("1", "n2", "Running", `"deletionTimestamp":"2026-01-01T00:00:00Z",`), pod("1", "n3", "Running", "")}, "n3"},
		{[]string{pod("10", "n1", "Pending", ""), pod("9", "n3", "Running", "")}, ""},
		{[]string{pod("x", "n1", "Running", "")}, ""},
	} {
		got, err := rankNodes(`{"items":[` + strings.Join(c.pods, ",") + `]}`)
		if err != nil || strings.Join(got, " ") != c.want {
			t.Errorf("%v: on %q, %v", c.pods, got, err)
		}
	}
}

// kubectlModel answers kubectl.
type kubectlModel struct {
	mu      sync.Mutex
	calls   []string
	applied []json.RawMessage
	suspect []string // nodes with the remediator's mark
	fail    string   // calls that begin so
}

func (m *kubectlModel) run(_ context.Context, input string, args ...string) (string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	call := strings.Join(args, " ")
	m.calls = append(m.calls, call)
	if m.fail != "" && strings.HasPrefix(call, m.fail) {
		return "", errors.New("refused")
	}
	switch {
	case args[0] == "apply":
		var list struct{ Items []json.RawMessage }
		if err := json.Unmarshal([]byte(input), &list); err != nil {
			return "", err
		}
		m.applied = append(m.applied, list.Items...)
	case strings.HasPrefix(call, "get nodes -l"):
		return strings.Join(m.suspect, "\n"), nil
	case strings.Contains(call, "jsonpath={.items[0].metadata.name}"):
		return "agent-x", nil
	case strings.Contains(call, "get pods"):
		var l []string
		for _, n := range []string{"n1", "n2"} {
			l = append(l, `{"metadata":{"labels":{"`+restartAttempt+`":"0"}},"spec":{"nodeName":"`+n+`"},"status":{"phase":"Running"}}`)
		}
		return `{"items":[` + strings.Join(l, ",") + `]}`, nil
	}
	return "", nil
}

func (m *kubectlModel) at(prefix string) int {
	return slices.IndexFunc(m.calls, func(c string) bool { return strings.HasPrefix(c, prefix) })
}

func onKubernetes(t *testing.T, m *kubectlModel) (*kubernetesSite, *cluster, certs) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "shared")
	cl, err := newCluster(&cluster{dir: dir, job: "lockstep-demo-0b", masterGRPC: "127.0.0.1:9401", pace: time.Millisecond, device: "cpu"})
	if err != nil {
		t.Fatal(err)
	}
	cl.self = filepath.Join(t.TempDir(), "self")
	if err := os.WriteFile(cl.self, []byte("program"), 0o700); err != nil {
		t.Fatal(err)
	}
	ca, err := pki.New(filepath.Join(dir, "pki"))
	if err != nil {
		t.Fatal(err)
	}
	k := &kubernetesSite{
		job: cl.job, dir: dir, shape: shape{dp: 2, tp: 1, pp: 1, nodes: 2}, spares: 1, image: "pause", wait: time.Minute, run: m.run, say: t.Logf,
		hosts: []kubeNode{{"n1", "127.0.0.1"}, {"n2", "127.0.0.2"}, {"n3", "127.0.0.3"}},
	}
	cl.site = k
	return k, cl, certs{ca}
}

func strict[T any](t *testing.T, b []byte) (v T) {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&v); err != nil {
		t.Fatalf("%v in %s", err, b)
	}
	return v
}

// TestKubernetesSite: namespace, agents, and when these run the ranks; in the end nodes are brought back and all is deleted, once.
func TestKubernetesSite(t *testing.T) {
	m := &kubectlModel{}
	k, cl, ca := onKubernetes(t, m)
	if a, err := k.prepare(t.Context()); err != nil || a != "127.0.0.1" {
		t.Fatalf("nodes reach this machine by %q, %v", a, err)
	}
	if err := k.submit(t.Context(), cl, ca); err != nil {
		t.Fatal(err)
	}
	if len(m.applied) != 3 {
		t.Fatalf("%d objects are applied", len(m.applied))
	}
	ns, agents := strict[corev1.Namespace](t, m.applied[0]), strict[appsv1.DaemonSet](t, m.applied[1])
	if ns.Name != k.job || agents.Namespace != k.job || !agents.Spec.Template.Spec.HostPID {
		t.Errorf("%+v, %+v", ns, agents)
	}
	var set struct {
		Kind     string
		Metadata struct{ Name, Namespace string }
		Spec     struct {
			ReplicatedJobs []struct {
				Template struct{ Spec json.RawMessage }
			}
		}
	}
	if err := json.Unmarshal(m.applied[2], &set); err != nil || set.Kind != "JobSet" || set.Metadata.Namespace != k.job || len(set.Spec.ReplicatedJobs) != 1 {
		t.Fatalf("%+v, %v", set, err)
	}
	job := strict[batchv1.JobSpec](t, set.Spec.ReplicatedJobs[0].Template.Spec)
	if *job.Completions != 2 || *job.BackoffLimit != 0 || job.Template.Labels["lockstep.dev/job"] != k.job {
		t.Errorf("%+v", job)
	}
	for what, pod := range map[string]corev1.PodSpec{"agent": agents.Spec.Template.Spec, "rank": job.Template.Spec} {
		terms := pod.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
		if got := terms[0].MatchExpressions[0].Values; !slices.Equal(got, []string{"n1", "n2", "n3"}) {
			t.Errorf("%s may go to %v", what, got)
		}
		if got := pod.Containers[0].Command[0]; got != filepath.Join(k.dir, "lockstep") {
			t.Errorf("%s runs %s", what, got)
		}
	}
	if roll := m.at("-n lockstep-demo-0b rollout status daemonset/agent"); roll < 0 || roll < m.at("apply") {
		t.Errorf("the agents are not waited for: %q", m.calls)
	}
	if err := k.exec(t.Context(), "n2", "fault", "{}"); err != nil || m.at("-n lockstep-demo-0b exec agent-x -- "+k.dir+"/lockstep fault {}") < 0 {
		t.Errorf("%v: %q", err, m.calls)
	}
	m.suspect = []string{"node/n2", "node/others"}
	k.remove()
	k.remove()
	if m.at("uncordon n2") < 0 || m.at("uncordon others") >= 0 || m.at("taint nodes others") >= 0 {
		t.Errorf("nodes are brought back by %q", m.calls)
	}
	deleted := slices.DeleteFunc(slices.Clone(m.calls), func(c string) bool { return !strings.HasPrefix(c, "delete namespace lockstep-demo-0b") })
	if len(deleted) != 1 {
		t.Errorf("deleted by %q", deleted)
	}
}

// TestKubernetesRemoves: a node that was taken out loses all marks, and what cannot be removed is said.
func TestKubernetesRemoves(t *testing.T) {
	m := &kubectlModel{suspect: []string{"node/n3"}, fail: "delete namespace"}
	k, _, _ := onKubernetes(t, m)
	var said []string
	k.say = func(format string, _ ...any) { said = append(said, format) }
	k.made = true
	k.remove()
	for _, want := range []string{"uncordon n3", "taint nodes n3 lockstep.dev/suspect-", "annotate node n3 lockstep.dev/suspect-", "label node n3 lockstep.dev/suspect-", "patch node n3 --subresource=status"} {
		if m.at(want) < 0 {
			t.Errorf("no %q: %q", want, m.calls)
		}
	}
	if len(said) != 1 || !strings.Contains(said[0], "not all is removed") {
		t.Errorf("said %q", said)
	}
}

func TestStatic(t *testing.T) {
	if err := static("/bin/sh"); err == nil || !strings.Contains(err.Error(), "CGO_ENABLED=0") {
		t.Errorf("a shell with shared libraries: %v", err)
	}
	file := filepath.Join(t.TempDir(), "x")
	if err := os.WriteFile(file, []byte("#!/bin/sh"), 0o700); err != nil {
		t.Fatal(err)
	}
	if static(file) == nil || static(file+"y") == nil {
		t.Error("a script, or nothing, is a program for pods")
	}
}
