package kubernetes

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lockstep-ccl/lockstep/remediation"
)

// leases of kubelets are in this namespace.
const leaseNamespace = corev1.NamespaceNodeLease

// heard is when a node's kubelet was last heard, by our own clock: a node's may be wrong.
type heard struct {
	renewed string    // its lease's word
	last    time.Time // when we first saw that word
	looked  time.Time
	lives   bool // it changed between two looks that were close to each other
}

// patience is the share of a lease after which a kubelet is silent. It renews every
// quarter of it.
const patience = 0.35

// listen says why a node counts as silent and for how long nobody has heard it; "" when
// it is heard. It waits until it is sure.
func (a *Actuator) listen(ctx context.Context, name string) (silent string, since time.Duration, err error) {
	for {
		silent, since, wait, err := a.hear(ctx, name)
		if err != nil || silent != "" || wait == 0 {
			return silent, since, err
		}
		select {
		case <-ctx.Done():
			return "", 0, ctx.Err()
		case <-time.After(min(wait, a.o.Poll)):
		}
	}
}

// hear is one look. wait is how much longer it takes to be sure, 0 when it is heard.
func (a *Actuator) hear(ctx context.Context, name string) (silent string, since, wait time.Duration, err error) {
	n, err := a.node(ctx, name)
	if apierrors.IsNotFound(err) {
		return "it is not in the cluster any more", 0, 0, nil
	}
	if err != nil {
		return "", 0, 0, err
	}
	lease, err := a.resource(leasesGVR, leaseNamespace).Get(ctx, name, metav1.GetOptions{})
	a.m.called("get", err)
	if err != nil && !apierrors.IsNotFound(err) {
		return "", 0, 0, fmt.Errorf("get the lease of node %s: %w", name, err)
	}
	renewed, seconds := "", int64(40)
	if err == nil {
		renewed, _, _ = unstructured.NestedString(lease.Object, "spec", "renewTime")
		seconds = number(lease.Object, 40, "spec", "leaseDurationSeconds")
	}
	limit := max(2*time.Second, time.Duration(patience*float64(seconds)*float64(time.Second)))
	h := a.compare(name, renewed, limit)
	since = time.Since(h.last)
	status, at := readiness(n)
	switch back := a.back(); {
	case h.lives && since < limit:
		return "", 0, 0, nil
	case back < limit: // nobody could be heard, by Kubernetes neither
		return "", 0, min(limit-back, limit), nil
	case status == corev1.ConditionUnknown:
		return "its kubelet is not heard, by Kubernetes' word since " + at.UTC().Format(time.TimeOnly), max(since, time.Since(at)), 0, nil
	case since >= limit:
		return fmt.Sprintf("its kubelet has not renewed its lease for %v", since.Round(100*time.Millisecond)), since, 0, nil
	default:
		return "", 0, limit - since, nil
	}
}

// back is for how long the API server has been there, as far as is known: while it is away no kubelet
// can renew its lease, and one that has tried in vain tries again after a quarter of it. We look
// as often as the lease of who leads is renewed, so it may have been away for so much longer.
func (a *Actuator) back() time.Duration {
	at := a.m.unanswered.Load()
	if at == 0 {
		return math.MaxInt64
	}
	return time.Since(time.Unix(0, at)) - renewEvery
}

// compare compares a lease with how it was at the last look.
func (a *Actuator) compare(name, renewed string, limit time.Duration) heard {
	now := time.Now()
	a.mu.Lock()
	defer a.mu.Unlock()
	h, known := a.heard[name]
	if !known || h.renewed != renewed {
		// A change since a look long ago does not say that it lives now.
		h = heard{renewed: renewed, last: now, lives: known && now.Sub(h.looked) < limit}
	}
	h.looked = now
	if len(a.heard) >= maxHeard { // nodes come and go; what is forgotten is looked at twice again
		clear(a.heard)
	}
	a.heard[name] = h
	return h
}

const maxHeard = 4096

func readiness(n *corev1.Node) (ready corev1.ConditionStatus, at time.Time) {
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status, c.LastTransitionTime.Time
		}
	}
	return corev1.ConditionFalse, n.CreationTimestamp.Time
}

const (
	// overdue is how long after its grace period a pod may still be there.
	overdue = 2 * time.Second
	// unstarted is how long after it was made a pod may be unknown to its kubelet.
	unstarted = 5 * time.Second
)

// unblock removes the job's pods on nodes that are silent: their Job is not over before
// they are gone, and only who knows that the processes have ended may say so.
func (a *Actuator) unblock(ctx context.Context, j *job, r *record, stale, fresh []*pod) (blocked string, err error) {
	now := time.Now()
	on := map[string][]*pod{}
	for _, p := range stale {
		if p.node != "" && !p.ended && (r.Node == p.node && r.Why == whySilent || !p.deleting.IsZero() && now.After(p.deleting.Add(overdue))) {
			on[p.node] = append(on[p.node], p)
		}
	}
	for _, p := range fresh {
		if p.node != "" && !p.started && now.Sub(p.created) > unstarted {
			on[p.node] = append(on[p.node], p)
		}
	}
	// Where pods of very many nodes do not start, each look is at some of them in turn.
	nodes := slices.Sorted(maps.Keys(on))
	if n := len(nodes); n > maxSilent {
		from := r.looks * maxSilent % n
		nodes = append(nodes[from:], nodes[:from]...)[:maxSilent]
	}
	r.looks++
	for _, node := range nodes {
		pods := on[node]
		silent, since, _, err := a.hear(ctx, node)
		switch {
		case err != nil:
			return "", err
		case silent == "":
			continue
		}
		if r.Node != node {
			if _, err := a.takeOut(ctx, node, note{Action: r.ID, Incident: r.Incident, Job: j.namespace() + "/" + j.name, Why: whySilent, Reason: silent}); err != nil {
				return "", err
			}
			if err := a.replace(ctx, node); err != nil {
				return "", err
			}
			if about := "node " + node + ": "; !slices.ContainsFunc(r.Notes, func(s string) bool { return strings.HasPrefix(s, about) }) { // for how long changes with each look
				r.note("%s%s", about, silent)
			}
		}
		how, err := a.prove(ctx, j.name, r.Attempt, node, since)
		if err != nil {
			if blocked = err.Error(); !r.waits[node] { // told once
				if r.waits == nil {
					r.waits = map[string]bool{}
				}
				r.waits[node] = true
				a.event(ctx, j.owner, r.ID+node, "LockstepWaitsForProof", warning, blocked)
			}
			continue
		}
		if err := a.force(ctx, j.namespace(), pods, node, how); err != nil {
			return "", err
		}
		r.note("pods on node %s deleted by force: %s", node, how)
	}
	return blocked, nil
}

// prove says what shows that nothing of an attempt runs on a silent node, or which policy
// allows to act without. The error says what a person can do.
func (a *Actuator) prove(ctx context.Context, job string, attempt int, node string, since time.Duration) (how string, err error) {
	n, err := a.node(ctx, node)
	if apierrors.IsNotFound(err) {
		return "its node is deleted, and Kubernetes takes it for gone", nil
	}
	if err != nil {
		return "", err
	}
	if slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeOutOfService }) {
		return "an operator has declared the node out of service", nil
	}
	why := "no fencing is configured"
	if a.o.Fencer != nil {
		asking, cancel := context.WithTimeout(ctx, a.fenceWait)
		proof, err := a.o.Fencer.Fence(asking, job, attempt, node)
		cancel()
		switch {
		case err != nil:
			why = err.Error()
		case proof.Proven:
			a.m.fenced.WithLabelValues("proven").Inc()
			return "fenced: " + proof.How, nil
		default:
			why = proof.How
		}
	}
	if a.o.UnfencedAfter > 0 && since >= a.o.UnfencedAfter {
		a.m.fenced.WithLabelValues("unproven").Inc()
		return fmt.Sprintf("WITHOUT PROOF that its ranks have ended (%s), as --kubernetes.unfenced-after says, after %v", why, since.Round(time.Second)), nil
	}
	a.m.fenced.WithLabelValues("waiting").Inc()
	return "", fmt.Errorf("node %s is silent, and nothing proves that its ranks have ended: %s. Once the machine is known to be off: kubectl taint node %s node.kubernetes.io/out-of-service=off:NoExecute", node, strings.TrimSpace(why), node)
}

// force deletes pods whose processes are known to have ended.
func (a *Actuator) force(ctx context.Context, ns string, pods []*pod, node, how string) error {
	zero := int64(0)
	for _, p := range pods {
		uid := types.UID(p.uid)
		err := a.resource(podsGVR, ns).Delete(ctx, p.name, metav1.DeleteOptions{GracePeriodSeconds: &zero, Preconditions: &metav1.Preconditions{UID: &uid}})
		a.m.called("delete", err)
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return fmt.Errorf("delete pod %s of node %s: %w", p.name, node, err)
		}
		a.o.Logger.Warn("pod deleted by force", "pod", ns+"/"+p.name, "node", node, "how", how)
		a.m.forced.Inc()
		a.eventOn(ctx, ref{"v1", "Pod", ns, p.name, p.uid}, ns, p.uid, "LockstepDeletedByForce", warning, "node "+node+": "+how)
	}
	return nil
}

var _ remediation.Actuator = (*Actuator)(nil)
