package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/remediation"
)

// keep runs the keeper until ok, which only a bug keeps from coming.
func keep(t *testing.T, a *Actuator, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); a.Keep(ctx) }()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Error("it did not come to that within a minute")
			break
		}
	}
	cancel()
	<-done
}

func (w *world) out(node string) bool {
	return at(w.get(nodesAt+"/"+node), "spec", "unschedulable") == true
}

// TestUncordonCancels: what a person undoes stays undone, for that action.
func TestUncordonCancels(t *testing.T) {
	w := newWorld(t, 5)
	w.jobSet(4)
	a := w.actuator(nil)
	if _, err := act(t, a, action("a1", remediation.ActionExclude, 2, 0)); err != nil || !w.out("n3") {
		t.Fatal(err)
	}
	w.edit(nodesAt+"/n3", func(o obj) { delete(at(o, "spec").(obj), "unschedulable") })
	keep(t, a, func() bool { return text(w.get(nodesAt+"/n3"), "metadata", "annotations", Suspect) == "" })
	n := w.get(nodesAt + "/n3")
	if taints, _ := at(n, "spec", "taints").([]any); len(taints) > 0 || text(n, "metadata", "labels", Suspect) != "" {
		t.Errorf("taints %v, label %q", taints, text(n, "metadata", "labels", Suspect))
	}
	if why, err := a.takeOut(t.Context(), "n3", note{Action: "a1", Why: whySuspect}); err != nil || why == "" || w.out("n3") {
		t.Errorf("the same action again: %q, %v", why, err)
	}
	// Another one, soon after: it stays out for twice as long.
	if why, err := a.takeOut(t.Context(), "n3", note{Action: "a2", Why: whySuspect}); err != nil || why != "" || !w.out("n3") {
		t.Errorf("another action: %q, %v", why, err)
	}
	n3, err := a.node(t.Context(), "n3")
	if err != nil {
		t.Fatal(err)
	}
	if again, ok := noteOf(n3); !ok || again.Round != 1 || again.Until.Sub(again.Since) != 2*a.o.Hold {
		t.Errorf("%+v", again)
	}
}

// TestOthersCordon: a cordon that was there before, or that NVSentinel has put, stays.
func TestOthersCordon(t *testing.T) {
	for _, sentinel := range []bool{false, true} {
		w := newWorld(t, 2)
		a := w.actuator(nil)
		before := func() {
			w.edit(nodesAt+"/n1", func(o obj) {
				at(o, "spec").(obj)["unschedulable"] = true
				if sentinel {
					at(o, "metadata").(obj)["annotations"] = merged(at(o, "metadata", "annotations"), obj{"quarantineHealthEventIsCordoned": "True"})
				}
			})
		}
		if !sentinel {
			before()
		}
		if why, err := a.takeOut(t.Context(), "n1", note{Action: "a1", Why: whySilent}); err != nil || why != "" {
			t.Fatal(why, err)
		}
		before()
		a.o.ReturnAfter = time.Nanosecond
		beat := 0
		keep(t, a, func() bool {
			beat++
			w.edit(leaseAt+"n1", func(o obj) { at(o, "spec").(obj)["renewTime"] = fmt.Sprint(beat) })
			return text(w.get(nodesAt+"/n1"), "metadata", "annotations", Suspect) == ""
		})
		if !w.out("n1") {
			t.Errorf("NVSentinel %v: somebody else's cordon is gone", sentinel)
		}
	}
}

// TestShortLease: a node that was silent returns also where kubelets renew their leases more often
// than the keeper looks.
func TestShortLease(t *testing.T) {
	w := newWorld(t, 2)
	a := w.actuator(func(o *Options) { o.ReturnAfter = time.Nanosecond })
	if why, err := a.takeOut(t.Context(), "n1", note{Action: "a1", Why: whySilent}); err != nil || why != "" {
		t.Fatal(why, err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var beating sync.WaitGroup
	beating.Go(func() {
		for ctx.Err() == nil {
			w.edit(leaseAt+"n1", func(o obj) { at(o, "spec").(obj)["renewTime"] = time.Now().String() })
			time.Sleep(200 * time.Millisecond)
		}
	})
	defer beating.Wait()
	defer stop()
	for range 2 {
		a.keepNodes(ctx)
		if text(w.get(nodesAt+"/n1"), "metadata", "annotations", Suspect) == "" {
			return
		}
		time.Sleep(2100 * time.Millisecond) // a lease of 4 s is silent after 2 s
	}
	t.Error("it is still out")
}

const checkJob = `
apiVersion: batch/v1
kind: Job
metadata: {labels: {app: check}}
spec: {backoffLimit: 0, template: {spec: {restartPolicy: Never, containers: [{name: c, image: lockstep, args: [preflight]}]}}}
`

// TestProbation: after its time a node is checked, stays out when it fails, and returns as a
// spare of its pool when it passes.
func TestProbation(t *testing.T) {
	p, err := ParsePreflight([]byte(checkJob))
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, 5)
	for i := range 5 {
		w.edit(fmt.Sprintf("%s/n%d", nodesAt, i+1), func(o obj) { at(o, "metadata").(obj)["labels"] = obj{LabelPool: "gpu"} })
	}
	w.edit(nodesAt+"/n5", func(o obj) { at(o, "spec").(obj)["taints"] = []any{obj{"key": Spare, "effect": "NoSchedule"}} })
	w.jobSet(4)
	a := w.actuator(func(o *Options) { o.Preflight, o.Hold = p, time.Millisecond })
	if answer, err := act(t, a, action("a1", remediation.ActionExclude, 2, 0)); err != nil || !strings.Contains(answer.Detail, "spare n5") {
		t.Fatal(answer, err)
	}
	const jobs = "/apis/batch/v1/namespaces/lockstep/jobs"
	judge := func(verdict string, ok func() bool) {
		seen := map[string]bool{}
		keep(t, a, func() bool {
			for _, j := range w.under(jobs) {
				if o := w.get(j); o["status"] == nil && !seen[j] {
					seen[j] = true
					if on := text(o, "spec", "template", "spec", "nodeName"); on != "n3" {
						t.Errorf("preflight is on %q", on)
					}
					o["status"] = obj{"conditions": []any{obj{"type": verdict, "status": "True"}}}
					w.put(j, o)
				}
			}
			return ok()
		})
	}
	judge("Failed", func() bool { return len(w.under(jobs)) >= 2 })
	if !w.out("n3") {
		t.Error("it has failed preflight, and is back")
	}
	for _, j := range w.under(jobs) {
		w.remove(j)
	}
	judge("Complete", func() bool { return !w.out("n3") })
	n3, err := a.node(t.Context(), "n3")
	if err != nil || !isSpare(n3) || isOut(n3) {
		t.Errorf("%v: taints %v", err, n3.Spec.Taints)
	}
}

// TestKeeperUnblocks: a JobSet that restarts itself is stuck on a dead node, and no alert comes.
func TestKeeperUnblocks(t *testing.T) {
	w := newWorld(t, 5)
	w.jobSet(4)
	w.kill("n2")
	w.edit(jobSet, func(o obj) { o["status"] = obj{"restarts": 1} })
	w.reconcile()
	f := &fencer{}
	a := w.actuator(func(o *Options) { o.Fencer = f })
	keep(t, a, func() bool { f.mu.Lock(); defer f.mu.Unlock(); return len(f.asked) > 3 })
	if len(w.where()) != 0 {
		t.Fatal("a pod was deleted without proof")
	}
	f.mu.Lock()
	f.proof.Proven = true
	f.mu.Unlock()
	keep(t, a, func() bool { return w.runOn("n1", "n3", "n4", "n5") })
	w.revive("n2")
	a.o.ReturnAfter = time.Nanosecond
	beat := 0
	keep(t, a, func() bool {
		beat++
		w.edit(leaseAt+"n2", func(o obj) { at(o, "spec").(obj)["renewTime"] = fmt.Sprint(beat) })
		return !w.out("n2")
	})
}

// slowFencer answers when it is told to.
type slowFencer struct{ asked, answer chan struct{} }

func (f slowFencer) Fence(ctx context.Context, _ string, _ int, _ string) (remediation.Proof, error) {
	select {
	case f.asked <- struct{}{}:
	default:
	}
	select {
	case <-ctx.Done():
	case <-f.answer:
	}
	return remediation.Proof{}, nil
}

// TestKeeperDoesNotWait: a node returns while the keeper waits for proof about another one.
func TestKeeperDoesNotWait(t *testing.T) {
	w := newWorld(t, 5)
	w.jobSet(3)
	w.kill("n2")
	w.edit(jobSet, func(o obj) { o["status"] = obj{"restarts": 1} })
	w.reconcile()
	f := slowFencer{make(chan struct{}, 1), make(chan struct{})}
	a := w.actuator(func(o *Options) { o.Fencer, o.ReturnAfter = f, time.Nanosecond })
	if why, err := a.takeOut(t.Context(), "n5", note{Action: "a1", Why: whySilent}); err != nil || why != "" {
		t.Fatal(why, err)
	}
	beat, asked := 0, false
	keep(t, a, func() bool {
		select {
		case <-f.asked:
			asked = true
		default:
		}
		if !asked {
			return false
		}
		beat++
		w.edit(leaseAt+"n5", func(o obj) { at(o, "spec").(obj)["renewTime"] = fmt.Sprint(beat) })
		if w.out("n5") {
			return false
		}
		close(f.answer)
		return true
	})
}

// TestKeeperAsksAgain: about a node that nobody can prove anything of, the keeper waits for a bounded time, and
// hears of the next one.
func TestKeeperAsksAgain(t *testing.T) {
	w := newWorld(t, 5)
	w.jobSet(3)
	w.kill("n1")
	w.edit(jobSet, func(o obj) { o["status"] = obj{"restarts": 1} })
	w.reconcile()
	f := deafFencer{to: "n1", asked: make(chan struct{}, 1)}
	a := w.actuator(func(o *Options) { o.Fencer = f })
	a.fenceWait = time.Millisecond
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	done := make(chan struct{})
	go func() { defer close(done); a.Keep(ctx) }()
	<-f.asked
	// Only now a pod on another node is stuck.
	w.put(podsAt+"/late", obj{"apiVersion": "v1", "kind": "Pod", "spec": obj{"nodeName": "n5"}, "status": obj{"phase": "Running"}, "metadata": obj{
		"labels": obj{LabelJob: "late"}, "deletionTimestamp": time.Now().Add(-time.Minute).UTC().Format(time.RFC3339)}})
	w.kill("n5")
	for end := time.Now().Add(time.Minute); w.get(podsAt+"/late") != nil; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the keeper waits for the other node's proof")
		}
	}
	stop()
	<-done
}

// deafFencer knows of every node but one, about which it waits for as long as it may.
type deafFencer struct {
	to    string
	asked chan struct{}
}

func (f deafFencer) Fence(ctx context.Context, _ string, _ int, node string) (remediation.Proof, error) {
	if node != f.to {
		return remediation.Proof{Proven: true, How: "its power is off"}, nil
	}
	select {
	case f.asked <- struct{}{}:
	default:
	}
	<-ctx.Done()
	return remediation.Proof{How: "nobody knows"}, nil
}

// TestManySilent: a cluster none of whose kubelets is heard has another trouble than its nodes. The bound holds
// also where an action and the keeper come to many at once.
func TestManySilent(t *testing.T) {
	for _, atOnce := range []bool{false, true} {
		w := newWorld(t, 3*maxSilent)
		a := w.actuator(nil)
		var taking sync.WaitGroup
		why := make([]string, 3*maxSilent)
		for i := range why {
			take := func() {
				var err error
				if why[i], err = a.takeOut(t.Context(), fmt.Sprintf("n%d", i+1), note{Action: fmt.Sprint(i), Why: whySilent}); err != nil {
					t.Error(err)
				}
			}
			if atOnce {
				taking.Go(take)
			} else {
				take()
			}
		}
		taking.Wait()
		said, out := 0, 0
		for i := range why {
			if why[i] == "" {
				said++
			}
			if w.out(fmt.Sprintf("n%d", i+1)) {
				out++
			}
		}
		if said != maxSilent || out != maxSilent {
			t.Errorf("at once %v: %d nodes are out (%d said so), want %d", atOnce, out, said, maxSilent)
		}
	}
}

func TestLead(t *testing.T) {
	w := newWorld(t, 4)
	w.jobSet(4)
	a, b := w.actuator(func(o *Options) { o.Identity = "a" }), w.actuator(func(o *Options) { o.Identity = "b" })
	first, stop := context.WithCancel(t.Context())
	leads := make(chan string, 2)
	ended := make(chan error, 2)
	run := func(who string) func(context.Context) error {
		return func(ctx context.Context) error { leads <- who; <-ctx.Done(); return nil }
	}
	go func() { ended <- a.Lead(first, run("a")) }()
	if who := <-leads; who != "a" {
		t.Fatal(who)
	}
	second, stopB := context.WithCancel(t.Context())
	go func() { ended <- b.Lead(second, run("b")) }()
	for b.Leads() { // until it has seen that another one does
		time.Sleep(time.Millisecond)
	}
	if _, err := act(t, b, action("a1", remediation.ActionRestart, 0, 0)); err == nil || w.restarts() != 0 {
		t.Errorf("who does not lead has acted: %v", err)
	}
	stop() // a gives the lease back
	if err := <-ended; err != nil {
		t.Errorf("a: %v", err)
	}
	if who := <-leads; who != "b" || !b.Leads() || a.Leads() {
		t.Errorf("%s leads", who)
	}
	if _, err := act(t, b, action("a1", remediation.ActionRestart, 0, 0)); err != nil || w.restarts() != 1 {
		t.Errorf("who leads cannot act: %v", err)
	}
	// Somebody takes the lease by force.
	lease := "/apis/coordination.k8s.io/v1/namespaces/lockstep/leases/" + LeaseName
	w.edit(lease, func(o obj) { at(o, "spec").(obj)["holderIdentity"] = "c" })
	if err := <-ended; !errors.Is(err, ErrLost) || b.Leads() {
		t.Errorf("b: %v", err)
	}
	stopB()
}
