package kubernetes

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/lockstep-ccl/lockstep/remediation"
)

// kind is how one kind of owner is restarted. There are two ways.
//
// A JobSet counts its attempts in status.restarts, and makes anew each Job whose label
// restart-attempt is lower: raising that number by one is what its controller itself does
// when a Job fails. So its strategy (Recreate, BlockingRecreate) is kept, every rank is
// told the new attempt, and restartsCountTowardsMax stays as it is. Deleting child Jobs would
// restart them as well, but under the old attempt's number, and beside what is left of
// it whatever the strategy says.
//
// The others are suspended until the last old pod is gone, and resumed: neither uses up a
// backoffLimit.
type kind struct {
	name     string
	gvr      schema.GroupVersionResource
	top      bool     // what owns it does not restart it
	podLabel string   // by which its pods name it
	restarts []string // path of its count of attempts; nil: suspend and resume
	suspend  []string // path of what suspends it
	want     func(o *unstructured.Unstructured) (int, error)
}

var kinds = []*kind{
	{
		name: "JobSet", gvr: jobSetsGVR, top: true, podLabel: labelJobSet,
		restarts: []string{"status", "restarts"}, suspend: []string{"spec", "suspend"}, want: jobSetPods,
	},
	{
		name: "PyTorchJob", gvr: pyTorchJobsGVR, top: true, podLabel: labelKubeflowJob,
		suspend: []string{"spec", "runPolicy", "suspend"}, want: pyTorchJobPods,
	},
	{
		name: "Job", gvr: jobsGVR, podLabel: labelBatchJob,
		suspend: []string{"spec", "suspend"}, want: jobPods,
	},
}

func kindOf(name string) *kind {
	for _, k := range kinds {
		if k.name == name {
			return k
		}
	}
	return nil
}

// over says how the owner has ended, "" when it has not.
func (k *kind) over(o *unstructured.Unstructured) string {
	if !o.GetDeletionTimestamp().IsZero() {
		return "is being deleted"
	}
	conditions, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	for _, c := range conditions {
		m, ok := c.(map[string]any)
		if !ok || m["status"] != "True" {
			continue
		}
		switch t, _ := m["type"].(string); t {
		case "Completed", "Complete", "Succeeded", "Failed":
			return fmt.Sprintf("has ended: %s %v", t, m["message"])
		}
	}
	return ""
}

// attempt is the number of the attempt that the owner wants to run, -1 when it counts none.
func (k *kind) attempt(o *unstructured.Unstructured) int {
	if k.restarts == nil {
		return -1
	}
	n, _, _ := unstructured.NestedInt64(o.Object, k.restarts...) // absent: 0
	return int(n)
}

func (k *kind) suspended(o *unstructured.Unstructured) bool {
	s, _, _ := unstructured.NestedBool(o.Object, k.suspend...)
	return s
}

// attempt is the one that runs, as its ranks tell it: -1 when they tell none.
func (j *job) attempt() int {
	n := -1
	for _, p := range j.pods {
		if !p.ended && p.deleting.IsZero() {
			n = max(n, p.attempt)
		}
	}
	return n
}

// newest is the owner's count that the youngest of its pods bear, those that are being deleted too: -1 when none does.
func (j *job) newest() int {
	n := -1
	for _, p := range j.pods {
		if k, err := strconv.Atoi(p.restart); err == nil {
			n = max(n, k)
		}
	}
	return n
}

// made is when the youngest of the pods that run was made, where attempts are not counted; zero elsewhere.
func (j *job) made() (youngest time.Time) {
	_, youngest = j.span()
	return youngest
}

// span is when the oldest and the youngest of the pods that run were made, by the API server's clock.
func (j *job) span() (oldest, youngest time.Time) {
	if j.kind.restarts != nil {
		return time.Time{}, time.Time{}
	}
	for _, p := range j.pods {
		if p.ended || !p.deleting.IsZero() {
			continue
		}
		if oldest.IsZero() || p.created.Before(oldest) {
			oldest = p.created
		}
		if p.created.After(youngest) {
			youngest = p.created
		}
	}
	return oldest, youngest
}

// clocks is how far a master's clock and the API server's may be apart.
const clocks = 10 * time.Second

// remade says why an action is about an attempt that is over, where nobody counts them: not one of the pods
// that it is about is left. "": it may be about these.
func (j *job) remade(act remediation.Action) string {
	switch oldest, _ := j.span(); {
	case oldest.IsZero():
		return ""
	case !act.Made.IsZero() && oldest.After(act.Made):
		return fmt.Sprintf("all pods of %s have been made since it was decided", j)
	case !act.Opened.IsZero() && oldest.Sub(act.Opened) > clocks:
		return fmt.Sprintf("all pods of %s have been made since the incident was opened", j)
	}
	return ""
}

// fresh are the pods of the attempt that a restart has led to.
func (j *job) fresh(r *record) (fresh []*pod) {
	for i := range j.pods {
		p := &j.pods[i]
		switch {
		case !p.deleting.IsZero(), p.ended:
		case j.kind.restarts != nil:
			if n, err := strconv.Atoi(p.restart); err == nil && n >= r.To {
				fresh = append(fresh, p)
			}
		case !r.old(p.uid):
			fresh = append(fresh, p)
		}
	}
	return fresh
}

// stale are those that are left of the attempts before.
func (j *job) stale(r *record) (stale []*pod) {
	for i := range j.pods {
		p := &j.pods[i]
		switch {
		case !p.deleting.IsZero():
			stale = append(stale, p)
		case j.kind.restarts != nil:
			if n, err := strconv.Atoi(p.restart); err == nil && n < r.To && !p.ended {
				stale = append(stale, p)
			}
		case r.old(p.uid) && !p.ended:
			stale = append(stale, p)
		}
	}
	return stale
}

// patchOf is a merge patch that sets one field, on the condition that nobody has
// changed the object since it was read.
func patchOf(o *unstructured.Unstructured, value any, path ...string) map[string]any {
	p := map[string]any{"metadata": map[string]any{"resourceVersion": o.GetResourceVersion(), "uid": string(o.GetUID())}}
	m := p
	for _, f := range path[:len(path)-1] {
		next, ok := m[f].(map[string]any)
		if !ok {
			next = map[string]any{}
			m[f] = next
		}
		m = next
	}
	m[path[len(path)-1]] = value
	return p
}

// number reads a count; absent is the default of its kind.
func number(m map[string]any, fallback int64, path ...string) int64 {
	if n, ok, err := unstructured.NestedInt64(m, path...); ok && err == nil {
		return n
	}
	return fallback
}

func jobPods(o *unstructured.Unstructured) (int, error) {
	n := number(o.Object, 1, "spec", "parallelism")
	return int(min(n, number(o.Object, n, "spec", "completions"))), nil
}

func jobSetPods(o *unstructured.Unstructured) (int, error) {
	list, _, err := unstructured.NestedSlice(o.Object, "spec", "replicatedJobs")
	if err != nil {
		return 0, fmt.Errorf("spec.replicatedJobs: %w", err)
	}
	total := int64(0)
	for _, e := range list {
		if m, ok := e.(map[string]any); ok {
			n := number(m, 1, "template", "spec", "parallelism")
			total += number(m, 1, "replicas") * min(n, number(m, n, "template", "spec", "completions"))
		}
	}
	return int(total), nil
}

func pyTorchJobPods(o *unstructured.Unstructured) (int, error) {
	m, _, err := unstructured.NestedMap(o.Object, "spec", "pytorchReplicaSpecs")
	if err != nil {
		return 0, fmt.Errorf("spec.pytorchReplicaSpecs: %w", err)
	}
	total := int64(0)
	for _, e := range m {
		if s, ok := e.(map[string]any); ok {
			total += number(s, 1, "replicas")
		}
	}
	return int(total), nil
}

// completed counts the indexes of a Job that are over and done: a rank that answers
// SIGTERM with status 0 is one, and will not be started again.
func (j *job) completed() string {
	if j.kind.name != "Job" {
		return ""
	}
	var s batchv1.JobStatus
	s.CompletedIndexes, _, _ = unstructured.NestedString(j.owner.Object, "status", "completedIndexes")
	return strings.TrimSpace(s.CompletedIndexes)
}
