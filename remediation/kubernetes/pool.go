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
)

// Nodes of one pool are equal: any of them takes any other's place. Those that wait carry
// the spare taint, which jobs do not tolerate; to use one is to remove it.
const (
	LabelPool = "lockstep.dev/pool"
	Spare     = "lockstep.dev/spare" // taint of a node that waits, annotation of one that was used
)

var spareTaint = corev1.Taint{Key: Spare, Effect: corev1.TaintEffectNoSchedule}

// WhenEmpty is what happens when a node is to be taken out and its pool has no spare.
type WhenEmpty string

// What it can be.
const (
	EmptyInPlace WhenEmpty = "in-place" // restart on the same nodes, and say so
	EmptyWaits   WhenEmpty = "wait"     // take it out: the job waits until a node returns
)

func (w WhenEmpty) check() error {
	switch w {
	case "", EmptyInPlace, EmptyWaits:
		return nil
	}
	return fmt.Errorf("kubernetes: when a pool is empty: %q is not one of %s, %s", string(w), EmptyInPlace, EmptyWaits)
}

// used is the annotation of a spare that is in use.
type used struct {
	Action string    `json:"action"`
	Job    string    `json:"job"`
	For    string    `json:"for"`
	At     time.Time `json:"at"`
}

type pool struct {
	name  string // "": nobody has made pools of this node's kind, the scheduler finds what is free
	nodes []*corev1.Node
}

// poolOf is the pool that a node belongs to.
func (a *Actuator) poolOf(ctx context.Context, node string) (pool, error) {
	n, err := a.node(ctx, node)
	if err != nil || n.Labels[LabelPool] == "" {
		if apierrors.IsNotFound(err) {
			err = nil
		}
		return pool{}, err
	}
	nodes, err := a.listNodes(ctx, LabelPool+"="+n.Labels[LabelPool])
	return pool{n.Labels[LabelPool], nodes}, err
}

func (a *Actuator) listNodes(ctx context.Context, selector string) ([]*corev1.Node, error) {
	var nodes []*corev1.Node
	o := metav1.ListOptions{LabelSelector: selector, Limit: pageSize}
	for {
		list, err := a.resource(nodesGVR, "").List(ctx, o)
		a.m.called("list", err)
		if err != nil {
			return nil, fmt.Errorf("list nodes (%s): %w", selector, err)
		}
		for i := range list.Items {
			n, err := nodeFrom(&list.Items[i])
			if err != nil {
				return nil, err
			}
			nodes = append(nodes, n)
		}
		if o.Continue = list.GetContinue(); o.Continue == "" {
			return nodes, nil
		}
	}
}

func isSpare(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == Spare })
}

func usable(n *corev1.Node) bool {
	ready, _ := readiness(n)
	return ready == corev1.ConditionTrue && !n.Spec.Unschedulable && !isOut(n)
}

// spareFor is the spare that was opened for a node that is out by an action, "" when none was.
func (p pool) spareFor(action, node string) string {
	for _, n := range p.nodes {
		var u used
		if !isSpare(n) && json.Unmarshal([]byte(n.Annotations[Spare]), &u) == nil && u.Action == action && u.For == node {
			return n.Name
		}
	}
	return ""
}

// takeSpare opens one of the pool's spares to pods, the same one on a repeat. "": none is left.
// An action and the keeper may both want one in place of the same node: one at a time, each
// from the pool as it is then, so that the second finds what the first has opened.
func (a *Actuator) takeSpare(ctx context.Context, name string, u used) (string, error) {
	a.taking.Lock()
	defer a.taking.Unlock()
	for range maxConflicts {
		nodes, err := a.listNodes(ctx, LabelPool+"="+name)
		if err != nil {
			return "", err
		}
		p := pool{name, nodes}
		if spare := p.spareFor(u.Action, u.For); spare != "" {
			return spare, nil
		}
		i := slices.IndexFunc(nodes, func(n *corev1.Node) bool { return isSpare(n) && usable(n) })
		if i < 0 {
			return "", nil
		}
		n := nodes[i]
		u.At = a.o.now().UTC()
		text, err := json.Marshal(u)
		if err != nil {
			return "", err
		}
		err = a.patchNode(ctx, n, map[string]any{"annotations": map[string]any{Spare: string(text)}}, map[string]any{"taints": withoutSpare(n)})
		switch {
		case apierrors.IsConflict(err), apierrors.IsNotFound(err):
			continue // it was taken, or has changed
		case err != nil:
			return "", err
		}
		a.nodeEvent(ctx, n, u.Action+u.For, "LockstepSpareUsed", normal, fmt.Sprintf("in place of %s for job %s", u.For, u.Job))
		return n.Name, nil
	}
	return "", fmt.Errorf("the spares of pool %s change faster than one can be taken", name)
}

// replace opens a spare in place of a node that is out and has none: it was found silent
// while an action or the keeper was at its pods, or its pool had no spare then.
func (a *Actuator) replace(ctx context.Context, name string) error {
	taken := ""
	for range maxConflicts {
		n, err := a.node(ctx, name)
		if err != nil && !apierrors.IsNotFound(err) {
			return err
		}
		var t note
		out := false
		if err == nil {
			if t, out = noteOf(n); out {
				out = isOut(n) && t.Spare == "" && n.Labels[LabelPool] != "" && !isSpare(n)
			}
		}
		switch {
		case !out && taken != "" && t.Spare != taken:
			return a.returnSpare(ctx, taken) // the node has returned meanwhile
		case !out:
			return nil
		}
		if taken, err = a.takeSpare(ctx, n.Labels[LabelPool], used{Action: t.Action, Job: t.Job, For: name}); err != nil || taken == "" {
			return err
		}
		t.Spare = taken
		text, err := json.Marshal(t)
		if err != nil {
			return err
		}
		err = a.patchNode(ctx, n, map[string]any{"annotations": map[string]any{Suspect: string(text)}}, map[string]any{})
		if err == nil {
			a.o.Logger.Info("a spare takes the place of a node that is out", "node", name, "spare", taken, "pool", n.Labels[LabelPool], "job", t.Job)
		}
		if !apierrors.IsConflict(err) {
			return err
		}
	}
	return fmt.Errorf("node %s changes faster than its spare %s can be written onto it", name, taken)
}

// returnSpare undoes takeSpare for an action that did not need it after all.
func (a *Actuator) returnSpare(ctx context.Context, name string) error {
	n, err := a.node(ctx, name)
	if err != nil || isSpare(n) {
		return err
	}
	return a.patchNode(ctx, n, map[string]any{"annotations": map[string]any{Spare: nil}}, map[string]any{"taints": append(withoutSpare(n), spareTaint)})
}

func withoutSpare(n *corev1.Node) []corev1.Taint {
	return slices.DeleteFunc(slices.Clone(n.Spec.Taints), func(t corev1.Taint) bool { return t.Key == Spare })
}
