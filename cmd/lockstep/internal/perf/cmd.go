package perf

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/children"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/flags"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/plannercmd"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/progress"
	"github.com/lockstep-ccl/lockstep/record"
)

// Cmd is the command line; short options are nccl-tests'.
type Cmd struct {
	Collectives []string `arg:"" optional:"" name:"collective" help:"What to measure: allreduce, reduce, broadcast, allgather, reduce_scatter, alltoall, gather, scatter, sendrecv, barrier. nccl-tests' names (all_reduce_perf) work too."`

	Begin  flags.Size `short:"b" default:"8" help:"Smallest size in bytes (K, M, G)."`
	End    flags.Size `short:"e" default:"64M" help:"Largest size."`
	Factor int        `short:"f" default:"2" help:"From one size to the next."`
	Step   flags.Size `short:"i" default:"0" help:"Add so much instead of multiplying."`
	Iters  int        `short:"n" default:"0" help:"Operations in each measurement (0: as many as take about 150 ms, in blocks of which the median counts)."`
	Warmup int        `short:"w" default:"5" help:"Operations before."`
	Check  int        `short:"c" default:"1" help:"Check results so many times (0: no)."`
	Op     string     `short:"o" default:"sum" help:"sum, prod, max, min, avg or all."`
	Type   string     `short:"d" default:"float" help:"int8, uint8, int32, uint32, int64, uint64, half, float, double, bfloat16 or all; on GPUs also fp8_e4m3 and fp8_e5m2."`
	Root   int        `short:"r" default:"0" help:"Root of broadcast, reduce, gather and scatter."`

	Ranks      int           `default:"2" help:"Processes to start." placeholder:"N"`
	Nodes      int           `default:"1" help:"Logical nodes to spread them over; between nodes they talk TCP." placeholder:"N"`
	Device     string        `default:"cpu" enum:"cpu,cuda" help:"Where the buffers are: cpu, or cuda with one GPU a rank (ranks beyond the number of GPUs share them)."`
	Threads    bool          `help:"All ranks in one process."`
	Staged     bool          `help:"On GPUs: do not register the buffers as windows."`
	Offset     int           `default:"0" help:"On GPUs: buffers begin so many elements after their memory does, as views of tensors do." placeholder:"N"`
	Graph      int           `default:"0" help:"On GPUs: launch so many operations as one CUDA graph (0: each by itself)." placeholder:"N"`
	GPUAlgo    string        `name:"gpu-algo" default:"" help:"On GPUs: force ll, ll2, ll12, sym, bulk, ce, ring, pushbulk or chain where a collective has it."`
	Blocks     int           `default:"0" help:"On GPUs: so many multiprocessors (0: the tuning table's choice)." placeholder:"N"`
	GPUPace    int           `name:"gpu-pace" default:"0" help:"On GPUs: send to peers by bulk copies and rings at most so many GB/s (0: what links carry, as far as known; -1: no limit)." placeholder:"N"`
	GPUThreads int           `name:"gpu-threads" default:"0" help:"On GPUs: so many threads in each block, where a kernel takes any number." placeholder:"N"`
	Place      string        `default:"both" enum:"both,out,in" help:"Out of place, in place, or both."`
	Recorder   string        `default:"on" enum:"on,off,both" help:"Flight recorder: on, off, or both in turns with their ratio."`
	Algo       string        `default:"" help:"Force an algorithm: direct, ring, doubling, tree or hierarchical."`
	Proto      string        `default:"" help:"Force a protocol: ll or simple."`
	JSON       bool          `help:"One JSON object a line instead of the table."`
	Timeout    time.Duration `default:"10m" help:"Give up after this long."`
}

// Help implements kong's help provider.
func (*Cmd) Help() string {
	return `Columns are nccl-tests': size in bytes, elements, type, operator, root, then time in µs,
algorithm and bus bandwidth in GB/s and wrong elements, out of place and in place.
A time is that of a call and its Wait, averaged over the ranks; on GPUs, of calls back to back,
and the slowest rank's. Wrong elements make the exit status 1.

Examples:
  lockstep perf                                       allreduce, 8 B to 64 MB, 2 ranks over shared memory
  lockstep perf allgather reduce_scatter -b 1K -e 16M --ranks 4
  lockstep perf allreduce --ranks 4 --nodes 2         two logical nodes, TCP between them
  lockstep perf allreduce --recorder both             what the flight recorder costs
  lockstep perf allreduce -d all -o all -b 1M -e 1M   every type and operator
  lockstep perf allreduce --device cuda --ranks 8 -e 4G        8 GPUs, registered buffers
  lockstep perf allreduce --device cuda --ranks 8 --graph 32   CUDA graphs of 32 operations
  lockstep perf allreduce --device cuda --ranks 4 --nodes 2    2 GPUs on each of two logical nodes
  lockstep run -n 8 -- lockstep perf alltoall         on ranks that are supervised`
}

// Run measures, or starts the ranks that do.
func (c *Cmd) Run(ctx context.Context, out io.Writer) error {
	ctx, cancel := context.WithTimeoutCause(ctx, c.Timeout, fmt.Errorf("not done within --timeout=%v", c.Timeout))
	defer cancel()
	if len(c.Collectives) == 0 {
		c.Collectives = []string{"allreduce"}
	}
	plan, err := c.plan()
	if err != nil {
		return err
	}
	switch {
	case os.Getenv("LOCKSTEP_COMM_ID") != "":
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
		return c.rank(ctx, plan, cfg, out)
	case c.Threads:
		return c.threads(ctx, plan, out)
	}
	return c.launch(ctx, out)
}

// maxOffset is beyond any alignment that a kernel distinguishes.
const maxOffset = 4096

// plan is what the command line asks for, checked.
type plan struct {
	colls []collective
	types []ccl.DType
	ops   []ccl.Op
	algo  ccl.Algo
	proto ccl.Proto
}

func (c *Cmd) plan() (p plan, err error) {
	switch {
	case c.Begin < 0 || c.End < c.Begin:
		return p, fmt.Errorf("sizes from %d to %d bytes", c.Begin, c.End)
	case c.Factor < 2 && c.Step == 0 && c.Begin != c.End:
		return p, fmt.Errorf("-f %d: want at least 2, or -i", c.Factor)
	case c.Device == "cpu" && (c.Graph > 0 || c.Staged || c.Offset != 0 || c.GPUAlgo != "" || c.Blocks != 0 || c.GPUPace != 0):
		return p, errors.New("--graph, --staged, --offset, --gpu-algo, --blocks and --gpu-pace are for --device cuda")
	case c.Offset < 0 || c.Offset > maxOffset:
		return p, fmt.Errorf("--offset %d: want 0 to %d elements", c.Offset, maxOffset)
	case c.Graph < 0 || c.Graph > 4096:
		return p, fmt.Errorf("--graph %d: want 0 to 4096 operations", c.Graph)
	case c.Device == "cuda" && c.Recorder == "both":
		return p, errors.New("--recorder both measures host memory; on GPUs compare --recorder on with off")
	case c.Ranks < 1 || c.Nodes < 1 || c.Nodes > c.Ranks:
		return p, fmt.Errorf("%d ranks on %d nodes", c.Ranks, c.Nodes)
	}
	for _, name := range c.Collectives {
		coll, err := find(name)
		if err != nil {
			return p, err
		}
		p.colls = append(p.colls, coll)
	}
	if p.types, err = parseTypes(c.Type); err != nil {
		return p, err
	}
	if p.ops, err = parseOps(c.Op); err != nil {
		return p, err
	}
	if p.algo, err = ccl.ParseAlgo(c.Algo); err != nil {
		return p, err
	}
	p.proto, err = ccl.ParseProto(c.Proto)
	return p, err
}

// job is the ranks of a run. dir holds the secret; perf makes its own recorders. Its ranks
// have met when meet is closed.
func (c *Cmd) job(dir string, out io.Writer) (job *children.Job, meet io.Closer, err error) {
	env, meet, err := children.Env(dir)
	return &children.Job{
		Ranks: c.Ranks, Nodes: c.Nodes, Node: func(i int) string { return fmt.Sprintf("node%d", i) },
		Env: append(env, "LOCKSTEP_JOB=perf", "LOCKSTEP_RECORDER=off"), Out: out,
	}, meet, err
}

// launch starts the ranks as children that run the same command, and waits for
// them. Rank 0 writes to out.
func (c *Cmd) launch(ctx context.Context, out io.Writer) error {
	dir, err := os.MkdirTemp("", "lockstep-perf-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	job, meet, err := c.job(dir, out)
	if err != nil {
		return err
	}
	defer meet.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ends, started, err := job.Start(ctx)
	if err != nil {
		cancel()
	}
	killed := map[int32]bool{} // by process id
	for range started {
		e := <-ends
		killed[int32(e.PID)] = ctx.Err() != nil
		if e.Err != nil && err == nil {
			err = fmt.Errorf("rank %d: %w", e.Rank, e.Err)
			if ctx.Err() != nil {
				err = context.Cause(ctx)
			}
			cancel()
		}
	}
	sweep(killed)
	return err
}

// sweep removes the recorders of ranks that were killed before they could do so: they
// take memory, and nobody asks what an interrupted measurement was in.
func sweep(killed map[int32]bool) {
	dir, _, err := record.Dir("")
	if err != nil {
		return // then there are none
	}
	paths, _ := record.List(dir)
	for _, path := range paths {
		r, err := record.Open(path)
		if err != nil {
			continue // not one of ours
		}
		if killed[r.Header().PID] && !r.Alive() {
			_ = os.Remove(path)
		}
		r.Close()
	}
}

// threads runs all ranks in this process.
func (c *Cmd) threads(ctx context.Context, p plan, out io.Writer) error {
	dir, err := os.MkdirTemp("", "lockstep-perf-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	job, meet, err := c.job(dir, out)
	if err != nil {
		return err
	}
	defer meet.Close()
	for _, kv := range append(job.Env, "LOCKSTEP_RANK=0", "LOCKSTEP_WORLD_SIZE="+strconv.Itoa(c.Ranks)) {
		name, value, _ := strings.Cut(kv, "=")
		if err := os.Setenv(name, value); err != nil {
			return err
		}
	}
	base, err := ccl.ConfigFromEnv()
	if err == nil {
		err = base.Prepare()
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	errs := make(chan error, c.Ranks)
	for r := range c.Ranks {
		cfg := base
		cfg.Rank = r
		node, _ := job.NodeOf(r)
		cfg.Node = job.Node(node)
		go func() {
			err := c.rank(ctx, p, cfg, out)
			if err != nil {
				err = fmt.Errorf("rank %d: %w", r, err)
			}
			errs <- err
		}()
	}
	for range c.Ranks {
		if e := <-errs; e != nil && err == nil {
			err = e
			cancel()
		}
	}
	return err
}

// rank is one rank's part.
func (c *Cmd) rank(ctx context.Context, p plan, cfg ccl.Config, out io.Writer) (err error) {
	cfg.Name, cfg.Algo, cfg.Proto = "perf", p.algo, p.proto
	stamps := 0
	if c.Device == "cpu" {
		cfg.Device = ccl.CPU // whatever LOCKSTEP_DEVICE says to jobs
	}
	if c.Device == "cuda" {
		n, err := ccl.Devices()
		if err != nil {
			return err
		}
		if n == 0 {
			return errors.New("--device cuda: this process sees no GPU")
		}
		if cfg.Device == ccl.CPU {
			cfg.Device = ccl.GPU(cfg.Rank % n)
		}
		cfg.GPU.Blocks, cfg.GPU.Threads = c.Blocks, c.GPUThreads
		if c.GPUPace != 0 {
			cfg.GPU.Pace = c.GPUPace
		}
		if c.GPUAlgo != "" {
			cfg.GPU.Algo = c.GPUAlgo
		}
		stamps = record.GPUStampSlots
	}
	rec := cfg.Recorder
	if rec == nil && c.Recorder != "off" {
		rec, err = record.Create(record.Options{
			Identity: record.Identity{
				Job: os.Getenv("LOCKSTEP_JOB"), Node: cfg.Node, Rank: int32(cfg.Rank), WorldSize: int32(cfg.Size), LocalRank: -1,
			},
			StampSlots: stamps,
		})
		if err != nil {
			return err
		}
		defer os.Remove(rec.Path())
	}
	defer func() { err = errors.Join(err, rec.Close()) }()
	cfg.Recorder = rec
	if c.Recorder == "off" {
		cfg.Recorder = nil
	}
	var at *progress.Line
	if cfg.Rank == 0 {
		at = progress.Start(fmt.Sprintf("waiting for %d ranks", cfg.Size))
		defer at.Stop()
	}
	comm, err := ccl.Init(ctx, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, comm.Close()) }()
	own := *c // a launcher may have spread the ranks otherwise
	b := &bench{cmd: &own, comm: comm, stream: comm.NewStream(), device: cfg.Device}
	defer func() { err = errors.Join(err, b.free(ctx)) }()
	if c.Recorder == "both" {
		if b.plain, err = comm.Split(ctx, 0, comm.Rank(), "plain", func(cfg *ccl.Config) { cfg.Recorder = nil }); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, b.plain.Close()) }()
	}
	if own.Nodes, err = b.nodes(ctx, cfg.Node); err != nil {
		return err
	}
	w := io.Discard
	if comm.Rank() == 0 {
		w = out
	}
	results := newPrinter(w, &own, comm.Size())
	b.at, results.at = at, at
	if err := b.run(ctx, p, results); err != nil {
		return err
	}
	if comm.Rank() == 0 { // who says it once
		return results.verdict()
	}
	return nil
}
