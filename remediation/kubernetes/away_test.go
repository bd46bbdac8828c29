package kubernetes

import (
	"context"
	"errors"
	"net/url"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/lockstep-ccl/lockstep/remediation"
)

// TestServerAway: while the API server does not answer, no kubelet can renew its lease. That is no silence of
// the kubelets', neither by our clock nor by Kubernetes' word, before they have had the time to be heard again.
func TestServerAway(t *testing.T) {
	w := newWorld(t, 2)
	w.kill("n2")
	a := w.actuator(nil)
	before := func() { // both were last heard long ago
		at := time.Now().Add(-time.Minute)
		for _, n := range []string{"n1", "n2"} {
			a.heard[n] = heard{renewed: text(w.get(leaseAt+n), "spec", "renewTime"), last: at, looked: at}
		}
	}
	look := func(n string) (string, time.Duration) {
		t.Helper()
		silent, _, wait, err := a.hear(t.Context(), n)
		if err != nil {
			t.Fatal(err)
		}
		return silent, wait
	}
	before()
	a.m.called("get", &url.Error{Op: "Get", Err: errNotThere})
	for _, n := range []string{"n1", "n2"} {
		if silent, wait := look(n); silent != "" || wait == 0 {
			t.Errorf("%s, when the API server is just back: silent %q, wait %v", n, silent, wait)
		}
	}
	a.m.unanswered.Store(time.Now().Add(-time.Minute).UnixNano())
	before()
	for _, n := range []string{"n1", "n2"} {
		if silent, _ := look(n); silent == "" {
			t.Errorf("%s is not silent", n)
		}
	}
}

// TestBetweenAttempts: a job without pods is asked about again, and no try is used up.
func TestBetweenAttempts(t *testing.T) {
	w := newWorld(t, 1)
	w.jobSet(0)
	if _, err := w.actuator(nil).Act(t.Context(), action("a1", remediation.ActionRestart, 0, 0)); !errors.Is(err, remediation.ErrAway) {
		t.Errorf("%v", err)
	}
}

// TestAway: what says that nobody answered, and what is an answer.
func TestAway(t *testing.T) {
	w := newWorld(t, 1)
	w.jobSet(1)
	a := w.actuator(nil)
	if _, err := a.Inventory(t.Context(), "nobody"); err == nil || errors.Is(err, remediation.ErrAway) {
		t.Errorf("a job that is not there: %v", err)
	}
	w.ts.Close()
	if _, err := a.Act(t.Context(), action("a1", remediation.ActionRestart, 0, 0)); !errors.Is(err, remediation.ErrAway) {
		t.Errorf("an action: %v", err)
	}
	if _, err := a.Inventory(t.Context(), "llm"); !errors.Is(err, remediation.ErrAway) {
		t.Errorf("an inventory: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := a.Act(ctx, action("a1", remediation.ActionRestart, 0, 0)); err == nil || errors.Is(err, remediation.ErrAway) {
		t.Errorf("the caller's time is over: %v", err)
	}
	for _, err := range []error{apierrors.NewServiceUnavailable("starting"), apierrors.NewTooManyRequests("later", 1), apierrors.NewInternalError(errors.New("etcd"))} {
		if !isAway(err) {
			t.Errorf("%v is an answer", err)
		}
	}
	for _, err := range []error{nil, context.DeadlineExceeded, apierrors.NewForbidden(nodesGVR.GroupResource(), "n1", nil), apierrors.NewUnauthorized("who")} {
		if isAway(err) {
			t.Errorf("%v is no answer", err)
		}
	}
}
