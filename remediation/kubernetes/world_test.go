package kubernetes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/remediation"
)

const (
	ns      = "training"
	ns2     = "other" // of another tenant, served by the same remediator
	podsAt  = "/api/v1/namespaces/" + ns + "/pods"
	nodesAt = "/api/v1/nodes"
	jobSet  = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/" + ns + "/jobsets/llm"
	leaseAt = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/"
)

// world is a cluster: an API server, and as much of JobSet's and Job's controllers, of
// the scheduler and of kubelets as a restart needs. One pod fits on a node.
type world struct {
	*apiserver
	t    *testing.T
	mu   sync.Mutex // one reconciliation at a time
	dead map[string]bool
	n    int
}

func newWorld(t *testing.T, nodes int) *world {
	w := &world{apiserver: newAPIServer(t), t: t, dead: map[string]bool{}}
	for i := range nodes {
		w.addNode(fmt.Sprintf("n%d", i+1))
	}
	w.changed = w.reconcile
	return w
}

func (w *world) addNode(name string) {
	w.put(nodesAt+"/"+name, obj{"apiVersion": "v1", "kind": "Node", "metadata": obj{"labels": obj{}}, "spec": obj{},
		"status": obj{"conditions": []any{obj{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}}}})
	w.put(leaseAt+name, obj{"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": obj{"leaseDurationSeconds": 4, "renewTime": "2026-01-01T00:00:00.000000Z"}})
}

// kill is a power loss that Kubernetes has noticed.
func (w *world) kill(node string) {
	w.mu.Lock()
	w.dead[node] = true
	w.mu.Unlock()
	w.edit(nodesAt+"/"+node, func(o obj) {
		at(o, "status").(obj)["conditions"] = []any{obj{"type": "Ready", "status": "Unknown", "lastTransitionTime": time.Now().UTC().Format(time.RFC3339)}}
	})
}

func (w *world) revive(node string) {
	w.mu.Lock()
	delete(w.dead, node)
	w.mu.Unlock()
	w.edit(nodesAt+"/"+node, func(o obj) {
		at(o, "status").(obj)["conditions"] = []any{obj{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}}
	})
	w.edit(leaseAt+node, func(o obj) { at(o, "spec").(obj)["renewTime"] = time.Now().String() })
}

// edit changes an object, between two requests.
func (w *world) edit(path string, f func(obj)) {
	w.apiserver.mu.Lock()
	defer w.apiserver.mu.Unlock()
	b, err := json.Marshal(w.objects[path])
	o := obj{}
	if err == nil {
		err = json.Unmarshal(b, &o)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	f(o)
	w.store(path, o)
}

func (w *world) jobSet(pods int) {
	w.put(jobSet, obj{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": obj{"uid": "js"}, "spec": obj{
		"replicatedJobs": []any{obj{"name": "w", "replicas": 1, "template": obj{"spec": obj{"parallelism": pods, "completions": pods}}}}}, "status": obj{"restarts": 0}})
	w.put("/apis/batch/v1/namespaces/"+ns+"/jobs/llm-w-0", obj{"apiVersion": "batch/v1", "kind": "Job", "metadata": obj{"uid": "jb", "ownerReferences": controller("jobset.x-k8s.io/v1alpha2", "JobSet", "llm", "js")}})
	w.reconcile()
}

func controller(version, kind, name, uid string) []any {
	return []any{obj{"apiVersion": version, "kind": kind, "name": name, "uid": uid, "controller": true}}
}

// reconcile is everybody else.
func (w *world) reconcile() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, path := range []string{jobSet, plainJob, pyTorchJob} {
		o := w.get(path)
		if o == nil {
			continue
		}
		want, restarts := w.wanted(path, o)
		var present []int
		left := 0
		for _, p := range w.under(podsAt) {
			q := w.get(p)
			if q == nil || text(q, "metadata", "labels", "owner") != path {
				continue
			}
			n, _ := strconv.Atoi(text(q, "metadata", "labels", labelJobSetTry))
			if n >= restarts && want > 0 && text(q, "status", "phase") == "Pending" {
				w.remove(p) // the scheduler tries again
				continue
			}
			if n >= restarts && want > 0 {
				i, _ := strconv.Atoi(text(q, "metadata", "annotations", "index"))
				present = append(present, i)
				continue
			}
			if w.dead[text(q, "spec", "nodeName")] {
				left++
				if text(q, "metadata", "deletionTimestamp") == "" {
					w.edit(p, func(o obj) {
						at(o, "metadata").(obj)["deletionTimestamp"] = time.Now().Add(-time.Minute).UTC().Format(time.RFC3339)
					})
				}
				continue
			}
			w.remove(p)
		}
		if left > 0 {
			continue
		}
		for i := range want {
			if !slices.Contains(present, i) {
				w.makePod(path, i, restarts)
			}
		}
	}
}

// wanted is how many pods an owner wants, of which attempt.
func (w *world) wanted(path string, o obj) (pods, restarts int) {
	num := func(v any) int { f, _ := v.(float64); return int(f) }
	switch path {
	case jobSet:
		rj := at(o, "spec", "replicatedJobs").([]any)[0].(obj)
		return num(at(rj, "template", "spec", "parallelism")), num(at(o, "status", "restarts"))
	case plainJob:
		if at(o, "spec", "suspend") == true {
			return 0, 0
		}
		return num(at(o, "spec", "parallelism")), 0
	default:
		if at(o, "spec", "runPolicy", "suspend") == true {
			return 0, 0
		}
		return 2, 0
	}
}

const (
	plainJob   = "/apis/batch/v1/namespaces/" + ns + "/jobs/plain"
	pyTorchJob = "/apis/kubeflow.org/v1/namespaces/" + ns + "/pytorchjobs/torch"
)

// makePod schedules a pod onto the first free node; without one it is pending.
func (w *world) makePod(owner string, index, restarts int) {
	busy := map[string]bool{}
	for _, p := range w.under(podsAt) {
		busy[text(w.get(p), "spec", "nodeName")] = true
	}
	node := ""
	for _, p := range w.under(nodesAt) {
		n := w.get(p)
		taints, _ := at(n, "spec", "taints").([]any)
		if name := text(n, "metadata", "name"); !busy[name] && at(n, "spec", "unschedulable") != true && len(taints) == 0 && !w.dead[name] {
			node = name
			break
		}
	}
	w.n++
	name := owner[strings.LastIndex(owner, "/")+1:]
	meta := obj{"annotations": obj{"index": fmt.Sprint(index), "batch.kubernetes.io/job-completion-index": fmt.Sprint(index)}, "creationTimestamp": time.Now().UTC().Format(time.RFC3339)}
	env := []any{obj{"name": "JOB_COMPLETION_INDEX", "valueFrom": obj{"fieldRef": obj{"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}}}
	labels := obj{"owner": owner}
	switch owner {
	case jobSet:
		labels[labelJobSet], labels["jobset.sigs.k8s.io/jobset-uid"], labels[labelJobSetTry], labels[LabelJob] = "llm", "js", fmt.Sprint(restarts), "llm"
		meta["ownerReferences"] = controller("batch/v1", "Job", "llm-w-0", "jb")
		env = append(env, obj{"name": "JOBSET_RESTART_ATTEMPT", "valueFrom": obj{"fieldRef": obj{"fieldPath": "metadata.labels['" + labelJobSetTry + "']"}}})
	case plainJob:
		labels[labelBatchJob] = name
		meta["ownerReferences"] = controller("batch/v1", "Job", name, "pj")
	default:
		labels[labelKubeflowJob] = name
		meta["ownerReferences"] = controller("kubeflow.org/v1", "PyTorchJob", name, "pt")
		env = []any{obj{"name": "RANK", "value": fmt.Sprint(index)}, obj{"name": "WORLD_SIZE", "value": "2"}, obj{"name": "PET_NPROC_PER_NODE", "value": "8"}}
	}
	meta["labels"] = labels
	status := obj{"phase": "Pending", "conditions": []any{obj{"type": "PodScheduled", "status": "False", "message": "no node is free"}}}
	spec := obj{"containers": []any{obj{"name": "c", "env": env}}}
	if node != "" {
		spec["nodeName"] = node
		status = obj{"phase": "Running", "startTime": time.Now().UTC().Format(time.RFC3339)}
	}
	w.put(fmt.Sprintf("%s/%s-%d-%d", podsAt, name, index, w.n), obj{"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec, "status": status})
}

// where lists the running pods' nodes, by index.
func (w *world) where() map[int]string {
	m := map[int]string{}
	for _, p := range w.under(podsAt) {
		if o := w.get(p); text(o, "metadata", "deletionTimestamp") == "" && text(o, "status", "phase") == "Running" {
			i, _ := strconv.Atoi(text(o, "metadata", "annotations", "index"))
			m[i] = text(o, "spec", "nodeName")
		}
	}
	return m
}

// runOn reports whether the running pods are on exactly these nodes.
func (w *world) runOn(nodes ...string) bool {
	return slices.Equal(slices.Sorted(maps.Values(w.where())), nodes)
}

func (w *world) restarts() int {
	f, _ := at(w.get(jobSet), "status", "restarts").(float64)
	return int(f)
}

// fencer answers as it is told to, and remembers.
type fencer struct {
	mu    sync.Mutex
	proof remediation.Proof
	err   error
	asked []string
	then  func(asked int)
}

func (f *fencer) Fence(_ context.Context, job string, attempt int, node string) (remediation.Proof, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked = append(f.asked, fmt.Sprintf("%s/%d on %s", job, attempt, node))
	if f.then != nil {
		f.then(len(f.asked))
	}
	return f.proof, f.err
}

func (w *world) actuator(change func(*Options)) *Actuator {
	o := Options{Client: w.client(), Namespaces: []string{ns}, Namespace: "lockstep", Poll: 2 * time.Millisecond, Keep: 2 * time.Millisecond}
	if change != nil {
		change(&o)
	}
	a, err := New(o)
	if err != nil {
		w.t.Fatal(err)
	}
	return a
}

// act carries an action out, within a time that only a bug exceeds.
func act(t *testing.T, a *Actuator, action remediation.Action) (remediation.Answer, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	answer, err := a.Act(ctx, action)
	if errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	return answer, err
}

func action(id string, kind remediation.ActionKind, rank int, attempt int) remediation.Action {
	return remediation.Action{ID: id, Job: "llm", Incident: "i-" + id, Kind: kind, Rank: rank, Attempt: &attempt, Reason: "noncommunication_hang: rank " + fmt.Sprint(rank)}
}
