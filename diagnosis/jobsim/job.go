package jobsim

import (
	"container/heap"
	"fmt"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// Start is the unix time at which every simulated job starts.
const Start = int64(1_700_000_000e9)

// Tick is the step of virtual time: reports are taken and faults begin at its multiples.
const Tick = 20 * time.Millisecond

// never is later than any simulation's end.
const never = int64(1) << 62

// Job is a running simulation. It is not safe for concurrent use.
type Job struct {
	cfg   Config
	now   int64 // since the start, ns: everything up to here has happened
	until int64 // the end of the tick under way
	tick  int64 // ticks so far
	rng   rng

	ranks  []rank
	comms  []*comm
	nodes  []node
	progs  [][]instr
	noise  [1024]float64
	delays [1024]float64 // of windows, like it

	ready   []int32   // ranks that can run on in this tick
	ending  []*comm   // with a collective that ends after this tick
	pairs   []pairEnd // likewise of sends and receives
	events  events
	faults  []fault // parallel to cfg.Faults
	slowing bool    // some fault changes computations
	odd     bool    // or what a rank calls
	resized [numSlots][]*comm

	ev        diagnosis.Evidence
	paused    int64 // the evidence is void until then
	samples   samples
	cells     int // of Evidence.Arrivals
	perSecond float64
	collectAt int64
	commOf    []*comm   // parallel to Evidence.Comms
	connOf    []connRef // parallel to Evidence.Conns
	slack     int64     // how long after the end of an operation it is known to all
	revisions uint64
	launched  bool // the launcher is about to end the rest
}

// rank is one process of the job.
type rank struct {
	id, node              int32
	tensor, context, data int32
	stage                 int32
	t                     int64 // it has run up to here
	pc                    int32
	step                  int32
	phase                 phase
	blocked               bool  // in, or for, an operation of waits
	frozen                bool  // its process does not run: stopped or gone
	done                  bool  // it has left
	waits                 *comm // where it is blocked
	idleFrom              int64 // end of its last operation
	since                 int64 // it has computed since then
	collects              int64 // its next garbage collection, not before
	rng                   rng
	comms                 [numSlots]ref
	next                  int32 // of the prelude or the pauses

	mark   record.MarkCode
	markAt int64
	io     bool // the computation reads or writes storage
	asleep bool // or waits for something

	proc    diagnosis.ProcState
	stuck   stuckKind // in its own code
	stuckAt int64
	ended   diagnosis.ProcState // how its process has ended; its agent has to look twice
	looks   int
	exit    diagnosis.Exit

	starved, throttled, memory float32
	xid                        uint32
	gpu                        diagnosis.GPU

	calls  *[diagnosis.MaxCalls]diagnosis.Call // apart: a tick looks at all ranks
	ncalls uint32

	failing bool    // an error of a communicator has reached the program
	prog    []instr // of this step, when it is not its stage's
	former  []ref   // communicators that it has left
}

type phase uint8

const (
	phaseStart phase = iota
	phaseJoin
	phaseWarm
	phaseSteps
	phasePause
	phaseLeave
)

type stuckKind uint8

const (
	notStuck  stuckKind = iota
	stuckIdle           // sleeps in its own code
	stuckBusy           // computes for ever
	stuckDisk           // uninterruptible sleep
	stuckStop           // SIGSTOP
)

// ref is a rank's place in one of its communicators.
type ref struct {
	comm   *comm
	member int32
}

type connRef struct {
	comm *comm
	edge int32
}

// comm is one communicator.
type comm struct {
	id      uint64
	name    string
	slot    slot
	gen     int
	members []member
	base    int64 // what an operation takes once all have entered

	// The collective under way; members are in the same one, or behind.
	seq     uint64 // finished
	entered int32
	last    int64 // start of the last to enter
	ends    int64 // 0: not all are in, or it does not move
	stalled bool
	coll    record.CollKind

	chans        []channel // of p2p: by direction and source
	edges        []edge
	out          [][]int32 // by member: edges that are told of
	in           [][]int32 // likewise, from other nodes
	hits         []hit     // faults that touch its connections
	told         bool      // somebody tells of its connections
	hierarchical bool      // several NVLink domains with several members each
	frozen       int32     // members whose process does not run
	odd          bool      // members have called different operations: it never ends
	bytes        uint64
	scale        float64 // of its transfer, by the call's program; 0: 1

	stalledAt, resumed int64

	joined   int32
	joinLast int64
	// When all whom the end of a member, and the abort of one, reaches have heard of one: that of
	// others changes nothing. 0: not before never.
	bereft, aborted int64

	at      int32 // index in the evidence, -1
	left    int32
	leftAt  int64
	touched int64 // tick of the last change
	over    bool  // removed from the evidence
}

// member is one rank's truth in a communicator; times are since the start.
type member struct {
	diagnosis.Member
	queue   []call // asynchronous operations that have not started
	parts   int8   // of a group of sends and receives, that are not done
	partEnd int64
	late    int64 // start of the last peer of those parts
	own     int64 // own time before the operation that is open
	hears   int64 // when it hears first that the communicator fails, 0: nothing is under way
	dirty   bool
}

type call struct {
	at    int64
	coll  record.CollKind
	bytes uint64
}

// event is something that happens at a moment, whatever ranks do.
type event struct {
	at  int64
	seq int
	do  func()
}

type events struct {
	list []event
	n    int
}

func (h *events) Len() int { return len(h.list) }
func (h *events) Less(i, k int) bool {
	a, b := &h.list[i], &h.list[k]
	return a.at < b.at || a.at == b.at && a.seq < b.seq
}
func (h *events) Swap(i, k int) { h.list[i], h.list[k] = h.list[k], h.list[i] }
func (h *events) Push(x any)    { h.list = append(h.list, x.(event)) }
func (h *events) Pop() any {
	x := h.list[len(h.list)-1]
	h.list = h.list[:len(h.list)-1]
	return x
}

// at has do called at the end of the tick in which t lies.
func (j *Job) at(t int64, do func()) {
	heap.Push(&j.events, event{max(t, j.now), j.events.n, do})
	j.events.n++
}

// New returns a job at time 0, about to start.
func New(cfg Config) (*Job, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	j := &Job{cfg: cfg, rng: rng(hash(cfg.Seed, 0x6a6f62, 0))}
	for i := range j.noise {
		j.noise[i] = spread(uint64(i)<<54|1<<53, cfg.Noise)
		j.delays[i] = spread(uint64(i)<<54|1<<53, cfg.Cluster.DelayNoise)
	}
	j.slack = jitter
	if cfg.Cluster.Wake > 0 {
		j.slack = maxWake
	}
	j.progs = programs(&cfg)
	world := cfg.Ranks()
	j.ranks = make([]rank, world)
	for i := range j.ranks {
		r := &j.ranks[i]
		k := i
		r.id, r.node, r.calls = int32(i), int32(i/cfg.Cluster.RanksPerNode), new([diagnosis.MaxCalls]diagnosis.Call)
		r.tensor, k = int32(k%cfg.Tensor), k/cfg.Tensor
		r.context, k = int32(k%cfg.Context), k/cfg.Context
		r.data, k = int32(k%cfg.Data), k/cfg.Data
		r.stage = int32(k)
		r.proc, r.rng = diagnosis.ProcRunning, rng(hash(cfg.Seed, 0x72616e6b, uint64(i)))
		r.t = r.rng.int63n(int64(300 * time.Millisecond))
	}
	j.makeNodes((world + cfg.Cluster.RanksPerNode - 1) / cfg.Cluster.RanksPerNode)
	j.ev.Job = cfg.Name
	if j.ev.Job == "" {
		j.ev.Job = fmt.Sprintf("sim-%d", cfg.Seed)
	}
	j.ev.Ranks = make([]diagnosis.Rank, world)
	for i := range j.ev.Ranks {
		j.ev.Ranks[i].Node = -1
	}
	j.form(0, cfg.Data)
	if cfg.ResizeAt > 0 {
		j.form(1, cfg.Data-1)
	}
	if err := j.inject(); err != nil {
		return nil, err
	}
	return j, nil
}

// form makes the communicators of a generation with that many replicas; those of
// the first are the ranks' at once.
func (j *Job) form(gen, replicas int) {
	c := &j.cfg
	rankAt := func(t, x, d, p int) int32 { return int32(t + c.Tensor*(x+c.Context*(d+c.Data*p))) }
	add := func(s slot, name string, base time.Duration, ranks []int32) {
		if len(ranks) < 2 {
			return
		}
		k := &comm{id: hash(c.Seed, uint64(len(j.comms)), 0x636f6d6d), name: name, slot: s, gen: gen, base: int64(base), at: -1}
		k.members = make([]member, len(ranks))
		for i, r := range ranks {
			k.members[i].Member = diagnosis.Member{World: r, State: record.CommNone, Peer: -1, FaultPeer: -1}
			if gen == 0 {
				j.ranks[r].comms[s] = ref{k, int32(i)}
			}
		}
		j.wire(k)
		j.comms = append(j.comms, k)
		if gen > 0 {
			j.resized[s] = append(j.resized[s], k)
		}
	}
	seq := func(n int, f func(i int) int32) []int32 {
		out := make([]int32, n)
		for i := range out {
			out[i] = f(i)
		}
		return out
	}
	for p := range c.Pipeline {
		for d := range replicas {
			for x := range c.Context {
				add(slotTensor, fmt.Sprintf("tp%d.%d.%d", p, d, x), c.TensorTime, seq(c.Tensor, func(i int) int32 { return rankAt(i, x, d, p) }))
			}
			for t := range c.Tensor {
				add(slotContext, fmt.Sprintf("cp%d.%d.%d", p, d, t), c.ContextTime, seq(c.Context, func(i int) int32 { return rankAt(t, i, d, p) }))
			}
		}
		for x := range c.Context {
			for t := range c.Tensor {
				for e := 0; c.Expert > 1 && e < replicas/c.Expert; e++ {
					add(slotExpert, fmt.Sprintf("ep%d.%d.%d.%d", p, e, x, t), c.ExpertTime, seq(c.Expert, func(i int) int32 { return rankAt(t, x, e*c.Expert+i, p) }))
				}
			}
		}
		// Megatron's data-parallel group with context parallelism: gradients are summed over both.
		for t := range c.Tensor {
			for x := range c.Context {
				add(slotData, fmt.Sprintf("dp%d.%d.%d", p, x, t), c.DataTime, seq(replicas, func(i int) int32 { return rankAt(t, x, i, p) }))
			}
		}
	}
	for d := range replicas {
		for x := range c.Context {
			for t := range c.Tensor {
				add(slotPipe, fmt.Sprintf("pp%d.%d.%d", d, x, t), c.PipeTime, seq(c.Pipeline, func(i int) int32 { return rankAt(t, x, d, i) }))
			}
		}
	}
	for i, of := range c.extra {
		for n, ranks := range of {
			if gen > 0 {
				continue
			}
			t := c.extraTime[i]
			if t == 0 {
				t = time.Millisecond
			}
			add(slotExtra+slot(i), fmt.Sprintf("x%c%d", 'a'+rune(i), n), t, seq(len(ranks), func(k int) int32 { return int32(ranks[k]) }))
		}
	}
	if c.World {
		var all []int32
		for i := range j.ranks {
			if int(j.ranks[i].data) < replicas {
				all = append(all, int32(i))
			}
		}
		add(slotWorld, "world", time.Millisecond, all)
	}
}

// Advance runs the job for d of its own time, in whole ticks.
func (j *Job) Advance(d time.Duration) {
	for end := j.now + int64(d); j.now+int64(Tick) <= end; {
		j.step()
	}
}

// step runs the job for one tick.
func (j *Job) step() {
	j.until = j.now + int64(Tick)
	j.tick++
	j.endPending()
	for i := range j.ranks {
		if r := &j.ranks[i]; !r.blocked && r.t < j.until && !r.frozen && !r.done {
			j.run(r)
		}
	}
	j.drain()
	j.now = j.until
	for len(j.events.list) > 0 && j.events.list[0].at <= j.now {
		e := heap.Pop(&j.events).(event)
		e.do()
	}
	j.drain()
	j.reports()
}

func (j *Job) drain() {
	for len(j.ready) > 0 {
		r := &j.ranks[j.ready[len(j.ready)-1]]
		j.ready = j.ready[:len(j.ready)-1]
		j.run(r)
	}
}

// Now is the job's time since its start.
func (j *Job) Now() time.Duration { return time.Duration(j.now) }

// Steps is the lowest step that a rank of the job has reached, those that left it left out.
func (j *Job) Steps() int {
	low := int32(-1)
	for i := range j.ranks {
		if r := &j.ranks[i]; !(r.done && j.leftAll(r)) && (low < 0 || r.step < low) {
			low = r.step
		}
	}
	return int(max(low, 0))
}

// Config returns the job's configuration, defaults filled in.
func (j *Job) Config() Config { return j.cfg }
