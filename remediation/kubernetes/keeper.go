package kubernetes

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// Keep does what needs no alert, until ctx ends: nodes that are out return, and pods that
// cannot end on a node that is silent are removed once that is fenced, also where a JobSet or
// an eviction has deleted them and no action of ours.
func (a *Actuator) Keep(ctx context.Context) {
	var keeping sync.WaitGroup
	defer keeping.Wait()
	// A fence is waited for: nodes that are back do not.
	keeping.Go(func() {
		a.every(ctx, func(round int) {
			a.keepNodes(ctx)
			if round%6 == 0 {
				a.countSpares(ctx)
			}
		})
	})
	a.every(ctx, func(int) {
		for _, ns := range a.o.Namespaces {
			if err := a.keepPods(ctx, ns); err != nil && ctx.Err() == nil {
				a.o.Logger.Warn("cannot look for pods that do not end", "namespace", ns, "err", err)
			}
		}
	})
}

// every does something at the keeper's pace, while this remediator leads.
func (a *Actuator) every(ctx context.Context, do func(round int)) {
	t := time.NewTicker(a.o.Keep)
	defer t.Stop()
	for round := 0; ; round++ {
		if a.leading.Load() {
			do(round)
		}
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

func (a *Actuator) keepNodes(ctx context.Context) {
	nodes, err := a.listNodes(ctx, Suspect)
	if err != nil {
		if ctx.Err() == nil {
			a.o.Logger.Warn("cannot look at nodes that are out", "err", err)
		}
		return
	}
	out := map[string]int{whySuspect: 0, whySilent: 0}
	for _, n := range nodes {
		t, ok := noteOf(n)
		if !ok {
			a.o.Logger.Warn("a node is out, and its annotation cannot be read: uncordon it, and remove taint and label", "node", n.Name, "annotation", Suspect)
			continue
		}
		out[t.Why]++
		// Who changed the node meanwhile is heard in the next round.
		if err := a.keepNode(ctx, n, t); err != nil && !apierrors.IsConflict(err) && ctx.Err() == nil {
			a.o.Logger.Warn("a node that is out cannot be looked after", "node", n.Name, "err", err)
		}
	}
	for why, n := range out {
		a.m.out.WithLabelValues(why).Set(float64(n))
	}
}

func (a *Actuator) keepNode(ctx context.Context, n *corev1.Node, t note) error {
	if t.Spare == "" && n.Labels[LabelPool] != "" && isOut(n) {
		if err := a.replace(ctx, n.Name); err != nil {
			return err
		}
	}
	switch {
	case t.Cordoned && !n.Spec.Unschedulable:
		return a.bringBack(ctx, n, t, "a person has uncordoned it", true)
	case !isOut(n):
		return a.bringBack(ctx, n, t, "a person has removed its taint", true)
	case t.Why == whySilent:
		return a.keepSilent(ctx, n, t)
	case a.o.Preflight != nil && a.o.now().After(t.Until):
		return a.check(ctx, n, t)
	}
	return nil
}

// keepSilent brings a node back that has been heard for a while. Its old ranks are gone by
// then: its kubelet has seen what was deleted.
func (a *Actuator) keepSilent(ctx context.Context, n *corev1.Node, t note) error {
	ready, since := readiness(n)
	if ready != corev1.ConditionTrue || time.Since(since) < a.o.ReturnAfter || a.o.now().Sub(t.Since) < a.o.ReturnAfter {
		return nil
	}
	// The keeper's own looks may be further apart than a short lease's renewals.
	if silent, _, err := a.listen(ctx, n.Name); err != nil || silent != "" {
		return err
	}
	return a.bringBack(ctx, n, t, fmt.Sprintf("heard again, for %v", time.Since(since).Round(time.Second)), false)
}

// keepPods removes pods that are deleted, and whose node does not carry that out.
func (a *Actuator) keepPods(ctx context.Context, ns string) error {
	list, err := a.listPods(ctx, ns, LabelJob)
	if err != nil {
		return err
	}
	stuck := map[stuckAt][]*pod{}
	for i := range list {
		p := describe(&list[i])
		if !p.deleting.IsZero() && !p.ended && p.node != "" && time.Now().After(p.deleting.Add(overdue)) {
			at := stuckAt{list[i].Labels[LabelJob], p.node}
			stuck[at] = append(stuck[at], &p)
		}
	}
	errs := make(chan error, len(stuck))
	var removing sync.WaitGroup
	few := make(chan struct{}, maxSilent)
	for at, pods := range stuck {
		removing.Go(func() {
			few <- struct{}{}
			defer func() { <-few }()
			errs <- a.removeStuck(ctx, ns, at, pods)
		})
	}
	removing.Wait()
	close(errs)
	for e := range errs {
		err = errors.Join(err, e)
	}
	return err
}

// stuckAt is where a job's pods are.
type stuckAt struct{ job, node string }

// removeStuck removes pods that are deleted and still there, when their node is silent and fenced.
func (a *Actuator) removeStuck(ctx context.Context, ns string, at stuckAt, pods []*pod) error {
	silent, since, _, err := a.hear(ctx, at.node)
	if err != nil || silent == "" {
		return err // a kubelet that is heard ends its pods itself
	}
	attempt := 0
	for _, p := range pods {
		attempt = max(attempt, p.attempt)
	}
	sum := sha256.Sum256([]byte(at.job + "\x00" + pods[0].uid))
	id := "keeper-" + hex.EncodeToString(sum[:6])
	if _, err := a.takeOut(ctx, at.node, note{Action: id, Incident: "none", Job: ns + "/" + at.job, Why: whySilent, Reason: silent}); err != nil {
		return err
	}
	if err := a.replace(ctx, at.node); err != nil && !apierrors.IsConflict(err) {
		return err
	}
	how, err := a.prove(ctx, at.job, attempt, at.node, since)
	if err != nil {
		a.o.Logger.Warn("pods that are deleted do not end", "job", ns+"/"+at.job, "node", at.node, "err", err)
		return nil
	}
	return a.force(ctx, ns, pods, at.node, how)
}

func (a *Actuator) countSpares(ctx context.Context) {
	nodes, err := a.listNodes(ctx, LabelPool)
	if err != nil {
		if ctx.Err() == nil {
			a.o.Logger.Warn("cannot count spares", "err", err)
		}
		return
	}
	spares := map[string]int{}
	for _, n := range nodes {
		left := spares[n.Labels[LabelPool]]
		if isSpare(n) && usable(n) {
			left++
		}
		spares[n.Labels[LabelPool]] = left
	}
	a.m.spares.Reset()
	for pool, n := range spares {
		a.m.spares.WithLabelValues(pool).Set(float64(n))
	}
}
