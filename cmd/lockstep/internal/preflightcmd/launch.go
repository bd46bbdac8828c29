package preflightcmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/children"
	"github.com/lockstep-ccl/lockstep/preflight"
)

// grace is how long the other ranks may take to end once rank 0 has.
const grace = 5 * time.Second

// launch starts the ranks as children that run the same command, and waits for
// them. What rank 0 says is the result.
func (c *Cmd) launch(ctx context.Context, out io.Writer) error {
	dir, err := os.MkdirTemp("", "lockstep-preflight-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	env, meet, err := children.Env(dir)
	if err != nil {
		return err
	}
	defer meet.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	job := children.Job{Ranks: c.Ranks, Nodes: c.Nodes, Node: func(i int) string { return nodeName(i, c.Nodes) }, Env: env, Out: out}
	ends, started, failure := job.Start(ctx)
	if failure != nil {
		cancel()
	}
	told := false // rank 0 has ended: what it said stands
	for range started {
		e := <-ends
		if e.Rank == 0 {
			told, failure = true, nil
			defer time.AfterFunc(grace, cancel).Stop() // whoever has not ended then is stuck
		}
		if e.Err == nil || told && e.Rank != 0 || failure != nil {
			continue
		}
		failure = fmt.Errorf("rank %d: %w", e.Rank, e.Err)
		if ctx.Err() != nil {
			failure = context.Cause(ctx)
		}
		var exit *exec.ExitError
		if errors.As(e.Err, &exit) && exit.ExitCode() == preflight.StatusBad {
			failure = &BadError{} // it has told
		}
	}
	return failure
}

// nodeName is this machine's, or that of a logical node on it.
func nodeName(i, nodes int) string {
	name, err := os.Hostname()
	if err != nil {
		name = "node"
	}
	if v := os.Getenv("LOCKSTEP_NODE"); v != "" {
		name = v
	}
	if nodes > 1 {
		name = fmt.Sprintf("%s-%d", name, i)
	}
	return name
}
