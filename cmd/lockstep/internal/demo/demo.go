package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/deploy/local"
	"github.com/lockstep-ccl/lockstep/exporters/web"
)

// warmUp is how many steps of an attempt come before a fault: the pipeline
// learns what is normal for this job from them.
const warmUp = 40

// Cmd is the command line.
type Cmd struct {
	Fault    string        `default:"any" enum:"any,communication_hang,noncommunication_hang,communication_slow,noncommunication_slow,rank_killed,rank_stopped,gpu_slow,collective_skipped,collectives_swapped,node_lost,none" help:"What to break: ${enum}. With any, each in turn."`
	Once     bool          `help:"Break it once, print a summary and exit: 0 only if class and culprit were right, the job runs again and its losses are those of an undisturbed run, bit for bit."`
	Rounds   int           `default:"0" placeholder:"N" help:"Break it N times, then print the table of times (0: until interrupted)."`
	Trainer  string        `default:"ccl" enum:"ccl,torch" help:"Whose job it is: ccl, Lockstep's own, or torch, an unmodified PyTorch job over NCCL, started by torchrun under lockstep attach (two GPUs or more)."`
	Device   string        `default:"cpu" enum:"cpu,cuda" help:"What the ranks communicate with: cpu, or cuda for a GPU each (as many ranks as GPUs: 2, 4 or 8)."`
	OnLoss   string        `default:"restart" enum:"restart,shrink" help:"What follows when a rank is lost: restart the job, or shrink it, where the survivors of a data-parallel job go on by themselves (--fault rank_killed)."`
	Alerts   bool          `default:"true" negatable:"" help:"Run a real Prometheus and Alertmanager. Without them the demo itself hands confirmed verdicts to the remediator."`
	Tracing  bool          `help:"Run a real Jaeger too, and print the link to the trace of each fault. Building it takes about five minutes of two cores, once."`
	OpenWeb  bool          `help:"Leave the pages open on loopback: no TLS and no password. Without it each run makes its own, for every web listener."`
	Every    time.Duration `default:"10s" help:"Time between a recovery and the next fault."`
	Duration time.Duration `default:"0s" help:"With --fault none: how long to watch for false alarms (0: until interrupted)."`
	Rank     int           `default:"-1" help:"Victim (-1: any)." placeholder:"R"`
	Seed     uint64        `default:"0" help:"Seed of the choice of victims (0: from the clock)."`
	Pace     time.Duration `default:"50ms" help:"Least duration of a training step."`
	Limit    time.Duration `default:"60s" help:"How long a fault may take from injection to running again."`
	Kill     string        `placeholder:"PART" help:"Also kill -9 this part once the fault is suspected or 1 s has passed, and start it again 1 s later: agent0, agent1, master, remediator, prometheus, alertmanager."`
	Dir      string        `type:"path" help:"Where logs, checkpoints and data go (default: a new folder, removed at the end unless something went wrong)."`
	Keep     bool          `help:"Keep the folder."`
	Panels   bool          `help:"After the last fault, run every query of every dashboard: none may fail or be empty. With --fault none: none may be red."`
	Cluster  onCluster     `embed:"" group:"On a cluster"`
	JSON     string        `type:"path" placeholder:"FILE" help:"Append each fault's outcome to FILE, a JSON object a line."`
}

// Help implements kong's help provider.
func (*Cmd) Help() string {
	return `Runs the whole loop on this machine: a training job of 8 processes over Lockstep's own
collectives, an agent for each of 2 logical nodes, a master, a real Prometheus and Alertmanager, and
the remediator. Breaks something every now and then and tells what each part says about it.

With --device cuda the job has a process for each of 2, 4 or 8 GPUs, on one node. What it communicates
is in device memory, what it computes is not: the model is small. Faults of GPU ranks are a data loader
that does not come back (noncommunication_hang) or is late (noncommunication_slow), a stopped or killed
process (rank_stopped, rank_killed), and a GPU that another kernel keeps busy (gpu_slow). Connections
cannot be broken: NVLink's are the hardware's.

With --trainer torch the job is a PyTorch program that knows nothing of Lockstep, on all of this machine's
GPUs. The remediator has the agent end its ranks, and torchrun begins anew from the last checkpoint. Faults are
a stopped or killed process, a data loader that does not come back or is late, a GPU with other work, a
collective that one rank leaves out (collective_skipped), two communicators that one rank calls the other way
round (collectives_swapped) and, asked for by name since all of its job goes over sockets, a rank whose
connections are throttled (communication_slow).

Examples:
  lockstep demo                                        break things in turn, until ^C
  lockstep demo --once --fault communication_slow      one fault, summary, exit status
  lockstep demo --rounds 20 --fault rank_killed        twenty, and a table of times
  lockstep demo --fault none --duration 10m            watch for false alarms
  lockstep demo --tracing --once --fault rank_stopped   and where its trace is in a real Jaeger
  lockstep demo --once --fault communication_hang --kill master
                                                       the master dies in the middle of it
  lockstep demo --device cuda --rounds 5 --every 1s    GPU ranks, every fault that they can have
  lockstep demo --device cuda --once --fault rank_killed --on-loss shrink
                                                       survivors go on by themselves
  lockstep demo --trainer torch --once --fault rank_stopped
                                                       a PyTorch job, as it is, with torchrun
  lockstep demo --on slurm                             what it would do to this Slurm cluster
  lockstep demo --on slurm --yes --once --fault rank_killed
                                                       the same story, in a batch job of it
  lockstep demo --on kubernetes --yes --once --fault rank_stopped
                                                       and in a namespace of a cluster with JobSet

Exit status: 0 as promised above, 1 when anything was wrong.`
}

var errWrong = errors.New("not everything was as it should be (see above)")

// Run runs the demo.
func (c *Cmd) Run(ctx context.Context, w io.Writer) (err error) {
	out := &printer{w: w, color: isTerminal(w)}
	if c.Cluster.On != here {
		return c.onCluster(ctx, out)
	}
	cl, err := c.local(ctx)
	if err != nil {
		return err
	}
	if cl.dir = c.Dir; cl.dir == "" {
		if cl.dir, err = os.MkdirTemp("", "lockstep-demo-"); err != nil {
			return err
		}
		defer func() {
			if c.Keep || (err != nil && ctx.Err() == nil) {
				out.say("logs and data are in %s", cl.dir)
				return
			}
			_ = os.RemoveAll(cl.dir)
		}()
	}
	return c.play(ctx, out, cl)
}

// local is what a demo on this machine is to bring up.
func (c *Cmd) local(ctx context.Context) (*cluster, error) {
	cl := &cluster{job: jobName, pace: c.Pace, device: c.Device, monitored: c.Alerts, traced: c.Tracing, shrink: c.OnLoss == "shrink", openWeb: c.OpenWeb}
	var err error
	if c.Trainer == "torch" {
		err = c.onTorch(ctx, cl)
	} else {
		cl.shape, err = c.shape()
	}
	return cl, err
}

// play brings everything up, breaks things, and tells.
func (c *Cmd) play(ctx context.Context, out *printer, cl *cluster) error {
	cl, err := newCluster(cl)
	if err != nil {
		return err
	}
	defer cl.stop()
	began := time.Now()
	if err := cl.start(ctx, out.w); err != nil {
		return err
	}
	c.intro(ctx, out, cl, time.Since(began))
	if c.Fault == "none" {
		return c.watchNothing(ctx, out, cl)
	}
	return c.breakThings(ctx, out, cl)
}

// parts are what can be killed beside the job.
func (s shape) parts() []string {
	parts := []string{"master", "remediator", local.Prometheus, local.Alertmanager}
	for i := range s.agents {
		parts = append(parts, fmt.Sprintf("agent%d", i))
	}
	return parts
}

func (c *Cmd) wholeShape() (shape, error) {
	n := c.Cluster.Nodes
	switch c.Cluster.On {
	case "slurm":
		return shape{dp: 2, tp: 2, pp: 2, nodes: n}, nil
	case "kubernetes": // a rank a node
		return shape{dp: 2, tp: min(2, n/2), pp: max(1, n/4), nodes: n}, nil
	}
	if c.Device == "cpu" {
		return shape{dp: 2, tp: 2, pp: 2, nodes: 2, agents: 2}, nil
	}
	gpus, err := ccl.Devices()
	switch {
	case err != nil:
		return shape{}, fmt.Errorf("--device cuda: %w", err)
	case gpus >= 8:
		return shape{dp: 2, tp: 2, pp: 2, nodes: 1, agents: 1}, nil
	case gpus >= 4:
		return shape{dp: 2, tp: 1, pp: 2, nodes: 1, agents: 1}, nil
	case gpus >= 2:
		return shape{dp: 2, tp: 1, pp: 1, nodes: 1, agents: 1}, nil
	}
	return shape{}, fmt.Errorf("--device cuda: %d GPUs, at least 2 are needed", gpus)
}

// intro says what runs, and what each address shows.
func (c *Cmd) intro(ctx context.Context, out *printer, cl *cluster, took time.Duration) {
	out.say("%s", out.paint("1", fmt.Sprintf("lockstep demo: %s on %s, up in %.1f s", cl.program.ranks(), cl.where(), took.Seconds())))
	link := func(what, url, shows string) { out.say("  %-14s %-34s %s", what, url, shows) }
	link("status page", cl.web.URL(cl.master)+"/status", "who is held up by whom; the story of each incident")
	if cl.monitored {
		link("alerts", cl.alertsPage(ctx), "which rules fire in Prometheus")
		link("Alertmanager", cl.stack.AlertmanagerURL, "what it sends to the remediator")
	}
	if cl.tracing != nil {
		link("Jaeger", cl.tracing.Page(), "traces: job is the service")
	}
	for i, a := range cl.agents {
		link("agent "+cl.nodeName(i), cl.web.URL(a)+"/metrics", "what Prometheus scrapes")
	}
	link("master", cl.web.URL(cl.master)+"/metrics", "")
	how := ""
	if cl.web != nil {
		how = "for who has a certificate: curl -K, below"
	}
	link("remediator", cl.web.URL(cl.remediator)+"/metrics", how)
	out.say("  %-14s %s", "logs", cl.dir)
	cl.signIn(out)
}

// alertsPage is where Prometheus shows its alerts: a server that was built from its module has
// no pages, and answers in JSON only.
func (c *cluster) alertsPage(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if page := c.stack.PrometheusURL + "/alerts"; c.get(ctx, page, nil) == nil {
		return page
	}
	return c.stack.PrometheusURL + "/api/v1/alerts"
}

// next says where to go from here.
func (p *printer) next(dir string, kept bool) {
	p.say("\nWhat to look at next:")
	p.say("  lockstep demo                        the same without an end: open the status page while things break")
	p.say("  lockstep demo --once --keep          keeps logs, evidence and journal")
	if kept {
		p.say("  lockstep diagnose --help             the verdict again from the evidence in %s", dir)
	}
	p.say("  lockstep attach -- torchrun …        your own job, as it is")
	p.say("  docs/operations.md, docs/runbooks    how it is deployed, and what to do about each alert")
}

func (c *Cmd) breakThings(ctx context.Context, out *printer, cl *cluster) error {
	seed := c.Seed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	rng := rand.New(rand.NewPCG(seed, 1))
	rounds := c.Rounds
	if c.Once {
		rounds = 1
	}
	kinds := faultsOn(c.Device)
	if c.Trainer == "torch" {
		kinds = torchFaults()
	}
	if c.Fault != "any" {
		kinds = []string{c.Fault}
	}
	var done []outcome
	for n := 0; rounds == 0 || n < rounds; n++ {
		f, err := cl.program.choose(kinds[n%len(kinds)], c.Rank, rng)
		if err != nil {
			return err
		}
		st, err := cl.settle(ctx)
		if err != nil {
			return stopped(ctx, err)
		}
		o, err := c.one(ctx, out, cl, f, st, n+1)
		if err != nil {
			return stopped(ctx, err)
		}
		done = append(done, o)
		if c.JSON != "" {
			if err := appendJSON(c.JSON, o); err != nil {
				return err
			}
		}
		if n+1 != rounds && !sleep(ctx, c.Every) {
			break
		}
	}
	if len(done) > 1 {
		table(out, done)
	}
	bad := slices.ContainsFunc(done, func(o outcome) bool { return !o.right() })
	if c.Panels {
		if err := cl.panels(ctx); err != nil {
			return fmt.Errorf("dashboards over this demo's data: %w", err)
		}
		out.say("%s every query of every dashboard has data", out.paint("32", "✓"))
	}
	if c.Once || c.Rounds > 0 {
		if err := c.compare(ctx, out, cl); err != nil {
			return err
		}
	}
	if bad {
		return errWrong
	}
	if c.Once {
		out.next(cl.dir, c.Keep)
	}
	return nil
}

// one breaks one thing and follows it to the end.
func (c *Cmd) one(ctx context.Context, out *printer, cl *cluster, f fault, st *web.Status, n int) (outcome, error) {
	attempt, victim, err := cl.victim(ctx, f.Rank)
	if err != nil {
		return outcome{}, err
	}
	f.on(victim.Node)
	out.say("")
	out.say("%s", out.paint("1", fmt.Sprintf("fault %d: %s at step %d", n, f.Name, cl.program.step(st))))
	w := watch(cl, f, out, st)
	if err := cl.breakIt(ctx, f, attempt, victim); err != nil {
		return outcome{}, err
	}
	out.line(0, "fault", f.Text)
	if c.Kill != "" {
		killed := make(chan error, 1)
		go func() { killed <- c.killPart(ctx, out, cl, w) }()
		defer func() {
			if e := <-killed; err == nil {
				err = e
			}
		}()
	}
	o, err := w.run(ctx, c.Limit)
	if err != nil || ctx.Err() != nil {
		return o, errors.Join(err, ctx.Err())
	}
	w.showTrace(ctx)
	o = w.o
	if o.right() {
		out.say("  %s right class, right culprit, job running again in %.2f s", out.paint("32", "✓"), o.Running)
	} else {
		for _, s := range o.Wrong {
			out.say("  %s %s", out.paint("31", "✗"), s)
		}
	}
	return o, nil
}

// killPart kills a part in the middle of an incident and starts it again.
func (c *Cmd) killPart(ctx context.Context, out *printer, cl *cluster, w *watcher) error {
	if !sleep(ctx, time.Second) {
		return nil
	}
	if err := cl.kill(c.Kill); err != nil {
		return fmt.Errorf("kill %s: %w", c.Kill, err)
	}
	out.line(time.Since(w.t0).Seconds(), "kill -9", c.Kill)
	if !sleep(ctx, time.Second) {
		return nil
	}
	if err := cl.restart(ctx, c.Kill); err != nil {
		return fmt.Errorf("restart %s: %w", c.Kill, err)
	}
	out.line(time.Since(w.t0).Seconds(), "again", c.Kill+" was started again")
	return nil
}

// settleWithin is long enough to import PyTorch from a cold disk.
const settleWithin = 3 * time.Minute

// settle waits until the job has run long enough, undisturbed, for a next fault.
func (c *cluster) settle(ctx context.Context) (*web.Status, error) {
	first, step := uint64(0), uint64(0)
	deadline := time.NewTimer(settleWithin)
	defer deadline.Stop()
	for {
		var st web.Status
		if c.get(ctx, c.web.URL(c.master)+"/api/v1/status", &st) == nil {
			step = c.program.step(&st)
		}
		if step > 0 {
			if first == 0 || step < first || len(st.Open) > 0 {
				first = step
			}
			if step >= first+warmUp && len(st.Open) == 0 {
				return &st, nil
			}
		}
		select {
		case err := <-c.died:
			return nil, err
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-deadline.C:
			return nil, fmt.Errorf("the job did not make %d steps without an incident within %v (at step %d, open incidents: %+v)\n%s", warmUp, settleWithin, step, st.Open, tail(filepath.Join(c.dir, "log", "job.log")))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// watchNothing counts false alarms.
func (c *Cmd) watchNothing(ctx context.Context, out *printer, cl *cluster) error {
	began := time.Now()
	alarms := map[string]bool{}
	var step uint64
	for c.Duration == 0 || time.Since(began) < c.Duration {
		var st web.Status
		if err := cl.get(ctx, cl.web.URL(cl.master)+"/api/v1/status", &st); err == nil {
			step = cl.program.step(&st)
			for _, in := range append(st.Open, st.Closed...) {
				if k := "verdict " + in.ID; !alarms[k] {
					alarms[k] = true
					out.line(time.Since(began).Seconds(), "verdict", fmt.Sprintf("%s %s %+v %v", in.Level, in.Class, in.Culprits, in.Evidence))
				}
			}
		}
		if firing, err := cl.firing(ctx); err == nil {
			for _, l := range firing {
				if k := fmt.Sprint("alert ", l); !alarms[k] {
					alarms[k] = true
					out.line(time.Since(began).Seconds(), "alert", fmt.Sprint(l))
				}
			}
		}
		select {
		case err := <-cl.died:
			return err
		case <-ctx.Done():
			out.say("watched for %.0f s, %d steps", time.Since(began).Seconds(), step)
			if len(alarms) > 0 {
				return errWrong
			}
			return nil
		case <-time.After(200 * time.Millisecond):
		}
	}
	out.say("watched for %.0f s, %d training steps: %d false alarms", time.Since(began).Seconds(), step, len(alarms))
	if c.Panels {
		if err := cl.red(ctx); err != nil {
			return fmt.Errorf("the dashboards of a healthy job: %w", err)
		}
		out.say("%s no panel of any dashboard is red", out.paint("32", "✓"))
	}
	if err := c.compare(ctx, out, cl); err != nil {
		return err
	}
	if len(alarms) > 0 {
		return errWrong
	}
	return nil
}

func appendJSON(path string, o outcome) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(json.NewEncoder(f).Encode(o), f.Close())
}

// stopped prefers the interrupt to the error that it causes on its way.
func stopped(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok || os.Getenv("NO_COLOR") != "" {
		return false
	}
	fi, err := f.Stat()
	return err == nil && fi.Mode()&os.ModeCharDevice != 0
}
