package kubernetes

import (
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
)

// TestCampaign is the campaign of `make test-kwok` in short: on this package's API server,
// a job of 12 nodes with 3 spares.
func TestCampaign(t *testing.T) {
	faults := 14
	if testing.Short() {
		faults = 8
	}
	b := newModelBed(t, 12, 3)
	c := newCampaign(t, b, 3, 12, "gpu")
	c.play(faults)
	c.stop()
	c.tell()
}

// modelBed is the world of the other tests, as a bed.
type modelBed struct {
	*world
	c *campaign
}

func newModelBed(t *testing.T, need, spares int) *modelBed {
	b := &modelBed{world: newWorld(t, 0)}
	for i := range need + spares {
		name := fmt.Sprintf("n%02d", i)
		b.addNode(name)
		b.edit(nodesAt+"/"+name, func(o obj) {
			at(o, "metadata").(obj)["labels"] = obj{LabelPool: "gpu"}
			if i >= need {
				at(o, "spec").(obj)["taints"] = []any{obj{"key": Spare, "effect": "NoSchedule"}}
			}
		})
	}
	for i := range 5 { // of others
		name := fmt.Sprintf("other%d", i)
		b.addNode(name)
		b.edit(nodesAt+"/"+name, func(o obj) { at(o, "spec").(obj)["taints"] = []any{obj{"key": "others", "effect": "NoSchedule"}} })
	}
	beat := 0
	b.read = func(path string) { // a kubelet that lives has always just renewed its lease
		if node, ok := cutPrefix(path, leaseAt); ok {
			b.mu.Lock()
			dead := b.dead[node]
			beat++
			n := beat
			b.mu.Unlock()
			if !dead && b.get(path) != nil {
				b.edit(path, func(o obj) { at(o, "spec").(obj)["renewTime"] = fmt.Sprint(n) })
			}
		}
	}
	b.jobSet(need)
	return b
}

func cutPrefix(s, prefix string) (string, bool) {
	if len(s) > len(prefix) && s[:len(prefix)] == prefix {
		return s[len(prefix):], true
	}
	return "", false
}

func (b *modelBed) cluster(c *campaign) {
	b.c, c.patience, c.again = c, 100*time.Millisecond, 300*time.Millisecond
	p, err := ParsePreflight([]byte(checkJob))
	c.must(err)
	c.r.config = &rest.Config{Host: b.ts.URL, QPS: -1}
	c.r.options = Options{Namespaces: []string{ns}, Namespace: "lockstep", Poll: 20 * time.Millisecond, Keep: 20 * time.Millisecond, ReturnAfter: time.Millisecond, Preflight: p, Logger: discard}
	c.r.identity = func(int) string { return "one" } // the next one need not wait for the lease's end
}

func (b *modelBed) nodes() map[string]*corev1.Node {
	m := map[string]*corev1.Node{}
	for _, path := range b.under(nodesAt) {
		n, err := nodeFrom(&unstructured.Unstructured{Object: b.get(path)})
		b.c.must(err)
		m[n.Name] = n
	}
	return m
}

func (b *modelBed) all() map[string]*corev1.Node { return b.nodes() }

func (b *modelBed) job() jobView {
	b.world.mu.Lock()
	defer b.world.mu.Unlock()
	js := b.get(jobSet)
	own, _ := at(js, "status", "restartsCountTowardsMax").(float64)
	v := jobView{attempt: b.restarts(), own: int(own), on: map[int]string{}}
	for _, path := range b.under(podsAt) {
		o := b.get(path)
		if o == nil {
			continue
		}
		node := text(o, "spec", "nodeName")
		try, _ := strconv.Atoi(text(o, "metadata", "labels", labelJobSetTry))
		switch {
		case text(o, "metadata", "deletionTimestamp") != "" || try < v.attempt:
			v.stale++
		case node == "":
			v.pending++
		case text(o, "status", "phase") == "Running":
			i, _ := strconv.Atoi(text(o, "metadata", "annotations", "index"))
			v.on[i] = node
		}
		if node != "" {
			v.placed = append(v.placed, node)
		}
	}
	slices.Sort(v.placed)
	return v
}

// end is a rank's process gone: its Job fails, and JobSet's controller restarts.
func (b *modelBed) end(int) {
	b.world.mu.Lock()
	b.edit(jobSet, func(o obj) {
		status := at(o, "status").(obj)
		own, _ := status["restartsCountTowardsMax"].(float64)
		restarts, _ := status["restarts"].(float64)
		status["restarts"], status["restartsCountTowardsMax"] = restarts+1, own+1
	})
	b.world.mu.Unlock()
	b.reconcile()
}

func (b *modelBed) power(node string, on bool) {
	if !on {
		b.kill(node)
		return
	}
	b.revive(node)
	b.reconcile()
}

func (b *modelBed) preflights(verdict func(string) bool) {
	jobs := "/apis/batch/v1/namespaces/lockstep/jobs"
	for _, path := range b.under(jobs) {
		o := b.get(path)
		if at(o, "status", "conditions") != nil {
			continue
		}
		outcome := map[bool]string{true: "Complete", false: "Failed"}[verdict(text(o, "metadata", "labels", LabelPreflight))]
		b.edit(path, func(o obj) { o["status"] = obj{"conditions": []any{obj{"type": outcome, "status": "True"}}} })
	}
}

func (b *modelBed) uncordon(node string) {
	b.edit(nodesAt+"/"+node, func(o obj) { delete(at(o, "spec").(obj), "unschedulable") })
}

func (b *modelBed) rest() { time.Sleep(20 * time.Millisecond) }
