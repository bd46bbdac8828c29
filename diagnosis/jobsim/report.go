package jobsim

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// Patience of the simulated master with a silent agent, and for how long a
// communicator that all have left is kept: those of collector/master.
const (
	lostAfter  = int64(3 * time.Second)
	leftFor    = int64(30 * time.Second)
	unknownMap = int64(time.Hour)
	lateFor    = int64(500 * time.Millisecond)
)

// node is a host, its agent, and its clock as the master maps it.
type node struct {
	id    int32
	name  string
	first int32 // rank
	ranks int32

	due      int64
	rng      rng
	offset   int64 // of the mapping in use
	drift    float64
	remap    int64 // when the mapping is changed next
	lastSeen int64
	lastTick int64 // of the last report
	reports  int
	silent   bool  // it does not reach the master: cut off, or gone
	down     bool  // gone, with all its processes
	cut      bool  // on the other side of the network
	awayTill int64 // it is not run, or restarted, until then
	lateTill int64 // it told of a pause of its own a moment ago
	again    bool  // the next report tells everything
	starved  float32
	memory   float32
	cpu      float32
	arrivals []arrival
}

type arrival struct {
	sample     *sampled
	member     int32
	start, end int64
}

func (j *Job) makeNodes(n int) {
	j.nodes = make([]node, n)
	j.ev.Nodes = make([]diagnosis.Node, 0, n)
	size := j.cfg.Cluster.RanksPerNode
	for i := range j.nodes {
		d := &j.nodes[i]
		*d = node{id: int32(i), name: NodeName(i), first: int32(i * size), ranks: int32(min(size, len(j.ranks)-i*size)), rng: rng(hash(j.cfg.Seed, 0x6e6f6465, uint64(i)))}
		d.due = d.rng.int63n(int64(j.cfg.Agents.Every))
		d.drift = d.rng.between(-1, 1) * j.cfg.Agents.Drift
		d.again = true
		d.cpu = float32(min(1, j.cfg.Agents.Busy*d.rng.between(0.5, 1.5)))
		d.map_(j, 0)
	}
}

// NodeName is the name of a job's n-th node.
func NodeName(n int) string { return fmt.Sprintf("node%04d", n) }

// map_ chooses a new mapping of the node's clock, within its bound.
func (n *node) map_(j *Job, at int64) {
	half := float64(j.cfg.Agents.MapError) / 2
	n.offset = int64(n.rng.between(-half, half))
	n.remap = at + int64(n.rng.between(20, 120)*1e9)
}

// real maps a time of the job to the master's clock as this node's reports give
// it; 0 stays 0, and nothing lies in the future.
func (n *node) real(t, now int64) int64 {
	if t <= 0 {
		return 0
	}
	return Start + min(t+n.offset, now)
}

// reports lets the agents whose turn it is report.
func (j *Job) reports() {
	every := int64(j.cfg.Agents.Every)
	for i := range j.nodes {
		n := &j.nodes[i]
		if n.due > j.now {
			continue
		}
		n.due = j.now + every + n.rng.int63n(every/5) - every/10
		if n.silent {
			continue
		}
		a := &j.cfg.Agents
		perReport := float64(every) / 60e9
		switch {
		case n.awayTill > j.now:
			continue
		case n.awayTill > 0:
			if n.lateTill == -1 {
				n.again = true // it was restarted
			}
			n.lateTill, n.awayTill = j.now+int64(time.Second), 0
		case a.Late > 0 && n.rng.float() < a.Late*perReport:
			n.awayTill = j.now + n.rng.int63n(int64(a.LateBy))
			continue
		case a.Restart > 0 && n.rng.float() < a.Restart*perReport:
			n.awayTill, n.lateTill = j.now+int64(n.rng.between(1, 5)*1e9), -1
			continue
		case a.Drop > 0 && n.rng.float() < a.Drop:
			continue
		}
		j.report(n)
	}
}

// report copies what an agent sees into the master's evidence.
func (j *Job) report(n *node) {
	n.offset += int64(n.drift * float64(j.now-max(n.lastSeen, 1)))
	if b := int64(j.cfg.Agents.MapError); j.now > n.remap || n.offset > b || n.offset < -b {
		n.map_(j, j.now)
	}
	n.lastSeen = j.now
	n.reports++
	for i := n.first; i < n.first+n.ranks; i++ {
		j.reportRank(n, &j.ranks[i])
	}
	n.lastTick, n.again = j.tick, false
	for _, a := range n.arrivals {
		if a.sample.at >= 0 {
			x := &j.ev.Arrivals[a.sample.at]
			x.Start[a.member], x.End[a.member] = n.real(a.start, j.now), n.real(a.end, j.now)
		}
	}
	n.arrivals = n.arrivals[:0]
}

func (j *Job) reportRank(n *node, r *rank) {
	e := &j.ev.Ranks[r.id]
	e.Node, e.PID = n.id, 4000+r.id
	if r.ended != diagnosis.ProcUnknown {
		if r.looks++; r.looks == 2 {
			r.proc = r.ended // not found twice
		}
	}
	if e.Proc != r.proc {
		e.Proc, e.ProcAt = r.proc, n.real(j.now, j.now)
	}
	gone := r.proc == diagnosis.ProcGone || r.proc == diagnosis.ProcExited
	e.CPU, e.IO = j.cpu(r), r.io && !gone && r.t > j.now
	e.Starved, e.Throttled, e.MemoryPressure = r.starved, r.throttled, r.memory
	if !gone {
		e.Starved = min(1, r.starved+n.starved+n.cpu*0.5*float32(n.rng.float()))
	}
	e.Mark, e.MarkAt = r.mark, n.real(r.markAt, j.now)
	if j.cfg.Steps {
		e.Step = uint64(r.step)
	}
	e.Xid, e.GPU = r.xid, j.gpu(n, r)
	if r.exit.By != diagnosis.ExitUnknown {
		e.Exit = r.exit
		e.Exit.At = n.real(r.exit.At, j.now)
	}
	j.reportCalls(n, r, e)
	for s := range r.comms {
		if k := r.comms[s]; k.comm != nil {
			j.reportMember(n, r, k)
		}
	}
	for _, k := range r.former {
		j.reportMember(n, r, k)
	}
}

// revision is a number for what has changed: no communicator ever has one twice.
func (j *Job) revision() uint64 {
	j.revisions++
	return j.revisions
}

// reportCalls tells the last calls of a rank that is held up: inside one operation
// for a second.
func (j *Job) reportCalls(n *node, r *rank, e *diagnosis.Rank) {
	up := false
	if r.blocked && r.waits != nil && !r.frozen && !r.done {
		for s := range r.comms {
			if k := r.comms[s]; k.comm == r.waits {
				m := &k.comm.members[k.member]
				up = m.Open() && j.now-m.StartedAt >= int64(time.Second)
			}
		}
	}
	if !up {
		e.Calls = nil
		return
	}
	if e.Calls != nil {
		return
	}
	first := uint32(0)
	if r.ncalls > diagnosis.MaxCalls {
		first = r.ncalls - diagnosis.MaxCalls
	}
	for i := first; i < r.ncalls; i++ {
		x := r.calls[i%diagnosis.MaxCalls]
		x.At = n.real(x.At, j.now)
		e.Calls = append(e.Calls, x)
	}
}

func (j *Job) reportMember(n *node, r *rank, k ref) {
	c := k.comm
	quiet := c.touched < n.lastTick && !n.again // nothing has happened there since the last report
	if c.over || quiet && (!c.told || len(c.hits) == 0 && c.ends == 0) {
		return
	}
	m := &c.members[k.member]
	if m.State == record.CommNone {
		return
	}
	if m.dirty || n.again {
		m.dirty = false
		if c.at < 0 {
			c.at = int32(len(j.ev.Comms))
			x := diagnosis.Comm{ID: c.id, Name: c.name, Members: make([]diagnosis.Member, len(c.members)), Rev: j.revision(), ConnRev: j.revision()}
			for i := range x.Members {
				x.Members[i] = diagnosis.Member{World: -1, Peer: -1}
			}
			j.ev.Comms = append(j.ev.Comms, x)
			j.commOf = append(j.commOf, c)
		}
		e := &j.ev.Comms[c.at].Members[k.member]
		gone := func(s record.CommState) bool { return s == record.CommLeft || s == record.CommAborted }
		if gone(m.State) && !gone(e.State) {
			c.left++
			if c.leftAt = j.now; c.left == int32(len(c.members)) && j.collectAt == 0 {
				j.collectAt = j.now + leftFor
			}
		}
		j.ev.Comms[c.at].Rev = j.revision()
		*e = m.Member
		e.StateAt, e.EnqueuedAt = n.real(m.StateAt, j.now), n.real(m.EnqueuedAt, j.now)
		e.StartedAt, e.FinishedAt = n.real(m.StartedAt, j.now), n.real(m.FinishedAt, j.now)
	}
	if !c.told {
		return
	}
	for _, i := range c.out[k.member] {
		j.reportEdge(n, c, i, true, j.ranks[c.members[c.edges[i].dst].World].node == n.id)
	}
	for _, i := range c.in[k.member] {
		j.reportEdge(n, c, i, false, true)
	}
}

// cpu is the share of a core used over the last second.
func (j *Job) cpu(r *rank) float32 {
	part := func(since int64) float32 { return min(1, float32(j.now-since)/1e9) }
	busy := float32(0.05)
	if !j.cfg.Cluster.GPU || j.cfg.Cluster.Spin {
		busy = 0.75 + 0.25*float32(unit(hash(uint64(r.id), uint64(j.now), 7)))
	}
	if r.throttled > 0 {
		busy *= 1 - r.throttled
	}
	switch {
	case r.done || r.proc == diagnosis.ProcGone || r.proc == diagnosis.ProcExited:
		return 0
	case r.stuck == stuckBusy:
		return 0.97
	case r.stuck != notStuck || r.frozen:
		return busy*(1-part(r.stuckAt)) + 0.005
	case r.blocked && r.waits != nil && !j.cfg.Cluster.Spin:
		for s := range r.comms {
			if k := r.comms[s]; k.comm == r.waits {
				if m := &k.comm.members[k.member]; m.Open() {
					return busy*(1-part(m.StartedAt)) + 0.02
				}
			}
		}
	case r.t > j.now && (r.asleep || r.io):
		return busy*(1-part(r.since)) + 0.02
	}
	return busy
}

// Evidence is what the master knows now. It is the job's own, and valid until the
// next Advance.
func (j *Job) Evidence() *diagnosis.Evidence {
	j.collect()
	j.ev.Now = Start + j.now
	j.ev.Nodes = j.ev.Nodes[:0]
	silent, connected := 0, 0
	for i := range j.nodes {
		n := &j.nodes[i]
		x := diagnosis.Node{Name: n.name, MapError: unknownMap, CPUPressure: n.cpu, MemoryPressure: n.memory}
		if n.reports > 0 {
			x.LastSeen = Start + n.lastSeen
			x.Lost = j.now-n.lastSeen > lostAfter
			if n.reports > 3 {
				x.MapError = int64(j.cfg.Agents.MapError)
			}
			if !x.Lost {
				connected++
				if j.now-n.lastSeen > lateFor || n.lateTill > j.now {
					silent++
				}
			} else {
				j.disconnected(n)
			}
		}
		j.ev.Nodes = append(j.ev.Nodes, x)
	}
	j.ev.Paused = 2*silent > connected || j.now < j.paused
	return &j.ev
}

// disconnected forgets what only a present agent can tell.
func (j *Job) disconnected(n *node) {
	n.again = true
	for i := n.first; i < n.first+n.ranks; i++ {
		r := &j.ev.Ranks[i]
		if r.Node >= 0 && r.Proc != diagnosis.ProcGone && r.Proc != diagnosis.ProcExited {
			r.Proc, r.CPU, r.IO = diagnosis.ProcUnknown, 0, false
		}
	}
}

// collect removes the communicators that everybody has left a while ago.
func (j *Job) collect() {
	if j.collectAt == 0 || j.now < j.collectAt {
		return
	}
	j.collectAt = 0
	kept := 0
	for i, c := range j.commOf {
		if c.left == int32(len(c.members)) {
			if j.now-c.leftAt >= leftFor {
				c.over, c.at = true, -1
				continue
			}
			j.collectAt = c.leftAt + leftFor
		}
		c.at = int32(kept)
		j.commOf[kept], j.ev.Comms[kept] = c, j.ev.Comms[i]
		kept++
	}
	clear(j.commOf[kept:])
	clear(j.ev.Comms[kept:])
	j.commOf, j.ev.Comms = j.commOf[:kept], j.ev.Comms[:kept]
	conns := 0
	for i, k := range j.connOf {
		e := &k.comm.edges[k.edge]
		if k.comm.over {
			e.at = -1
			continue
		}
		j.connOf[conns], j.ev.Conns[conns] = k, j.ev.Conns[i]
		j.ev.Conns[conns].Comm = k.comm.at
		e.at = int32(conns)
		conns++
	}
	j.connOf, j.ev.Conns = j.connOf[:conns], j.ev.Conns[:conns]
	j.samples.moved(j)
}

// samples are the collectives that every rank samples alike.
type samples struct {
	live []*sampled // parallel to Evidence.Arrivals
}

type sampled struct {
	comm *comm
	at   int
}

const (
	maxArrivals = 4096
	maxCells    = 1 << 20
)

// sample decides on the collective of c that has just ended; nil when it is not
// taken. The share taken follows from how often they come, as agents choose it:
// at most 64 a second and member, and 200,000 of the whole job.
func (j *Job) sample(c *comm, size int) *sampled {
	if j.perSecond == 0 {
		members := 0
		for _, k := range j.comms {
			members += len(k.members)
		}
		j.perSecond = min(64, max(1, 200_000/float64(max(members, 1))))
	}
	rate := float64(c.seq) / max(1, float64(j.now)/1e9)
	zeros := uint64(0)
	if rate > j.perSecond {
		zeros = uint64(math.Ceil(math.Log2(rate / j.perSecond)))
	}
	if hash(c.id, c.seq, 0x617272)&(1<<zeros-1) != 0 || c.at < 0 {
		return nil
	}
	if n := len(j.ev.Arrivals); n >= maxArrivals || j.cells+size > maxCells {
		j.samples.drop(j, size)
	}
	times := make([]int64, 2*size)
	j.cells += size
	s := &sampled{c, len(j.ev.Arrivals)}
	j.samples.live = append(j.samples.live, s)
	j.ev.Arrivals = append(j.ev.Arrivals, diagnosis.Arrival{Comm: c.at, Seq: c.seq, Coll: c.coll, Start: times[:size:size], End: times[size:]})
	return s
}

func (s *sampled) take(j *Job, c *comm, i int, start, end int64) {
	n := &j.nodes[j.ranks[c.members[i].World].node]
	if len(n.arrivals) < 2048 {
		n.arrivals = append(n.arrivals, arrival{s, int32(i), start, end})
	}
}

// drop removes the older half.
func (x *samples) drop(j *Job, size int) {
	drop := (len(x.live) + 1) / 2
	for i := range drop {
		j.cells -= len(j.ev.Arrivals[i].Start)
		x.live[i].at = -1
	}
	x.live = slices.Delete(x.live, 0, drop)
	j.ev.Arrivals = slices.Delete(j.ev.Arrivals, 0, drop)
	for i := range x.live {
		x.live[i].at = i
	}
}

// moved follows communicators that have other indices now.
func (x *samples) moved(j *Job) {
	kept := 0
	for i, s := range x.live {
		if s.comm.over {
			j.cells -= len(j.ev.Arrivals[i].Start)
			s.at = -1
			continue
		}
		x.live[kept], j.ev.Arrivals[kept] = s, j.ev.Arrivals[i]
		j.ev.Arrivals[kept].Comm = s.comm.at
		s.at = kept
		kept++
	}
	x.live, j.ev.Arrivals = x.live[:kept], j.ev.Arrivals[:kept]
}
