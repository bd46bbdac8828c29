package kubernetes

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// The second set of books has nothing of the actuator's: neither its functions nor its names of taints
// and annotations, which are written here as docs/kubernetes.md gives them. An unused function of the
// actuator's, wrong, would else be wrong twice and agree.

// mark is what a node carries that is out, read as a person would.
type mark struct {
	Why      string
	Action   string
	Reason   string
	Until    time.Time
	Cordoned bool
}

func marked(n *corev1.Node) (m mark, ok bool) {
	text := n.Annotations["lockstep.dev/suspect"]
	return m, text != "" && json.Unmarshal([]byte(text), &m) == nil
}

func tainted(n *corev1.Node, key string) bool {
	return slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == key })
}

func standsBy(n *corev1.Node) bool { return tainted(n, "lockstep.dev/spare") }
func takenOut(n *corev1.Node) bool { return tainted(n, "lockstep.dev/suspect") }
func poolName(n *corev1.Node) string {
	return n.Labels["lockstep.dev/pool"]
}

// place is where a node stands. It is in one place at a time.
type place string

const (
	active place = "active"
	spare  place = "spare"
	out    place = "out"
)

// books say where each node of the pool has to be, by what was decided about it.
type books struct {
	need  int
	at    map[string]place
	since map[string]time.Time
	why   map[string]string
	waits map[string]bool // nodes that are out, and have no other in their place
}

func openBooks(need int, nodes, used []string, now time.Time) (*books, error) {
	b := &books{need: need, at: map[string]place{}, since: map[string]time.Time{}, why: map[string]string{}, waits: map[string]bool{}}
	for _, n := range nodes {
		b.move(n, spare, now, "at the start")
	}
	return b, b.assign(used, now)
}

func (b *books) move(node string, to place, now time.Time, why string) {
	b.at[node], b.since[node], b.why[node] = to, now, why
}

func (b *books) in(p place) (nodes []string) {
	for _, n := range slices.Sorted(maps.Keys(b.at)) {
		if b.at[n] == p {
			nodes = append(nodes, n)
		}
	}
	return nodes
}

func (b *books) count(p place) int { return len(b.in(p)) }

// assign says on which nodes the job runs in truth: which of two equal nodes is used is the
// scheduler's choice. That none of them is out is not.
func (b *books) assign(used []string, now time.Time) error {
	in := map[string]bool{}
	for _, n := range used {
		switch b.at[n] {
		case out:
			return fmt.Errorf("the job runs on %s, which is out since %s: %s", n, b.since[n].Format(time.DateTime), b.why[n])
		case "":
			return fmt.Errorf("the job runs on %s, which is none of the pool's", n)
		}
		in[n] = true
	}
	if len(in) > b.need {
		return fmt.Errorf("the job runs on %d nodes, and needs %d", len(in), b.need)
	}
	for n, p := range b.at {
		switch {
		case in[n] && p == spare:
			b.move(n, active, now, "used")
		case !in[n] && p == active:
			b.move(n, spare, now, "not used")
		}
	}
	return nil
}

// take is a node that is to be out, and says what comes of it. Without a spare a node that is only
// slow stays in.
func (b *books) take(node, why string, silent bool, now time.Time) string {
	free := b.in(spare)
	switch {
	case b.at[node] == out:
		return "out already"
	case b.at[node] == spare:
		b.move(node, out, now, why)
		return "a spare less"
	case len(free) > 0:
		b.move(node, out, now, why)
		b.move(free[0], active, now, "in place of "+node)
		return "a spare in its place"
	case silent:
		b.move(node, out, now, why)
		b.waits[node] = true
		return "no spare: the job waits"
	}
	return "no spare: in place"
}

// back is a node that has returned: it stands by, or works where one is missing.
func (b *books) back(node string, now time.Time) {
	delete(b.waits, node)
	b.move(node, spare, now, "returned")
	b.serve(now)
}

// serve gives spares to who waits for one.
func (b *books) serve(now time.Time) {
	for free := b.in(spare); len(free) > 0 && b.count(active) < b.need; free = free[1:] {
		b.move(free[0], active, now, "one was missing")
		for _, n := range slices.Sorted(maps.Keys(b.waits)) {
			delete(b.waits, n)
			break
		}
	}
}
