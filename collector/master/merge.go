package master

import (
	"math"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/internal/roots"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// Limits bound what a master keeps, whatever its agents say. What exceeds them is
// not tracked and counted in MasterSnapshot.Overflow. Zero fields take the defaults.
type Limits struct {
	Nodes    int // agents; 16,384
	Ranks    int // world size; 131,072
	Comms    int // communicators; 65,536
	Members  int // of all communicators together; 1,048,576 (about 150 MiB when full)
	Conns    int // directed connections; 524,288 (about 100 MiB when full)
	Arrivals int // cells (collectives × members) of sampled arrivals; 1,048,576 (16 MiB)
	Calls    int // last calls of all ranks that are held up; 262,144 (12 MiB)
	PerNode  int // ranks of one agent; 4,096
}

func (l *Limits) setDefaults() {
	def := func(v *int, d int) {
		if *v <= 0 {
			*v = d
		}
	}
	def(&l.Nodes, 1<<14)
	def(&l.Ranks, 1<<17)
	def(&l.Comms, 1<<16)
	def(&l.Members, 1<<20)
	def(&l.Conns, 1<<19)
	def(&l.Arrivals, 1<<20)
	def(&l.Calls, 1<<18)
	def(&l.PerNode, 1<<12)
}

// maxArrivals bounds Evidence.Arrivals by number; Limits.Arrivals does by size.
const maxArrivals = 4096

// leftFor is how long a communicator that all of its members have left is kept.
const leftFor = int64(30e9)

// state is the evidence with the indices that merging needs. It is kept in
// place, so that a pass costs nothing for what has not changed. Its owner
// serialises all calls.
type state struct {
	limits Limits
	ev     diagnosis.Evidence

	epoch                    // that the job is in
	shared  bool             // ranks of several nodes are known to be in one communicator
	epochs  uint64           // that it has been in
	knownBy map[uint64]int32 // communicators that agents told of whose ranks are others', and which agent did
	claims  int              // nodes whose agents have another word
	ahead   int64            // of the master's clock, which never jumps, by this host's: that was set, or the host suspended, ns
	began   int64            // when the process was created that showed that the job was started anew, unix ns; 0: none has
	anew    uint64           // times that it was
	seen    int              // ranks of the world that an agent has reported

	nodes   []node // parallel to ev.Nodes
	nodeOf  map[string]int32
	ranks   []process   // parallel to ev.Ranks
	comms   []commIndex // parallel to ev.Comms
	commOf  map[uint64]int32
	connOf  map[connKey]int32
	conns   []connKey // parallel to ev.Conns
	connBy  []int32   // node that told of it first; likewise
	arrived map[arrivalKey]int32
	samples []sample                // parallel to ev.Arrivals
	mixed   map[arrivalKey]struct{} // of arrivals that were dropped: members mean different operations by their number
	nicOf   map[nicKey]int32

	clock jobClock
	roots roots.Gather
	asks  []roots.Key // collectives of which all agents' spans are wanted

	revisions uint64 // given out to communicators: no two states of one have the same
	members   int    // sum of communicator sizes
	cells     int    // sum of arrival sizes
	calls     int    // sum of ranks' calls
	overflow  uint64
	report    oneReport
	refused   uint64  // entries that made no sense: out of range, of another rank's process, contradicting
	foreign   uint64  // of them, those about ranks that another node's agent, which is heard, tells of
	reopened  bool    // in this report a process has ended, or ranks were vouched for: who was denied a rank may have it now
	free      []int32 // indices of nodes that were evicted
}

// node is one agent as the merge needs it.
type node struct {
	instance uint64
	bootID   string
	stream   *stream // the one that speaks for this node, nil when disconnected
	clock    clockMap
	sequence uint64 // of the last report
	lateAt   int64  // when it last reported a pause of its own
	stale    bool   // some of what it said was forgotten or refused: it is to say everything again
	gone     bool   // it has been silent for so long that its ranks are anybody's
	denied   bool   // it spoke for processes of which another agent tells, too
	fast     int64  // by how much a process of it began after now, by its clock, ns; -1 once that is told

	vouched  int   // of its ranks, those that are in a communicator with another node's
	apart    apart // what it alone has told of
	claim    claim
	nics     int    // of its ports, in the evidence
	knows    int    // of state.knownBy, that it told of first
	chose    uint64 // the last of state.epochs that it was for before the job was in it
	since    int64  // when it first had a rank of the job, 0: never
	owned    int    // ranks of the job's epoch that are its
	running  int    // of them, those that have not ended as far as is known
	youngest int64  // when the last of these was created, unix ns
}

// process identifies the process that a rank's entry describes; its pid does not:
// it may be known in a container only at first.
type process struct {
	node    int32
	created int64 // unix ns by its node's clock
	vouched bool  // it was in a communicator with ranks of another node
	kept    bool  // the rank is nobody's, and kept for keeper
	keeper  int32

	overflow uint64 // of its recorder's tables
	stall    uint32 // that the rank's calls are of
	lease    int64  // ns that it may run on though its agent does not hear the master; 0: for ever

	leaseKept bool // the lease includes its grace, and outlives its agent
}

// maxLease is the longest that an agent reports: a day, and a grace of a minute.
const maxLease = int64(24*time.Hour + time.Minute)

// apart is what one agent alone reports. It gets at most half of each table, so that an agent
// that invents leaves room for the others.
type apart struct{ comms, members, conns int }

type commIndex struct {
	leftAt  int64      // when the last member left, 0 while one is there
	present int        // members that are there
	by      int32      // node of its members; several when they are of more than one
	calls   *callsOnly // nil while more than calls is known of all members
}

// several is commIndex.by of a communicator whose members are of several nodes.
const several = int32(-2)

// connKey is a connection's identity that both of its ends know.
type connKey struct {
	comm      int32
	src, dst  int32
	channel   uint32
	transport record.Transport
}

type arrivalKey struct {
	comm int32
	seq  uint64
}

// sample is what is known of an arrival beside the evidence.
type sample struct {
	by    int32  // who tells of it, several or one node
	bytes uint64 // 0: not known, or members need not agree
	mixed bool   // members contradict each other
}

func newState(job string, l Limits) *state {
	l.setDefaults()
	s := &state{limits: l, nodeOf: map[string]int32{}, clock: newJobClock()}
	s.ev.Job = job
	s.clearComms()
	return s
}

func (s *state) revision() uint64 { s.revisions++; return s.revisions }

// nobody is a member that nobody has reported.
var nobody = diagnosis.Member{World: -1, Peer: -1, FaultPeer: -1}

func (s *state) clearComms() {
	s.ev.Comms, s.ev.Conns, s.ev.Arrivals, s.ev.RAS, s.comms, s.conns, s.connBy = nil, nil, nil, nil, nil, nil, nil
	s.commOf = map[uint64]int32{}
	s.knownBy = map[uint64]int32{}
	for i := range s.nodes {
		s.nodes[i].knows, s.nodes[i].apart = 0, apart{}
	}
	s.connOf = map[connKey]int32{}
	s.arrived, s.samples, s.mixed = map[arrivalKey]int32{}, nil, map[arrivalKey]struct{}{}
	s.clock.clear()
	s.members, s.cells = 0, 0
}

// disconnected forgets what only a present agent can tell. That a process has
// ended stays true.
func (s *state) disconnected(n int32) {
	s.nodes[n].stale = true
	s.askDenied()
	for i := range s.ranks {
		if r := &s.ev.Ranks[i]; s.ranks[i].node == n && r.Node == n && !ended(r.Proc) {
			r.Proc, r.CPU, r.IO = diagnosis.ProcUnknown, 0, false
			r.Starved, r.Throttled, r.MemoryPressure = 0, 0, 0
			r.OffCPU = diagnosis.OffCPU{}
		}
	}
	s.ev.Nodes[n].CPUPressure, s.ev.Nodes[n].MemoryPressure = 0, 0
}

// askDenied has agents report everything again that were refused and may be believed now.
func (s *state) askDenied() {
	for i := range s.nodes {
		if o := &s.nodes[i]; o.denied {
			o.stale, o.denied = true, false
		}
	}
}

func ended(p diagnosis.ProcState) bool { return p == diagnosis.ProcGone || p == diagnosis.ProcExited }

// merge takes in one report of node n that arrived at now.
func (s *state) merge(n int32, r *wire.Report, now int64) {
	nd := &s.nodes[n]
	nd.clock.observe(r.MonoSentNs, now, int64(r.Echo.GetMasterNs()), r.Echo.GetMonoReceivedNs())
	nd.sequence = r.Sequence
	if r.LateNs > pauseAfter.Nanoseconds() {
		nd.lateAt = now
	}
	ev := &s.ev.Nodes[n]
	ev.LastSeen, ev.Lost, ev.MapError = now, false, nd.clock.err()
	nd.gone = false
	ev.CPUPressure, ev.MemoryPressure = share(r.CpuPressure), share(r.MemoryPressure)

	s.report = oneReport{}
	s.hear(n, r.Ranks, now)
	for _, w := range r.Ranks {
		s.mergeRank(n, w, now)
	}
	s.forget(now)
	s.report = oneReport{}
	for _, w := range r.Members {
		s.mergeMember(n, w, now)
	}
	s.forget(now) // whom members have shown not to be who they are
	for _, w := range r.Ras {
		s.mergeRAS(w, nd.clock.real(w.MonoAtNs, now), now)
	}
	if s.reopened {
		s.reopened = false
		s.askDenied()
	}
	s.decide()
	for _, w := range r.Connections {
		s.mergeConn(n, w, now)
	}
	for _, w := range r.Nics[:min(len(r.Nics), diagnosis.MaxNodeNICs)] {
		s.mergeNIC(n, w, now)
	}
	for _, w := range r.Arrivals {
		s.mergeArrival(n, w, now)
	}
	s.dropMixed()
	for _, w := range r.Traced {
		s.mergeTraced(n, w, now)
	}
}

func (s *state) mergeRank(n int32, w *wire.Rank, now int64) {
	clock := &s.nodes[n].clock
	if !s.possible(w, now) {
		s.refuse(n, w, now)
		return
	}
	if int(w.WorldSize) > s.limits.Ranks {
		s.overflow++
		return
	}
	if s.epoch != (epoch{w.Attempt, w.WorldSize}) { // the job is in another one, for now at least
		s.refused++
		return
	}
	p, r := &s.ranks[w.WorldRank], &s.ev.Ranks[w.WorldRank]
	if p.node != n || p.created != w.CreatedUnixNs {
		if !s.mayTake(n, w, now) {
			s.refused++
			return
		}
		if p.node < 0 {
			s.seen++
		} else {
			s.report.forget(w.WorldRank)
		}
		s.calls -= len(r.Calls)
		s.uncount(w.WorldRank)
		*p, *r = process{node: n, created: w.CreatedUnixNs}, diagnosis.Rank{}
	} else {
		s.uncount(w.WorldRank)
	}
	defer s.count(w.WorldRank, now)
	p.overflow = w.TableOverflow
	p.lease, p.leaseKept = min(max(w.FenceLeaseNs, 0), maxLease), w.FenceLeaseKept
	r.Node, r.PID, r.Attempt = n, w.Pid, w.Attempt
	s.reopened = s.reopened || !ended(r.Proc) && ended(diagnosis.ProcState(w.Proc))
	r.Proc = diagnosis.ProcState(w.Proc)
	if w.Proc > uint32(diagnosis.ProcExited) {
		r.Proc = diagnosis.ProcUnknown
	}
	r.ProcAt = clock.real(w.MonoProcNs, now)
	r.CPU, r.IO = float32(finite(float64(w.Cpu))), w.Io
	r.Starved, r.Throttled, r.MemoryPressure = share(w.Starved), share(w.Throttled), share(w.MemoryPressure)
	r.OffCPU = diagnosis.OffCPU{}
	if o := w.OffCpu; o != nil {
		r.OffCPU = diagnosis.OffCPU{
			Disk: share(o.Disk), NCCLStarved: share(o.NcclStarved), ChildDisk: share(o.ChildDisk), ChildStarved: share(o.ChildStarved),
			For: diagnosis.WaitFor(min(o.WaitsFor, math.MaxUint8)).Known(), Resent: o.Resent,
		}
	}
	r.Starting, r.WaitsIn = w.Starting, diagnosis.WaitIn(min(w.WaitsIn, math.MaxUint8)).Known()
	r.Exit = exitOf(w.Exit, clock, now)
	s.mergeCalls(p, r, w, clock, now)
	if !s.trusted(n) && !p.vouched { // which is not counted now
		s.doubt(r)
		return
	}
	r.Mark, r.MarkAt, r.Step, r.Xid = record.MarkCode(w.Mark), clock.real(w.MonoMarkNs, now), w.Step, w.Xid
	r.GPU = diagnosis.GPU{}
	if g := w.Gpu; g != nil {
		r.GPU = diagnosis.GPU{
			Seen: true, Index: uint16(min(g.Index, math.MaxUint16)), Throttle: diagnosis.Throttle(g.Throttle),
			XidAt: clock.real(g.MonoXidNs, now), LostAt: clock.real(g.MonoLostNs, now),
			ThrottledAt: clock.real(g.MonoThrottledNs, now), UnresponsiveAt: clock.real(g.MonoUnresponsiveNs, now),
		}
	}
}

// forget removes the processes that a report superseded from their communicators, all in one
// go.
func (s *state) forget(now int64) {
	if len(s.report.forgotten) == 0 {
		return
	}
	for c := range s.ev.Comms {
		members, was := s.ev.Comms[c].Members, false
		for m := range members {
			if _, gone := s.report.forgotten[members[m].World]; gone {
				s.setMember(int32(c), m, nobody)
				was = true
			}
		}
		if was {
			s.ev.Comms[c].Rev = s.revision()
			s.leave(int32(c), now)
		}
	}
}

// setMember replaces a member, and keeps count of who is there.
func (s *state) setMember(c int32, rank int, m diagnosis.Member) {
	was := &s.ev.Comms[c].Members[rank]
	if present(was) {
		s.comms[c].present--
	}
	if *was = m; present(was) {
		s.comms[c].present++
	}
	s.comms[c].calls.set(rank, m)
}

func present(m *diagnosis.Member) bool { return m.World >= 0 && !left(m.State) }

// leave notes when the last member has left a communicator.
func (s *state) leave(c int32, now int64) {
	if s.comms[c].present == 0 {
		s.comms[c].leftAt = now
	}
}

// taken reports whether a place in a communicator belongs to another rank, whose process
// another connected agent reports. Only that agent can give it up.
func (s *state) taken(n int32, was *diagnosis.Member, world int32) bool {
	if !present(was) || was.World == world || int(was.World) >= len(s.ranks) {
		return false
	}
	o := s.ranks[was.World].node
	return o >= 0 && o != n && s.heard(o) && !ended(s.ev.Ranks[was.World].Proc)
}

func (s *state) mergeMember(n int32, w *wire.Member, now int64) {
	if w == nil || w.Rank < 0 || w.Rank >= w.Size || w.Size > s.world {
		s.refused++
		return
	}
	if !s.owns(n, w.WorldRank, w.Attempt) {
		s.refused++
		s.contest(n, w)
		return
	}
	c, ok := s.commOf[w.CommId]
	if !s.trusted(n) && (!ok || s.comms[c].by == n) {
		s.refused++
		s.foreign++
		s.nodes[n].denied = true
		return
	}
	if !ok {
		own := &s.nodes[n].apart
		if len(s.ev.Comms) >= s.limits.Comms || int(w.Size) > s.limits.Members-s.members ||
			own.comms >= (s.limits.Comms+1)/2 || own.members+int(w.Size) > (s.limits.Members+1)/2 {
			s.overflow++
			return
		}
		own.comms++
		own.members += int(w.Size)
		members := make([]diagnosis.Member, w.Size)
		for i := range members {
			members[i] = nobody
		}
		c = int32(len(s.ev.Comms))
		s.ev.Comms = append(s.ev.Comms, diagnosis.Comm{ID: w.CommId, Members: members, Rev: s.revision(), ConnRev: s.revision()})
		s.comms = append(s.comms, commIndex{by: n})
		s.commOf[w.CommId] = c
		s.members += len(members)
	}
	comm := &s.ev.Comms[c]
	if int(w.Size) != len(comm.Members) {
		s.refused++
		return
	}
	was := &comm.Members[w.Rank]
	if s.taken(n, was, w.WorldRank) {
		s.nodes[n].denied = true
		s.refused++
		return
	}
	s.vouch(n, c, w.WorldRank, now)
	if w.CommName != "" {
		comm.Name = bounded(w.CommName)
	}
	comm.Rev = s.revision()
	clock := &s.nodes[n].clock
	stateAt := clock.real(w.MonoStateNs, now)
	if stateAt == 0 && was.World == w.WorldRank && was.State == record.CommState(w.State) {
		stateAt = was.StateAt
	}
	fault, faultPeer := faultOf(w)
	s.callsOnly(c, int(w.Rank), w.CallsOnly)
	s.setMember(c, int(w.Rank), diagnosis.Member{
		World: w.WorldRank, State: record.CommState(w.State), StateAt: stateAt, Fault: fault, FaultPeer: faultPeer,
		Coll: record.CollKind(w.Coll), Peer: w.Peer, Bytes: w.Bytes,
		Enqueued: w.Enqueued, Started: w.Started, Finished: w.Finished,
		EnqueuedAt: clock.real(w.MonoEnqueuedNs, now), StartedAt: clock.real(w.MonoStartedNs, now), FinishedAt: clock.real(w.MonoFinishedNs, now),
		Ops: w.Ops, OwnNs: w.OwnNs, WaitNs: w.WaitNs, TransferNs: w.TransferNs, MaxOwnNs: w.MaxOwnNs,
	})
	if !left(record.CommState(w.State)) {
		s.comms[c].leftAt = 0
		return
	}
	s.leave(c, now)
}

func left(c record.CommState) bool { return c == record.CommLeft || c == record.CommAborted }

// owns reports whether node n speaks for the process that this rank has now.
func (s *state) owns(n, world int32, attempt uint32) bool {
	return world >= 0 && int(world) < len(s.ranks) && s.ranks[world].node == n && s.ev.Ranks[world].Attempt == attempt && attempt == s.attempt
}

// member returns the communicator's index when node n speaks for its given rank.
func (s *state) member(n int32, id uint64, rank int32) (c int32, ok bool) {
	c, ok = s.commOf[id]
	if !ok || rank < 0 || int(rank) >= len(s.ev.Comms[c].Members) {
		return 0, false
	}
	w := s.ev.Comms[c].Members[rank].World
	return c, w >= 0 && int(w) < len(s.ranks) && s.ranks[w].node == n
}

// arrivalsPerSecond shares what a master can take among the job's members.
func (s *state) arrivalsPerSecond() uint32 {
	const total, most = 200_000, 64
	return uint32(min(most, max(1, total/max(s.members, 1))))
}

func bounded(name string) string {
	if len(name) > wire.MaxName {
		name = strings.ToValidUTF8(name[:wire.MaxName], "")
	}
	return strings.Clone(name)
}

func finite(x float64) float64 {
	if x >= 0 && x <= math.MaxFloat64 {
		return x
	}
	return 0
}
