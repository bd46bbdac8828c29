// Command lockstep is the whole of Lockstep in one binary; `lockstep --help` lists its parts.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

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

// options are how the command line is read.
func options(more ...kong.Option) []kong.Option {
	return append([]kong.Option{
		kong.Name("lockstep"), kong.ShortUsageOnError(), kong.Exit(exit), kong.ConfigureHelp(kong.HelpOptions{Compact: true}),
		kong.Description("Collective communication and its observability for training clusters: who broke step, and why.\n\nStart with `lockstep demo`. Every command has --help with examples."),
		kong.Vars(runcmd.Vars()), kong.Vars{"version": buildinfo.String()},
	}, more...)
}

func main() {
	if len(os.Args) == 1 {
		os.Args = append(os.Args, "--help")
	}
	var c cli
	k := kong.Parse(&c, options()...)
	stopping := []os.Signal{syscall.SIGINT, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) { // by nohup
		stopping = append(stopping, syscall.SIGHUP)
	}
	ctx, stop := signal.NotifyContext(context.Background(), stopping...)
	context.AfterFunc(ctx, stop) // a second ^C does not wait
	log := c.Log.Logger()
	slog.SetDefault(log)
	k.BindTo(ctx, (*context.Context)(nil))
	k.BindTo(os.Stdout, (*io.Writer)(nil))
	err := k.Run(log)
	var asks interface { // for a status of its own; without a text, all was said already
		error
		ExitStatus() int
	}
	switch {
	case errors.As(err, &asks):
		if asks.Error() != "" {
			fmt.Fprintln(os.Stderr, "lockstep:", err)
		}
		os.Exit(asks.ExitStatus())
	case err == nil:
	case errors.Is(err, train.ErrStopped): // as if SIGTERM had ended it: a scheduler takes 0 for done
		os.Exit(128 + int(syscall.SIGTERM))
	case errors.Is(err, context.Canceled) && ctx.Err() != nil:
		os.Exit(130)
	default:
		fmt.Fprintln(os.Stderr, "lockstep:", err)
		os.Exit(1)
	}
}
