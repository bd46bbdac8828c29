package remediatorcmd

import (
	"log/slog"
	"time"

	"github.com/lockstep-ccl/lockstep/remediation/slurm"
)

// slurmFlags are what the Slurm actuator needs to be told.
type slurmFlags struct {
	User         []string      `placeholder:"USER" help:"Whose jobs may be acted on; repeatable, * for everybody's (default: this process's user)."`
	Journal      string        `default:"/var/lib/lockstep/slurm" type:"path" help:"Directory of the actions' own journal."`
	Bin          string        `type:"path" placeholder:"DIR" help:"Where scontrol, scancel, squeue, sinfo and sattach are (default: in PATH)."`
	Drain        bool          `help:"Drain nodes that are left out, set those down that do not answer. Needs AdminLevel=Administrator, SlurmUser or root."`
	Spares       string        `placeholder:"RESERVATION" help:"Reservation that holds spare nodes: a requeued job that lost a node gets one. Needs Operator."`
	WaitForNodes bool          `help:"Requeue without the bad node also when no other is free, and let the job wait."`
	RequireProof bool          `help:"Act only when it is proven that the attempt has ended on the culprit's node."`
	FenceTimeout time.Duration `default:"3s" help:"How long to wait for that proof."`
}

func (f *slurmFlags) actuator(log *slog.Logger) (*slurm.Actuator, error) {
	return slurm.New(slurm.Options{
		Users: f.User, Journal: f.Journal, Run: slurm.Commands(f.Bin), Drain: f.Drain, Spares: f.Spares, WaitForNodes: f.WaitForNodes,
		RequireProof: f.RequireProof, FenceTimeout: f.FenceTimeout, Logger: log,
	})
}
