package train

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/ccl/ccltest"
)

// FaultDirEnv names the directory in which each rank serves the socket by
// which the demo breaks things; without it nothing can be broken.
const FaultDirEnv = "LOCKSTEP_FAULT_DIR"

// FaultSocket is a rank's socket in the fault directory.
func FaultSocket(dir string, rank int) string {
	return filepath.Join(dir, fmt.Sprintf("rank%d.sock", rank))
}

// Cmd is one rank's command line: `lockstep train`, started by `lockstep run`.
type Cmd struct {
	DP         int           `default:"1" help:"Data-parallel replicas."`
	TP         int           `default:"1" help:"Tensor-parallel ranks."`
	PP         int           `default:"1" help:"Pipeline stages."`
	Dir        string        `required:"" type:"path" help:"Checkpoints and the loss log."`
	Steps      int           `default:"0" help:"Steps to train (0: until told to stop)."`
	Checkpoint int           `default:"20" help:"Steps between checkpoints."`
	Pace       time.Duration `default:"0s" help:"Least duration of a step."`
	Seed       uint64        `default:"1" help:"Seed of model and data set."`
}

// Run joins the job and trains.
func (c *Cmd) Run(ctx context.Context, log *slog.Logger) (err error) {
	cfg, err := ccl.ConfigFromEnv()
	if err != nil {
		return err
	}
	var inj *ccltest.Injector
	if dir := os.Getenv(FaultDirEnv); dir != "" {
		inj = ccltest.New()
		cfg.Faults = inj
		stop, err := ccltest.Serve(FaultSocket(dir, cfg.Rank), inj)
		if err != nil {
			return err
		}
		defer stop()
	}
	joinCtx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	world, err := ccl.Init(joinCtx, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, world.Close()) }()
	return Run(ctx, Config{
		DP: c.DP, TP: c.TP, PP: c.PP, Steps: c.Steps, Seed: c.Seed, Dir: c.Dir, Checkpoint: c.Checkpoint, Pace: c.Pace,
		Loader: func(ctx context.Context, _ int) error { return inj.Delay(ctx) },
	}, world, cfg.Recorder)
}
