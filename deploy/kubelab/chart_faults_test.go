package kubelab

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// kill ends a part, which comes back: by its kubelet, or after a while by the lab.
func (c *chart) kill(part, node string, away time.Duration) {
	if part == "apiserver" {
		_, _ = Try(filepath.Join(c.dir, "apiserver"), "kill")
		time.Sleep(away)
		_, _ = Try(filepath.Join(c.dir, "apiserver"), "start")
		for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
			if _, err := Try("kubectl", "get", "--raw", "/readyz"); err == nil {
				return
			}
		}
		return
	}
	for _, p := range c.processes(part) {
		if part != "agent" || p.node == node {
			_ = syscall.Kill(p.pid, syscall.SIGKILL) // it may just be gone with its node
		}
	}
}

// fault is broken from outside: by signals, quotas, switches.
type fault struct {
	name   string
	inject func(c *chart, p rank)
	// heal brings the node back, and waits for nothing.
	heal func(c *chart, node string)
	// class and reason of the verdict; no class where what happens is no fault of the job's.
	class, reason string
	moves         bool // the rank is elsewhere afterwards
	// unplugged nodes cannot end their ranks: these are dead, or stand still until they are back.
	unplugged bool
}

var faults = []fault{
	{
		name: "rank_killed", class: "noncommunication_hang", reason: "process_gone",
		inject: func(c *chart, p rank) { c.signal(p, syscall.SIGKILL) },
	},
	{
		name: "rank_stopped", class: "noncommunication_hang", reason: "process_stopped",
		inject: func(c *chart, p rank) { c.signal(p, syscall.SIGSTOP) },
	},
	{
		name: "node_slow", class: "noncommunication_slow", moves: true,
		inject: func(c *chart, p rank) { c.starve(p) },
		heal:   func(c *chart, node string) { c.Kubectl("uncordon", node) },
	},
	{
		name: "power_loss", class: "noncommunication_hang", reason: names.ReasonNodeLost, moves: true,
		inject: func(c *chart, p rank) { c.Node("kill", p.node) },
		heal:   func(c *chart, node string) { c.Node("start", node) },
	},
	{
		name: "node_cut", class: "noncommunication_hang", reason: names.ReasonNodeLost, moves: true,
		inject: func(c *chart, p rank) { c.Node("cut", p.node) },
		heal:   func(c *chart, node string) { c.Node("heal", node) },
	},
	{
		name: "node_frozen", class: "noncommunication_hang", reason: names.ReasonNodeLost, moves: true, unplugged: true,
		inject: func(c *chart, p rank) { c.Node("freeze", p.node) },
		heal:   func(c *chart, node string) { c.Node("thaw", node) },
	},
	{ // its ranks run on, until Kubernetes takes the node for dead
		name: "kubelet_dead", moves: true,
		inject: func(c *chart, p rank) { c.Node("kubelet", p.node) },
		heal: func(c *chart, node string) {
			c.Node("kill", node)
			c.Node("start", node)
		},
	},
}

// outcome is one run of a fault: times since it, 0 for what was not seen.
type outcome struct {
	node                            string
	verdict, alert, action, running time.Duration
	ended                           time.Duration // when the last process of the old attempt had ended
	said                            string        // the verdict
	wrong                           []string
}

func (o outcome) String() string {
	s := fmt.Sprintf("%s: verdict %.1f (%s), alert %.1f, action %.1f, running %.1f, old attempt ended %.1f s", o.node, o.verdict.Seconds(), o.said, o.alert.Seconds(), o.action.Seconds(), o.running.Seconds(), o.ended.Seconds())
	if len(o.wrong) > 0 {
		s += "; WRONG: " + strings.Join(o.wrong, "; ")
	}
	return s
}

func summary(name string, all []outcome) string {
	right := 0
	for _, o := range all {
		if len(o.wrong) == 0 {
			right++
		}
	}
	col := func(of func(outcome) time.Duration) string {
		var l []time.Duration
		for _, o := range all {
			if d := of(o); d > 0 {
				l = append(l, d)
			}
		}
		if len(l) == 0 {
			return "-"
		}
		slices.Sort(l)
		return fmt.Sprintf("%.1f, %.1f", l[len(l)/2].Seconds(), l[len(l)-1].Seconds())
	}
	return fmt.Sprintf("%-18s %4d %5d %12s %12s %12s %12s %10s", name, len(all), right,
		col(func(o outcome) time.Duration { return o.verdict }), col(func(o outcome) time.Duration { return o.alert }),
		col(func(o outcome) time.Duration { return o.action }), col(func(o outcome) time.Duration { return o.running }), col(func(o outcome) time.Duration { return o.ended }))
}

// play breaks a rank's node, does besides what disturbs that, and waits until the job runs again and
// all nodes are back.
func (c *chart) play(f fault, victim int, disturb func()) (o outcome) {
	c.t.Helper()
	was, _ := c.attempt()
	before := c.steps()
	c.wait("the job runs undisturbed", func() bool { return len(c.ranks(was)) == world && c.steps() > before+int(settle/(50*time.Millisecond)) })
	old := c.ranks(0)
	if len(old) != world {
		c.t.Fatalf("%s: more than the job's ranks live: %+v", f.name, old)
	}
	p := old[victim]
	o.node = p.node
	at := time.Now()
	f.inject(c, p)
	var disturbed sync.WaitGroup
	if disturb != nil {
		disturbed.Go(disturb)
	}
	since := func() time.Duration { return time.Since(at) }
	wrong := func(format string, args ...any) { o.wrong = append(o.wrong, fmt.Sprintf(format, args...)) }
	var incident string
	var resumed int
	rebooted := false
	for o.running == 0 {
		if since() > within {
			wrong("it does not run again after %v: %s", within, c.state())
			c.t.Fatalf("%s: %v", f.name, o)
		}
		if o.verdict == 0 {
			if v := c.verdict(was); v != nil {
				o.verdict, incident = since(), v[names.LabelIncident]
				o.said = fmt.Sprintf("%s, %s, %s on %s", v[names.LabelClass], v[names.LabelReason], v[names.LabelCulprit], v[names.LabelNode])
				isTrue := v[names.LabelClass] == f.class && (f.reason == "" || v[names.LabelReason] == f.reason) && (v[names.LabelNode] == p.node || v[names.LabelCulprit] == p.node)
				if !isTrue && !rebooted { // which is another fault
					wrong("the verdict is %s", o.said)
				}
			}
		} else if o.alert == 0 && c.alerted(incident) {
			o.alert = since()
		}
		now, when := c.attempt()
		if f.class == "" && disturb != nil && !rebooted && now == was && since() > within/2 && c.steps() > before+int(within/4/(50*time.Millisecond)) {
			// Kubernetes forgets to delete the pods when its API server is away at that moment. Nothing is
			// wrong with the job, until somebody reboots the node.
			rebooted = true
			c.t.Logf("%s: %s: its pods were not deleted, and the job has gone on; the node is rebooted", f.name, p.node)
			f.heal(c, p.node)
		}
		if now > was && o.action == 0 {
			o.action = when.Sub(at)
		}
		living := c.ranks(0)
		if o.ended == 0 && !slices.ContainsFunc(living, func(p rank) bool { return p.attempt <= was }) {
			o.ended = since()
		}
		if now > was && len(c.ranks(now)) == world {
			switch n := c.steps(); {
			case resumed == 0:
				resumed = n
			case n > resumed+1: // one may have been under way when the log was read
				o.running = since()
			}
		}
		time.Sleep(50 * time.Millisecond)
	}
	c.t.Logf("%s: %v", f.name, o)
	disturbed.Wait()
	now, _ := c.attempt()
	if now != was+1 {
		wrong("attempt %d led to %d", was, now)
	}
	if f.class != "" && o.verdict == 0 && disturb == nil {
		wrong("no verdict")
	}
	for _, r := range c.ranks(0) {
		if r.attempt <= was && !(f.unplugged && r.node == p.node) {
			wrong("rank %d of attempt %d lives on %s beside the next attempt", r.rank, r.attempt, r.node)
		}
	}
	moved := !slices.ContainsFunc(c.ranks(now), func(r rank) bool { return r.node == p.node })
	if moved != f.moves && !rebooted {
		wrong("the job has left its node: %v, and should: %v", moved, f.moves)
	}
	for n := range strings.FieldsSeq(c.Kubectl("get", "nodes", "-l", "lockstep.dev/suspect", "-o", "jsonpath={.items[*].metadata.name}")) {
		if !f.moves || n != p.node {
			wrong("node %s is out, with which nothing is wrong", n)
		}
	}
	if f.heal != nil && !rebooted {
		f.heal(c, p.node)
	}
	c.wait("all nodes are back, one of them as the spare", func() bool {
		nodes := c.Kubectl("get", "nodes", "--no-headers")
		spares := c.Kubectl("get", "nodes", "-o", `jsonpath={.items[*].spec.taints[?(@.key=="lockstep.dev/spare")].effect}`)
		return strings.Count(nodes, " Ready ") == 6 && !strings.Contains(nodes, "SchedulingDisabled") && len(strings.Fields(spares)) == 1 && c.agents() == 6
	})
	c.wait("nothing of the old attempt lives", func() bool { return !slices.ContainsFunc(c.ranks(0), func(r rank) bool { return r.attempt <= was }) })
	return o
}
