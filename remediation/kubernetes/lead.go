package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// LeaseName is the lease of who leads.
const LeaseName = "lockstep-remediator"

// Times of the lease. Who leads stops acting when it has not renewed for renewWithin, which
// is before another one may take over: each measures by its own clock.
const (
	leaseFor    = 15 * time.Second
	renewWithin = 10 * time.Second
	renewEvery  = 2 * time.Second
)

// ErrLost says that another remediator leads now, or that nobody could be told that this one still does.
var ErrLost = errors.New("kubernetes: the lease " + LeaseName + " is lost")

// Leads reports whether this process may act.
func (a *Actuator) Leads() bool { return a.leading.Load() }

// Lead waits until this process leads, calls run, and ends run's context when it does not
// lead any more; the error is then ErrLost. Until run is called, and after, Act refuses.
func (a *Actuator) Lead(ctx context.Context, run func(context.Context) error) error {
	a.lead(false)
	e := &election{a: a}
	for !e.try(ctx) {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(renewEvery):
		}
	}
	a.o.Logger.Info("this remediator leads", "lease", a.o.Namespace+"/"+LeaseName, "as", a.o.Identity)
	a.lead(true)
	defer a.lead(false)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-time.After(renewEvery):
			}
			tctx, done := context.WithTimeout(ctx, renewWithin/2)
			ok := e.try(tctx)
			done()
			if ctx.Err() == nil && !ok && (e.others || time.Since(e.renewed) > renewWithin) {
				a.lead(false)
				cancel(ErrLost)
				return
			}
		}
	}()
	err := run(ctx)
	if errors.Is(context.Cause(ctx), ErrLost) {
		return ErrLost
	}
	e.release()
	return err
}

func (a *Actuator) lead(yes bool) {
	a.leading.Store(yes)
	a.m.leading.Set(map[bool]float64{true: 1}[yes])
}

// election is one process's view of the lease.
type election struct {
	a       *Actuator
	renewed time.Time // when this process last wrote it
	seen    string    // the last word of whoever holds it
	seenAt  time.Time // by our own clock
	others  bool      // another one holds it
}

// try takes or renews the lease.
func (e *election) try(ctx context.Context) bool {
	leases := e.a.resource(leasesGVR, e.a.o.Namespace)
	began := time.Now()
	o, err := leases.Get(ctx, LeaseName, metav1.GetOptions{})
	e.a.m.called("get", err)
	if apierrors.IsNotFound(err) {
		o = &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": map[string]any{"name": LeaseName, "namespace": e.a.o.Namespace}, "spec": e.spec(0, ""),
		}}
		_, err = leases.Create(ctx, o, metav1.CreateOptions{FieldManager: manager})
		e.a.m.called("create", err)
		return e.done(began, err)
	}
	if err != nil {
		return e.done(began, err)
	}
	holder, _, _ := unstructured.NestedString(o.Object, "spec", "holderIdentity")
	word, _, _ := unstructured.NestedString(o.Object, "spec", "renewTime")
	e.others = holder != "" && holder != e.a.o.Identity
	if e.others {
		if word = holder + word; word != e.seen {
			e.seen, e.seenAt = word, time.Now()
		}
		if time.Since(e.seenAt) < leaseFor {
			return false
		}
	}
	transitions := number(o.Object, 0, "spec", "leaseTransitions")
	acquired, _, _ := unstructured.NestedString(o.Object, "spec", "acquireTime")
	if holder != e.a.o.Identity {
		transitions, acquired = transitions+1, ""
	}
	o.Object["spec"] = e.spec(transitions, acquired)
	_, err = leases.Update(ctx, o, metav1.UpdateOptions{FieldManager: manager}) // which fails when another one was faster
	e.a.m.called("update", err)
	return e.done(began, err)
}

func (e *election) done(began time.Time, err error) bool {
	if err != nil {
		if !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) {
			e.a.o.Logger.Warn("cannot renew the lease of who leads", "err", fmt.Errorf("lease %s/%s: %w", e.a.o.Namespace, LeaseName, err))
		}
		return false
	}
	e.renewed, e.others = began, false
	return true
}

func (e *election) spec(transitions int64, acquired string) map[string]any {
	now := time.Now().UTC().Format("2006-01-02T15:04:05.000000Z07:00")
	if acquired == "" {
		acquired = now
	}
	return map[string]any{
		"holderIdentity": e.a.o.Identity, "leaseDurationSeconds": int64(leaseFor / time.Second), "acquireTime": acquired, "renewTime": now, "leaseTransitions": transitions,
	}
}

// release lets the next one lead at once.
func (e *election) release() {
	ctx, cancel := context.WithTimeout(context.Background(), renewEvery)
	defer cancel()
	leases := e.a.resource(leasesGVR, e.a.o.Namespace)
	o, err := leases.Get(ctx, LeaseName, metav1.GetOptions{})
	e.a.m.called("get", err)
	if holder, _, _ := unstructured.NestedString(objectOf(o), "spec", "holderIdentity"); err != nil || holder != e.a.o.Identity {
		return
	}
	spec := e.spec(number(o.Object, 0, "spec", "leaseTransitions"), "")
	spec["holderIdentity"] = ""
	o.Object["spec"] = spec
	_, err = leases.Update(ctx, o, metav1.UpdateOptions{FieldManager: manager})
	e.a.m.called("update", err)
}

func objectOf(o *unstructured.Unstructured) map[string]any {
	if o == nil {
		return nil
	}
	return o.Object
}
