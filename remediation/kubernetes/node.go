package kubernetes

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
)

// What a node carries that is out. The taint keeps pods away that tolerate a cordon, the
// label lets it be found, the annotation says who, why and until when.
const (
	Suspect = "lockstep.dev/suspect" // taint, label and annotation
	// LabelExclude with value never keeps a node from being taken out.
	LabelExclude = "lockstep.dev/exclude"
	// AnnotationCancelled holds the action that a person has cancelled by uncordoning.
	AnnotationCancelled = "lockstep.dev/cancelled"
	// ConditionSuspect is the node's condition while it is out.
	ConditionSuspect = "LockstepSuspect"
)

// Why a node is out.
const (
	whySuspect = "suspect" // it was blamed: returns by an operator, or by preflight
	whySilent  = "silent"  // it was not heard: returns when it is heard again
)

// note is the annotation of a node that is out.
type note struct {
	Action   string    `json:"action"`
	Incident string    `json:"incident"`
	Job      string    `json:"job"`
	Why      string    `json:"why"`
	Reason   string    `json:"reason,omitempty"`
	By       string    `json:"by"`
	Since    time.Time `json:"since"`
	Until    time.Time `json:"until,omitzero"` // when preflight may bring it back; a silent node returns by itself
	Cordoned bool      `json:"cordoned"`       // by this package: else it was so before, and stays so
	Spare    string    `json:"spare,omitempty"`
	Round    int       `json:"round"` // how often it was blamed lately
}

// history is kept on a node that has returned, so that one that is blamed again stays out longer,
// and that it is known of a spare for which of its absences it was opened.
type history struct {
	Round    int       `json:"round"`
	Returned time.Time `json:"returned,omitzero"` // from being blamed
	Returns  int       `json:"returns,omitempty"`
}

func historyOf(n *corev1.Node) (h history) {
	if json.Unmarshal([]byte(n.Annotations[annotationHistory]), &h) != nil {
		return history{}
	}
	return h
}

// returns is how often a node has returned.
func returns(n *corev1.Node) int { return historyOf(n).Returns }

const annotationHistory = "lockstep.dev/history"

func (a *Actuator) node(ctx context.Context, name string) (*corev1.Node, error) {
	o, err := a.resource(nodesGVR, "").Get(ctx, name, metav1.GetOptions{})
	a.m.called("get", err)
	if err != nil {
		return nil, fmt.Errorf("get node %s: %w", name, err)
	}
	return nodeFrom(o)
}

func nodeFrom(o *unstructured.Unstructured) (*corev1.Node, error) {
	n := new(corev1.Node)
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, n); err != nil {
		return nil, fmt.Errorf("node %s: %w", o.GetName(), err)
	}
	return n, nil
}

func noteOf(n *corev1.Node) (t note, ok bool) {
	text := n.Annotations[Suspect]
	return t, text != "" && json.Unmarshal([]byte(text), &t) == nil
}

// isOut reports whether this package has taken the node out.
func isOut(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == Suspect })
}

// patchNode changes a node on the condition that nobody else has since it was read:
// spec.taints is one value for the API server, whoever applied it would undo others' taints.
func (a *Actuator) patchNode(ctx context.Context, n *corev1.Node, meta, spec map[string]any) error {
	meta["resourceVersion"], meta["uid"] = n.ResourceVersion, string(n.UID)
	body, err := json.Marshal(map[string]any{"metadata": meta, "spec": spec})
	if err != nil {
		return err
	}
	_, err = a.resource(nodesGVR, "").Patch(ctx, n.Name, types.MergePatchType, body, metav1.PatchOptions{FieldManager: manager})
	a.m.called("patch", err)
	return err
}

// maxSilent bounds how many nodes may be out because nobody hears them. They do not count against the
// remediator's breakers, which stay open until a person comes: docs/design/kubernetes.md says why.
const maxSilent = 8

// tooMany says why one more node may not be out. One in whose place a spare works costs the cluster nothing.
func (a *Actuator) tooMany(ctx context.Context, name string, t note) (why string, err error) {
	if t.Why == whySuspect && t.Spare != "" {
		return "", nil
	}
	nodes, err := a.listNodes(ctx, Suspect+"="+t.Why)
	if err != nil {
		return "", err
	}
	out := 0
	for _, n := range nodes {
		if o, _ := noteOf(n); n.Name != name && (t.Why == whySilent || o.Spare == "") {
			out++
		}
	}
	switch {
	case t.Why == whySilent && out >= maxSilent:
		return fmt.Sprintf("%d nodes are out because they are silent: that may be the API server's fault, not theirs", out), nil
	case t.Why == whySuspect && out >= a.o.MaxOut:
		return fmt.Sprintf("%d nodes that were blamed are out with no spare in their place, at most %d may be", out, a.o.MaxOut), nil
	}
	return "", nil
}

// takeOut taints and cordons a node, once an action. why says that it is not done, and the reason.
func (a *Actuator) takeOut(ctx context.Context, name string, t note) (why string, err error) {
	a.counting.Lock() // actions and the keeper come to several at once: each counts those before it
	defer a.counting.Unlock()
	for range maxConflicts {
		n, err := a.node(ctx, name)
		if apierrors.IsNotFound(err) {
			return "there is no such node any more", nil
		}
		if err != nil {
			return "", err
		}
		was, had := noteOf(n)
		switch {
		case n.Labels[LabelExclude] == "never":
			return "label " + LabelExclude + "=never", nil
		case n.Annotations[AnnotationCancelled] == t.Action:
			return "a person has uncordoned it since", nil
		case had && isOut(n) && (was.Action == t.Action || was.Why == whySuspect || t.Why == whySilent):
			return "", nil // for this action, or for a reason that weighs no less
		}
		if why, err := a.tooMany(ctx, name, t); err != nil || why != "" {
			return why, err
		}
		now := a.o.now().UTC()
		t.By, t.Since, t.Cordoned = a.o.Identity, now, !n.Spec.Unschedulable || had && was.Cordoned
		if t.Why == whySuspect {
			if h := historyOf(n); !h.Returned.IsZero() && now.Sub(h.Returned) < a.hold(h.Round) {
				t.Round = h.Round + 1
			}
			t.Until = now.Add(a.hold(t.Round))
		}
		text, err := json.Marshal(t)
		if err != nil {
			return "", err
		}
		taints := slices.DeleteFunc(n.Spec.Taints, func(x corev1.Taint) bool { return x.Key == Suspect })
		taints = append(taints, corev1.Taint{Key: Suspect, Value: t.Why, Effect: corev1.TaintEffectNoSchedule, TimeAdded: &metav1.Time{Time: now}})
		err = a.patchNode(ctx, n,
			map[string]any{"annotations": map[string]any{Suspect: string(text)}, "labels": map[string]any{Suspect: t.Why}},
			map[string]any{"unschedulable": true, "taints": taints})
		if apierrors.IsConflict(err) {
			continue
		}
		if err != nil {
			return "", err
		}
		a.o.Logger.Warn("node taken out", "node", name, "why", t.Why, "incident", t.Incident, "job", t.Job, "until", t.Until)
		a.condition(ctx, n, true, t.Why, fmt.Sprintf("%s (incident %s of job %s)", t.Reason, t.Incident, t.Job))
		a.nodeEvent(ctx, n, t.Action, "LockstepTakenOut", warning, fmt.Sprintf("%s: %s (incident %s of job %s); kubectl uncordon brings it back", t.Why, t.Reason, t.Incident, t.Job))
		return "", nil
	}
	return "", fmt.Errorf("node %s changes faster than it can be taken out", name)
}

// hold doubles with each time that a node is blamed again soon after it has returned.
func (a *Actuator) hold(round int) time.Duration { return a.o.Hold << min(round, 6) }

// bringBack undoes takeOut: nothing that others have put there. spare puts it into its pool's reserve.
func (a *Actuator) bringBack(ctx context.Context, n *corev1.Node, t note, why string, cancelled bool) error {
	meta := map[string]any{Suspect: nil}
	if cancelled {
		meta[AnnotationCancelled] = t.Action
	}
	h := historyOf(n)
	h.Returns++
	if t.Why == whySuspect {
		h.Round, h.Returned = t.Round, a.o.now().UTC()
	}
	text, err := json.Marshal(h)
	if err != nil {
		return err
	}
	meta[annotationHistory] = string(text)
	if t.Spare == "" && n.Labels[LabelPool] != "" { // opened, and not written down here
		p, err := a.poolOf(ctx, n.Name)
		if err != nil {
			return err
		}
		t.Spare = p.spareFor(t.Action, n.Name)
	}
	taints := slices.DeleteFunc(slices.Clone(n.Spec.Taints), func(x corev1.Taint) bool { return x.Key == Suspect })
	if t.Spare != "" {
		taints = append(taints, spareTaint)
	}
	spec := map[string]any{"taints": taints}
	if t.Cordoned && !cordonedByOthers(n) {
		spec["unschedulable"] = nil
	}
	if err := a.patchNode(ctx, n, map[string]any{"annotations": meta, "labels": map[string]any{Suspect: nil}}, spec); err != nil {
		return err
	}
	a.o.Logger.Info("node brought back", "node", n.Name, "why", why, "was", t.Why, "incident", t.Incident)
	a.condition(ctx, n, false, "Returned", why)
	a.nodeEvent(ctx, n, t.Action, "LockstepBroughtBack", normal, why)
	a.m.returned.WithLabelValues(t.Why).Inc()
	return nil
}

// cordonedByOthers knows those who leave a trace: a cordon is one bit, and has no owner.
func cordonedByOthers(n *corev1.Node) bool {
	if n.Annotations["quarantineHealthEventIsCordoned"] == "True" { // NVSentinel
		return true
	}
	return slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == "ToBeDeletedByClusterAutoscaler" })
}

// condition is server-side applied: conditions are a list by type, and this one is ours. A
// condition tells; that it cannot be written stops nothing.
func (a *Actuator) condition(ctx context.Context, n *corev1.Node, on bool, reason, message string) {
	status := map[bool]string{true: "True", false: "False"}[on]
	now := a.o.now().UTC().Format(time.RFC3339)
	o := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": n.Name},
		"status": map[string]any{"conditions": []any{map[string]any{
			"type": ConditionSuspect, "status": status, "reason": camel(reason), "message": cut(message, 1024), "lastTransitionTime": now, "lastHeartbeatTime": now,
		}}},
	}}
	_, err := a.resource(nodesGVR, "").ApplyStatus(ctx, n.Name, o, metav1.ApplyOptions{FieldManager: manager, Force: true})
	a.m.called("patch", err)
	if err != nil {
		a.o.Logger.Warn("cannot write a node's condition", "node", n.Name, "err", err)
	}
}

func camel(s string) string {
	if s != "" && s[0] >= 'a' && s[0] <= 'z' {
		return string(s[0]-'a'+'A') + s[1:]
	}
	return s
}

func cut(s string, n int) string {
	if len(s) > n {
		return s[:n]
	}
	return s
}
