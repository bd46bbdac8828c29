package preflightcmd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/flags"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/progress"
	"github.com/lockstep-ccl/lockstep/preflight"
)

// Cmd is the command line.
type Cmd struct {
	Ranks  int    `short:"n" default:"2" help:"Processes to start on this machine, where no launcher has (LOCKSTEP_COMM_ID is not set)." placeholder:"N"`
	Nodes  int    `default:"1" help:"Logical nodes to spread them over; between nodes they talk TCP." placeholder:"N"`
	Device string `default:"cpu" enum:"cpu,cuda" help:"Where the buffers are: cpu, or cuda with one GPU a rank. Between nodes it is host memory all the same."`

	Size     flags.Size    `default:"0" help:"Largest message of the bandwidth measurement, in bytes (K, M, G). 0: 16M on CPUs, 64M on GPUs." placeholder:"BYTES"`
	Time     time.Duration `default:"60ms" help:"How long to measure the bandwidth of each direction of a pair."`
	Trips    int           `default:"200" help:"Round trips of the latency measurement." placeholder:"N"`
	Together bool          `help:"Measure also while all ranks exchange with all others at once: what they share is short of."`

	Tolerance    float64       `default:"0" help:"An edge or rank is bad that is so many times slower than what is typical of its kind (of latencies: twice that). 0: 1.5 on GPUs, 2 on CPUs." placeholder:"FACTOR"`
	MinBandwidth float64       `default:"0" help:"An edge is bad that is below this, in GB/s, whatever is typical." placeholder:"GB/S"`
	MaxLatency   time.Duration `default:"0s" help:"An edge is bad that is above this." placeholder:"DURATION"`

	PairTimeout time.Duration `default:"10s" help:"Give up a pair after this long; it is blocked."`
	JoinTimeout time.Duration `default:"1m" help:"Wait so long for all ranks to come."`
	Timeout     time.Duration `default:"15m" help:"Give up altogether after this long."`

	JSON string `type:"path" help:"Write everything that was measured to this file." placeholder:"FILE"`
	Prom string `type:"path" help:"Write metrics to this file, for a textfile collector (its name must end in .prom)." placeholder:"FILE"`
	Good string `type:"path" help:"Write the nodes without anything bad to this file, one a line." placeholder:"FILE"`

	faults ccl.Faults // of tests
}

// Help implements kong's help provider.
func (*Cmd) Help() string {
	return `Measures every ordered pair of ranks, one direction at a time, in rounds of disjoint pairs:
half the round trip of a small message, and the bandwidth of large ones. Each rank also times
its memory and one core. What stands out among its kind (within a node, between nodes) is
measured again, by itself; what is still bad is named: a connection, all that a rank sends or
receives, a node, or what lies between two nodes.

On one machine it starts the ranks itself. On many, a launcher starts one preflight a rank
with the environment of a job: LOCKSTEP_RANK and LOCKSTEP_WORLD_SIZE (or torchrun's), LOCKSTEP_LOCAL_RANK,
LOCKSTEP_COMM_ID=lockstep1:HOST:PORT:32 HEX DIGITS, where HOST is rank 0's, and
LOCKSTEP_SECRET_FILE. Rank 0 prints, and writes the files.

Examples:
  lockstep preflight --ranks 4                                 shared memory of this machine
  lockstep preflight --ranks 8 --device cuda                   its GPUs
  lockstep preflight --ranks 4 --nodes 2 --json report.json    two logical nodes, TCP between them
  lockstep preflight -n 8 --device cuda --min-bandwidth 100 --max-latency 20us
  lockstep run -n 4 -- lockstep preflight --prom /var/lib/node_exporter/preflight.prom
  srun --ntasks-per-node=1 ./rank.sh lockstep preflight --good good-nodes    (docs/operations.md has rank.sh)

Exit status, the same on every rank that is told: 0 good, 1 could not measure (a rank did not come, time is up),
2 wrong command line, 3 something is bad (an edge, or a rank that went away meanwhile).`
}

// BadError is a check that found something bad. It has no text where somebody
// else has told.
type BadError struct{ text string }

func (e *BadError) Error() string { return e.text }

// ExitStatus is the command's.
func (*BadError) ExitStatus() int { return preflight.StatusBad }

// Validate implements kong's check of a command line.
func (c *Cmd) Validate() error {
	switch {
	case c.Ranks < 1 || c.Ranks > 1024 || c.Nodes < 1 || c.Nodes > c.Ranks:
		return fmt.Errorf("%d ranks on %d nodes", c.Ranks, c.Nodes)
	case c.Trips < 1 || c.Trips > 1e6:
		return fmt.Errorf("--trips %d: want 1 to 1000000", c.Trips)
	case c.Tolerance != 0 && !(c.Tolerance > 1):
		return fmt.Errorf("--tolerance %g: want more than 1, or 0 for the default", c.Tolerance)
	case c.MinBandwidth < 0 || c.MaxLatency < 0:
		return errors.New("--min-bandwidth and --max-latency cannot be negative")
	case c.Time <= 0 || c.PairTimeout <= 0 || c.JoinTimeout <= 0 || c.Timeout <= 0:
		return errors.New("--time and time-outs must be above 0")
	case c.PairTimeout < 20*c.Time:
		return fmt.Errorf("--pair-timeout %v is too short for --time %v: want at least 20 times as long", c.PairTimeout, c.Time)
	case c.Prom != "" && !strings.HasSuffix(c.Prom, ".prom"):
		return fmt.Errorf("--prom %s: textfile collectors read names that end in .prom", c.Prom)
	}
	return nil
}

// options are what to measure; defaults are those of the device.
func (c *Cmd) options() preflight.Options {
	o := preflight.Options{
		Size: int(c.Size), Time: c.Time, Trips: c.Trips, Together: c.Together, JoinTimeout: c.JoinTimeout, PairTimeout: c.PairTimeout,
		Limits: preflight.Limits{Tolerance: c.Tolerance, MinBandwidth: c.MinBandwidth * 1e9, MaxLatency: c.MaxLatency},
	}
	size, tolerance := 16<<20, 2. // other work on a host's cores is felt
	if c.Device == "cuda" {
		size, tolerance = 64<<20, 1.5
	}
	o.Size = cmp.Or(o.Size, size)
	o.Limits.Tolerance = cmp.Or(o.Limits.Tolerance, tolerance)
	return o
}

// Run measures, or starts the ranks that do.
func (c *Cmd) Run(ctx context.Context, out io.Writer) error {
	if os.Getenv("LOCKSTEP_COMM_ID") == "" {
		ctx, cancel := context.WithTimeout(ctx, c.Timeout+c.PairTimeout+3*preflight.Slack) // the ranks end by themselves
		defer cancel()
		return c.launch(ctx, out)
	}
	// A check is no job: the agent need not hear of it.
	if err := os.Setenv("LOCKSTEP_RECORDER", "off"); err != nil {
		return err
	}
	cfg, err := ccl.ConfigFromEnv()
	if err == nil {
		err = cfg.Prepare()
	}
	if err != nil {
		return err
	}
	cfg.Faults = c.faults
	if cfg.Rank == 0 {
		return c.lead(ctx, cfg, out)
	}
	_, err = c.rank(ctx, cfg, c.Timeout+c.PairTimeout+2*preflight.Slack, nil) // rank 0 is the one to tell that time is up
	if errors.Is(err, preflight.ErrBad) {
		return &BadError{} // rank 0 has told why
	}
	return err
}

// rank is one rank's part.
func (c *Cmd) rank(ctx context.Context, cfg ccl.Config, patience time.Duration, tell func(what string, done, total int)) (*preflight.Report, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("not done within --timeout=%v", c.Timeout))
	defer cancel()
	o := c.options()
	o.Progress = tell
	var err error
	if o.Device, err = device(c.Device, localRank(cfg.Rank)); err != nil {
		return nil, fmt.Errorf("rank %d: --device %s: %w", cfg.Rank, c.Device, err)
	}
	return preflight.Run(ctx, cfg, o)
}

// lead is rank 0's part: it prints, and writes the files.
func (c *Cmd) lead(ctx context.Context, cfg ccl.Config, out io.Writer) error {
	began := time.Now()
	var line *phase
	if progress.Terminal(os.Stderr) {
		line = &phase{out: os.Stderr}
	}
	r, err := c.rank(ctx, cfg, c.Timeout, line.show)
	line.wipe()
	if r == nil { // files of an earlier check must not speak for this one
		return errors.Join(err, c.save(preflight.Unmeasured(cfg.Size, began, err)))
	}
	printErr := show(r, out, progress.Terminal(out) && os.Getenv("NO_COLOR") == "")
	if e := errors.Join(printErr, c.save(r)); e != nil {
		return e
	}
	if r.Verdict == preflight.VerdictBad {
		return &BadError{"preflight: bad edges or ranks (see above)"}
	}
	return err
}

// localRank is the rank's number on its node, as launchers tell.
func localRank(rank int) int {
	for _, name := range []string{"LOCKSTEP_LOCAL_RANK", "LOCAL_RANK", "SLURM_LOCALID"} {
		if n, err := strconv.Atoi(os.Getenv(name)); err == nil && n >= 0 {
			return n
		}
	}
	return rank
}

// device is the GPU of a rank: of the node's, by its number there.
func device(name string, local int) (ccl.Device, error) {
	if name == "cpu" {
		return ccl.CPU, nil
	}
	n, err := ccl.Devices()
	if err == nil && n == 0 {
		err = errors.New("this process sees no GPU")
	}
	if err != nil {
		return ccl.CPU, err
	}
	return ccl.GPU(local % n), nil
}
