package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/lockstep-ccl/lockstep/remediation"
)

// Resources that the package speaks of.
var (
	podsGVR   = corev1.SchemeGroupVersion.WithResource("pods")
	nodesGVR  = corev1.SchemeGroupVersion.WithResource("nodes")
	eventsGVR = corev1.SchemeGroupVersion.WithResource("events")
	leasesGVR = schema.GroupVersionResource{Group: "coordination.k8s.io", Version: "v1", Resource: "leases"}

	jobsGVR        = batchv1.SchemeGroupVersion.WithResource("jobs")
	jobSetsGVR     = schema.GroupVersionResource{Group: "jobset.x-k8s.io", Version: "v1alpha2", Resource: "jobsets"}
	pyTorchJobsGVR = schema.GroupVersionResource{Group: "kubeflow.org", Version: "v1", Resource: "pytorchjobs"}
)

const (
	// LabelJob names a job of Lockstep's on its pods. Without it a job is found by its owner's name.
	LabelJob = "lockstep.dev/job"

	labelJobSet      = "jobset.sigs.k8s.io/jobset-name"
	labelJobSetTry   = "jobset.sigs.k8s.io/restart-attempt"
	labelBatchJob    = batchv1.JobNameLabel
	labelKubeflowJob = "training.kubeflow.org/job-name"
)

// selectors are the labels that a job's pods are found by, the most explicit first.
var selectors = []string{LabelJob, labelJobSet, labelKubeflowJob, labelBatchJob}

// job is a job as it was when it was looked at.
type job struct {
	name  string
	kind  *kind
	owner *unstructured.Unstructured
	pods  []pod
}

func (j *job) namespace() string { return j.owner.GetNamespace() }

// errNowhere says that no object of the job is left.
var errNowhere = errors.New("no pod and no owner of this job is there")

// pageSize bounds one answer to a list.
const pageSize = 500

// find looks a job up in the namespaces that are ours. The error is remediation.ErrGone
// when there is none, or it has ended.
func (a *Actuator) find(ctx context.Context, name string) (*job, error) {
	var found []*job
	namespaces := a.o.Namespaces
	if ns, ok := a.o.Jobs[name]; ok {
		namespaces = []string{ns} // a label in another tenant's namespace says nothing
	}
	for _, ns := range namespaces {
		j, err := a.findIn(ctx, ns, name)
		switch {
		case errors.Is(err, errNowhere):
		case err != nil:
			return nil, fmt.Errorf("kubernetes: job %s in namespace %s: %w", name, ns, err)
		default:
			found = append(found, j)
		}
	}
	switch {
	case len(found) == 0:
		return nil, fmt.Errorf("%w: no pods and no JobSet, Job or PyTorchJob of job %s in %v (label %s)", remediation.ErrGone, name, namespaces, LabelJob)
	case len(found) > 1:
		return nil, fmt.Errorf("%w: job %s is in namespaces %s and %s: which one is meant, nobody knows (--kubernetes.job says it)", remediation.ErrGone, name, found[0].namespace(), found[1].namespace())
	}
	if why := found[0].kind.over(found[0].owner); why != "" {
		return nil, fmt.Errorf("%w: %s %s", remediation.ErrGone, found[0], why)
	}
	return found[0], nil
}

func (a *Actuator) findIn(ctx context.Context, ns, name string) (*job, error) {
	for _, label := range selectors {
		pods, err := a.listPods(ctx, ns, label+"="+name)
		if err != nil {
			return nil, err
		}
		if len(pods) == 0 {
			continue
		}
		owner, k, err := a.ownerOf(ctx, ns, pods)
		if err != nil {
			return nil, err
		}
		j := &job{name: name, kind: k, owner: owner}
		for i := range pods {
			j.pods = append(j.pods, describe(&pods[i]))
		}
		return j, nil
	}
	// Between two attempts there may be no pod at all.
	for _, k := range kinds {
		owner, err := a.namedOwner(ctx, k, ns, name)
		if err != nil {
			return nil, err
		}
		if owner != nil {
			return &job{name: name, kind: k, owner: owner}, nil
		}
	}
	return nil, errNowhere
}

// namedOwner finds the object of a kind that carries the job's label, or its name. nil: there is none.
func (a *Actuator) namedOwner(ctx context.Context, k *kind, ns, name string) (*unstructured.Unstructured, error) {
	list, err := a.resource(k.gvr, ns).List(ctx, metav1.ListOptions{LabelSelector: LabelJob + "=" + name, Limit: 2})
	switch {
	case apierrors.IsNotFound(err): // the cluster has no such kind
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("list %s: %w", k.gvr.Resource, err)
	case len(list.Items) > 1:
		return nil, fmt.Errorf("%w: several %s carry its label", remediation.ErrGone, k.gvr.Resource)
	case len(list.Items) == 1:
		if metav1.GetControllerOf(&list.Items[0]) != nil {
			return nil, nil // a JobSet's Job
		}
		return &list.Items[0], nil
	}
	owner, err := a.resource(k.gvr, ns).Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("get %s %s: %w", k.gvr.Resource, name, err)
	case owner.GetLabels()[LabelJob] != "" || metav1.GetControllerOf(owner) != nil:
		return nil, nil // another job's
	}
	return owner, nil
}

// ownerOf follows the pods' controllers up to the object that restarts them, which must
// be one. What owns a JobSet (a TrainJob) leaves restarts to it.
func (a *Actuator) ownerOf(ctx context.Context, ns string, pods []corev1.Pod) (*unstructured.Unstructured, *kind, error) {
	refs := map[metav1.OwnerReference]bool{}
	for i := range pods {
		ref := metav1.GetControllerOf(&pods[i])
		if ref == nil {
			return nil, nil, fmt.Errorf("%w: pod %s has no controller: who deleted it would end it for good", remediation.ErrGone, pods[i].Name)
		}
		refs[metav1.OwnerReference{APIVersion: ref.APIVersion, Kind: ref.Kind, Name: ref.Name, UID: ref.UID}] = true
	}
	owners := map[string]*unstructured.Unstructured{}
	var last *kind
	missing := 0
	for ref := range refs {
		owner, k, err := a.climb(ctx, ns, ref, pods)
		switch {
		case apierrors.IsNotFound(err): // deleted, its pods not yet
			missing++
			continue
		case err != nil:
			return nil, nil, err
		}
		owners[string(owner.GetUID())], last = owner, k
	}
	switch len(owners) {
	case 0:
		return nil, nil, fmt.Errorf("%w: the owners of its %d pods are deleted", remediation.ErrGone, len(pods))
	case 1:
		for _, o := range owners {
			return o, last, nil
		}
	}
	var who []string
	for _, o := range owners {
		who = append(who, o.GetKind()+" "+o.GetName())
	}
	slices.Sort(who)
	return nil, nil, fmt.Errorf("%w: its pods have several owners: %v", remediation.ErrGone, who)
}

func (a *Actuator) climb(ctx context.Context, ns string, ref metav1.OwnerReference, pods []corev1.Pod) (*unstructured.Unstructured, *kind, error) {
	// A JobSet's pods name it: that saves reading each of its Jobs. That the label tells the
	// truth is checked by the UID, which nobody can make up.
	if i := slices.IndexFunc(pods, func(p corev1.Pod) bool { c := metav1.GetControllerOf(&p); return c != nil && c.UID == ref.UID }); i >= 0 && ref.Kind == "Job" {
		l := pods[i].Labels
		if name, uid := l[labelJobSet], l["jobset.sigs.k8s.io/jobset-uid"]; name != "" && uid != "" {
			if js, err := a.resource(jobSetsGVR, ns).Get(ctx, name, metav1.GetOptions{}); err == nil && string(js.GetUID()) == uid {
				return js, kindOf("JobSet"), nil
			}
		}
	}
	for range 4 {
		k := kindOf(ref.Kind)
		if k == nil || schema.FromAPIVersionAndKind(ref.APIVersion, ref.Kind).Group != k.gvr.Group {
			return nil, nil, fmt.Errorf("%w: its pods are owned by %s %s; JobSet, Job and PyTorchJob can be restarted", remediation.ErrGone, ref.Kind, ref.Name)
		}
		owner, err := a.resource(k.gvr, ns).Get(ctx, ref.Name, metav1.GetOptions{})
		if err != nil {
			return nil, nil, fmt.Errorf("get %s %s: %w", ref.Kind, ref.Name, err)
		}
		if owner.GetUID() != ref.UID {
			return nil, nil, fmt.Errorf("get %s %s: %w", ref.Kind, ref.Name, apierrors.NewNotFound(k.gvr.GroupResource(), ref.Name))
		}
		up := metav1.GetControllerOf(owner)
		if up == nil || k.top {
			return owner, k, nil
		}
		ref = *up
	}
	return nil, nil, fmt.Errorf("%w: its pods' owners are too many", remediation.ErrGone)
}

func (a *Actuator) listPods(ctx context.Context, ns, selector string) ([]corev1.Pod, error) {
	var pods []corev1.Pod
	o := metav1.ListOptions{LabelSelector: selector, Limit: pageSize}
	for {
		list, err := a.resource(podsGVR, ns).List(ctx, o)
		a.m.called("list", err)
		if err != nil {
			return nil, fmt.Errorf("list pods (%s): %w", selector, err)
		}
		for i := range list.Items {
			var p corev1.Pod
			if err := runtime.DefaultUnstructuredConverter.FromUnstructured(list.Items[i].Object, &p); err != nil {
				return nil, fmt.Errorf("pod %s: %w", list.Items[i].GetName(), err)
			}
			pods = append(pods, p)
		}
		if o.Continue = list.GetContinue(); o.Continue == "" {
			return pods, nil
		}
	}
}

// again reads the job's pods once more, by the owner that is known.
func (a *Actuator) again(ctx context.Context, j *job) error {
	owner, err := a.resource(j.kind.gvr, j.namespace()).Get(ctx, j.owner.GetName(), metav1.GetOptions{})
	if apierrors.IsNotFound(err) || err == nil && owner.GetUID() != j.owner.GetUID() {
		return fmt.Errorf("%w: %s has been deleted", remediation.ErrGone, j)
	}
	if err != nil {
		return fmt.Errorf("kubernetes: get %s: %w", j, err)
	}
	pods, err := a.listPods(ctx, j.namespace(), j.kind.podLabel+"="+j.owner.GetName())
	if err != nil {
		return fmt.Errorf("kubernetes: %s: %w", j, err)
	}
	j.owner, j.pods = owner, nil
	for i := range pods {
		j.pods = append(j.pods, describe(&pods[i]))
	}
	return nil
}

// String names the job for people.
func (j *job) String() string {
	return fmt.Sprintf("%s %s/%s", j.owner.GetKind(), j.namespace(), j.owner.GetName())
}

// nodes are those that its pods are on.
func (j *job) nodes() []string {
	set := map[string]bool{}
	for _, p := range j.pods {
		if p.node != "" && !p.ended {
			set[p.node] = true
		}
	}
	return slices.Sorted(maps.Keys(set))
}
