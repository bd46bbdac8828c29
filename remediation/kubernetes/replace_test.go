package kubernetes

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"
)

// spareWorld has six nodes of one pool, of which the last two stand by.
func spareWorld(t *testing.T) *world {
	w := newWorld(t, 6)
	for i := range 6 {
		w.edit(fmt.Sprintf("%s/n%d", nodesAt, i+1), func(o obj) { at(o, "metadata").(obj)["labels"] = obj{LabelPool: "gpu"} })
	}
	for _, n := range []string{"n5", "n6"} {
		w.edit(nodesAt+"/"+n, func(o obj) { at(o, "spec").(obj)["taints"] = []any{obj{"key": Spare, "effect": "NoSchedule"}} })
	}
	w.jobSet(4)
	return w
}

func (w *world) sparesLeft() (names []string) {
	for _, p := range w.under(nodesAt) {
		if strings.Contains(fmt.Sprint(at(w.get(p), "spec", "taints")), Spare) {
			names = append(names, text(w.get(p), "metadata", "name"))
		}
	}
	return names
}

// TestReplace: a node that is found silent while its pods do not start or end gets a spare
// too, one, whatever write the remediator dies at; and it returns as the spare.
func TestReplace(t *testing.T) {
	for write := range 5 {
		for _, done := range []bool{false, true} {
			w := spareWorld(t)
			a := w.actuator(nil)
			if why, err := a.takeOut(t.Context(), "n1", note{Action: "a1", Job: "training/llm", Why: whySilent}); why != "" || err != nil {
				t.Fatal(why, err)
			}
			first := w.apiserver.writes
			w.break_ = func(n int) (bool, bool) {
				if n-first < write {
					return true, true
				}
				return done && n-first == write, false
			}
			_ = a.replace(t.Context(), "n1")
			w.apiserver.mu.Lock()
			w.break_ = nil
			w.apiserver.mu.Unlock()
			a = w.actuator(nil)
			for range 2 {
				if err := a.replace(t.Context(), "n1"); err != nil {
					t.Fatal(err)
				}
			}
			n, err := a.node(t.Context(), "n1")
			if err != nil {
				t.Fatal(err)
			}
			if out, _ := noteOf(n); out.Spare != "n5" || fmt.Sprint(w.sparesLeft()) != "[n6]" {
				t.Errorf("killed at write %d (done: %v): spare %q, left %v", write, done, out.Spare, w.sparesLeft())
			}
			// Another node that the same action has found silent gets another one.
			if why, err := a.takeOut(t.Context(), "n2", note{Action: "a1", Job: "training/llm", Why: whySilent}); why != "" || err != nil {
				t.Fatal(why, err)
			}
			if err := a.replace(t.Context(), "n2"); err != nil || len(w.sparesLeft()) != 0 {
				t.Errorf("killed at write %d (done: %v): %v, left %v", write, done, err, w.sparesLeft())
			}
		}
	}
}

// TestReplacedAndNotWrittenDown: the spare was opened, and the node that is out does not
// say so when it returns: it is the spare all the same, or the pool would have one less.
func TestReplacedAndNotWrittenDown(t *testing.T) {
	w := spareWorld(t)
	a := w.actuator(nil)
	out := note{Action: "a1", Job: "training/llm", Why: whySilent}
	if why, err := a.takeOut(t.Context(), "n1", out); why != "" || err != nil {
		t.Fatal(why, err)
	}
	if _, err := a.takeSpare(t.Context(), "gpu", used{Action: "a1", Job: out.Job, For: "n1"}); err != nil {
		t.Fatal(err)
	}
	n, err := a.node(t.Context(), "n1")
	if err != nil {
		t.Fatal(err)
	}
	if err := a.bringBack(t.Context(), n, out, "heard again", false); err != nil || fmt.Sprint(w.sparesLeft()) != "[n1 n6]" {
		t.Errorf("%v, left %v", err, w.sparesLeft())
	}
}

// TestReplaceAtOnce: an action and the keeper want a spare in place of the same node at the same
// time, also two processes: they open one.
func TestReplaceAtOnce(t *testing.T) {
	for range 20 {
		w := spareWorld(t)
		a := w.actuator(nil)
		if why, err := a.takeOut(t.Context(), "n1", note{Action: "a1", Job: "training/llm", Why: whySilent}); why != "" || err != nil {
			t.Fatal(why, err)
		}
		var all sync.WaitGroup
		for _, a := range []*Actuator{a, a, w.actuator(nil)} {
			all.Go(func() {
				if err := a.replace(t.Context(), "n1"); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		if left := w.sparesLeft(); len(left) != 1 {
			t.Fatalf("left: %v", left)
		}
	}
}

// TestKeeperReplaces: a node that went out when no spare was left gets the next one.
func TestKeeperReplaces(t *testing.T) {
	w := spareWorld(t)
	for _, n := range []string{"n5", "n6"} {
		w.edit(nodesAt+"/"+n, func(o obj) { at(o, "spec").(obj)["unschedulable"] = true })
	}
	a := w.actuator(nil)
	if why, err := a.takeOut(t.Context(), "n1", note{Action: "a1", Job: "training/llm", Why: whySuspect}); why != "" || err != nil {
		t.Fatal(why, err)
	}
	looks := 0
	keep(t, a, func() bool {
		if looks++; looks == 20 {
			w.edit(nodesAt+"/n6", func(o obj) { delete(at(o, "spec").(obj), "unschedulable") })
		}
		return fmt.Sprint(w.sparesLeft()) == "[n5]"
	})
}

// TestManyUnstarted: where pods of very many nodes do not start, as when the control plane
// is slow, each look asks about some of them, and the looks come to all.
func TestManyUnstarted(t *testing.T) {
	const nodes = 3*maxSilent - 2
	w := newWorld(t, nodes)
	w.jobSet(4)
	a := w.actuator(nil)
	j, err := a.find(t.Context(), "llm")
	if err != nil {
		t.Fatal(err)
	}
	var fresh []*pod
	for i := range nodes {
		fresh = append(fresh, &pod{name: fmt.Sprint("p", i), node: fmt.Sprintf("n%d", i+1), created: time.Now().Add(-time.Minute)})
	}
	asked := map[string]int{}
	w.read = func(path string) {
		if strings.HasPrefix(path, leaseAt) {
			asked[path]++
		}
	}
	r := &record{ID: "a1"}
	for look := range 3 {
		before := len(asked)
		if _, err := a.unblock(t.Context(), j, r, nil, fresh); err != nil {
			t.Fatal(err)
		}
		if n := len(asked) - before; n > maxSilent {
			t.Errorf("look %d asked about %d nodes, at most %d", look, n, maxSilent)
		}
	}
	if len(asked) != nodes {
		t.Errorf("three looks asked about %d of %d nodes", len(asked), nodes)
	}
}
