package kubernetes

import (
	"bufio"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
)

// TestKWOK is `make test-kwok`: 1,000 nodes of KWOK under a real control plane, a job of 128
// nodes with 8 spares, 200 random faults over simulated days, and the remediator with the
// rights of its service account as the chart binds them, which the API server's audit log
// is compared with.
func TestKWOK(t *testing.T) {
	cluster := newKWOKCluster(t)
	faults, seed, minutes := 200, uint64(17), 0
	for name, v := range map[string]any{"FAULTS": &faults, "SEED": &seed, "MINUTES": &minutes} {
		if text := os.Getenv("LOCKSTEP_TEST_KWOK_" + name); text != "" {
			if _, err := fmt.Sscan(text, v); err != nil {
				t.Fatalf("LOCKSTEP_TEST_KWOK_%s=%s: %v", name, text, err)
			}
		}
	}
	b := &kwokBed{kwokCluster: cluster}
	b.populate(1000, 136, 8)
	c := newCampaign(t, b, seed, 128, "gpu")
	began := time.Now()
	if minutes > 0 {
		c.end = began.Add(time.Duration(minutes) * time.Minute)
	}
	c.play(faults)
	b.others(c)
	c.stop()
	c.tell()
	b.audited(c)
	t.Logf("%d faults in %v", c.faults, time.Since(began).Round(time.Second))
}

// kwokBed is the real cluster, as a bed.
type kwokBed struct {
	*kwokCluster
	c    *campaign
	beat *beat
}

func (b *kwokBed) rest() { b.alive(); time.Sleep(700 * time.Millisecond) }

// populate makes the nodes, the rights of the chart, and the job.
func (b *kwokBed) populate(nodes, pool, spares int) {
	var wg sync.WaitGroup
	todo := make(chan int)
	for range 8 {
		wg.Go(func() {
			for i := range todo {
				if _, err := b.client.Resource(nodesGVR).Create(b.t.Context(), kwokNode(i, pool, spares), metav1.CreateOptions{}); err != nil {
					b.t.Errorf("node %d: %v", i, err)
				}
			}
		})
	}
	for i := range nodes {
		todo <- i
	}
	close(todo)
	wg.Wait()
	b.beat = b.beats(pooled(pool))
	b.kubectl("create", "namespace", "lockstep")
	b.kubectl("create", "namespace", ns)
	b.write("rbac.yaml", chartRights(b.t))
	b.kubectl("apply", "-f", "rbac.yaml")
	b.until("service accounts are there", func() bool {
		_, err := b.client.Resource(corev1.SchemeGroupVersion.WithResource("serviceaccounts")).Namespace(ns).Get(b.t.Context(), "default", metav1.GetOptions{})
		return err == nil
	})
	b.until("all nodes are ready", func() bool {
		time.Sleep(2 * time.Second)
		for _, o := range b.list(nodesGVR, "", "") {
			n, err := nodeFrom(&o)
			if err != nil {
				b.t.Fatal(err)
			}
			if r, _ := readiness(n); r != corev1.ConditionTrue || slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeNotReady }) {
				return false
			}
		}
		return true
	})
	b.write("job.yaml", strings.NewReplacer("@RANKS@", fmt.Sprint(pool-spares)).Replace(kwokJob))
	b.kubectl("apply", "-f", "job.yaml")
	b.until("the job runs", func() bool { v := b.job(); return len(v.on) == pool-spares })
}

func kwokNode(i, pooled, spares int) *unstructured.Unstructured {
	labels := obj{kwokAlive: "others", "kubernetes.io/hostname": fmt.Sprintf("n%04d", i)}
	spec := obj{}
	if i < pooled {
		labels[LabelPool], labels[kwokAlive] = "gpu", "pool"
		if i >= pooled-spares {
			spec["taints"] = []any{obj{"key": Spare, "effect": "NoSchedule"}}
		}
	}
	size := obj{"cpu": "64", "memory": "1Ti", "pods": "110", "lab.example/gpu": "8"}
	return &unstructured.Unstructured{Object: obj{"apiVersion": "v1", "kind": "Node", "metadata": obj{"name": fmt.Sprintf("n%04d", i), "labels": labels}, "spec": spec,
		"status": obj{"capacity": size, "allocatable": size}}}
}

const kwokJob = `
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: llm, namespace: training}
spec:
  failurePolicy: {maxRestarts: 100000, restartStrategy: BlockingRecreate}
  replicatedJobs:
  - name: w
    replicas: 1
    template:
      spec:
        parallelism: @RANKS@
        completions: @RANKS@
        completionMode: Indexed
        backoffLimit: 0
        template:
          metadata: {labels: {lockstep.dev/job: llm}}
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: 1
            nodeSelector: {lockstep.dev/pool: gpu}
            containers:
            - name: c
              image: llm
              resources: {limits: {lab.example/gpu: 8}}
              env:
              - {name: RANK, valueFrom: {fieldRef: {fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}}
              - {name: WORLD_SIZE, value: "@RANKS@"}
              - {name: JOB_COMPLETION_INDEX, valueFrom: {fieldRef: {fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}}
              - {name: JOBSET_RESTART_ATTEMPT, valueFrom: {fieldRef: {fieldPath: "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"}}}
`

// chartRights is what the chart renders to, as far as it is about rights.
func chartRights(t *testing.T) string {
	text, err := os.ReadFile("../../deploy/helm/testdata/lockstep/default.golden")
	if err != nil {
		t.Fatal(err)
	}
	var docs []string
	for _, d := range strings.Split(string(text), "\n---\n") {
		if strings.Contains(d, "# Source: lockstep/templates/rbac.yaml") {
			docs = append(docs, d)
		}
	}
	if len(docs) < 9 {
		t.Fatalf("the chart has %d objects about rights", len(docs))
	}
	return strings.Join(docs, "\n---\n")
}

// token is one of the remediator's service account.
func (b *kwokBed) token() string {
	o := &unstructured.Unstructured{Object: obj{"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "metadata": obj{"name": "lockstep-remediator"}, "spec": obj{"expirationSeconds": int64(86400)}}}
	got, err := b.client.Resource(corev1.SchemeGroupVersion.WithResource("serviceaccounts")).Namespace("lockstep").Create(b.t.Context(), o, metav1.CreateOptions{}, "token")
	if err != nil {
		b.t.Fatal(err)
	}
	token, _, _ := unstructured.NestedString(got.Object, "status", "token")
	return token
}

func (b *kwokBed) cluster(c *campaign) {
	b.c = c
	p, err := ParsePreflight([]byte(checkJob))
	c.must(err)
	c.patience, c.again = 3*time.Second, 5*time.Second
	c.r.config = &rest.Config{Host: b.url, BearerToken: b.token(), TLSClientConfig: rest.TLSClientConfig{Insecure: true}, QPS: 20, Burst: 40, Timeout: 10 * time.Second} // as the command has it
	c.r.options = Options{Namespaces: []string{ns}, Namespace: "lockstep", Poll: time.Second, Keep: 5 * time.Second, ReturnAfter: time.Second, Preflight: p, Logger: discard}
	c.r.identity = func(n int) string { return fmt.Sprintf("remediator-%d", n) }
}

func (b *kwokBed) nodes() map[string]*corev1.Node { return b.some(LabelPool + "=gpu") }
func (b *kwokBed) all() map[string]*corev1.Node   { return b.some("", true) }

func (b *kwokBed) some(selector string, exact ...bool) map[string]*corev1.Node {
	m := map[string]*corev1.Node{}
	for _, o := range b.list(nodesGVR, "", selector, exact...) {
		n, err := nodeFrom(&o)
		b.c.must(err)
		m[n.Name] = n
	}
	return m
}

func (b *kwokBed) pods() []unstructured.Unstructured {
	return b.list(podsGVR, ns, labelJobSet+"=llm")
}

func (b *kwokBed) job() jobView {
	js := b.list(jobSetsGVR, ns, "")
	if len(js) != 1 {
		b.t.Fatalf("%d JobSets", len(js))
	}
	v := jobView{attempt: int(number(js[0].Object, 0, "status", "restarts")), own: int(number(js[0].Object, 0, "status", "restartsCountTowardsMax")), on: map[int]string{}}
	for _, o := range b.pods() {
		node := text(o.Object, "spec", "nodeName")
		try, _ := strconv.Atoi(o.GetLabels()[labelJobSetTry])
		switch {
		case o.GetDeletionTimestamp() != nil || try < v.attempt:
			v.stale++
		case node == "":
			v.pending++
		case text(o.Object, "status", "phase") == "Running":
			i, _ := strconv.Atoi(o.GetAnnotations()["batch.kubernetes.io/job-completion-index"])
			v.on[i] = node
		}
		if node != "" {
			v.placed = append(v.placed, node)
		}
	}
	slices.Sort(v.placed)
	return v
}

func (b *kwokBed) patch(r schema.GroupVersionResource, ns, name string, what obj, sub ...string) {
	b.t.Helper()
	body, err := json.Marshal(what)
	if err == nil {
		_, err = b.client.Resource(r).Namespace(ns).Patch(b.t.Context(), name, types.MergePatchType, body, metav1.PatchOptions{}, sub...)
	}
	if err != nil && !apierrors.IsNotFound(err) {
		b.c.fatalf("patch %s %s: %v", r.Resource, name, err)
	}
}

// end is what a kubelet says when the process has ended.
func (b *kwokBed) end(rank int) {
	for _, o := range b.pods() {
		if o.GetAnnotations()["batch.kubernetes.io/job-completion-index"] == fmt.Sprint(rank) && o.GetDeletionTimestamp() == nil {
			b.patch(podsGVR, ns, o.GetName(), obj{"status": obj{"phase": "Failed"}}, "status")
		}
	}
}

// power off is a kubelet that is not heard any more, of which Kubernetes learns after its
// grace period.
func (b *kwokBed) power(node string, on bool) {
	b.beat.power(node, on)
	b.patch(nodesGVR, "", node, obj{"metadata": obj{"labels": obj{kwokAlive: map[bool]any{true: "pool"}[on]}}})
}

func (b *kwokBed) preflights(verdict func(string) bool) {
	for _, o := range b.list(podsGVR, "lockstep", "") {
		if text(o.Object, "status", "phase") == "Running" && o.GetDeletionTimestamp() == nil {
			phase := map[bool]string{true: "Succeeded", false: "Failed"}[verdict(text(o.Object, "spec", "nodeName"))]
			b.patch(podsGVR, "lockstep", o.GetName(), obj{"status": obj{"phase": phase}}, "status")
		}
	}
}

func (b *kwokBed) uncordon(node string) {
	b.patch(nodesGVR, "", node, obj{"spec": obj{"unschedulable": nil}})
}

// audited compares what the API server has noted down with what the chart grants: each right
// is used, none is missing, and the counts are those that the campaign goes by.
func (b *kwokBed) audited(c *campaign) {
	granted, err := grants("../../deploy/kubernetes/rbac.yaml")
	c.must(err)
	f, err := os.Open(filepath.Join(b.dir, "audit.log"))
	c.must(err)
	defer f.Close()
	used, total := map[string]int{}, 0
	s := bufio.NewScanner(f)
	s.Buffer(nil, 1<<24)
	for s.Scan() {
		var e struct {
			Stage, Verb    string
			Annotations    map[string]string
			ResponseStatus struct{ Code int }
			ObjectRef      struct{ Resource, Subresource, Namespace, APIGroup string }
			RequestURI     string
		}
		c.must(json.Unmarshal(s.Bytes(), &e))
		if e.Stage != "ResponseComplete" {
			continue
		}
		resource, namespace := e.ObjectRef.Resource, e.ObjectRef.Namespace
		if e.ObjectRef.Subresource != "" {
			resource += "/" + e.ObjectRef.Subresource
		}
		k := fmt.Sprintf("%s %s/%s in %s", e.Verb, e.ObjectRef.APIGroup, resource, namespace)
		used[k]++
		total++
		if e.Annotations["authorization.k8s.io/decision"] != "allow" || e.ResponseStatus.Code == 403 || e.ResponseStatus.Code == 401 {
			c.t.Errorf("refused: %s %s: %d", e.Verb, e.RequestURI, e.ResponseStatus.Code)
		}
	}
	c.must(s.Err())
	for k := range granted {
		if used[k] == 0 {
			c.t.Errorf("granted, and not used: %s", k)
		}
	}
	for k, n := range used {
		if !granted[k] {
			c.t.Errorf("used %d times, and not granted: %s", n, k)
		}
	}
	counted := 0
	for _, k := range slices.Sorted(maps.Keys(c.counts.m)) {
		counted += c.counts.m[k]
		if lost := c.counts.m[k] - used[k]; lost < 0 || lost > 5*(c.seen["remediator killed"]+1) {
			c.t.Errorf("%s: sent %d times, the API server has seen %d", k, c.counts.m[k], used[k])
		}
	}
	c.t.Logf("audit log: %d requests (sent: %d), %d rights granted, all used, none refused", total, counted, len(granted))
}
