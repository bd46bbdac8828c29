package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/remediation"
)

func TestRestart(t *testing.T) {
	w := newWorld(t, 4)
	w.jobSet(4)
	a := w.actuator(nil)
	answer, err := act(t, a, action("a1", remediation.ActionRestart, 2, 0))
	if err != nil || answer.At.IsZero() || w.restarts() != 1 || len(w.where()) != 4 {
		t.Fatalf("%+v, %v; %d restarts, pods on %v", answer, err, w.restarts(), w.where())
	}
	// Again, by the same process and by another one: as it was then, and nothing is done.
	for _, a := range []*Actuator{a, w.actuator(nil)} {
		again, err := act(t, a, action("a1", remediation.ActionRestart, 2, 0))
		if err != nil || !again.At.Equal(answer.At) || w.restarts() != 1 {
			t.Errorf("repeat: %+v, %v; %d restarts", again, err, w.restarts())
		}
	}
	// Another incident of the attempt that is over.
	late, err := act(t, a, action("a2", remediation.ActionRestart, 1, 0))
	if err != nil || !late.At.IsZero() || w.restarts() != 1 {
		t.Errorf("an action about attempt 0: %+v, %v; %d restarts", late, err, w.restarts())
	}
	if _, err := act(t, a, action("a3", remediation.ActionRestart, 1, 1)); err != nil || w.restarts() != 2 {
		t.Errorf("the next incident: %v; %d restarts", err, w.restarts())
	}
}

// TestKilledAnywhere: whatever write a remediator dies at, before or after it is
// done, another one ends the action, and the job has been restarted once, one node is
// out and one spare in.
func TestKilledAnywhere(t *testing.T) {
	for write := 0; ; write++ {
		for _, done := range []bool{false, true} {
			w := newWorld(t, 6)
			for i := range 6 {
				w.edit(fmt.Sprintf("%s/n%d", nodesAt, i+1), func(o obj) { at(o, "metadata").(obj)["labels"] = obj{LabelPool: "gpu"} })
			}
			for _, n := range []string{"n5", "n6"} {
				w.edit(nodesAt+"/"+n, func(o obj) { at(o, "spec").(obj)["taints"] = []any{obj{"key": Spare, "effect": "NoSchedule"}} })
			}
			w.jobSet(4)
			killed := false
			ctx, kill := context.WithTimeout(t.Context(), time.Minute)
			w.break_ = func(n int) (bool, bool) {
				if n < write {
					return true, true
				}
				first := !killed
				killed = true
				kill()
				return done && first, false
			}
			_, err := w.actuator(nil).Act(ctx, action("a1", remediation.ActionExclude, 1, 0))
			kill()
			w.apiserver.mu.Lock()
			w.break_ = nil
			w.apiserver.mu.Unlock()
			if !killed && err == nil {
				if write < 5 {
					t.Fatalf("an action of %d writes", write)
				}
				return
			}
			answer, err := act(t, w.actuator(nil), action("a1", remediation.ActionExclude, 1, 0))
			if err != nil || answer.At.IsZero() {
				t.Fatalf("killed at write %d (done: %v): %+v, %v", write, done, answer, err)
			}
			out, spares := 0, 0
			for _, p := range w.under(nodesAt) {
				n := w.get(p)
				if at(n, "spec", "unschedulable") == true {
					out++
				}
				if taints, _ := at(n, "spec", "taints").([]any); len(taints) == 1 && text(taints[0].(obj), "key") == Spare {
					spares++
				}
			}
			where := w.where()
			if w.restarts() != 1 || out != 1 || spares != 1 || len(where) != 4 || where[1] == "n2" {
				t.Errorf("killed at write %d (done: %v): %d restarts, %d nodes out, %d spares left, pods on %v", write, done, w.restarts(), out, spares, where)
			}
		}
	}
}

// TestOthersChangeIt: who else writes the same objects is not overwritten, and does not keep an action from being done once.
func TestOthersChangeIt(t *testing.T) {
	w := newWorld(t, 5)
	w.jobSet(4)
	n := 0
	w.break_ = func(int) (bool, bool) { // somebody is faster, at every write
		if n++; n <= 4 {
			for _, p := range []string{jobSet, nodesAt + "/n3"} {
				o := w.objects[p]
				w.version++
				at(o, "metadata").(obj)["resourceVersion"] = fmt.Sprint(w.version)
				if p != jobSet {
					o["spec"] = obj{"taints": []any{obj{"key": "other", "effect": "PreferNoSchedule"}}}
				}
			}
		}
		return true, true
	}
	answer, err := act(t, w.actuator(nil), action("a1", remediation.ActionExclude, 2, 0))
	if err != nil || w.restarts() != 1 {
		t.Fatalf("%+v, %v; %d restarts", answer, err, w.restarts())
	}
	taints := fmt.Sprint(at(w.get(nodesAt+"/n3"), "spec", "taints"))
	if !strings.Contains(taints, "other") || !strings.Contains(taints, Suspect) || !w.runOn("n1", "n2", "n4", "n5") {
		t.Errorf("n3's taints: %s; pods on %v", taints, w.where())
	}
}

// TestItsOwnRestart: a JobSet that restarts by itself between decision and action is left alone.
func TestItsOwnRestart(t *testing.T) {
	w := newWorld(t, 4)
	w.jobSet(4)
	w.edit(jobSet, func(o obj) { o["status"] = obj{"restarts": 1} })
	answer, err := act(t, w.actuator(nil), action("a1", remediation.ActionRestart, 2, 0)) // pods of attempt 0 still run
	if err != nil || !answer.At.IsZero() || w.restarts() != 1 {
		t.Errorf("%+v, %v; %d restarts", answer, err, w.restarts())
	}
	for _, p := range w.under(podsAt) { // all are told to end, and none of the next attempt is there
		w.edit(p, func(o obj) {
			at(o, "metadata").(obj)["deletionTimestamp"] = time.Now().Add(time.Minute).UTC().Format(time.RFC3339)
		})
	}
	answer, err = act(t, w.actuator(nil), action("a2", remediation.ActionExclude, 2, 0))
	if err != nil || !answer.At.IsZero() || w.restarts() != 1 {
		t.Errorf("while its pods end: %+v, %v; %d restarts", answer, err, w.restarts())
	}
}

func TestExclude(t *testing.T) {
	w := newWorld(t, 5)
	w.jobSet(4)
	a := w.actuator(nil)
	inv, err := a.Inventory(t.Context(), "llm")
	if err != nil || inv.Units != 4 || inv.UnitOn(2, "") != "n3" || inv.UnitOn(2, "n4") != "n4" || inv.UnitOn(2, "elsewhere") != "" || inv.Unit(9) != "" {
		t.Fatalf("inventory: %d units, %v", inv.Units, err)
	}
	x := action("a1", remediation.ActionExclude, 2, 0)
	x.Unit = "n3"
	if answer, err := act(t, a, x); err != nil || !w.runOn("n1", "n2", "n4", "n5") {
		t.Fatalf("%+v, %v; pods on %v", answer, err, w.where())
	}
	n := w.get(nodesAt + "/n3")
	for _, want := range []string{`"incident":"i-a1"`, `"job":"training/llm"`, `"why":"suspect"`, `"until":`, `"by":`} {
		if got := text(n, "metadata", "annotations", Suspect); !strings.Contains(got, want) {
			t.Errorf("annotation %s lacks %s", got, want)
		}
	}
	if c := fmt.Sprint(at(n, "status", "conditions")); !strings.Contains(c, ConditionSuspect) || !strings.Contains(c, "Ready") {
		t.Errorf("conditions: %s", c)
	}
	events := map[string]int{}
	for _, p := range append(w.under("/api/v1/namespaces/default/events"), w.under("/api/v1/namespaces/"+ns+"/events")...) {
		events[text(w.get(p), "reason")]++
	}
	if events["LockstepTakenOut"] != 1 || events["LockstepAction"] != 1 || events["LockstepRestarted"] != 1 {
		t.Errorf("events: %v", events)
	}
	// The decision was about n3; by now the rank is elsewhere.
	x = action("a2", remediation.ActionExclude, 2, 1)
	x.Unit = "n3"
	if answer, err := act(t, a, x); err != nil || !strings.Contains(answer.Detail, "the rank is on n4 now") || at(w.get(nodesAt+"/n4"), "spec", "unschedulable") == true {
		t.Errorf("%+v, %v", answer, err)
	}
	// A node that its owner keeps in.
	w.edit(nodesAt+"/n1", func(o obj) { at(o, "metadata").(obj)["labels"] = obj{LabelExclude: "never"} })
	if answer, err := act(t, a, action("a3", remediation.ActionExclude, 0, 2)); err != nil || answer.At.IsZero() || at(w.get(nodesAt+"/n1"), "spec", "unschedulable") == true {
		t.Errorf("%+v, %v", answer, err)
	}
}

// TestMaxOut: however slowly one follows the other, no more than so many nodes are out for being blamed, but for those in
// whose place a spare works. The job is restarted all the same, in place.
func TestMaxOut(t *testing.T) {
	w := spareWorld(t)
	for i := range 4 {
		w.addNode(fmt.Sprintf("n%d", 7+i))
	}
	a := w.actuator(func(o *Options) { o.MaxOut = 1 })
	for i, c := range []struct {
		node, spare string
		out         bool
	}{{"n7", "", true}, {"n8", "", false}, {"n9", "n5", true}, {"n7", "", true}} {
		why, err := a.takeOut(t.Context(), c.node, note{Action: fmt.Sprint("a", i), Why: whySuspect, Spare: c.spare})
		if err != nil || (why == "") != c.out || w.out(c.node) != c.out {
			t.Errorf("%s with spare %q: %q, %v", c.node, c.spare, why, err)
		}
	}
	for _, n := range []string{"n1", "n2", "n3", "n4"} { // in no pool
		w.edit(nodesAt+"/"+n, func(o obj) { at(o, "metadata").(obj)["labels"] = obj{} })
	}
	answer, err := act(t, a, action("b", remediation.ActionExclude, 1, 0))
	if err != nil || answer.At.IsZero() || w.restarts() != 1 || w.out("n2") || !strings.Contains(answer.Detail, "at most 1 may be") {
		t.Errorf("%+v, %v; %d restarts, n2 out: %v", answer, err, w.restarts(), w.out("n2"))
	}
}

func TestPoolEmpty(t *testing.T) {
	for _, when := range []WhenEmpty{EmptyInPlace, EmptyWaits} {
		w := newWorld(t, 4)
		w.edit(nodesAt+"/n2", func(o obj) { at(o, "metadata").(obj)["labels"] = obj{LabelPool: "gpu"} })
		w.jobSet(4)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		go func() { // a new node comes once the job waits for one
			for ctx.Err() == nil && len(w.where()) != 3 {
				time.Sleep(time.Millisecond)
			}
			if when == EmptyWaits {
				w.addNode("n9")
				w.reconcile()
			}
		}()
		answer, err := w.actuator(func(o *Options) { o.WhenEmpty = when }).Act(ctx, action("a1", remediation.ActionExclude, 1, 0))
		cancel()
		where := w.where()[1]
		if err != nil || !strings.Contains(answer.Detail, "pool gpu has no spare") || (where == "n2") != (when == EmptyInPlace) {
			t.Errorf("%s: %+v, %v; rank 1 is on %s", when, answer, err, where)
		}
	}
}

func TestDeadNode(t *testing.T) {
	lost := func(id string) remediation.Action {
		x := action(id, remediation.ActionRestart, -1, 0)
		x.Node, x.Cause = "n3", names.ReasonNodeLost
		return x
	}
	t.Run("Proven", func(t *testing.T) {
		w := newWorld(t, 5)
		w.jobSet(4)
		w.kill("n3")
		f := &fencer{proof: remediation.Proof{Proven: true, How: "its power is off"}}
		answer, err := act(t, w.actuator(func(o *Options) { o.Fencer = f }), lost("a1"))
		if err != nil || w.restarts() != 1 || !w.runOn("n1", "n2", "n4", "n5") || !strings.Contains(answer.Detail, "its power is off") {
			t.Fatalf("%+v, %v; pods on %v", answer, err, w.where())
		}
		if len(f.asked) == 0 || f.asked[0] != "llm/0 on n3" {
			t.Errorf("fenced: %v", f.asked)
		}
	})
	for name, f := range map[string]*fencer{
		"NoProof":     {proof: remediation.Proof{How: "nobody answers"}},
		"NobodyAsked": {err: errors.New("the fence is down")},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 5)
			w.jobSet(4)
			w.kill("n3")
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			f.then = func(asked int) {
				if asked > 3 { // the remediator gives up
					cancel()
				}
			}
			_, err := w.actuator(func(o *Options) { o.Fencer = f }).Act(ctx, lost("a1"))
			f.then = nil
			if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "nothing proves") || !strings.Contains(err.Error(), "out-of-service") {
				t.Errorf("%v", err)
			}
			if len(w.under(podsAt)) != 1 { // the one that nobody may delete
				t.Errorf("pods: %v", w.under(podsAt))
			}
			told := 0
			for _, e := range w.under("/api/v1/namespaces/" + ns + "/events") {
				if o := w.get(e); text(o, "reason") == "LockstepWaitsForProof" && strings.Contains(text(o, "message"), "kubectl taint node n3") {
					told++
				}
			}
			if told != 1 {
				t.Errorf("what it waits for was told %d times", told)
			}
			// An operator knows.
			w.edit(nodesAt+"/n3", func(o obj) {
				at(o, "spec").(obj)["taints"] = append(at(o, "spec", "taints").([]any), obj{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"})
			})
			if answer, err := act(t, w.actuator(func(o *Options) { o.Fencer = f }), lost("a1")); err != nil || w.restarts() != 1 {
				t.Errorf("%+v, %v; %d restarts", answer, err, w.restarts())
			}
		})
	}
	t.Run("ByPolicy", func(t *testing.T) {
		w := newWorld(t, 5)
		w.jobSet(4)
		w.kill("n3")
		answer, err := act(t, w.actuator(func(o *Options) { o.UnfencedAfter = 50 * time.Millisecond }), lost("a1"))
		if err != nil || !strings.Contains(answer.Detail, "WITHOUT PROOF") {
			t.Errorf("%+v, %v", answer, err)
		}
	})
	// The master has lost the node's agent, its kubelet is heard: nothing is taken out or forced.
	t.Run("Heard", func(t *testing.T) {
		w := newWorld(t, 5)
		w.jobSet(4)
		beat := 0
		w.read = func(path string) { // at each look, however rarely this process runs
			if path == leaseAt+"n3" {
				beat++
				w.edit(path, func(o obj) { at(o, "spec").(obj)["renewTime"] = fmt.Sprint(beat) })
			}
		}
		answer, err := act(t, w.actuator(nil), lost("a1"))
		if err != nil || w.restarts() != 1 || at(w.get(nodesAt+"/n3"), "spec", "unschedulable") == true {
			t.Errorf("%+v, %v", answer, err)
		}
	})
}

// uncounted gives the world an owner of two pods that counts no attempts, plainJob or pyTorchJob.
func (w *world) uncounted(path string) {
	if path == plainJob {
		w.put(path, obj{"apiVersion": "batch/v1", "kind": "Job", "metadata": obj{"uid": "pj"}, "spec": obj{"parallelism": 2, "completions": 2}})
	} else {
		w.put(path, obj{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": obj{"uid": "pt"}, "spec": obj{"pytorchReplicaSpecs": obj{"Master": obj{"replicas": 1}, "Worker": obj{"replicas": 1}}}})
	}
	w.reconcile()
}

// TestSuspendAndResume: owners that count no attempts.
func TestSuspendAndResume(t *testing.T) {
	for _, c := range []struct{ path, name string }{{plainJob, "plain"}, {pyTorchJob, "torch"}} {
		w := newWorld(t, 3)
		w.uncounted(c.path)
		old := w.under(podsAt)
		x := action("a1", remediation.ActionExclude, 1, 0)
		x.Job = c.name
		if c.path == pyTorchJob {
			x.Rank = 11 // 8 ranks a pod
		}
		for range 2 {
			answer, err := act(t, w.actuator(nil), x)
			if err != nil || answer.At.IsZero() || w.where()[1] != "n3" {
				t.Fatalf("%s: %+v, %v; pods on %v", c.name, answer, err, w.where())
			}
		}
		if now := w.under(podsAt); len(now) != 2 || now[0] == old[0] || now[1] == old[1] {
			t.Errorf("%s: pods %v, before %v", c.name, now, old)
		}
	}
}

// TestAttemptIsOver: where nothing counts attempts, pods that have all been made since an incident was opened, or
// since it was decided about, are of another one. One that is left of those is enough to act.
func TestAttemptIsOver(t *testing.T) {
	for _, c := range []struct{ path, name string }{{plainJob, "plain"}, {pyTorchJob, "torch"}} {
		w := newWorld(t, 3)
		w.uncounted(c.path)
		made := time.Now().Add(-time.Minute).Truncate(time.Second)
		for i, pod := range w.under(podsAt) {
			w.edit(pod, func(o obj) {
				at(o, "metadata").(obj)["creationTimestamp"] = made.Add(time.Duration(i) * 20 * time.Second).UTC().Format(time.RFC3339)
			})
		}
		a := w.actuator(nil)
		inventory, err := a.Inventory(t.Context(), c.name)
		if err != nil || !inventory.Made.Equal(made.Add(20*time.Second)) {
			t.Fatalf("%s: made %v, want %v; %v", c.name, inventory.Made, made.Add(20*time.Second), err)
		}
		for i, x := range []struct {
			opened, made time.Time
			over         bool
		}{
			{made: made.Add(-time.Second), over: true},
			{opened: made.Add(-clocks - time.Second), over: true},
			{opened: made.Add(-clocks)}, // clocks may differ
			{made: made},                // one of them was there
			{opened: made.Add(30 * time.Second), made: inventory.Made},
		} {
			before := fmt.Sprint(w.under(podsAt))
			o := action(fmt.Sprint("a", i), remediation.ActionRestart, 0, 0)
			o.Job, o.Opened, o.Made = c.name, x.opened, x.made
			answer, err := act(t, a, o)
			if over := fmt.Sprint(w.under(podsAt)) == before; err != nil || over != x.over || over != answer.At.IsZero() {
				t.Fatalf("%s, %d: %+v, %v; pods %v, before %v", c.name, i, answer, err, w.under(podsAt), before)
			}
			for i, pod := range w.under(podsAt) {
				w.edit(pod, func(o obj) {
					at(o, "metadata").(obj)["creationTimestamp"] = made.Add(time.Duration(i) * 20 * time.Second).UTC().Format(time.RFC3339)
				})
			}
		}
	}
}

func TestWhoseJob(t *testing.T) {
	w := newWorld(t, 4)
	a := w.actuator(nil)
	gone := func(what, want string) {
		t.Helper()
		if _, err := a.Inventory(t.Context(), "llm"); !errors.Is(err, remediation.ErrGone) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", what, err, want)
		}
	}
	gone("nothing there", "no pods and no JobSet")
	w.kinds["jobsets"], w.kinds["pytorchjobs"] = true, true
	gone("a cluster without JobSet", "no pods and no JobSet")
	w.kinds = map[string]bool{}
	// Another tenant's pods that carry the job's label.
	w.jobSet(2)
	foreign := strings.Replace(podsAt, ns, "other", 1) + "/p"
	w.put(foreign, w.get(w.under(podsAt)[0]))
	if _, err := a.Inventory(t.Context(), "llm"); err != nil {
		t.Errorf("pods in a namespace that is not ours: %v", err)
	}
	w.put(podsAt+"/stray", obj{"apiVersion": "v1", "kind": "Pod", "metadata": obj{"labels": obj{LabelJob: "llm"}, "ownerReferences": controller("apps/v1", "ReplicaSet", "x", "u")}, "spec": obj{}})
	gone("a stranger's pod in ours", "ReplicaSet x")
	w.remove(podsAt + "/stray")
	w.edit(jobSet, func(o obj) {
		at(o, "status").(obj)["conditions"] = []any{obj{"type": "Failed", "status": "True", "message": "max restarts"}}
	})
	gone("ended", "has ended: Failed max restarts")
}

// TestAnotherTenantsLabel: pods that another tenant labels with a job's name in a namespace of the same
// remediator make the job nobody's, unless it is said where the job is.
func TestAnotherTenantsLabel(t *testing.T) {
	w := newWorld(t, 4)
	w.jobSet(2)
	w.put(strings.Replace(podsAt, ns, ns2, 1)+"/p", obj{
		"apiVersion": "v1", "kind": "Pod",
		"metadata": obj{"labels": obj{LabelJob: "llm"}, "ownerReferences": controller("apps/v1", "ReplicaSet", "x", "u")}, "spec": obj{},
	})
	both := func(o *Options) { o.Namespaces = []string{ns, ns2} }
	if _, err := w.actuator(both).Inventory(t.Context(), "llm"); !errors.Is(err, remediation.ErrGone) {
		t.Errorf("nobody says where it is: %v", err)
	}
	said := func(o *Options) { both(o); o.Jobs = map[string]string{"llm": ns} }
	if _, err := w.actuator(said).Inventory(t.Context(), "llm"); err != nil {
		t.Errorf("it is said where it is: %v", err)
	}
	if _, err := New(Options{Client: w.client(), Namespaces: []string{ns}, Jobs: map[string]string{"llm": ns2}}); err == nil {
		t.Error("a job in a namespace that is not ours is taken")
	}
}
