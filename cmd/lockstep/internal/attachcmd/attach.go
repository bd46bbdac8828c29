package attachcmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Cmd is the command line.
type Cmd struct {
	Job        string        `help:"Name of the job, a DNS label (default: the launcher's, such as slurm-4711, else the script's)." env:"LOCKSTEP_JOB" placeholder:"NAME"`
	Node       string        `help:"Name of this node (default: the launcher's, else the host's)." env:"LOCKSTEP_NODE" placeholder:"NAME"`
	RuntimeDir string        `default:"${runtime_dir}" type:"path" help:"Where the ranks of this node keep their flight recorders." env:"LOCKSTEP_RUNTIME_DIR"`
	StateDir   string        `type:"path" placeholder:"DIR" help:"Where logs of what attach starts go, and the master's evidence (default: $XDG_STATE_HOME/lockstep/attach, else ~/.local/state/lockstep/attach)."`
	Agent      string        `enum:"auto,never" default:"auto" help:"auto: start this node's agent, and a master, when there is none; never: somebody else does (default: ${default})." env:"LOCKSTEP_ATTACH_AGENT"`
	Master     string        `placeholder:"HOST:PORT" help:"Where the job's master listens (default: one on this node, for jobs of one node)." env:"LOCKSTEP_MASTER"`
	PKI        string        `name:"pki" type:"path" placeholder:"DIR" help:"Certificates that lockstep pki has made, for jobs of several nodes: agent-NODE and, where rank 0 is, master-JOB." env:"LOCKSTEP_PKI"`
	Plugin     string        `type:"path" placeholder:"FILE" help:"NCCL's profiler plugin (default: libnccl-profiler-lockstep.so beside this program)." env:"LOCKSTEP_NCCL_PLUGIN"`
	AgentWeb   string        `default:":9400" placeholder:"HOST:PORT" help:"Where an agent that attach starts has its pages; another port when that is taken (default: ${default})."`
	MasterWeb  string        `default:"127.0.0.1:9402" placeholder:"HOST:PORT" help:"Likewise a master (default: ${default})."`
	Wait       time.Duration `default:"5s" help:"The command waits no longer for an agent and a master that attach starts (default: ${default})." env:"LOCKSTEP_ATTACH_WAIT"`
	Patience   time.Duration `name:"start-patience" placeholder:"TIME" help:"For a master that attach starts: how long a rank that has made no communicator may do nothing, while all others wait, before a hang at the start is suspected (default: the master's, 1m)."`
	DryRun     bool          `short:"n" help:"Print what would be set and started, and do nothing."`
	PrintEnv   bool          `help:"Print the variables for a shell, and start what is needed for as long as that shell lives."`
	Quiet      bool          `short:"q" help:"Say nothing but warnings."`
	Command    []string      `arg:"" optional:"" passthrough:"partial" help:"Command of the job, or of one rank, after --."`
}

// Help implements kong's help provider.
func (*Cmd) Help() string {
	return `Puts a job that knows nothing of Lockstep under its eyes, and becomes its command: signals and exit status
are the command's own. Variables tell NCCL to load Lockstep's profiler plugin; this node gets an agent
when it has none, and a job of one node a master, which end some seconds after the job. Job, rank and attempt
come from the variables of torchrun, Slurm, Open MPI, MPICH or Kubernetes. What you have set yourself stays,
and whatever fails is one line of warning: the command runs all the same.

Examples:
  lockstep attach -- torchrun --standalone --nproc-per-node 8 train.py     around a node's launcher
  srun lockstep attach -- python train.py                                  or inside each rank
  mpirun lockstep attach -- ./train
  eval "$(lockstep attach --print-env)"                                    or for a shell and all that it starts
  lockstep attach --dry-run -- torchrun train.py                           what it would do
  lockstep attach --job llm --pki /etc/lockstep/pki -- torchrun --nnodes 2 --node-rank 0 --master-addr head train.py

docs/attach has a page each for torchrun, Slurm and Kubernetes.`
}

// Run becomes the command. It returns only when it does not get that far.
func (c *Cmd) Run(ctx context.Context, out io.Writer) error {
	command := c.Command
	if len(command) > 0 && command[0] == "--" {
		command = command[1:]
	}
	exe, err := os.Executable()
	if err != nil {
		exe = "lockstep"
	}
	p := c.planned(command, exe)
	if err := c.stateDir(); err != nil && c.Agent == "auto" {
		p.warn("%v: no agent is started", err)
		c.Agent = "never"
	}
	if c.DryRun {
		c.print(out, p, exe)
		return nil
	}
	pid := os.Getpid()
	if c.PrintEnv {
		pid = os.Getppid()
	}
	if c.Agent == "auto" {
		said, err := c.daemons(ctx, p, exe, pid)
		if err != nil {
			p.warn("%s", strings.ReplaceAll(err.Error(), "\n", "; "))
		}
		if len(said) > 0 && !c.Quiet {
			fmt.Fprintf(os.Stderr, "lockstep attach: job %s: %s\n", p.Job, strings.Join(said, ", "))
		}
	}
	for _, w := range p.Warn {
		fmt.Fprintf(os.Stderr, "lockstep attach: warning: %s\n", w)
	}
	if ctx.Err() != nil {
		return ctx.Err() // interrupted before there was a command
	}
	if c.PrintEnv {
		for _, v := range p.Set {
			fmt.Fprintf(out, "export %s=%s\n", v.Name, quote(v.Value))
		}
		return nil
	}
	return become(command, p.environ(os.Environ()))
}

// planned is plan, and what is left of one when that goes wrong: the job comes first.
func (c *Cmd) planned(command []string, exe string) (p *Plan) {
	defer func() {
		if r := recover(); r != nil {
			p = &Plan{Job: script(command), Warn: []string{fmt.Sprint("a mistake of Lockstep's own, nothing is set: ", r)}}
			c.Agent = "never"
		}
	}()
	return c.plan(os.LookupEnv, command, exe)
}

// become is what env(1) does, with its exit statuses.
func become(command, env []string) error {
	path, err := exec.LookPath(command[0])
	if err == nil {
		err = syscall.Exec(path, command, env)
	}
	var lookup *exec.Error
	if errors.As(err, &lookup) {
		err = lookup.Err
	}
	fmt.Fprintf(os.Stderr, "lockstep attach: %s: %v\n", command[0], err)
	status := 126
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
		status = 127
	}
	os.Exit(status)
	return nil
}

func (c *Cmd) stateDir() error {
	if c.StateDir != "" {
		return nil
	}
	base := os.Getenv("XDG_STATE_HOME")
	if base == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return fmt.Errorf("no place for logs (%w): give one with --state-dir", err)
		}
		base = filepath.Join(home, ".local", "state")
	}
	c.StateDir = filepath.Join(base, "lockstep", "attach")
	return nil
}

// print is the dry run.
func (c *Cmd) print(out io.Writer, p *Plan, exe string) {
	where := "no launcher has started this process as a rank"
	if p.Who.Launcher != "" {
		where = fmt.Sprintf("rank %d of %d (%s), attempt %d", p.Who.Rank, p.Who.World, p.Who.Launcher, p.Who.Attempt)
	}
	fmt.Fprintf(out, "job %s on node %s, of %d; %s\n", p.Job, c.node(p), p.Nodes, where)
	for _, v := range p.Set {
		fmt.Fprintf(out, "set   %s=%s  (%s)\n", v.Name, v.Value, v.Why)
	}
	for _, v := range p.Kept {
		fmt.Fprintf(out, "keep  %s=%s  (%s)\n", v.Name, v.Value, v.Why)
	}
	if c.Agent == "auto" {
		if p.Lead {
			fmt.Fprintf(out, "start %s %s\n", exe, strings.Join(c.masterArgs(p), " "))
		}
		fmt.Fprintf(out, "start %s %s\n", exe, strings.Join(c.agentArgs(p), " "))
	}
	for _, w := range p.Warn {
		fmt.Fprintf(out, "warn  %s\n", w)
	}
}

// quote is for a POSIX shell.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
