package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/lockstep-ccl/lockstep/bench/zoo"
)

// Classes of verdicts, and what a fault may be that need not have one.
const (
	commHang  = "communication_hang"
	otherHang = "noncommunication_hang"
	commSlow  = "communication_slow"
	otherSlow = "noncommunication_slow"
	healthy   = "healthy"
)

// want is what has to come of a fault.
type want int

const (
	verdict want = iota // a confirmed verdict, class and culprit right
	goesOn              // the job goes on, bit-equal; the right verdict or none
	costly              // a verdict where the job has lost at least a tenth of its speed, else as goesOn
	nothing             // no confirmed verdict
)

// fault is a row of the table: what is done, and what is true then.
type fault struct {
	name  string
	class []string // the classes that are right, the fault's own first
	want  want
	needs need
	warm  time.Duration // of training before it
	limit time.Duration // for a verdict
	fits  func(*zoo.Job) bool
	// uneven faults hit some steps and not others: their cost is that of the mean step, not
	// of the median one.
	uneven bool
	asked  bool // made only where it is asked for by name
	// inject does it and says who is to blame.
	inject func(context.Context, *run) (*truth, error)
}

// need is what the machine and the run must offer.
type need int

const (
	needCgroup need = 1 << iota
	needPods        // ranks with addresses of their own
	needSpin        // ranks that use the CPU
)

// truth is whom a right verdict names.
type truth struct {
	text  string
	names []string      // culprits in the master's words; any of them will do
	parts []string      // of the culprit, so that they may stand behind it: the ranks of a slow node
	also  []string      // of a second fault at the same time; these have to be named as well
	class []string      // of the second
	ends  []int         // of a path
	undo  func() error  // of a fault that ends by itself
	last  time.Duration // until then
}

const (
	quickWarm = 2500 * time.Millisecond
	slowWarm  = 6 * time.Second
	hangLimit = 12 * time.Second
	slowLimit = 15 * time.Second
	// An outage shorter than 30 s costs a job time and no more, so some links are only
	// confirmed as dead when that is over.
	linkLimit = 45 * time.Second
)

var hangs = []string{otherHang}

// table is the one definition of the faults.
var table = []fault{
	{name: "none", class: []string{healthy}, want: nothing, warm: quickWarm, limit: 14 * time.Second, inject: func(context.Context, *run) (*truth, error) {
		return &truth{text: "nothing is wrong"}, nil
	}},
	{name: "none_load", class: []string{healthy}, want: nothing, warm: quickWarm, limit: 14 * time.Second, inject: loadCPU},

	{name: "kill9", class: hangs, warm: quickWarm, limit: hangLimit, inject: onRank("killed with SIGKILL", func(r *run, k int) error { return r.c.signalRank(k, syscall.SIGKILL) })},
	{name: "exit0", class: hangs, warm: quickWarm, limit: hangLimit, inject: ordered("exits with status 0", zoo.Order{End: zoo.EndExit})},
	{name: "exit3", class: hangs, warm: quickWarm, limit: hangLimit, inject: ordered("exits with status 3", zoo.Order{End: zoo.EndExit, Code: 3})},
	{name: "panic", class: hangs, warm: quickWarm, limit: hangLimit, inject: ordered("panics", zoo.Order{End: zoo.EndPanic})},
	{name: "sigterm", class: hangs, warm: quickWarm, limit: hangLimit, inject: onRank("gets SIGTERM", func(r *run, k int) error { return r.c.signalRank(k, syscall.SIGTERM) })},
	{name: "stop", class: hangs, warm: quickWarm, limit: hangLimit, inject: onRank("stopped with SIGSTOP", func(r *run, k int) error { return r.c.signalRank(k, syscall.SIGSTOP) })},
	{name: "stuck", class: hangs, warm: slowWarm, limit: 45 * time.Second, inject: ordered("sleeps outside of collectives for good", zoo.Order{End: zoo.EndStuck})},

	{name: "node_cut", class: []string{otherHang, commHang}, warm: quickWarm, limit: linkLimit, inject: onNode("loses its network", func(r *run, n int) error {
		return r.c.cut(n)
	})},
	{name: "node_down", class: []string{otherHang, commHang}, warm: quickWarm, limit: 16 * time.Second, inject: onNode("is killed, with its agent", func(r *run, n int) error {
		r.c.wire.set(func(s *ruleset) { s.node[n] = rule{drop: 1} }) // its kernel says nothing either
		return r.c.killNode(n)
	})},

	{name: "agent_kill", class: []string{healthy}, want: nothing, warm: quickWarm, limit: 8 * time.Second, inject: onAgent("killed", false, (*cluster).kill)},
	{name: "agent_restart", class: []string{healthy}, want: nothing, warm: quickWarm, limit: 9 * time.Second, inject: onAgent("killed and started again", true, (*cluster).kill)},
	{name: "agent_pause", class: []string{healthy}, want: nothing, warm: quickWarm, limit: 9 * time.Second, inject: pauseAgent},
	{name: "master_restart", class: []string{healthy}, want: nothing, warm: quickWarm, limit: 9 * time.Second, inject: restartMaster},
	{name: "stop_master_restart", class: hangs, warm: quickWarm, limit: 16 * time.Second, inject: func(ctx context.Context, r *run) (*truth, error) {
		k := r.victim()
		if err := r.c.signalRank(k, syscall.SIGSTOP); err != nil {
			return nil, err
		}
		if _, err := restartMaster(ctx, r); err != nil {
			return nil, err
		}
		return r.blame(k, "stopped with SIGSTOP, then the master restarts"), nil
	}},

	{name: "links_away1s", asked: true, class: []string{commHang, commSlow}, want: goesOn, warm: quickWarm, limit: 8 * time.Second, inject: away(time.Second)},
	{name: "links_away3s", asked: true, class: []string{commHang, commSlow}, want: goesOn, warm: quickWarm, limit: 10 * time.Second, inject: away(3 * time.Second)},
	{name: "links_away10s", asked: true, class: []string{commHang, otherHang}, want: goesOn, warm: quickWarm, limit: 18 * time.Second, inject: away(10 * time.Second)},
	{name: "links_away25s", asked: true, class: []string{commHang, otherHang}, want: goesOn, warm: quickWarm, limit: 34 * time.Second, inject: away(25 * time.Second)},
	{name: "links_away60s", asked: true, class: []string{commHang, otherHang}, warm: quickWarm, limit: linkLimit, inject: away(time.Minute)},
	{name: "links_loss1", asked: true, class: []string{commSlow}, want: goesOn, warm: slowWarm, limit: slowLimit, inject: lossy(0.01)},
	{name: "links_loss5", asked: true, class: []string{commSlow}, want: goesOn, warm: slowWarm, limit: slowLimit, inject: lossy(0.05)},
	{name: "links_loss20", asked: true, class: []string{commSlow, commHang}, want: goesOn, warm: slowWarm, limit: 30 * time.Second, inject: lossy(0.2)},

	{name: "pair_outage3s", class: []string{commHang, commSlow}, want: goesOn, needs: needPods, warm: quickWarm, limit: 9 * time.Second, inject: onPair("delivers nothing for 3 s", 3*time.Second, rule{drop: 1}, true)},
	{name: "pair_cut", class: []string{commHang}, needs: needPods, warm: quickWarm, limit: linkLimit, inject: onPair("delivers nothing", 0, rule{drop: 1}, true)},
	{name: "pair_cut_oneway", class: []string{commHang}, needs: needPods, warm: quickWarm, limit: linkLimit, inject: onPair("delivers nothing one way", 0, rule{drop: 1}, false)},
	{name: "pair_loss5", class: []string{commSlow}, want: goesOn, needs: needPods, warm: slowWarm, limit: slowLimit, inject: onPair("loses 5 % of its packets", 0, rule{drop: 0.05}, true)},
	{name: "pair_delay", class: []string{commSlow}, want: costly, needs: needPods, warm: slowWarm, limit: slowLimit, inject: onPair("takes 25 ms longer one way", 0, rule{delay: 25 * time.Millisecond}, false)},
	{name: "pair_slow", class: []string{commSlow}, want: costly, needs: needPods, warm: slowWarm, limit: slowLimit, inject: slowPair},
	{name: "node_delay", class: []string{commSlow}, want: costly, warm: slowWarm, limit: slowLimit, inject: onLinks("has links that take 15 ms longer", func(r *run, n int) error {
		r.c.wire.set(func(s *ruleset) { s.node[n] = rule{delay: 15 * time.Millisecond} })
		return nil
	})},
	{name: "node_rate", class: []string{commSlow}, want: costly, warm: slowWarm, limit: slowLimit, inject: onLinks("has links at their former mean rate", func(r *run, n int) error {
		rate := max(float64(r.nodeRate(n)), 20e3)
		r.c.wire.set(func(s *ruleset) { s.node[n] = rule{rate: rate} })
		return nil
	})},

	{name: "starve8", class: []string{otherSlow}, want: costly, needs: needCgroup | needSpin, warm: slowWarm, limit: slowLimit, fits: few, inject: starve(0.08)},
	{name: "starve25", class: []string{otherSlow}, want: costly, needs: needCgroup | needSpin, warm: slowWarm, limit: slowLimit, fits: few, inject: starve(0.25)},
	{name: "slow1.15", class: []string{otherSlow}, want: costly, warm: slowWarm, limit: slowLimit, fits: equal, inject: slower(1.15)},
	{name: "slow1.4", class: []string{otherSlow}, want: costly, warm: slowWarm, limit: slowLimit, inject: slower(1.4)},
	{name: "slow1.7", class: []string{otherSlow}, want: costly, warm: slowWarm, limit: slowLimit, inject: slower(1.7)},
	{name: "slow2", class: []string{otherSlow}, want: costly, warm: slowWarm, limit: slowLimit, inject: slower(2)},
	{name: "node_slow1.5", class: []string{otherSlow}, want: costly, warm: slowWarm, limit: slowLimit, inject: onNode("computes 1.5 times as long", func(r *run, n int) error {
		for k := range r.c.job.Ranks {
			if r.c.job.Node(k) == n {
				if err := r.order(k, zoo.Order{Factor: 1.5}); err != nil {
					return err
				}
			}
		}
		return nil
	})},
	{name: "stutter", uneven: true, class: []string{otherSlow}, want: costly, warm: slowWarm, limit: slowLimit, inject: stutter},
	{name: "pauses", uneven: true, class: []string{otherSlow}, want: costly, warm: slowWarm, limit: 20 * time.Second, inject: func(_ context.Context, r *run) (*truth, error) {
		k := r.victim()
		d := r.c.job.Step * 3 / 2
		return r.blame(k, fmt.Sprintf("pauses for %v in every third step", d)), r.order(k, zoo.Order{Pause: d, PauseEvery: 3})
	}},
	{name: "drift", uneven: true, class: []string{otherSlow}, want: costly, warm: slowWarm, limit: 25 * time.Second, inject: ordered("gets 2 % slower each step", zoo.Order{Drift: 0.02})},
	{name: "two", class: []string{otherSlow}, needs: needPods, warm: slowWarm, limit: 20 * time.Second, inject: func(ctx context.Context, r *run) (*truth, error) {
		t, err := onPair("takes 40 ms longer one way", 0, rule{delay: 40 * time.Millisecond}, false)(ctx, r)
		if err != nil {
			return nil, err
		}
		k := r.victim()
		for slices.Contains(t.ends, k) { // else one explains the other
			k = r.victim()
		}
		both := r.blame(k, "computes 2 times as long, and "+t.text)
		both.also, both.class = t.names, []string{commSlow}
		return both, r.order(k, zoo.Order{Factor: 2})
	}},

	{name: "bug_swap", class: hangs, warm: quickWarm, limit: hangLimit, fits: has(zoo.BugSwap), inject: ordered("calls two communicators in the other order", zoo.Order{Bug: zoo.BugSwap})},
	{name: "bug_skip", class: hangs, warm: quickWarm, limit: hangLimit, fits: has(zoo.BugSkip), inject: ordered("leaves a collective out", zoo.Order{Bug: zoo.BugSkip})},
	{name: "bug_mismatch", class: hangs, warm: quickWarm, limit: hangLimit, fits: has(zoo.BugMismatch), inject: ordered("calls another operation than the others", zoo.Order{Bug: zoo.BugMismatch})},
}

// undisturbed reports whether neither the job nor what watches it is touched.
func (f *fault) undisturbed() bool { return strings.HasPrefix(f.name, "none") }

func has(bug string) func(*zoo.Job) bool {
	return func(j *zoo.Job) bool { return slices.Contains(j.Bugs, bug) }
}

// few ranks use the CPU at once without being the fault themselves.
func few(j *zoo.Job) bool { return j.Ranks <= 5 }

func equal(j *zoo.Job) bool { return !j.Uneven }

// blame is the truth about a rank: on a node of its own, the node says the same.
func (r *run) blame(k int, text string) *truth {
	t := &truth{text: fmt.Sprintf("rank %d %s", k, text), names: []string{fmt.Sprintf("rank %d", k)}}
	if j := r.c.job; j.Ranks == j.Nodes {
		t.names = append(t.names, "node "+nodeName(j.Node(k)))
	}
	return t
}

func (r *run) order(k int, o zoo.Order) error { return zoo.Give(filepath.Join(r.c.dir, "job"), k, o) }

func (r *run) victim() int { return r.rand.IntN(r.c.job.Ranks) }

func onRank(text string, do func(*run, int) error) func(context.Context, *run) (*truth, error) {
	return func(_ context.Context, r *run) (*truth, error) {
		k := r.victim()
		return r.blame(k, text), do(r, k)
	}
}

func ordered(text string, o zoo.Order) func(context.Context, *run) (*truth, error) {
	return onRank(text, func(r *run, k int) error { return r.order(k, o) })
}

func slower(f float64) func(context.Context, *run) (*truth, error) {
	return ordered(fmt.Sprintf("computes %g times as long", f), zoo.Order{Factor: f})
}

func onNode(text string, do func(*run, int) error) func(context.Context, *run) (*truth, error) {
	return func(_ context.Context, r *run) (*truth, error) {
		n := r.rand.IntN(r.c.job.Nodes)
		t := &truth{text: fmt.Sprintf("%s %s", nodeName(n), text), names: []string{"node " + nodeName(n)}}
		for k := range r.c.job.Ranks {
			if r.c.job.Node(k) == n {
				t.parts = append(t.parts, fmt.Sprintf("rank %d", k))
			}
		}
		if j := r.c.job; j.Ranks == j.Nodes {
			t.names = append(t.names, fmt.Sprintf("rank %d", n), fmt.Sprintf("rank %d → all", n), fmt.Sprintf("all → rank %d", n))
		}
		return t, do(r, n)
	}
}

// onLinks is as onNode; of two nodes both have the same links, and are right. So are these links
// themselves, where they are all that is named: which of the two it is cannot be told. Nor can a node
// whose only rank has one peer be told from the path between them.
func onLinks(text string, do func(*run, int) error) func(context.Context, *run) (*truth, error) {
	return func(ctx context.Context, r *run) (*truth, error) {
		node := -1
		t, err := onNode(text, func(r *run, n int) error { node = n; return do(r, n) })(ctx, r)
		if err == nil {
			if a, b, ok := r.only(node); ok {
				t.names = append(t.names, fmt.Sprintf("rank %d → rank %d", a, b), fmt.Sprintf("rank %d → rank %d", b, a))
			}
		}
		if err == nil && r.c.job.Nodes == 2 {
			t.names = append(t.names, "node "+nodeName(0), "node "+nodeName(1))
			for a := range r.c.job.Ranks {
				for b := range r.c.job.Ranks {
					if r.c.job.Node(a) != r.c.job.Node(b) {
						t.names = append(t.names, fmt.Sprintf("rank %d → rank %d", a, b))
					}
				}
			}
		}
		return t, err
	}
}

// away has a node's links deliver nothing for a while.
func away(last time.Duration) func(context.Context, *run) (*truth, error) {
	return func(ctx context.Context, r *run) (*truth, error) {
		t, err := onLinks(fmt.Sprintf("has links that deliver nothing for %v", last), func(r *run, n int) error {
			r.c.wire.set(func(s *ruleset) { s.node[n] = rule{drop: 1} })
			return nil
		})(ctx, r)
		if err == nil {
			t.last, t.undo = last, func() error { r.c.wire.set(func(*ruleset) {}); return nil }
		}
		return t, err
	}
}

// lossy has a node's links lose a share of their packets.
func lossy(share float64) func(context.Context, *run) (*truth, error) {
	return onLinks(fmt.Sprintf("has links that lose %g %% of their packets", 100*share), func(r *run, n int) error {
		r.c.wire.set(func(s *ruleset) { s.node[n] = rule{drop: share} })
		return nil
	})
}

// cut takes down the network of a node: in pods, of each rank and of the agent, which still
// reach each other in reality; here what crosses the node's edge is dropped.
func (c *cluster) cut(n int) error {
	c.wire.set(func(s *ruleset) { s.node[n] = rule{drop: 1} })
	if c.pods {
		return nil
	}
	return c.nodes[n].within(func() error { return linkDown("zoo0") })
}

// killNode kills all that runs on a node.
func (c *cluster) killNode(n int) error {
	var errs []error
	for k := range c.job.Ranks {
		if c.job.Node(k) == n {
			errs = append(errs, c.signalRank(k, syscall.SIGKILL))
		}
	}
	return errors.Join(append(errs, c.kill(fmt.Sprintf("agent%d", n)))...)
}

func onAgent(text string, again bool, do func(*cluster, string) error) func(context.Context, *run) (*truth, error) {
	return func(ctx context.Context, r *run) (*truth, error) {
		n := r.rand.IntN(r.c.job.Nodes)
		if err := do(r.c, fmt.Sprintf("agent%d", n)); err != nil {
			return nil, err
		}
		t := &truth{text: fmt.Sprintf("the agent of %s is %s", nodeName(n), text)}
		if again {
			t.last, t.undo = time.Second, func() error { return r.c.startAgent(n) }
		}
		return t, nil
	}
}

func pauseAgent(_ context.Context, r *run) (*truth, error) {
	name := fmt.Sprintf("agent%d", r.rand.IntN(r.c.job.Nodes))
	t := &truth{text: name + " is stopped for 5 s", last: 5 * time.Second, undo: func() error { return r.c.signal(name, syscall.SIGCONT) }}
	return t, r.c.signal(name, syscall.SIGSTOP)
}

func restartMaster(ctx context.Context, r *run) (*truth, error) {
	if err := r.c.kill("master"); err != nil {
		return nil, err
	}
	return &truth{text: "the master is killed and started again"}, r.c.startMaster(ctx)
}

// onPair does something to the path between two ranks that talk to each other.
func onPair(text string, last time.Duration, what rule, both bool) func(context.Context, *run) (*truth, error) {
	return func(_ context.Context, r *run) (*truth, error) {
		a, b, _, err := r.pair()
		if err != nil {
			return nil, err
		}
		r.c.wire.set(func(s *ruleset) {
			s.path[r.path(a, b)] = what
			if both {
				s.path[r.path(b, a)] = what
			}
		})
		t := pairTruth(a, b, text)
		if last > 0 {
			t.last, t.undo = last, func() error { r.c.wire.set(func(*ruleset) {}); return nil }
		}
		return t, nil
	}
}

// pairTruth accepts either direction: what is dropped one way are also the other's
// acknowledgements, and a delayed path delays credit.
func pairTruth(a, b int, text string) *truth {
	return &truth{text: fmt.Sprintf("rank %d → rank %d %s", a, b, text), ends: []int{a, b},
		names: []string{fmt.Sprintf("rank %d → rank %d", a, b), fmt.Sprintf("rank %d → rank %d", b, a)}}
}

func slowPair(_ context.Context, r *run) (*truth, error) {
	a, b, rate, err := r.pair()
	if err != nil {
		return nil, err
	}
	rate = max(rate, 10e3)
	r.c.wire.set(func(s *ruleset) { s.path[r.path(a, b)] = rule{rate: rate} })
	return pairTruth(a, b, fmt.Sprintf("carries %.0f kB/s, its former mean", rate/1000)), nil
}

func (r *run) path(a, b int) [2]int { return [2]int{r.c.ranks[a].index, r.c.ranks[b].index} }

func starve(share float64) func(context.Context, *run) (*truth, error) {
	return onRank(fmt.Sprintf("gets %g %% of a CPU", share*100), func(r *run, k int) error {
		pid, err := r.c.pid(k)
		if err != nil {
			return err
		}
		return r.c.cg.limit(pid, fmt.Sprintf("rank%d", k), share)
	})
}

// stutter stops a rank from outside for 3/4 of a step's time, about once a second.
func stutter(ctx context.Context, r *run) (*truth, error) {
	k := r.victim()
	pid, err := r.c.pid(k)
	if err != nil {
		return nil, err
	}
	d := max(r.c.job.Step*3/4, 60*time.Millisecond)
	r.background(func(done <-chan struct{}) {
		for {
			if syscall.Kill(pid, syscall.SIGSTOP) != nil {
				return
			}
			time.Sleep(d)
			_ = syscall.Kill(pid, syscall.SIGCONT)
			select {
			case <-done:
				return
			case <-time.After(r.c.job.Step + time.Duration(r.noise.IntN(int(r.c.job.Step)))):
			}
		}
	})
	return r.blame(k, fmt.Sprintf("is stopped for %v every second step or so", d)), nil
}

// loadCPU has as many busy programs as cores beside the job.
func loadCPU(_ context.Context, r *run) (*truth, error) {
	for i := range 2 {
		if err := r.c.launch(&part{name: fmt.Sprintf("burn%d", i), at: r.c.hub, args: []string{r.c.self, "burn", r.c.life.String()}}); err != nil {
			return nil, err
		}
	}
	return &truth{text: "nothing is wrong; two busy programs run beside the job"}, nil
}

// drawn is what runs are drawn from where no faults are named.
func drawn() []fault {
	return slices.DeleteFunc(slices.Clone(table), func(f fault) bool { return f.asked })
}

// selected are the faults that a comma-separated list of names or prefixes with * means.
func selected(list string) ([]fault, error) {
	if list == "" || list == "all" {
		return drawn(), nil
	}
	var out []fault
	for _, name := range strings.Split(list, ",") {
		n := len(out)
		for _, f := range table {
			prefix, star := strings.CutSuffix(name, "*")
			if f.name == name || star && strings.HasPrefix(f.name, prefix) {
				out = append(out, f)
			}
		}
		if len(out) == n {
			fmt.Fprintln(os.Stderr, "faults:")
			for _, f := range table {
				fmt.Fprintln(os.Stderr, " ", f.name)
			}
			return nil, fmt.Errorf("no fault is called %q", name)
		}
	}
	return out, nil
}
