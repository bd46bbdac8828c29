// Package runcmd is `lockstep run`: it supervises a job's ranks on this machine.
package runcmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/record"
	"github.com/lockstep-ccl/lockstep/remediation/process"
)

// Cmd is the command line.
type Cmd struct {
	Job         string        `default:"job" help:"Name of the job; the label training_job everywhere." env:"LOCKSTEP_JOB"`
	Ranks       int           `short:"n" default:"1" help:"Processes to start." placeholder:"N"`
	Spares      int           `default:"0" help:"Further slots that stand by for ranks that are excluded." placeholder:"N"`
	Nodes       int           `default:"1" help:"Logical nodes to spread the ranks over, in blocks. Ranks of different nodes talk TCP." placeholder:"N"`
	Dir         string        `help:"State directory: control socket, secret, log files (default: a directory of the job's under the runtime directory)." type:"path"`
	RuntimeDir  string        `help:"Where flight recorders go." default:"${runtime_dir}" type:"path" env:"LOCKSTEP_RUNTIME_DIR"`
	Control     bool          `help:"Serve a control socket (DIR/control.sock) for the remediator."`
	Hold        time.Duration `help:"After a rank failed, leave the others as they are for so long and wait for a decision." default:"0s"`
	MaxRestarts int           `help:"Restarts without anybody asking, after failures." default:"0" placeholder:"N"`
	Grace       time.Duration `help:"Time between SIGTERM and SIGKILL." default:"5s"`
	OnRestart   string        `help:"Shell command to run before each restart, e.g. to check the last checkpoint." placeholder:"CMD"`
	Quiet       bool          `short:"q" help:"Do not copy the ranks' output to the terminal; it is in DIR/rankN.attemptM.log anyway."`
	Command     []string      `arg:"" passthrough:"" help:"Command of a rank, after --."`
}

// Help implements kong's help provider.
func (*Cmd) Help() string {
	return `Starts one process a rank with torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, ...)
and Lockstep's own (LOCKSTEP_RANK, LOCKSTEP_COMM_ID, LOCKSTEP_SECRET_FILE, LOCKSTEP_NODE, ...),
and restarts all ranks together, since they run in lockstep.

Examples:
  lockstep run --ranks 8 -- ./train                      run, fail when a rank fails
  lockstep run --ranks 8 --max-restarts 3 -- ./train     like torchrun
  lockstep run --ranks 8 --spares 1 --control --hold 30s -- ./train
                                                         let the remediator decide

Exit status: 0 when every rank ended with 0, 1 when the job failed, 130 when interrupted.`
}

// Run runs the job to its end.
func (c *Cmd) Run(ctx context.Context, log *slog.Logger, out io.Writer) error {
	command := c.Command
	if len(command) > 0 && command[0] == "--" {
		command = command[1:]
	}
	dir := c.Dir
	if dir == "" {
		dir = filepath.Join(c.RuntimeDir, "run."+c.Job)
	}
	o := process.Options{
		Job: c.Job, Command: command, Ranks: c.Ranks, Spares: c.Spares, Nodes: c.Nodes,
		RuntimeDir: func(node string) string {
			if c.Nodes == 1 {
				return c.RuntimeDir
			}
			return filepath.Join(c.RuntimeDir, node)
		},
		Node:   c.node,
		CommID: uniqueID,
		Dir:    dir, Control: c.Control, Hold: c.Hold, MaxRestarts: c.MaxRestarts, Grace: c.Grace,
		Logger: log,
	}
	if c.OnRestart != "" {
		o.OnRestart = []string{"/bin/sh", "-c", c.OnRestart}
	}
	if !c.Quiet {
		o.Output = out
	}
	s, err := process.New(o)
	if err != nil {
		return err
	}
	return s.Run(ctx)
}

func (c *Cmd) node(i int) string {
	host, err := os.Hostname()
	if err != nil {
		host = "node"
	}
	if c.Nodes == 1 {
		return host
	}
	return fmt.Sprintf("node%d", i)
}

// uniqueID names a free port of this machine for the ranks to meet on. The port
// is free now and could be taken before rank 0 listens; then that attempt
// fails with a clear error and the next one takes another.
func uniqueID() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("find a port for the rendezvous: %w", err)
	}
	addr := l.Addr().String()
	id, err := ccl.NewUniqueID(addr)
	return id.String(), errors.Join(err, l.Close())
}

// Vars are the defaults that the help shows.
func Vars() map[string]string { return map[string]string{"runtime_dir": record.DefaultDir()} }
