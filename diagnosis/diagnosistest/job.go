package diagnosistest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// Config describes a job. Zero fields take the defaults named.
type Config struct {
	DP, TP, PP   int // 2 × 2 × 2
	RanksPerNode int // 4
	Micro        int // microbatches a step: 2
	Seed         uint64

	Compute  time.Duration // of one microbatch forward on one stage: 8 ms; backward takes twice that
	Transfer time.Duration // of one operation once all have entered: 1 ms
	Uneven   float64       // the last stage takes 1 + Uneven times the compute of the first: 0.3
	Noise    float64       // sigma of compute times' logarithm: 0.15; negative for none
	Hiccup   time.Duration // longest scheduling hiccup, at one computation in fifty: 40 ms; negative for none
	NoSteps  bool          // the program marks no steps
	NoConns  bool          // the transport reports no connections
	OnGPU    bool          // computing takes no CPU
	Groups   bool          // sends and receives are groups, which name no peer
	World    bool          // every step ends with an operation of all ranks, on a communicator of their own

	ReportEvery time.Duration // of an agent: 100 ms
	MapError    time.Duration // largest error of a node's clock: 200 µs
	Pauses      []Pause
	Faults      []Fault
	// ResizeAt is the step at which the last data-parallel replica leaves and
	// the others form new communicators; 0 for never. It takes DP > 1.
	ResizeAt int
	// Survivors is what ranks do once a communicator's member, or its node, is gone.
	Survivors Reaction
}

// Start is the unix time at which every simulated job starts.
const Start = int64(1_700_000_000e9)

// Job is a running simulation. It is not safe for concurrent use.
type Job struct {
	cfg    Config
	rng    *rand.Rand
	now    int64 // since the start, ns
	events eventHeap
	ranks  []*rank
	comms  []*comm
	nodes  []*node
	ev     diagnosis.Evidence
	nextID uint64
	broken []bool // StallConn applied, by fault
}

type rank struct {
	id, tp, dp, stage int
	node              int
	todo              []instr
	step              int
	gen               int   // events of an older one are void
	idleFrom          int64 // end of its last operation
	computing         bool
	until             int64 // end of the computation
	frozen            bool  // stopped or killed
	proc              diagnosis.ProcState
	stuck             FaultKind
	stuckAt           int64
	op                *op // that it is in
	opMember          int
	mark              record.MarkCode
	markAt            int64
	io, sleeping      bool
	done              bool
	erred             bool
	tpComm, dpComm    *comm
	ppComm, worldComm *comm
	commGen           int
	member            map[*comm]*diagnosis.Member
}

type comm struct {
	id      uint64
	name    string
	ranks   []int
	members []diagnosis.Member // the truth; times since the start
	ops     map[uint64]*op
	conns   []*conn
	joined  int
	gen     int
}

type conn struct {
	comm     *comm
	src, dst int
	c        diagnosis.Conn // the truth
}

type op struct {
	comm    *comm
	seq     uint64
	coll    record.CollKind
	need    int
	entered int
	start   []int64
	out     []int64
	last    int64 // start of the last to enter
	ends    int64 // 0: not known
	stalled *conn
	a, b    int // members of a send and receive
	pair    bool
}

// New returns a job at time 0, about to start.
func New(cfg Config) *Job {
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	dur := func(v *time.Duration, d time.Duration) {
		if *v == 0 {
			*v = d
		}
	}
	def(&cfg.DP, 2)
	def(&cfg.TP, 2)
	def(&cfg.PP, 2)
	def(&cfg.RanksPerNode, 4)
	def(&cfg.Micro, 2)
	dur(&cfg.Compute, 8*time.Millisecond)
	dur(&cfg.Transfer, time.Millisecond)
	dur(&cfg.Hiccup, 40*time.Millisecond)
	dur(&cfg.ReportEvery, 100*time.Millisecond)
	dur(&cfg.MapError, 200*time.Microsecond)
	if cfg.Uneven == 0 {
		cfg.Uneven = 0.3
	}
	if cfg.Noise == 0 {
		cfg.Noise = 0.15
	}
	j := &Job{cfg: cfg, rng: rand.New(rand.NewPCG(cfg.Seed, 0x10c57e9)), broken: make([]bool, len(cfg.Faults))}
	world := cfg.DP * cfg.TP * cfg.PP
	for i := range world {
		r := &rank{id: i, tp: i % cfg.TP, dp: i / cfg.TP % cfg.DP, stage: i / (cfg.TP * cfg.DP), node: i / cfg.RanksPerNode,
			proc: diagnosis.ProcRunning, member: map[*comm]*diagnosis.Member{}}
		j.ranks = append(j.ranks, r)
	}
	for n := 0; n*cfg.RanksPerNode < world; n++ {
		j.nodes = append(j.nodes, &node{id: n, skew: j.rng.Int64N(2*int64(cfg.MapError)+1) - int64(cfg.MapError)})
	}
	j.ev.Job = fmt.Sprintf("sim-%d", cfg.Seed)
	j.ev.Ranks = make([]diagnosis.Rank, world)
	for i := range j.ev.Ranks {
		j.ev.Ranks[i].Node = -1
	}
	j.form(0, cfg.DP)
	for _, r := range j.ranks {
		r.todo = j.opening(r)
		j.at(j.rng.Int64N(50e6), r, func() { j.run(r) })
	}
	for _, n := range j.nodes {
		j.reportFrom(n, j.rng.Int64N(int64(cfg.ReportEvery)))
	}
	for i := range cfg.Faults {
		j.inject(&cfg.Faults[i])
	}
	return j
}

// form makes the communicators of a generation with dp replicas.
func (j *Job) form(gen, dp int) {
	cfg := &j.cfg
	add := func(name string, ranks []int, ring bool) {
		if len(ranks) < 2 {
			return
		}
		j.nextID++
		c := &comm{id: 1000 + j.nextID, name: name, ranks: ranks, ops: map[uint64]*op{}, gen: gen}
		for _, r := range ranks {
			c.members = append(c.members, diagnosis.Member{World: int32(r), State: record.CommJoining, Peer: -1})
		}
		for i, r := range ranks {
			j.ranks[r].member[c] = &c.members[i]
		}
		pair := func(a, b int) {
			t := record.TransportSHM
			if j.ranks[ranks[a]].node != j.ranks[ranks[b]].node || cfg.slows(ranks[a], ranks[b]) {
				t = record.TransportTCP
			}
			c.conns = append(c.conns, &conn{comm: c, src: a, dst: b, c: diagnosis.Conn{Src: int32(a), Dst: int32(b), Transport: t, Name: fmt.Sprintf("%s %d>%d", name, a, b)}})
		}
		for i := range ranks {
			next := (i + 1) % len(ranks)
			if ring {
				pair(i, next)
			} else if i+1 < len(ranks) {
				pair(i, i+1)
				pair(i+1, i)
			}
		}
		j.comms = append(j.comms, c)
		for i, r := range ranks {
			_ = i
			switch name[:2] {
			case "tp":
				j.ranks[r].tpComm = c
			case "dp":
				j.ranks[r].dpComm = c
			case "pp":
				j.ranks[r].ppComm = c
			case "wo":
				j.ranks[r].worldComm = c
			}
		}
	}
	at := func(t, d, p int) int { return t + cfg.TP*(d+cfg.DP*p) }
	for _, r := range j.ranks {
		r.tpComm, r.dpComm, r.ppComm, r.worldComm = nil, nil, nil, nil
	}
	if cfg.World {
		var m []int
		for _, r := range j.ranks {
			if r.dp < dp {
				m = append(m, r.id)
			}
		}
		add("world", m, true)
	}
	for p := range cfg.PP {
		for d := range dp {
			var m []int
			for t := range cfg.TP {
				m = append(m, at(t, d, p))
			}
			add(fmt.Sprintf("tp%d.%d", p, d), m, true)
		}
	}
	for p := range cfg.PP {
		for t := range cfg.TP {
			var m []int
			for d := range dp {
				m = append(m, at(t, d, p))
			}
			add(fmt.Sprintf("dp%d.%d", p, t), m, true)
		}
	}
	for d := range dp {
		for t := range cfg.TP {
			var m []int
			for p := range cfg.PP {
				m = append(m, at(t, d, p))
			}
			add(fmt.Sprintf("pp%d.%d", d, t), m, false)
		}
	}
}

// Now is the job's time since its start.
func (j *Job) Now() time.Duration { return time.Duration(j.now) }

// Steps is the lowest step that a rank still in the job has reached.
func (j *Job) Steps() int {
	low := math.MaxInt
	for _, r := range j.ranks {
		if !r.done {
			low = min(low, r.step)
		}
	}
	return low
}

// enter puts a rank into an operation of a communicator.
func (j *Job) enter(r *rank, c *comm, k record.CollKind, peer int) {
	m := r.member[c]
	me := j.memberOf(r, c)
	m.Coll, m.Peer, m.Bytes = k, int32(peer), 1<<20
	if j.cfg.Groups && peer >= 0 {
		m.Coll, m.Peer = record.Group, -1
	}
	m.Enqueued++
	m.Started++
	m.EnqueuedAt, m.StartedAt = j.now, j.now
	var o *op
	if peer < 0 {
		o = c.ops[m.Started]
		if o == nil {
			o = &op{comm: c, seq: m.Started, coll: k, need: len(c.ranks), start: make([]int64, len(c.ranks)), out: make([]int64, len(c.ranks))}
			c.ops[o.seq] = o
		}
	} else {
		src, dst := me, peer
		if k == record.Recv {
			src, dst = dst, src
		}
		// The n-th send of a pair meets the n-th receive.
		key := uint64(src)<<48 | uint64(dst)<<32
		var nth uint64
		for ; ; nth++ {
			o = c.ops[key|nth]
			if o == nil || o.start[me] == 0 {
				break
			}
		}
		if o == nil {
			o = &op{comm: c, seq: key | nth, coll: k, need: 2, pair: true, a: src, b: dst, start: make([]int64, len(c.ranks)), out: make([]int64, len(c.ranks))}
			c.ops[o.seq] = o
		}
	}
	o.start[me] = j.now + 1
	o.entered++
	o.last = j.now
	r.op, r.opMember = o, me
	for _, x := range c.conns {
		if x.src == me && o.uses(x) {
			x.c.LastPost = j.now
		}
	}
	j.finishWhenAll(o)
}

func (o *op) uses(c *conn) bool {
	return !o.pair || (c.src == o.a && c.dst == o.b)
}

// finishWhenAll schedules an operation's end once everyone is in and can move.
func (j *Job) finishWhenAll(o *op) {
	if o.entered < o.need || o.ends != 0 {
		return
	}
	d := float64(j.cfg.Transfer) * math.Exp(j.rng.NormFloat64()*0.2)
	late := 0.0
	if j.cfg.Hiccup > 0 && j.rng.IntN(40) == 0 {
		late = float64(j.rng.Int64N(int64(j.cfg.Hiccup))) / 2
	}
	for i, w := range o.comm.ranks {
		if o.start[i] != 0 && j.ranks[w].frozen {
			return
		}
	}
	slowest := 1.0
	for _, x := range o.comm.conns {
		if !o.uses(x) {
			continue
		}
		factor, stalled := j.connFault(x)
		if stalled {
			o.stalled = x
			return
		}
		slowest = max(slowest, factor)
	}
	// A ring pipelines: its transfer is as slow as its slowest connection.
	o.ends = j.now + int64(d*slowest+late) + 1
	for _, x := range o.comm.conns {
		if o.uses(x) {
			j.window(x, o, d, late)
		}
	}
	for i, w := range o.comm.ranks {
		if o.start[i] != 0 {
			r, end := j.ranks[w], o.ends+j.rng.Int64N(20e3)
			j.at(end, r, func() { j.leaveOp(r, o) })
		}
	}
}

// window is what a connection's monitor makes of one operation.
func (j *Job) window(x *conn, o *op, d, hiccup float64) {
	factor, _ := j.connFault(x)
	c := &x.c
	d *= 0.7 + 0.3*j.rng.Float64()
	c.Windows++
	c.LatencyNs = d*factor + hiccup
	c.BytesPerSec = 1e9 * float64(1<<20) / c.LatencyNs
	c.Cause = record.CauseNone
	switch late := o.last - (o.start[x.src] - 1); {
	case factor >= 1.5:
		c.Cause = record.CauseNetwork
	case o.last == o.start[x.src]-1 && late == 0 && j.rng.IntN(3) == 0:
		c.Cause = record.CauseSenderStarved
	case o.start[x.dst]-1 == o.last && j.rng.IntN(3) == 0:
		c.Cause = record.CauseReceiverNotReady
		c.LatencyNs += float64(late)
	case j.rng.IntN(200) == 0:
		c.Cause = record.CauseNetwork // a monitor errs too
	}
	if c.Cause != record.CauseNone {
		c.SlowWindows++
	}
	c.LastWindowAt, c.LastCompletion = j.now, j.now
}

func (j *Job) leaveOp(r *rank, o *op) {
	if r.frozen || r.op != o {
		return
	}
	m := r.member[o.comm]
	m.Finished = m.Started
	m.FinishedAt = j.now
	own := max(0, m.StartedAt-r.idleFrom)
	m.Ops++
	m.OwnNs += uint64(own)
	m.MaxOwnNs = max(m.MaxOwnNs, uint64(own))
	m.WaitNs += uint64(max(0, o.last-m.StartedAt))
	m.TransferNs += uint64(j.now - o.last)
	r.idleFrom = j.now
	r.op = nil
	o.out[r.opMember] = j.now
	o.need--
	for _, x := range o.comm.conns {
		if x.dst == r.opMember && o.uses(x) {
			x.c.LastCompletion = j.now
		}
	}
	if o.need == 0 {
		j.arrival(o)
		delete(o.comm.ops, o.seq)
	}
	j.run(r)
}
