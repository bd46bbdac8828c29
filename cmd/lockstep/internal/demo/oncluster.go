package demo

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// jobPrefix is what jobs of this demo on clusters are called by.
const jobPrefix = "lockstep-demo-"

// here is where the demo runs unless a cluster is named.
const here = "here"

// onCluster are the flags of a demo whose ranks and agents are on a cluster.
type onCluster struct {
	On       string        `default:"here" enum:"here,kubernetes,slurm" help:"Where ranks and agents run: here, in a namespace of the Kubernetes cluster that kubectl reaches, or as a batch job of the Slurm cluster whose commands this machine has."`
	Yes      bool          `help:"With --on: do it. Without it the demo says what it would do to the cluster, and does nothing."`
	Nodes    int           `default:"4" placeholder:"N" help:"With --on: nodes that the job is on, 2, 4 or 8: 8 ranks under Slurm, one a node on Kubernetes."`
	Spares   int           `default:"1" placeholder:"N" help:"With --on: spare nodes beside them."`
	Address  string        `placeholder:"HOST" help:"With --on: address by which the nodes reach this machine (default: the one on its route to them)."`
	Wait     time.Duration `default:"5m" help:"With --on: how long the job may take to get its nodes."`
	Requeue  bool          `help:"With --on slurm: a batch script of one srun, which is restarted by requeueing the job, instead of inside its allocation. The spare nodes are then others of the cluster."`
	Sbatch   []string      `sep:"none" placeholder:"OPTION" help:"With --on slurm: one more option for sbatch, such as --partition=debug. Repeatable."`
	Image    string        `default:"registry.k8s.io/pause:3.10" placeholder:"IMAGE" help:"With --on kubernetes: image of the containers. All that they run is this program, from --dir."`
	PowerOff string        `placeholder:"COMMAND" help:"With --on: shell command that takes a node's power away, with {node} for its name: for --fault node_lost."`
}

// validate says what does not go together.
func (o *onCluster) validate(c *Cmd) error {
	if o.On == here {
		if o.Yes || o.Requeue || len(o.Sbatch) > 0 || o.PowerOff != "" || o.Address != "" {
			return errors.New("--yes, --address, --requeue, --sbatch and --power-off are for --on")
		}
		return nil
	}
	switch {
	case c.Trainer != "ccl" || c.Device != "cpu" || c.OnLoss != "restart":
		return fmt.Errorf("--on %s: the demo's own trainer on CPUs is restarted there; --trainer, --device and --on-loss are for this machine", o.On)
	case o.On != "slurm" && (len(o.Sbatch) > 0 || o.Requeue):
		return errors.New("--sbatch and --requeue are for --on slurm")
	case c.Panels || c.Tracing:
		return fmt.Errorf("--on %s: agents are on their nodes, where this machine's Prometheus and Jaeger do not reach; --panels and --tracing are for this machine", o.On)
	case o.Nodes != 2 && o.Nodes != 4 && o.Nodes != 8:
		return fmt.Errorf("--nodes %d: 8 ranks are on 2, 4 or 8 nodes", o.Nodes)
	case o.Spares < 0 || o.Spares > 64:
		return fmt.Errorf("--spares %d: want 0 to 64", o.Spares)
	case c.Fault == faultNode && !strings.Contains(o.PowerOff, "{node}"):
		return errors.New("--fault node_lost: --power-off says how, a command with {node} in it")
	case c.Fault == faultNode && !c.Once && c.Rounds != 1:
		return errors.New("--fault node_lost is for --once: nobody gives the node its power back")
	}
	return nil
}

// faults are those that can be asked for.
func (c *Cmd) faults() []string {
	if c.Trainer == "torch" {
		return append(torchFaults(), torchAlone)
	}
	kinds := faultsOn(c.Device)
	if c.Cluster.On != here && c.Cluster.PowerOff != "" {
		kinds = append(kinds, faultNode)
	}
	return kinds
}

// ranksOn is where the ranks are, for errors.
func (c *Cmd) ranksOn() string {
	if c.Cluster.On != here {
		return c.Cluster.On
	}
	if c.Trainer == "torch" {
		return "PyTorch"
	}
	return c.Device
}

// onCluster plays the demo on a cluster, or says what it would do there.
func (c *Cmd) onCluster(ctx context.Context, out *printer) (err error) {
	shape, err := c.shape()
	if err != nil {
		return err
	}
	var suffix [3]byte
	rand.Read(suffix[:])
	job := jobPrefix + hex.EncodeToString(suffix[:])
	dir := c.Dir
	if dir == "" {
		dir = job // where this was called, which a cluster's users share with its nodes as a rule
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return err
	}
	o := &c.Cluster
	var s site = &slurmSite{job: job, dir: dir, shape: shape, spares: o.Spares, requeue: o.Requeue, options: o.Sbatch, address: o.Address, wait: o.Wait, pace: c.Pace, run: slurmCommand, say: out.say}
	if o.On == "kubernetes" {
		s = &kubernetesSite{job: job, dir: dir, shape: shape, spares: o.Spares, image: o.Image, address: o.Address, wait: o.Wait, run: kubectl, say: out.say}
	}
	if err := s.check(ctx); err != nil {
		return err
	}
	if err := c.ask(out, s); err != nil {
		return err
	}
	if _, err := os.Stat(dir); err == nil && c.Dir == "" {
		return fmt.Errorf("%s is there already", dir)
	}
	defer func() {
		if c.Keep || c.Dir != "" || (err != nil && ctx.Err() == nil) {
			out.say("logs and data are in %s", dir)
			return
		}
		_ = os.RemoveAll(dir)
	}()
	return c.play(ctx, out, &cluster{dir: dir, job: job, site: s, shape: shape, pace: c.Pace, device: c.Device, monitored: c.Alerts, openWeb: c.OpenWeb, powerOff: o.PowerOff})
}

// ask says what the demo would do to a site, unless it may.
func (c *Cmd) ask(out *printer, s site) error {
	if c.Cluster.Yes {
		return nil
	}
	out.say("On %s this would", s.where())
	for _, l := range s.plan() {
		out.say("  - %s", l)
	}
	return errors.New("nothing was done: add --yes to do it")
}

// power runs the operator's command for a node.
func (c *cluster) power(ctx context.Context, command, node string) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, "sh", "-c", strings.ReplaceAll(command, "{node}", quoted(node)))
	cmd.WaitDelay = time.Second
	if out, err := cmd.CombinedOutput(); err != nil && !errors.Is(err, exec.ErrWaitDelay) {
		return fmt.Errorf("take node %s's power away: %s: %w: %s", node, command, err, strings.TrimSpace(string(out)))
	}
	return nil
}
