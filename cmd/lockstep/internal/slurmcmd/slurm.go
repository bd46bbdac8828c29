// Package slurmcmd is `lockstep slurm`: what runs inside a Slurm job.
package slurmcmd

import (
	"context"
	"log/slog"
	"os"
	"time"

	"github.com/lockstep-ccl/lockstep/remediation/slurm"
)

// Cmd is the command line.
type Cmd struct {
	Run Run `cmd:"" help:"Run a job's step inside its allocation, again when the remediator says so: the batch script's last line."`
}

// Run is `lockstep slurm run`.
type Run struct {
	Nodes       int           `short:"N" required:"" placeholder:"N" help:"Nodes that a step takes. What the allocation has more are spares."`
	Hold        time.Duration `default:"30s" help:"How long the other tasks go on when one has ended, so that it is seen who broke step."`
	Decide      time.Duration `default:"10s" help:"How long a step that failed waits for the remediator's word."`
	MaxRestarts int           `default:"3" help:"Restarts that nobody asked for."`
	Srun        []string      `arg:"" passthrough:"partial" help:"Options of srun, and the command, after --."`
}

// Help implements kong's help provider.
func (*Run) Help() string {
	return `Runs 'srun OPTIONS COMMAND' on N nodes of the job's allocation. When the remediator ends the step, the next one
starts at once, without the nodes that are to blame: ask sbatch for a spare or two, and for --no-kill, so that the
job outlives a node. A step that fails by itself waits for the remediator, then starts again on its own.
Attempts are numbered on over requeues, by 100: LOCKSTEP_RESTART_COUNT, SLURM_RESTART_COUNT. It ends as the last step did.
The job's comment says what was asked ([lockstep/1 ...]); leave that part alone.

Examples:
  #!/bin/sh
  #SBATCH --nodes=5 --no-kill --requeue --open-mode=append
  exec lockstep slurm run --nodes 4 -- --ntasks-per-node=8 lockstep attach -- python train.py`
}

// Run implements the command.
func (c *Run) Run(ctx context.Context, log *slog.Logger) error {
	args := c.Srun
	if len(args) > 0 && args[0] == "--" {
		args = args[1:]
	}
	return slurm.Loop{
		Srun: args, Nodes: c.Nodes, Hold: c.Hold, Decide: c.Decide, MaxRestarts: c.MaxRestarts, Stdout: os.Stdout, Logger: log,
	}.Start(ctx)
}
