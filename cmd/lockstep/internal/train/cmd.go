package train

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/ccl/ccltest"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/plannercmd"
	"github.com/lockstep-ccl/lockstep/launcher"
)

// FaultDirEnv names the directory by which the demo breaks things; without it
// nothing can be broken. A rank serves a socket there for faults of its
// connections, and looks each step for a file that makes its data loader slow.
const FaultDirEnv = "LOCKSTEP_FAULT_DIR"

// FaultSocket is a rank's socket in the fault directory.
func FaultSocket(dir string, rank int) string {
	return filepath.Join(dir, fmt.Sprintf("rank%d.sock", rank))
}

// SlowLoader makes a rank's data loader take d longer, each step of one attempt.
func SlowLoader(dir string, rank, attempt int, d time.Duration) error {
	return os.WriteFile(loaderFile(dir, rank, attempt), []byte(d.String()), 0o600)
}

func loaderFile(dir string, rank, attempt int) string {
	return filepath.Join(dir, fmt.Sprintf("rank%d.attempt%d.loader", rank, attempt))
}

// loader is the data loader, as slow as SlowLoader has said.
func loader(dir string, rank int) func(context.Context, int) error {
	if dir == "" {
		return nil
	}
	attempt, _ := strconv.Atoi(os.Getenv("LOCKSTEP_RESTART_COUNT"))
	file := loaderFile(dir, rank, attempt)
	return func(ctx context.Context, _ int) error {
		b, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			return nil // the usual case: nobody has made it slow
		}
		if err != nil {
			return err
		}
		d, err := time.ParseDuration(string(b))
		if err != nil {
			return err
		}
		select {
		case <-time.After(d):
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
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
	OnFailure  string        `default:"fail" enum:"fail,shrink" help:"When another rank is lost: fail, or shrink to the survivors and go on from the last checkpoint (tp 1, pp 1)."`
	Device     string        `default:"cpu" enum:"cpu,cuda" help:"Where the buffers of collectives lie: cpu, or cuda for the memory of a GPU each (several ranks share one where there are too few)."`
	Meet       string        `type:"path" help:"Folder that all ranks see, in which they find rank 0 where nobody tells them: it leaves its --address there."`
	Address    string        `help:"Where other ranks reach this one's host, for --meet."`
}

// Run joins the job and trains.
func (c *Cmd) Run(ctx context.Context, log *slog.Logger) (err error) {
	if c.Device == "cuda" {
		if err := chooseGPU(); err != nil {
			return err
		}
	}
	if c.Meet != "" {
		if err := meet(ctx, c.Meet, c.Address); err != nil {
			return err
		}
	}
	cfg, err := ccl.ConfigFromEnv()
	if err == nil {
		err = cfg.Prepare()
	}
	if err != nil {
		return err
	}
	stop, err := plannercmd.Plan(&cfg)
	if err != nil {
		return err
	}
	defer stop()
	if dir := os.Getenv(FaultDirEnv); dir != "" {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
		inj := ccltest.New()
		cfg.Faults = inj
		stop, err := ccltest.Serve(FaultSocket(dir, cfg.Rank), inj)
		if err != nil {
			return err
		}
		defer stop()
	}
	defer func() { err = errors.Join(err, cfg.Recorder.Close()) }()
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return err
	}
	joinCtx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	world, err := ccl.Init(joinCtx, cfg)
	if err != nil {
		return err
	}
	t := Config{
		DP: c.DP, TP: c.TP, PP: c.PP, Steps: c.Steps, Seed: c.Seed, Dir: c.Dir, Checkpoint: c.Checkpoint, Pace: c.Pace,
		Device: cfg.Device, Loader: loader(os.Getenv(FaultDirEnv), cfg.Rank),
	}
	if c.OnFailure == "shrink" {
		return RunElastic(ctx, t, world, cfg.Recorder)
	}
	return leave(world, Run(ctx, t, world, cfg.Recorder))
}

// meet sets MASTER_ADDR by a file of this attempt's own, which rank 0 writes.
func meet(ctx context.Context, dir, address string) error {
	who, err := launcher.Detect(nil)
	if err != nil {
		return err
	}
	file := filepath.Join(dir, fmt.Sprintf("attempt%d.rank0", who.Attempt))
	if who.Rank == 0 {
		if net.ParseIP(address) == nil {
			return fmt.Errorf("train: --address %q: want an IP address", address)
		}
		if err := os.WriteFile(file+".new", []byte(address), 0o600); err != nil {
			return err
		}
		if err := os.Rename(file+".new", file); err != nil {
			return err
		}
	}
	for deadline := time.Now().Add(time.Minute); ; {
		b, err := os.ReadFile(file)
		if err == nil {
			return os.Setenv("MASTER_ADDR", string(b))
		}
		if !errors.Is(err, fs.ErrNotExist) || time.Now().After(deadline) {
			return fmt.Errorf("rank %d: where is rank 0: %w", who.Rank, err)
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// chooseGPU makes LOCKSTEP_DEVICE this rank's GPU: of the node's, by its number there.
func chooseGPU() error {
	n, err := ccl.Devices()
	if err == nil && n == 0 {
		err = errors.New("this process sees no GPU")
	}
	if err != nil {
		return fmt.Errorf("train on GPUs: %w", err)
	}
	local, _ := strconv.Atoi(cmp.Or(os.Getenv("LOCKSTEP_LOCAL_RANK"), os.Getenv("LOCAL_RANK"))) // ConfigFromEnv tells of a bad one
	return os.Setenv("LOCKSTEP_DEVICE", fmt.Sprintf("cuda:%d", local%n))
}
