package kubernetes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

// Preflight is the Job that a node must pass before it returns. It is placed on the node
// by name, beside the scheduler, whose taints keep everybody else away.
type Preflight struct{ job *unstructured.Unstructured }

// LabelPreflight on a preflight's Job names the node that it checks.
const LabelPreflight = "lockstep.dev/preflight"

// ParsePreflight reads a Job's manifest (YAML or JSON).
func ParsePreflight(text []byte) (*Preflight, error) {
	o := &unstructured.Unstructured{}
	b, err := yaml.YAMLToJSONStrict(text)
	if err == nil {
		err = json.Unmarshal(b, &o.Object)
	}
	switch {
	case err != nil:
		return nil, fmt.Errorf("kubernetes: preflight's Job: %w", err)
	case o.GetKind() != "Job" || o.GetAPIVersion() != "batch/v1":
		return nil, fmt.Errorf("kubernetes: preflight's Job: is a %s of %s, want a Job of batch/v1", o.GetKind(), o.GetAPIVersion())
	}
	if _, ok, err := unstructured.NestedMap(o.Object, "spec", "template", "spec"); !ok || err != nil {
		return nil, errors.New("kubernetes: preflight's Job: spec.template.spec is missing")
	}
	return &Preflight{o}, nil
}

// on is the Job for a node; its name follows from the exclusion, so that there is one.
func (p *Preflight) on(ns string, n *corev1.Node, t note) (*unstructured.Unstructured, error) {
	o := p.job.DeepCopy()
	o.SetNamespace(ns)
	o.SetName(fmt.Sprintf("lockstep-preflight-%.24s-%.12s-%d", n.Name, t.Action, t.Until.Unix()%1e6))
	labels := o.GetLabels()
	if labels == nil {
		labels = map[string]string{}
	}
	labels[LabelPreflight] = n.Name
	o.SetLabels(labels)
	return o, unstructured.SetNestedField(o.Object, n.Name, "spec", "template", "spec", "nodeName")
}

// check starts a node's preflight, and acts on how it ended.
func (a *Actuator) check(ctx context.Context, n *corev1.Node, t note) error {
	job, err := a.o.Preflight.on(a.o.Namespace, n, t)
	if err != nil {
		return err
	}
	jobs := a.resource(jobsGVR, a.o.Namespace)
	o, err := jobs.Get(ctx, job.GetName(), metav1.GetOptions{})
	a.m.called("get", err)
	if apierrors.IsNotFound(err) {
		_, err = jobs.Create(ctx, job, metav1.CreateOptions{FieldManager: manager})
		a.m.called("create", err)
		if err == nil {
			a.nodeEvent(ctx, n, t.Action, "LockstepPreflight", normal, "started: Job "+a.o.Namespace+"/"+job.GetName())
		}
		return err
	}
	if err != nil {
		return err
	}
	passed, ended := outcome(o)
	switch {
	case !ended:
		return nil
	case passed:
		return a.bringBack(ctx, n, t, "preflight passed: Job "+o.GetName(), false)
	}
	t.Round++
	t.Until = a.o.now().UTC().Add(a.hold(t.Round))
	text, err := json.Marshal(t)
	if err != nil {
		return err
	}
	a.nodeEvent(ctx, n, t.Action+o.GetName(), "LockstepPreflightFailed", warning, fmt.Sprintf("Job %s: the node stays out until %s at least", o.GetName(), t.Until.Format(time.RFC3339)))
	return a.patchNode(ctx, n, map[string]any{"annotations": map[string]any{Suspect: string(text)}}, map[string]any{})
}

func outcome(o *unstructured.Unstructured) (passed, ended bool) {
	conditions, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	for _, c := range conditions {
		if m, ok := c.(map[string]any); ok && m["status"] == "True" {
			switch m["type"] {
			case "Complete":
				return true, true
			case "Failed":
				return false, true
			}
		}
	}
	return false, false
}
