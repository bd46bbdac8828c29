// Package runcmd is `lockstep run`: it supervises a job's ranks on this machine.
package runcmd

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
	"github.com/lockstep-ccl/lockstep/remediation/process"
)

// Cmd is the command line.
type Cmd struct {
	Job         string        `default:"job" help:"Name of the job; the label training_job everywhere." env:"LOCKSTEP_JOB"`
	Ranks       int           `short:"n" default:"1" help:"Processes to start." placeholder:"N"`
	Spares      int           `default:"0" help:"Further slots that stand by for ranks that are excluded." placeholder:"N"`
	Nodes       int           `default:"1" help:"Logical nodes to spread the ranks over, in blocks. Ranks of different nodes talk TCP." placeholder:"N"`
	Dir         string        `help:"State directory, nobody else's (mode 0700): control socket, secret, log files (default: $XDG_STATE_HOME/lockstep/JOB, else ~/.local/state/lockstep/JOB)." type:"path" placeholder:"DIR"`
	RuntimeDir  string        `help:"Where flight recorders go." default:"${runtime_dir}" type:"path" env:"LOCKSTEP_RUNTIME_DIR"`
	Control     bool          `help:"Serve a control socket (DIR/control.sock) for the remediator."`
	Hold        time.Duration `help:"After a rank failed, leave the others as they are for so long and wait for a decision." default:"0s"`
	MaxRestarts int           `help:"Restarts without anybody asking, after failures." default:"0" placeholder:"N"`
	Grace       time.Duration `help:"Time between SIGTERM and SIGKILL." default:"5s"`
	OnRestart   string        `help:"Shell command to run before each restart, e.g. to check the last checkpoint." placeholder:"CMD"`
	Hosts       `embed:""`
	Quiet       bool     `short:"q" help:"Do not copy the ranks' output to the terminal; it is in DIR/rankN.attemptM.log anyway."`
	Command     []string `arg:"" passthrough:"partial" help:"Command of a rank, after --."`
}

// Help implements kong's help provider.
func (*Cmd) Help() string {
	return `Starts one process a rank with torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...)
and Lockstep's own (LOCKSTEP_RANK, LOCKSTEP_COMM_ID, LOCKSTEP_SECRET_FILE, LOCKSTEP_NODE, ...),
and restarts all ranks together, since they run in lockstep, on this machine or on several. A rank's children end with it. Flight
recorders of the last two attempts are kept for a post-mortem, older ones are removed.

Examples:
  lockstep run --ranks 8 -- ./train                      run, fail when a rank fails
  lockstep run --ranks 8 --max-restarts 3 -- ./train     like torchrun
  lockstep run --ranks 8 --spares 1 --control --hold 30s -- ./train
                                                         let the remediator decide
  lockstep run --ranks 32 --hosts 4 --coordinator head:29400 --max-restarts 3 --tls.cert n.crt --tls.key n.key --tls.ca ca.crt -- ./train
                                                         the same command on each of four machines, by ssh, mpirun
                                                         or srun; on a fifth one it stands by. See docs/several-machines.md

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
		var err error
		if dir, err = stateDir(c.Job); err != nil {
			return err
		}
	}
	c.place(log)
	o := process.Options{
		Job: c.Job, Command: command, Ranks: c.Ranks, Spares: c.Spares, Nodes: c.Nodes,
		RuntimeDir: c.runtimeDir, Node: c.node, Rendezvous: rendezvousAt("127.0.0.1"),
		Dir: dir, Control: c.Control, Hold: c.Hold, MaxRestarts: c.MaxRestarts, Grace: c.Grace,
		BeforeStart: func(attempt int) {
			for i := range max(c.Nodes, 1) {
				prune(c.runtimeDir(c.node(i)), c.Job, attempt, log)
			}
		},
		OnExit: func(x process.Exit) {
			if err := record.WriteEnd(c.runtimeDir(x.Node), endOf(c.Job, x)); err != nil {
				log.Warn("the node's agent does not hear how a rank ended", "rank", x.Rank, "err", err)
			}
		},
		Logger: log, Devices: c.devices(os.Getenv("CUDA_VISIBLE_DEVICES"), "/proc/driver/nvidia/gpus", log),
	}
	if c.OnRestart != "" {
		o.OnRestart = []string{"/bin/sh", "-c", c.OnRestart}
	}
	if !c.Quiet {
		o.Output = out
	}
	if c.Coordinator != "" {
		return c.runHosts(ctx, o, log)
	}
	s, err := process.New(o)
	if err != nil {
		return err
	}
	return s.Run(ctx)
}

// devices are the GPUs of the slots, where each has one: an exclusion is to move to another.
// Without spares nothing moves, and ranks see what the environment says.
func (c *Cmd) devices(visible, proc string, log *slog.Logger) []string {
	if c.Spares == 0 {
		return nil
	}
	var all []string
	if visible != "" {
		all = strings.Split(visible, ",")
	} else if gpus, err := os.ReadDir(proc); err == nil { // one directory each; none: no driver
		for i := range gpus {
			all = append(all, strconv.Itoa(i))
		}
	}
	slots := max(c.Ranks, 0) + c.Spares
	if len(all) >= slots {
		return all
	}
	if len(all) > 0 {
		log.Warn("there are fewer GPUs than slots: a rank that is excluded moves to another slot, and keeps its GPU", "gpus", len(all), "slots", slots)
	}
	return nil
}

func endOf(job string, x process.Exit) record.End {
	return record.End{
		Job: job, Rank: int32(x.Rank), Attempt: uint32(x.Attempt), PID: int32(x.PID), Started: x.Started.Round(0),
		Code: int32(x.Code), Signal: int32(x.Signal), Asked: x.Asked, At: record.Now() - time.Since(x.At).Nanoseconds(),
	}
}

// stateDir is not in the runtime directory: that is memory, and logs grow.
func stateDir(job string) (string, error) {
	base := os.Getenv("XDG_STATE_HOME")
	if base == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return "", fmt.Errorf("run: no place for the state directory (%w): give one with --dir", err)
		}
		base = filepath.Join(home, ".local", "state")
	}
	return filepath.Join(base, "lockstep", job), nil
}

// place finds this user's runtime directory, once for all ranks: they get it by name, so
// that nobody can take their places in advance.
func (c *Cmd) place(log *slog.Logger) {
	find := record.DirBelow
	if c.RuntimeDir == record.DefaultDir() {
		find = func(_, key string) (string, []error, error) { return record.Dir(key) }
	}
	var key [8]byte
	rand.Read(key[:])
	dir, refused, err := find(c.RuntimeDir, hex.EncodeToString(key[:]))
	switch {
	case err != nil: // the job matters more
		log.Warn("no runtime directory: nobody will see what the ranks do, and they share no memory", "err", err)
	case len(refused) > 0:
		log.Warn("the runtime directory is not this user's alone: another one is used", "dir", dir, "err", refused[0])
		fallthrough
	default:
		c.RuntimeDir = dir
	}
}

// runtimeDir keeps the recorders of logical nodes apart, as those of real ones are.
func (c *Cmd) runtimeDir(node string) string {
	if c.Nodes == 1 {
		return c.RuntimeDir
	}
	return filepath.Join(c.RuntimeDir, node)
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

// Vars are the defaults that the help shows.
func Vars() map[string]string { return map[string]string{"runtime_dir": record.DefaultDir()} }
