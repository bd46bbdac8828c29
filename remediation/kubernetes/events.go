package kubernetes

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

const (
	normal  = corev1.EventTypeNormal
	warning = corev1.EventTypeWarning
)

// ref is what an event is about.
type ref struct{ apiVersion, kind, namespace, name, uid string }

func (a *Actuator) event(ctx context.Context, o *unstructured.Unstructured, action, reason, kind, message string) {
	a.eventOn(ctx, ref{o.GetAPIVersion(), o.GetKind(), o.GetNamespace(), o.GetName(), string(o.GetUID())}, o.GetNamespace(), action, reason, kind, message)
}

// nodeEvent is in the namespace where Kubernetes keeps its own events of nodes, whose UID is their name.
func (a *Actuator) nodeEvent(ctx context.Context, n *corev1.Node, action, reason, kind, message string) {
	a.eventOn(ctx, ref{"v1", "Node", "", n.Name, n.Name}, metav1.NamespaceDefault, action, reason, kind, message)
}

// eventOn writes an event whose name follows from what it is about, so that a repeat
// writes none. An event tells; that it cannot be written stops nothing.
func (a *Actuator) eventOn(ctx context.Context, r ref, ns, action, reason, kind, message string) {
	sum := sha256.Sum256([]byte(r.kind + "\x00" + r.namespace + "\x00" + r.name + "\x00" + action + "\x00" + reason))
	now := time.Now().UTC().Format(time.RFC3339)
	about := map[string]any{"apiVersion": r.apiVersion, "kind": r.kind, "name": r.name, "uid": r.uid}
	if r.namespace != "" {
		about["namespace"] = r.namespace
	}
	o := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "Event",
		"metadata":       map[string]any{"name": "lockstep." + hex.EncodeToString(sum[:10]), "namespace": ns},
		"involvedObject": about, "reason": reason, "message": cut(message, 1024), "type": kind,
		"source": map[string]any{"component": manager}, "reportingComponent": manager, "reportingInstance": a.o.Identity,
		"firstTimestamp": now, "lastTimestamp": now, "count": int64(1),
	}}
	_, err := a.resource(eventsGVR, ns).Create(ctx, o, metav1.CreateOptions{FieldManager: manager})
	a.m.called("create", err)
	if err != nil && !apierrors.IsAlreadyExists(err) {
		a.o.Logger.Warn("cannot write an event", "about", r.kind+" "+r.name, "reason", reason, "err", err)
	}
}
