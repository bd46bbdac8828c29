package jobsim

import (
	"fmt"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

// Config describes a job. Zero fields take the defaults named, if any.
type Config struct {
	Name string
	Seed uint64

	// The degrees of parallelism; 1 each. Ranks are laid out as Megatron does it: tensor
	// first, then context, data, pipeline. Experts are spread over Expert
	// consecutive data-parallel ranks, so Expert divides Data.
	Tensor, Context, Data, Pipeline, Expert int
	Chunks                                  int // model chunks a pipeline stage: 1; more is the interleaved schedule
	Micro                                   int // microbatches a step (gradient accumulation): 1
	Layers                                  int // tensor-parallel operations of a forward, expert ones likewise: 1

	Compute time.Duration // of one microbatch's forward on one stage: 20 ms; backward takes twice that
	Load    time.Duration // of a step's data, before it: 0
	Uneven  float64       // the last stage takes 1 + Uneven times the compute of the first
	Lengths float64       // sigma of a microbatch's length's logarithm, alike for the ranks that share it
	Experts float64       // sigma of the experts' load's logarithm
	Noise   float64       // sigma of a computation's logarithm: 0.03; negative for none
	Hiccups float64       // share of computations that the scheduler interrupts
	Hiccup  time.Duration // longest such interruption: 20 ms
	Tail    float64       // not 0: interruptions take Hiccup at least, with a tail of this exponent (Pareto), up to 1.5 s
	Collect time.Duration // how far apart a rank's garbage collections are, each rank for itself: 0, none
	Garbage time.Duration // what one takes: mean

	// Times that an operation takes once all have entered.
	TensorTime, ContextTime, DataTime, PipeTime, ExpertTime time.Duration // 1, 1, 10, 1, 2 ms
	Buckets                                                 int           // gradient buckets that overlap the last backward: 0, one AllReduce after it
	Sharded                                                 bool          // ReduceScatter and AllGather in place of AllReduce
	World                                                   bool          // a small AllReduce of all ranks ends every step
	Tuned                                                   bool          // sends and receives are groups (GroupStart/GroupEnd), which name no peer

	Cluster Cluster
	Agents  Agents
	Dying   Dying

	Steps  bool // the program marks steps
	Pauses []Pause
	Warmup time.Duration // loading and compiling before the first step: 2 s
	// ResizeAt is the step at which the last data-parallel replica leaves, and the
	// others form new communicators; 0 for never. It takes Data > 1 and no experts.
	ResizeAt int

	Faults []Fault

	// Jobs of tests in this package: what a rank does in a step in place of the usual, communicators beside
	// the usual ones (kinds, of each the ranks of each), and what a collective takes on each kind.
	program   func(rank, step int, usual []instr) []instr
	extra     [numExtra][][]int
	extraTime [numExtra]time.Duration
}

// Cluster is what the job runs on.
type Cluster struct {
	RanksPerNode int // 8
	Domain       int // ranks of an NVLink domain: RanksPerNode
	GPU          bool
	RDMA         bool // else TCP
	Ports        int  // of a NIC: 1
	FatTree      bool // leaves serve whole nodes; else they serve a rail
	NodesPerLeaf int  // 16
	Spin         bool // who waits uses a core
	Mute         bool // transports tell nothing of connections
	Small        bool // messages under 4 KiB: the monitors of TCP and of shared memory take no times of them

	// What networks, operating systems and monitors add, as recordings of real jobs have it.
	TransferNoise float64       // sigma of the logarithm of a transfer's time: 0.05
	DelayNoise    float64       // the same of a window's delay; 0: it is evenly spread from 0.7 to 1
	DelaySpread   float64       // the same between the connections
	RTT           time.Duration // round-trip time between hosts, where a transport tells it; 0: 150 µs, < 0: none does
	RTTNoise      float64       // sigma of the logarithm of it
	Wake          time.Duration // how far apart members notice an operation's end, median of operations; 0: 16 µs
	SentAgain     float64       // share of operations over which a TCP connection sends bytes again without a reason
	MonitorErrs   float64       // share of the windows that are taken for slow, the network's, without a reason: 1/300
}

// setRTT sets round-trip times by what is drawn of the rest: the same kernels and wires are behind them.
func (c *Cluster) setRTT() {
	c.RTT, c.RTTNoise = 50*time.Microsecond+2*c.Wake, 0.6*c.DelayNoise
}

// Agents is how the pipeline from the nodes to the master behaves.
type Agents struct {
	Every    time.Duration // between two reports: 100 ms
	Drop     float64       // share of the reports that do not leave: what they held goes with the next
	Late     float64       // chance a minute that an agent is not run for up to LateBy
	LateBy   time.Duration
	Restart  float64       // chance a minute that an agent is restarted (1 to 5 s silent)
	MapError time.Duration // bound on a node's clock's mapping: 200 µs
	Drift    float64       // of it, at most: 5e-6
	Exits    ExitWords     // who tells how a process ended
	Busy     float64       // mean share of time in which some task of a host waits for a CPU
}

// ExitWords is who tells how a process ended.
type ExitWords uint8

const (
	NobodyTells ExitWords = iota
	SupervisorTells
	KernelTells
)

// Pause is a part of the program outside of collectives.
type Pause struct {
	Every  int             // steps; 0: once, before the first step
	Length time.Duration   // mean; ranks differ by a twentieth, or by Spread
	Spread time.Duration   // the slowest takes that much longer than the fastest
	Mark   record.MarkCode // MarkNone: the program says nothing
	IO     bool            // reads or writes storage; else it computes
	Sleep  bool            // neither: it waits for something
	Rank   int             // the one rank that does it, or AllRanks
}

// AllRanks in Pause.Rank means that everyone pauses.
const AllRanks = -1

func (c Config) withDefaults() (Config, error) {
	num := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	dur := func(v *time.Duration, d time.Duration) {
		if *v == 0 {
			*v = d
		}
	}
	for _, v := range []*int{&c.Tensor, &c.Context, &c.Data, &c.Pipeline, &c.Expert, &c.Chunks, &c.Micro, &c.Layers, &c.Cluster.Ports} {
		num(v, 1)
	}
	num(&c.Cluster.RanksPerNode, 8)
	num(&c.Cluster.Domain, c.Cluster.RanksPerNode)
	num(&c.Cluster.NodesPerLeaf, 16)
	dur(&c.Compute, 20*time.Millisecond)
	dur(&c.Hiccup, 20*time.Millisecond)
	dur(&c.TensorTime, time.Millisecond)
	dur(&c.ContextTime, time.Millisecond)
	dur(&c.DataTime, 10*time.Millisecond)
	dur(&c.PipeTime, time.Millisecond)
	dur(&c.ExpertTime, 2*time.Millisecond)
	dur(&c.Warmup, 2*time.Second)
	dur(&c.Agents.Every, 100*time.Millisecond)
	dur(&c.Agents.MapError, 200*time.Microsecond)
	c.Dying.setDefaults()
	if c.Agents.Drift == 0 {
		c.Agents.Drift = 5e-6
	}
	if c.Noise == 0 {
		c.Noise = 0.03
	}
	if c.Cluster.TransferNoise == 0 {
		c.Cluster.TransferNoise = 0.05
	}
	if c.Cluster.MonitorErrs == 0 {
		c.Cluster.MonitorErrs = 1. / 300
	}
	for _, v := range []int{c.Tensor, c.Context, c.Data, c.Pipeline, c.Expert, c.Chunks, c.Micro, c.Layers, c.Buckets + 1, c.Cluster.RanksPerNode, c.Cluster.Ports} {
		if v < 1 || v > 1<<20 {
			return c, fmt.Errorf("jobsim: a degree, count or size of %d", v)
		}
	}
	if n := c.Ranks(); n > 1<<18 {
		return c, fmt.Errorf("jobsim: %d ranks, at most %d", n, 1<<18)
	}
	if c.Data%c.Expert != 0 {
		return c, fmt.Errorf("jobsim: experts over %d ranks do not divide %d data-parallel ones", c.Expert, c.Data)
	}
	if c.ResizeAt > 0 && (c.Data < 2 || c.Expert > 1) {
		return c, fmt.Errorf("jobsim: a resize takes several replicas and no experts")
	}
	if c.Chunks > 1 && (c.Pipeline < 2 || c.Micro%c.Pipeline != 0) {
		return c, fmt.Errorf("jobsim: the interleaved schedule takes a pipeline, and as many microbatches as a multiple of its stages")
	}
	return c, nil
}

// Ranks is the size of the world.
func (c *Config) Ranks() int { return c.Tensor * c.Context * c.Data * c.Pipeline }
