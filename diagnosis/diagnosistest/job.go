package diagnosistest

import (
	"container/heap"
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

// Reaction of survivors to a peer's death.
type Reaction uint8

const (
	Linger Reaction = iota // they notice nothing and hang
	Exit                   // abort within two seconds and exit, closing their recorders
	Crash                  // abort within two seconds and die without closing them
	Idle                   // abort within two seconds and sleep
)

// Pause is a part of the program outside of collectives.
type Pause struct {
	Every  int             // steps; 0: once, before the first step
	Length time.Duration   // mean; ranks differ by a tenth, or by Spread
	Spread time.Duration   // the slowest takes that much longer than the fastest
	Mark   record.MarkCode // MarkNone: the program says nothing
	IO     bool            // reads or writes storage; else it computes
	Sleep  bool            // neither: it waits for something
	Rank   int             // the one rank that does it, or AllRanks
}

// AllRanks in Pause.Rank means that everyone pauses.
const AllRanks = -1

// FaultKind is what goes wrong.
type FaultKind uint8

const (
	Kill      FaultKind = iota + 1 // SIGKILL
	Stop                           // SIGSTOP
	Hang                           // the program sleeps for ever in its own code
	Spin                           // the program computes for ever
	StallConn                      // Rank → Peer delivers no more, on all communicators
	SlowConn                       // Rank → Peer takes Factor times as long
	SlowRank                       // Rank's own time is Factor times as long, plus Extra
	LostAgent                      // Rank's node reports no more; the job goes on
	LostNode                       // Rank's node is gone with all its ranks
	SlowAll                        // everybody's own time is Factor times as long
)

// Fault is one injected fault.
type Fault struct {
	Kind   FaultKind
	At     time.Duration // since the start
	Until  time.Duration // 0: for ever
	Rank   int
	Peer   int
	Factor float64
	Extra  time.Duration // of each computation
}

func (f *Fault) during(t int64) bool {
	return t >= int64(f.At) && (f.Until == 0 || t < int64(f.Until))
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

type instrKind uint8

const (
	doCompute instrKind = iota
	doColl
	doSend
	doRecv
	doMark
	doUnmark
	doStep
	doLeave
	doJoin
)

type instr struct {
	kind instrKind
	d    time.Duration
	comm func(*rank) *comm
	coll record.CollKind
	peer int
	mark record.MarkCode
	io   bool
	idle bool
}

type event struct {
	at   int64
	seq  int
	rank int // -1: a node's report
	gen  int
	call func()
}

type eventHeap struct {
	list []event
	n    int
}

func (h *eventHeap) Len() int { return len(h.list) }
func (h *eventHeap) Less(i, j int) bool {
	a, b := h.list[i], h.list[j]
	return a.at < b.at || (a.at == b.at && a.seq < b.seq)
}
func (h *eventHeap) Swap(i, j int) { h.list[i], h.list[j] = h.list[j], h.list[i] }
func (h *eventHeap) Push(x any)    { h.list = append(h.list, x.(event)) }
func (h *eventHeap) Pop() any {
	x := h.list[len(h.list)-1]
	h.list = h.list[:len(h.list)-1]
	return x
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
			if j.ranks[ranks[a]].node != j.ranks[ranks[b]].node {
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

func tpOf(r *rank) *comm    { return r.tpComm }
func dpOf(r *rank) *comm    { return r.dpComm }
func ppOf(r *rank) *comm    { return r.ppComm }
func worldOf(r *rank) *comm { return r.worldComm }

// opening is what a rank does before its first step.
func (j *Job) opening(r *rank) []instr {
	todo := []instr{{kind: doJoin}}
	for i := range j.cfg.Pauses {
		if p := &j.cfg.Pauses[i]; p.Every == 0 {
			todo = append(todo, j.pause(r, p)...)
		}
	}
	return todo
}

func (j *Job) pause(r *rank, p *Pause) []instr {
	if p.Rank != AllRanks && p.Rank != r.id {
		return nil
	}
	d := time.Duration(float64(p.Length) * (0.95 + 0.1*j.rng.Float64()))
	if p.Spread > 0 {
		d += time.Duration(j.rng.Int64N(int64(p.Spread)))
	}
	work := instr{kind: doCompute, d: d, io: p.IO, idle: p.Sleep || p.IO}
	if p.Mark == record.MarkNone {
		return []instr{work}
	}
	return []instr{{kind: doMark, mark: p.Mark}, work, {kind: doUnmark}}
}

// program is one step of a rank: all microbatches forward, all backward, the
// gradients, the optimizer.
func (j *Job) program(r *rank) []instr {
	cfg := &j.cfg
	var todo []instr
	if cfg.ResizeAt > 0 && r.step == cfg.ResizeAt && cfg.DP > 1 {
		todo = append(todo, instr{kind: doLeave})
		if r.dp == cfg.DP-1 {
			return todo
		}
		todo = append(todo, instr{kind: doJoin})
	}
	stage := 1.0
	if cfg.PP > 1 {
		stage += cfg.Uneven * float64(r.stage) / float64(cfg.PP-1)
	}
	forward := time.Duration(float64(cfg.Compute) * stage)
	compute := func(d time.Duration) { todo = append(todo, instr{kind: doCompute, d: d}) }
	tp := func(k record.CollKind) {
		if cfg.TP > 1 {
			todo = append(todo, instr{kind: doColl, comm: tpOf, coll: k})
		}
	}
	for range cfg.Micro {
		if r.stage > 0 {
			todo = append(todo, instr{kind: doRecv, comm: ppOf, peer: r.stage - 1})
		}
		compute(forward)
		tp(record.AllReduce)
		if r.stage < cfg.PP-1 {
			todo = append(todo, instr{kind: doSend, comm: ppOf, peer: r.stage + 1})
		}
	}
	for range cfg.Micro {
		if r.stage < cfg.PP-1 {
			todo = append(todo, instr{kind: doRecv, comm: ppOf, peer: r.stage + 1})
		}
		compute(forward)
		tp(record.ReduceScatter)
		compute(forward)
		tp(record.AllGather)
		if r.stage > 0 {
			todo = append(todo, instr{kind: doSend, comm: ppOf, peer: r.stage - 1})
		}
	}
	todo = append(todo, instr{kind: doColl, comm: dpOf, coll: record.AllReduce})
	compute(cfg.Compute / 4)
	todo = append(todo, instr{kind: doColl, comm: worldOf, coll: record.AllReduce}, instr{kind: doStep})
	for i := range cfg.Pauses {
		if p := &cfg.Pauses[i]; p.Every > 0 && (r.step+1)%p.Every == 0 {
			todo = append(todo, j.pause(r, p)...)
		}
	}
	return todo
}

func (j *Job) at(t int64, r *rank, call func()) {
	e := event{at: t, seq: j.events.n, rank: -1, call: call}
	if r != nil {
		e.rank, e.gen = r.id, r.gen
	}
	j.events.n++
	heap.Push(&j.events, e)
}

// Advance runs the job for d of its own time.
func (j *Job) Advance(d time.Duration) {
	end := j.now + int64(d)
	for len(j.events.list) > 0 && j.events.list[0].at <= end {
		e := heap.Pop(&j.events).(event)
		j.now = max(j.now, e.at)
		if e.rank >= 0 && j.ranks[e.rank].gen != e.gen {
			continue
		}
		e.call()
	}
	j.now = end
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

// run lets a rank execute until something takes time.
func (j *Job) run(r *rank) {
	for !r.frozen && !r.done {
		if len(r.todo) == 0 {
			r.todo = j.program(r)
		}
		in := r.todo[0]
		r.todo = r.todo[1:]
		switch in.kind {
		case doCompute:
			j.compute(r, in)
			return
		case doColl:
			if c := in.comm(r); c != nil {
				j.enter(r, c, in.coll, -1)
				return
			}
		case doSend, doRecv:
			if c := in.comm(r); c != nil {
				k := record.Send
				if in.kind == doRecv {
					k = record.Recv
				}
				j.enter(r, c, k, in.peer)
				return
			}
		case doMark:
			r.mark, r.markAt = in.mark, j.now
		case doUnmark:
			r.mark, r.markAt = record.MarkNone, 0
		case doStep:
			r.step++
		case doLeave:
			j.leave(r)
			if r.done {
				return
			}
		case doJoin:
			j.join(r)
			return
		}
	}
}

func (j *Job) compute(r *rank, in instr) {
	d := float64(in.d)
	if j.cfg.Noise > 0 {
		d *= math.Exp(j.rng.NormFloat64() * j.cfg.Noise)
	}
	if j.cfg.Hiccup > 0 && j.rng.IntN(50) == 0 {
		d += float64(j.rng.Int64N(int64(j.cfg.Hiccup)))
	}
	for i := range j.cfg.Faults {
		f := &j.cfg.Faults[i]
		if !f.during(j.now) {
			continue
		}
		switch {
		case f.Kind == SlowRank && f.Rank == r.id:
			d = d*max(f.Factor, 1) + float64(f.Extra)
		case f.Kind == SlowAll:
			d *= f.Factor
		case (f.Kind == Hang || f.Kind == Spin) && f.Rank == r.id:
			r.stuck, r.stuckAt = f.Kind, j.now
			if f.Until == 0 {
				r.computing = true
				return
			}
			d += float64(int64(f.Until) - j.now)
		}
	}
	r.computing, r.io, r.sleeping = true, in.io, in.idle
	r.until = j.now + int64(d)
	j.at(r.until, r, func() { j.computed(r) })
}

func (j *Job) computed(r *rank) {
	r.computing, r.io, r.sleeping = false, false, false
	r.stuck = 0
	j.run(r)
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

func (j *Job) connFault(x *conn) (factor float64, stalled bool) {
	factor = 1
	for i := range j.cfg.Faults {
		f := &j.cfg.Faults[i]
		if x.comm.ranks[x.src] != f.Rank || x.comm.ranks[x.dst] != f.Peer || !f.during(j.now) {
			continue
		}
		switch f.Kind {
		case StallConn:
			return 1, true
		case SlowConn:
			factor = f.Factor
		}
	}
	return factor, false
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

func (j *Job) memberOf(r *rank, c *comm) int {
	for i, w := range c.ranks {
		if w == r.id {
			return i
		}
	}
	return -1
}

func (r *rank) mine() []*comm {
	var cs []*comm
	for _, c := range []*comm{r.tpComm, r.dpComm, r.ppComm, r.worldComm} {
		if c != nil {
			cs = append(cs, c)
		}
	}
	return cs
}

// join waits in the rendezvous of a rank's communicators.
func (j *Job) join(r *rank) {
	for _, c := range r.mine() {
		r.member[c].State = record.CommJoining
		c.joined++
	}
	r.op = nil
	for _, x := range j.ranks {
		ready := !x.done && !x.frozen
		for _, c := range x.mine() {
			ready = ready && c.joined == len(c.ranks) && x.member[c].State == record.CommJoining
		}
		if !ready || len(x.mine()) == 0 {
			continue
		}
		for _, c := range x.mine() {
			x.member[c].State = record.CommJoined
		}
		x.idleFrom = j.now
		j.at(j.now+j.rng.Int64N(1e6), x, func() { j.run(x) })
	}
}

// leave ends a rank's communicators for a resize.
func (j *Job) leave(r *rank) {
	for _, c := range r.mine() {
		r.member[c].State = record.CommLeft
	}
	r.commGen++
	if r.dp == j.cfg.DP-1 {
		r.done, r.proc = true, diagnosis.ProcExited
		r.tpComm, r.dpComm, r.ppComm, r.worldComm = nil, nil, nil, nil
	}
	for _, x := range j.ranks {
		if x.commGen == 0 {
			// The others keep their old communicators until they get here.
			if r.commGen == 1 {
				j.reform(r)
			}
			return
		}
	}
	j.reform(r)
}

// reform gives a rank its communicators of the second generation, made when
// the first rank asks.
func (j *Job) reform(r *rank) {
	if r.done {
		return
	}
	made := false
	for _, c := range j.comms {
		made = made || c.gen == 1
	}
	if !made {
		old := make([][4]*comm, len(j.ranks))
		for i, x := range j.ranks {
			old[i] = [4]*comm{x.tpComm, x.dpComm, x.ppComm, x.worldComm}
		}
		j.form(1, j.cfg.DP-1)
		for i, x := range j.ranks {
			if x != r {
				x.tpComm, x.dpComm, x.ppComm, x.worldComm = old[i][0], old[i][1], old[i][2], old[i][3]
			}
		}
		return
	}
	r.tpComm, r.dpComm, r.ppComm, r.worldComm = nil, nil, nil, nil
	for _, c := range j.comms {
		if c.gen != 1 || j.memberOf(r, c) < 0 {
			continue
		}
		switch c.name[:2] {
		case "tp":
			r.tpComm = c
		case "dp":
			r.dpComm = c
		case "pp":
			r.ppComm = c
		case "wo":
			r.worldComm = c
		}
	}
}

// inject schedules a fault that does not act through connections or computing.
func (j *Job) inject(f *Fault) {
	switch f.Kind {
	case Kill, Stop:
		r := j.ranks[f.Rank]
		j.at(int64(f.At), nil, func() { j.freeze(r, f.Kind) })
		if f.Kind == Stop && f.Until > 0 {
			j.at(int64(f.Until), nil, func() { j.thaw(r) })
		}
	case LostNode:
		j.at(int64(f.At), nil, func() {
			n := j.nodes[j.ranks[f.Rank].node]
			n.lost = true
			for _, r := range j.ranks {
				if r.node == n.id {
					j.freeze(r, Stop)
				}
			}
			if j.cfg.Survivors == Linger {
				return
			}
			for _, r := range j.ranks {
				if r.node == n.id {
					j.bereave(r)
				}
			}
		})
	case LostAgent:
		j.at(int64(f.At), nil, func() { j.nodes[j.ranks[f.Rank].node].lost = true })
		if f.Until > 0 {
			j.at(int64(f.Until), nil, func() { j.nodes[j.ranks[f.Rank].node].lost = false })
		}
	case StallConn:
		if f.Until > 0 {
			j.at(int64(f.Until), nil, func() {
				for _, c := range j.comms {
					for _, o := range c.sorted() {
						if o.stalled != nil {
							o.stalled = nil
							j.finishWhenAll(o)
						}
					}
				}
			})
		}
	}
}

func (c *comm) sorted() []*op {
	var ops []*op
	for _, o := range c.ops {
		ops = append(ops, o)
	}
	for i := range ops {
		for k := i; k > 0 && ops[k].seq < ops[k-1].seq; k-- {
			ops[k], ops[k-1] = ops[k-1], ops[k]
		}
	}
	return ops
}

// freeze takes a rank's process off its CPUs, for ever or until thaw. An
// operation under way does not end for anyone.
func (j *Job) freeze(r *rank, why FaultKind) {
	if r.done || r.frozen {
		return
	}
	r.frozen, r.stuck, r.stuckAt = true, why, j.now
	r.gen++
	r.proc = diagnosis.ProcStopped
	if o := r.op; o != nil && o.ends > 0 {
		for i, w := range o.comm.ranks {
			if x := j.ranks[w]; o.start[i] != 0 && o.out[i] == 0 && x != r && x.op == o {
				x.gen++
			}
		}
		o.ends = 0
	}
	if why == Kill {
		r.proc = diagnosis.ProcGone
		if j.cfg.Survivors != Linger {
			j.bereave(r)
		}
	}
}

func (j *Job) thaw(r *rank) {
	r.frozen, r.stuck, r.proc = false, 0, diagnosis.ProcRunning
	switch {
	case r.op != nil:
		j.finishWhenAll(r.op)
	case r.computing:
		j.at(max(j.now, r.until), r, func() { j.computed(r) })
	default:
		j.at(j.now, r, func() { j.run(r) })
	}
}

// bereave lets those who share a communicator with the dead abort and react,
// and those who share one with them in turn.
func (j *Job) bereave(dead *rank) {
	for _, c := range dead.mine() {
		for _, w := range c.ranks {
			x := j.ranks[w]
			if x == dead || x.erred || x.done || x.frozen {
				continue
			}
			x.erred = true
			j.at(j.now+200e6+j.rng.Int64N(1500e6), nil, func() { j.fail(x) })
		}
	}
}

func (j *Job) fail(r *rank) {
	if r.frozen || r.done {
		return
	}
	for _, c := range r.mine() {
		r.member[c].State = record.CommAborted
	}
	r.gen++
	r.op = nil
	r.frozen, r.stuck, r.stuckAt = true, Hang, j.now
	r.proc = diagnosis.ProcRunning
	if j.cfg.Survivors != Idle {
		j.at(j.now+50e6+j.rng.Int64N(500e6), nil, func() {
			r.done = true
			r.proc = diagnosis.ProcExited
			if j.cfg.Survivors == Crash {
				r.proc = diagnosis.ProcGone
			}
		})
	}
	j.bereave(r)
}
