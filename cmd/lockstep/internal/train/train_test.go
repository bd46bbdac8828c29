package train_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/ccl/ccltest/fakegpu"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/train"
	"github.com/lockstep-ccl/lockstep/internal/ports"
	"github.com/lockstep-ccl/lockstep/record"
)

func TestMain(m *testing.M) {
	stop, err := fakegpu.Start(4)
	if err != nil && !errors.Is(err, fakegpu.ErrUnavailable) {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	if stop != nil {
		stop()
	}
	os.Exit(code)
}

// job runs a whole job in this process and returns its losses.
func job(t *testing.T, gpus bool, cfg train.Config) []float64 {
	t.Helper()
	held, err := ports.Hold("127.0.0.1", 1)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	id, err := ccl.NewUniqueID(held.Addrs[0])
	if err != nil {
		t.Fatal(err)
	}
	world := cfg.DP * cfg.TP * cfg.PP
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	var wg sync.WaitGroup
	for r := range world {
		wg.Go(func() {
			if err := rank(ctx, id, r, world, gpus, cfg); err != nil {
				t.Errorf("rank %d: %v", r, err)
				cancel()
			}
		})
	}
	wg.Wait()
	losses, err := train.ReadLosses(filepath.Join(cfg.Dir, train.LossLog))
	if err != nil {
		t.Fatal(err)
	}
	return losses
}

func rank(ctx context.Context, id ccl.UniqueID, r, world int, gpu bool, cfg train.Config) (err error) {
	rec, err := record.Create(record.Options{
		Identity: record.Identity{Job: "train", Rank: int32(r), WorldSize: int32(world)}, StampSlots: record.GPUStampSlots,
	})
	if err != nil {
		return err
	}
	defer rec.Close()
	c := ccl.Config{ID: id, Rank: r, Size: world, Secret: []byte("0123456789abcdef0123456789abcdef"), Node: "node", Recorder: rec}
	if gpu {
		n, err := ccl.Devices()
		if err != nil {
			return err
		}
		c.Device = ccl.GPU(r % n)
	}
	cfg.Device = c.Device
	comm, err := ccl.Init(ctx, c)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, comm.Close()) }()
	return train.Run(ctx, cfg, comm, rec)
}

// Training on GPUs is training on CPUs: the losses differ by rounding. It is a
// function of its configuration, also when it restarts from a checkpoint.
func TestGPU(t *testing.T) {
	if n, err := ccl.Devices(); err != nil || n == 0 {
		t.Skip("no GPU:", err)
	}
	runtime := filepath.Join(t.TempDir(), "rt")
	if err := os.Mkdir(runtime, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("LOCKSTEP_RUNTIME_DIR", runtime)
	for _, c := range []train.Config{{DP: 2, TP: 2, PP: 1}, {DP: 2, TP: 1, PP: 2}} {
		t.Run(fmt.Sprintf("dp %d, tp %d, pp %d", c.DP, c.TP, c.PP), func(t *testing.T) {
			run := func(gpus bool, steps, checkpoint int, dir string) []float64 {
				c := c
				c.Steps, c.Checkpoint, c.Dir, c.Seed = steps, checkpoint, dir, 1
				return job(t, gpus, c)
			}
			want := run(false, 4, 0, t.TempDir())
			got := run(true, 4, 0, t.TempDir())
			dir := t.TempDir()
			run(true, 3, 2, dir)
			again := run(true, 4, 2, dir)
			if len(want) != 4 || len(got) != 4 || len(again) != 4 {
				t.Fatalf("%d steps on CPUs, %d on GPUs, %d with a restart; want 4", len(want), len(got), len(again))
			}
			for i := range want {
				if math.Abs(got[i]-want[i]) > 1e-5*math.Abs(want[i]) {
					t.Errorf("step %d: loss %v on GPUs, %v on CPUs", i+1, got[i], want[i])
				}
				if again[i] != got[i] {
					t.Errorf("step %d: loss %x after a restart, %x without", i+1, again[i], got[i])
				}
			}
		})
	}
}
