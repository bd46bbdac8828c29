package kubernetes

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/lockstep-ccl/lockstep/remediation"
)

// past is what the API server has stored, version after version: what was done for a
// moment only is in it, too, and what the remediator's journal does not say.
type past struct {
	c *campaign

	mu       sync.Mutex
	seen     bool
	restarts int         // of the job
	raised   []time.Time // by the remediator, on the calendar
	gone     map[string]bool
	blamed   []blame
	wrong    []string
}

type blame struct {
	at   time.Time
	node string
}

func newPast(c *campaign) *past { return &past{c: c, gone: map[string]bool{}} }

// job is a version of the job's owner: restarts in all, and those that its own controller made.
func (h *past) job(restarts, own int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	others := restarts - own
	if was := h.restarts; h.seen && others != was {
		if others != was+1 {
			h.wrong = append(h.wrong, fmt.Sprintf("the remediator has raised the job's restarts from %d to %d at once", was, others))
		}
		h.raised = append(h.raised, h.c.calendar.now())
	}
	h.seen, h.restarts = true, others
}

// node is a version of a node.
func (h *past) node(n *corev1.Node) {
	h.mu.Lock()
	defer h.mu.Unlock()
	m, _ := marked(n)
	gone := takenOut(n)
	if gone && !h.gone[n.Name] {
		if !h.c.isHurt(n.Name) {
			h.wrong = append(h.wrong, fmt.Sprintf("node %s, with which nothing is wrong, was taken out: %+v", n.Name, m))
		}
		if m.Why == "suspect" {
			h.blamed = append(h.blamed, blame{h.c.calendar.now(), n.Name})
		}
	}
	h.gone[n.Name] = gone
}

// check compares what was stored with what the breakers allow: an action that they have let through
// may be carried out later, so one more, in half their time.
func (h *past) check() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	b := remediation.DefaultConfig().Breaker
	for i, first := range h.raised {
		if n := len(slices.DeleteFunc(slices.Clone(h.raised[i:]), func(t time.Time) bool { return t.Sub(first) >= b.Window/2 })); n > b.Job+1 {
			h.wrong = append(h.wrong, fmt.Sprintf("%d restarts within %v: at most %d may be decided", n, b.Window/2, b.Job))
		}
	}
	for i, first := range h.blamed {
		nodes := map[string]bool{}
		for _, x := range h.blamed[i:] {
			if x.at.Sub(first.at) < b.Window/2 {
				nodes[x.node] = true
			}
		}
		if len(nodes) > b.Units+1 {
			h.wrong = append(h.wrong, fmt.Sprintf("%d nodes blamed and taken out within %v: at most %d may be", len(nodes), b.Window/2, b.Units))
		}
	}
	if len(h.wrong) > 0 {
		return fmt.Errorf("what the API server has stored:\n%s", strings.Join(h.wrong, "\n"))
	}
	return nil
}

// isHurt is whether something is wrong with a node, or was a moment ago.
func (c *campaign) isHurt(node string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	until, ok := c.hurt[node]
	return ok && (until.IsZero() || time.Now().Before(until))
}
