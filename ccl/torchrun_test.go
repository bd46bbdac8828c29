package ccl_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/lockstep-ccl/lockstep/ccl"
)

// environ sets the variables of a launcher, and none of another's.
func environ(t *testing.T, env string) {
	t.Helper()
	for _, kv := range os.Environ() {
		for _, p := range []string{"LOCKSTEP_", "SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_"} {
			if k, _, _ := strings.Cut(kv, "="); strings.HasPrefix(k, p) {
				t.Setenv(k, "")
			}
		}
	}
	for _, kv := range strings.Fields(env) {
		k, v, _ := strings.Cut(kv, "=")
		t.Setenv(k, v)
	}
}

// freePair is a port for torch's store, with a free one above it.
func freePair(t *testing.T) int {
	for range 100 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		port := l.Addr().(*net.TCPAddr).Port
		above, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", port+1))
		l.Close()
		if err == nil {
			above.Close()
			return port
		}
	}
	t.Fatal("no two free ports side by side")
	return 0
}

// Ranks meet by torchrun's variables alone, while torch's store has MASTER_PORT.
func TestTorchrunsVariables(t *testing.T) {
	const ranks = 4
	dir := filepath.Join(t.TempDir(), "rt")
	port := freePair(t)
	store, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", port))
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	for _, launcher := range []string{
		"RANK=%d LOCAL_RANK=%[1]d WORLD_SIZE=4 LOCAL_WORLD_SIZE=4 TORCHELASTIC_RUN_ID=x TORCHELASTIC_RESTART_COUNT=1",
		"RANK=%d WORLD_SIZE=4",
		"SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=%d SLURM_NTASKS=4 RANK= WORLD_SIZE=",
	} {
		var g errgroup.Group
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		for r := range ranks {
			environ(t, fmt.Sprintf(launcher, r)+fmt.Sprintf(" MASTER_ADDR=127.0.0.1 MASTER_PORT=%d LOCKSTEP_RUNTIME_DIR=%s LOCKSTEP_RECORDER=off", port, dir))
			cfg, err := ccl.ConfigFromEnv()
			if err == nil {
				err = cfg.Prepare()
			}
			if err != nil {
				t.Fatal(err)
			}
			if want := fmt.Sprintf("127.0.0.1:%d:", port+1); !strings.Contains(cfg.ID.String(), want) || cfg.Rank != r {
				t.Fatalf("rank %d at %s, want rank %d at %s", cfg.Rank, cfg.ID, r, want)
			}
			g.Go(func() error {
				c, err := ccl.Init(ctx, cfg)
				if err != nil {
					return err
				}
				x := []float32{float32(r)}
				s := c.NewStream()
				err = errors.Join(c.AllReduce(s, ccl.Of(x), ccl.Of(x), ccl.Sum), s.Wait(ctx), c.Close())
				if x[0] != 6 {
					return fmt.Errorf("rank %d: the sum is %v, %w", r, x[0], err)
				}
				return err
			})
		}
		if err := g.Wait(); err != nil {
			t.Errorf("%s: %v", launcher, err)
		}
		cancel()
	}
}

// The id is of the attempt, so that ranks of two attempts do not meet.
func TestDerivedIDs(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "rt")
	ids := map[string]string{}
	for _, env := range []string{"", "TORCHELASTIC_RESTART_COUNT=1", "TORCHELASTIC_RUN_ID=a", "WORLD_SIZE=3", "MASTER_PORT=65535", "LOCKSTEP_COMM_PORT=1234", "LOCKSTEP_JOB=other"} {
		environ(t, "RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500 LOCKSTEP_RECORDER=off LOCKSTEP_RUNTIME_DIR="+dir+" "+env)
		cfg, err := ccl.ConfigFromEnv()
		if err == nil {
			err = cfg.Prepare()
		}
		if err != nil {
			t.Fatal(err)
		}
		id := cfg.ID.String()
		if was, ok := ids[id]; ok {
			t.Errorf("%q and %q have the same id %s", env, was, id)
		}
		ids[id] = env
	}
}

func TestDerivedIDErrors(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "rt")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ env, want string }{
		{"MASTER_ADDR=", "neither are torchrun's MASTER_ADDR and MASTER_PORT"},
		{"MASTER_PORT=x", `MASTER_PORT is "x"`},
		{"LOCKSTEP_COMM_PORT=29500", "want a port other than MASTER_PORT"},
		{"MASTER_ADDR=10.0.0.1", "LOCKSTEP_SECRET_FILE is not set: ranks of several hosts"},
		{"MASTER_ADDR=10.0.0.1 LOCAL_WORLD_SIZE=1", "LOCKSTEP_SECRET_FILE is not set: ranks of several hosts"},
		{"LOCAL_WORLD_SIZE=1", "LOCKSTEP_SECRET_FILE is not set: ranks of several hosts"},
		{"RANK=x", `RANK is "x"`},
	} {
		environ(t, "RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 LOCAL_WORLD_SIZE= LOCKSTEP_RECORDER=off LOCKSTEP_RUNTIME_DIR="+dir+" "+c.env)
		if _, err := ccl.ConfigFromEnv(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %s", c.env, err, c.want)
		}
	}
	// A secret that others could have put there, or can read, is none.
	environ(t, "RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 LOCKSTEP_RECORDER=off LOCKSTEP_RUNTIME_DIR="+dir)
	prepare := func() error {
		cfg, err := ccl.ConfigFromEnv()
		if err != nil {
			return err
		}
		return cfg.Prepare()
	}
	if err := prepare(); err != nil {
		t.Fatal(err)
	}
	paths, err := filepath.Glob(filepath.Join(dir, "*.secret"))
	if err != nil || len(paths) != 1 {
		t.Fatalf("secrets: %v, %v", paths, err)
	}
	if err := os.Chmod(paths[0], 0o644); err != nil {
		t.Fatal(err)
	}
	if err := prepare(); err == nil || !strings.Contains(err.Error(), "not this user's alone") {
		t.Errorf("a secret that all can read: %v", err)
	}
	os.Remove(paths[0])
	if err := os.Symlink("/etc/passwd", paths[0]); err != nil {
		t.Fatal(err)
	}
	if err := prepare(); err == nil {
		t.Error("a link is followed")
	}
}
