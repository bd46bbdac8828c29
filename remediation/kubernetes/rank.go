package kubernetes

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/lockstep-ccl/lockstep/launcher"
)

// AnnotationRanks on a pod says how many ranks it has, numbered on from its own number
// times that. Without it torchrun's PET_NPROC_PER_NODE says so, else it is one.
const AnnotationRanks = "lockstep.dev/ranks-per-pod"

// pod is what matters of a pod.
type pod struct {
	name, uid, node string
	first, ranks    int // its ranks; first is -1 when they are not known
	attempt         int // by its environment; -1 when that does not tell
	restart         string
	created         time.Time
	deleting        time.Time // zero: it is not; else when the kubelet should have ended it
	running, ended  bool
	started         bool   // the kubelet has told of it
	waits           string // why it does not run
}

func describe(p *corev1.Pod) pod {
	d := pod{
		name: p.Name, uid: string(p.UID), node: p.Spec.NodeName, first: -1, ranks: 1, attempt: -1,
		restart: p.Labels[labelJobSetTry], created: p.CreationTimestamp.Time,
		running: p.Status.Phase == corev1.PodRunning,
		ended:   p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed,
		started: p.Status.StartTime != nil,
	}
	if p.DeletionTimestamp != nil {
		d.deleting = p.DeletionTimestamp.Time // which the grace period is in
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status != corev1.ConditionTrue {
			d.waits = c.Message
		}
	}
	for _, c := range p.Status.ContainerStatuses {
		if c.State.Waiting != nil && d.waits == "" {
			d.waits = strings.TrimSpace(c.State.Waiting.Reason + " " + c.State.Waiting.Message)
		}
	}
	for i := range p.Spec.Containers {
		if d.identify(p, &p.Spec.Containers[i]) {
			break
		}
	}
	return d
}

// identify reads who a container's process is the way the process itself does, from the
// environment that the pod's specification gives it.
func (d *pod) identify(p *corev1.Pod, c *corev1.Container) bool {
	env := environment(p, c)
	id, err := launcher.Detect(func(name string) (string, bool) { v, ok := env[name]; return v, ok })
	index := id.Rank
	if err != nil || index < 0 {
		// torchrun, as Kubeflow's trainers start it, is told the pod's number.
		n, err := strconv.Atoi(env["PET_NODE_RANK"])
		if err != nil {
			return false
		}
		index = n
	}
	if id.Launcher == "torchrun" {
		// RANK of a pod that starts torchrun is the pod's (PyTorchJob).
		id.Launcher = ""
	}
	per := p.Annotations[AnnotationRanks]
	if per == "" {
		per = env["PET_NPROC_PER_NODE"]
	}
	if n, err := strconv.Atoi(per); err == nil && n > 0 && n <= 1024 {
		d.ranks = n
	}
	d.first = index * d.ranks
	for _, name := range []string{"LOCKSTEP_RESTART_COUNT", "JOBSET_RESTART_ATTEMPT"} {
		if n, err := strconv.Atoi(env[name]); err == nil && d.attempt < 0 {
			d.attempt = n
		}
	}
	return true
}

// environment is a container's, as far as its specification tells: values, and what the
// downward API takes from the pod.
func environment(p *corev1.Pod, c *corev1.Container) map[string]string {
	env := map[string]string{"KUBERNETES_SERVICE_HOST": "kubernetes"}
	for _, e := range c.Env {
		switch {
		case e.ValueFrom == nil:
			env[e.Name] = e.Value
		case e.ValueFrom.FieldRef != nil:
			if v, ok := field(p, e.ValueFrom.FieldRef.FieldPath); ok {
				env[e.Name] = v
			}
		}
	}
	return env
}

func field(p *corev1.Pod, path string) (string, bool) {
	for prefix, m := range map[string]map[string]string{"metadata.labels['": p.Labels, "metadata.annotations['": p.Annotations} {
		if key, ok := strings.CutPrefix(path, prefix); ok {
			v, ok := m[strings.TrimSuffix(key, "']")]
			return v, ok
		}
	}
	switch path {
	case "metadata.name":
		return p.Name, true
	case "metadata.namespace":
		return p.Namespace, true
	case "spec.nodeName":
		return p.Spec.NodeName, true
	}
	return "", false
}

// culprit is the pod of a rank. When the master names a node as well, the pod must be
// there: it has that from the agent that sees the process, while a pod's number is what a
// rank was meant to have (torchrun numbers ranks as they come). "" and an explanation when nobody can tell.
func (j *job) culprit(rank int, node string) (p *pod, why string) {
	var on []*pod
	for i := range j.pods {
		if p := &j.pods[i]; p.deleting.IsZero() && !p.ended && (node == "" || p.node == node) {
			on = append(on, p)
		}
	}
	has := func(p *pod) bool { return p.first >= 0 && rank >= p.first && rank < p.first+p.ranks }
	switch i := slices.IndexFunc(on, has); {
	case len(on) == 0 && node != "":
		return nil, fmt.Sprintf("no pod of the job runs on node %s", node)
	case node != "" && len(on) == 1:
		return on[0], ""
	case rank < 0:
		return nil, "no rank is blamed"
	case i < 0:
		return nil, fmt.Sprintf("no pod says that it has rank %d (environment of its containers; annotation %s)", rank, AnnotationRanks)
	case slices.IndexFunc(on[i+1:], has) >= 0:
		return nil, fmt.Sprintf("several pods say that they have rank %d", rank)
	default:
		return on[i], ""
	}
}
