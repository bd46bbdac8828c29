package main

import (
	"fmt"
	"os"
	"slices"

	"github.com/alecthomas/kong"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/agentcmd"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/attachcmd"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/buildinfo"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/clidoc"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/demo"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/diagnose"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/doctor"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/flags"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/gpus"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/inspect"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/mastercmd"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/monitoring"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/nics"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/perf"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/pkicmd"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/plannercmd"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/preflightcmd"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/remediatorcmd"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/runcmd"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/slurmcmd"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/top"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/train"
)

// cli is the command line: a package a command.
type cli struct {
	Demo       demo.Cmd                 `cmd:"" help:"Run the whole loop on this machine, break things, and see them found and repaired."`
	Attach     attachcmd.Cmd            `cmd:"" help:"Put a job that knows nothing of Lockstep under its eyes, and become its command."`
	Run        runcmd.Cmd               `cmd:"" help:"Supervise a job's ranks, on this machine or on several."`
	Agent      agentcmd.Cmd             `cmd:"" help:"Watch the ranks of this node (one a node)."`
	Master     mastercmd.Cmd            `cmd:"" help:"Tell who broke step, from what the agents see (one a job)."`
	Planner    plannercmd.Cmd           `cmd:"" help:"Give every connection of every job its path through the fabric, and probe it."`
	Remediator remediatorcmd.Cmd        `cmd:"" help:"Turn alerts into actions, carefully (one a cluster)."`
	Breaker    remediatorcmd.Breaker    `cmd:"" help:"List the remediator's open breakers, or close one."`
	Pki        pkicmd.Cmd               `cmd:"" help:"Issue the certificates of agents, masters and the remediator."`
	Perf       perf.Cmd                 `cmd:"" help:"Measure collectives, as nccl-tests does."`
	Preflight  preflightcmd.Cmd         `cmd:"" help:"Measure every pair of ranks before a job, and name what is bad."`
	Gpus       gpus.Cmd                 `cmd:"" help:"Show the health of this node's GPUs, as the agent sees it."`
	Nics       nics.Cmd                 `cmd:"" help:"Show this node's RDMA ports, and which of them a rank would use."`
	Inspect    inspect.Cmd              `cmd:"" help:"Read the flight recorder of a dead or live process."`
	Diagnose   diagnose.Cmd             `cmd:"" help:"Judge an incident again, offline, from the evidence that its master recorded."`
	Slurm      slurmcmd.Cmd             `cmd:"" help:"Inside a Slurm job: run its step in the allocation, again when the remediator says so."`
	Rules      monitoring.RulesCmd      `cmd:"" help:"Write rules for Prometheus and routes for Alertmanager, as a site wants them."`
	Dashboards monitoring.DashboardsCmd `cmd:"" help:"Write dashboards for Grafana, as a site wants them."`
	Doctor     doctor.Cmd               `cmd:"" help:"Tell what this node has and lacks, what works without it, and what to do."`
	Completion clidoc.Completion        `cmd:"" help:"Write a script with which a shell completes this command line."`
	Man        clidoc.Man               `cmd:"" help:"Write manual pages."`
	Top        top.Cmd                  `cmd:"" help:"Show where each rank of a node or job is, in a terminal."`
	Complete   clidoc.Complete          `cmd:"" hidden:"" help:"What completion scripts ask."`
	Train      train.Cmd                `cmd:"" hidden:""`
	Fault      demo.FaultCmd            `cmd:"" hidden:""`

	Log     flags.Log        `embed:"" prefix:"log."`
	Version kong.VersionFlag `short:"V" help:"Print the version and exit."`
}

// exit turns kong's 80 for a wrong command line into everybody else's 2.
func exit(code int) {
	if code == 80 {
		code = 2
	}
	os.Exit(code)
}

// parse reads the command line, or ends the process. A variable that a site has set wrongly must not stop
// the jobs that run under attach: it is told, and passed over.
func parse(c *cli, args []string) *kong.Context {
	p := kong.Must(c, options()...)
	k, err := p.Parse(args)
	if err != nil && isAttach(args) {
		*c = cli{}
		lenient := kong.Must(c, options()...)
		var names []string
		_ = kong.Visit(lenient.Model, func(n kong.Visitable, next kong.Next) error {
			if f, ok := n.(*kong.Flag); ok {
				names = append(names, f.Envs...)
			}
			return next(nil)
		})
		restore := unset(names)
		again, e := lenient.Parse(args)
		restore() // the command has its environment as it was
		if e == nil {
			fmt.Fprintf(os.Stderr, "lockstep attach: %v: the variables of lockstep's own flags are passed over, the command runs all the same\n", err)
			return again
		}
	}
	p.FatalIfErrorf(err)
	return k
}

// isAttach reports whether lockstep attach is called; flags may stand before its name.
func isAttach(args []string) bool {
	if end := slices.Index(args, "--"); end >= 0 {
		args = args[:end]
	}
	return slices.Contains(args, "attach")
}

// unset takes variables out of the environment until restore is called.
func unset(names []string) (restore func()) {
	was := make(map[string]string)
	for _, name := range names {
		if v, ok := os.LookupEnv(name); ok {
			was[name] = v
			_ = os.Unsetenv(name)
		}
	}
	return func() {
		for name, v := range was {
			_ = os.Setenv(name, v)
		}
	}
}

// options are how the command line is read.
func options(more ...kong.Option) []kong.Option {
	return append([]kong.Option{
		kong.Name("lockstep"), kong.ShortUsageOnError(), kong.Exit(exit), kong.ConfigureHelp(kong.HelpOptions{Compact: true}),
		kong.Description("Collective communication and its observability for training clusters: who broke step, and why.\n\nStart with `lockstep demo`. Every command has --help with examples."),
		kong.Vars(runcmd.Vars()), kong.Vars{"version": buildinfo.String()},
	}, more...)
}
