package agent

import (
	"cmp"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/internal/roots"
	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

const (
	firstOps = 32   // pending collectives that a communicator has room for at first
	maxOps   = 4096 // and at most
	// allOps bounds the room of all communicators of the node together (about 10 MiB).
	allOps = 1 << 16
	// maxTouched is how many of a communicator's last abnormal windows are remembered.
	maxTouched = 16
	// maxLinks likewise of changes of paths, and of ports.
	maxLinks = 32
)

// rank folds one process's records.
type rank struct {
	p          *source.Process
	job        *job
	workload   *collector.Workload // nil while it is not known
	terms      terms               // of its being stopped, by its environment
	metAt      int64               // when this agent first saw it, CLOCK_MONOTONIC ns
	workloadOf int32               // the process whose it is
	comms      []*comm             // by index in the recorder's table; nil until seen

	step  uint64
	marks [record.MarkDataLoading + 1]int64 // when the span of each code opened, 0 when it is not open
	conns []conn                            // by index

	calls     calls
	stall     stall
	asked     record.EventSet
	reported  reported
	firstConn int // of the process's connections: the next report begins with it
}

// conn counts one connection's windows by cause: those that were recorded with a
// cause, and, for the snapshot, the normal ones; the rest is by live words.
type conn struct {
	counts    [record.NumCauses]uint64
	total     uint64 // windows
	switches  uint64
	resent    uint64
	outages   uint64 // times that it was down and came back
	down      bool
	seen      bool // its path was told of before
	transport record.Transport
	gen       uint64
	who       *collector.Conn // nil until it was learnt
}

// comm folds one communicator's collectives as this rank sees them.
type comm struct {
	gen      uint64
	since    uint64 // ticket: older records of its index are of a former communicator
	seen     bool   // in this pass
	id       uint64
	name     string
	rank     int32
	size     int32
	device   uint16 // whose clock stamps are of
	finished uint64 // last sequence finished, by the live word

	ops     []op  // ring by sequence; its length is a power of two
	peer    int32 // root or peer of the last enqueued, with its sequence
	peerSeq uint64

	evicted uint64 // collectives whose end was never seen

	// host folds the operations on the host of a communicator that a GPU stamps:
	// they are numbered by themselves. nil until there is one, and on others.
	stamped bool
	host    *comm
	aside   bool // it is another one's host; the master does not know its id

	touched  [maxTouched]collector.Window // ring of abnormal windows
	ntouched int
	legs     *collector.Peers // of the collective legsOf, whose own record follows; nil before the first
	legsOf   uint64
	nvlinks  [record.MaxStampPeers]*nvlink // to this rank, by peer, where GPUs stamp by peer
	links    changes                       // of paths
	ports    changes                       // of the ports that they begin at

	history  history
	sampling sampling
	clock    gpuClock // of KindStart's and KindEnd's GPU stamps
}

// op is one collective that is not handed over yet, or the last one of its slot that was.
type op struct {
	seq                      uint64
	bytes                    uint64
	enqueued, started, ended int64
	wait, transfer           int64
	launched                 int64 // the kernel, or enqueued
	gpuStart                 int64 // by the GPU's clock, where the process does not convert
	root                     int32
	stream                   uint32
	channels                 uint16
	coll                     record.CollKind
	dtype                    record.DType
	redop                    record.RedOp
	algo                     record.Algo
	proto                    record.Proto
	result                   record.Result
	clock                    record.Clock
	clockErr                 int64
	replay                   bool
	waitedFor                int32 // 1 + the last peer to enter, 0: not known
	inPlace                  bool
	done                     bool // handed over
}

// fold takes in a batch of records of one process.
func (a *Agent) fold(p *source.Process, recs []record.Record) {
	r := a.rank(p)
	if r == nil {
		return
	}
	r.job.records += uint64(len(recs))
	refreshed := false
	for i := range recs {
		rec := &recs[i]
		switch rec.Kind {
		case record.KindMark:
			r.mark(rec)
			continue
		case record.KindEnqueue, record.KindStart, record.KindPhase, record.KindEnd, record.KindWhole, record.KindWindow, record.KindLink:
		default:
			continue
		}
		c := r.comm(rec.Comm)
		if !refreshed && (c == nil || rec.Kind == record.KindLink && record.LinkState(rec.Code) != record.LinkDown) {
			// After the last pass the communicator joined, or the connection got the queue pair with which it is
			// up again; a batch asks only once.
			refreshed = true
			a.recorders.Refresh(p)
			a.learn(r)
			c = r.comm(rec.Comm)
		}
		if c == nil || rec.Ticket < c.since {
			if rec.Kind != record.KindLink {
				r.job.unknown++
			}
			continue
		}
		a.foldRecord(p, r, c.hostSide(), rec)
	}
}

// foldRecord takes in one record of a communicator.
func (a *Agent) foldRecord(p *source.Process, r *rank, c *comm, rec *record.Record) {
	switch rec.Kind {
	case record.KindEnqueue:
		if p.Source.CallsOnly() {
			// Nobody will tell when it began to run or ended.
		} else if o := a.op(c, rec.Seq); o != nil {
			o.enqueued, o.coll, o.dtype, o.redop = rec.Mono, rec.Coll, rec.DType, rec.Op
			o.root, o.bytes, o.stream, o.inPlace = rec.Root, rec.Bytes, rec.Stream, rec.Flags&record.FlagInPlace != 0
			o.launched = rec.Mono + rec.Dur
		}
		r.called(c, diagnosis.Call{Seq: rec.Seq, Coll: rec.Coll, Peer: rec.Root, Bytes: rec.Bytes, At: rec.Mono})
	case record.KindStart:
		if o := a.op(c, rec.Seq); o != nil {
			o.started, o.coll, o.algo, o.proto, o.channels = hostTime(rec), rec.Coll, rec.Algo, rec.Proto, rec.Chan
			o.replay = rec.Flags&record.FlagReplay != 0
			if rec.Clock == record.ClockGPU {
				o.gpuStart = rec.Stamp
			}
		}
	case record.KindPhase:
		if o := a.op(c, rec.Seq); o != nil {
			switch record.PhaseCode(rec.Code) {
			case record.PhaseWait:
				o.wait += max(rec.Dur, 0)
				o.waitedFor = rec.Peer + 1
			case record.PhaseTransfer:
				o.transfer += max(rec.Dur, 0)
			case record.PhaseReduce, record.PhaseReceive:
				c.leg(rec)
			}
		}
	case record.KindEnd:
		o := a.op(c, rec.Seq)
		if o == nil {
			r.job.unknown++
			return
		}
		o.ended, o.coll, o.result = hostTime(rec), rec.Coll, record.Result(rec.Code)
		if rec.Algo != record.AlgoNone {
			o.algo, o.proto = rec.Algo, rec.Proto
		}
		switch {
		case rec.Flags&record.FlagUnseen != 0:
			o.started = 0 // how long it took nobody knows
		case o.started == 0:
			r.job.unknown++
		case rec.Clock == record.ClockGPU && o.gpuStart != 0:
			c.clock.times(o, rec, p.Source == record.SourceNCCLPlugin && p.SourceVersion >= 5)
		}
		a.finish(r, c, o)
	case record.KindWhole:
		r.called(c, diagnosis.Call{Seq: rec.Seq, Coll: rec.Coll, Peer: rec.Root, Bytes: rec.Bytes, At: rec.Mono - rec.Dur})
		o := a.op(c, rec.Seq)
		if o == nil {
			r.job.unknown++
			return
		}
		o.started, o.ended, o.wait, o.transfer = rec.Mono-rec.Dur, rec.Mono, rec.Wait, rec.Dur-rec.Wait
		if o.enqueued == 0 {
			o.enqueued = o.started
		}
		o.coll, o.dtype, o.redop, o.algo, o.proto = rec.Coll, rec.DType, rec.Op, rec.Algo, rec.Proto
		o.root, o.bytes, o.stream, o.channels, o.waitedFor = rec.Root, rec.Bytes, rec.Stream, 1, rec.Peer+1
		o.inPlace, o.result = rec.Flags&record.FlagInPlace != 0, record.Result(rec.Code)
		if rec.Flags&record.FlagStamped != 0 && int(c.device) < len(p.Devices) {
			o.clock, o.clockErr = record.ClockGPU, p.Devices[c.device].Mapped
		}
		a.finish(r, c, o)
	case record.KindWindow:
		r.window(c, rec)
	case record.KindLink:
		r.link(c, rec)
	}
}

// hostSide is where a communicator's records are folded.
func (c *comm) hostSide() *comm {
	if !c.stamped {
		return c
	}
	if c.host == nil {
		c.host = &comm{id: ^c.id, name: c.name, rank: c.rank, size: c.size, peer: -1, aside: true} // another id: other traces
	}
	return c.host
}

// foldStamps takes in a batch of operations that one process's GPUs stamped:
// each is start, phases and end at once, or a start alone.
func (a *Agent) foldStamps(p *source.Process, stamps []record.Stamp) {
	r := a.rank(p)
	if r == nil {
		return
	}
	r.job.records += uint64(len(stamps))
	refreshed := false
	for i := range stamps {
		s := &stamps[i]
		c := r.comm(s.Comm)
		if c == nil && !refreshed {
			refreshed = true
			a.recorders.Refresh(p)
			a.learn(r)
			c = r.comm(s.Comm)
		}
		if c == nil {
			r.job.unknown++
			continue
		}
		o := a.op(c, s.Seq)
		if o == nil {
			r.job.unknown++
			continue
		}
		o.started, o.clock, o.clockErr, o.replay = s.Start, record.ClockGPU, s.Err, s.Replay()
		o.coll, o.dtype, o.redop, o.algo, o.proto = s.Coll, s.DType, s.Op, s.Algo, s.Proto
		o.root, o.bytes, o.stream, o.channels, o.inPlace = s.Root, s.Bytes, s.Stream, s.SMs, s.Flags&record.DescInPlace != 0
		r.called(c, diagnosis.Call{Seq: s.Seq, Coll: s.Coll, Peer: s.Root, Bytes: s.Bytes, At: s.Start})
		if s.End != 0 {
			o.ended, o.wait, o.transfer, o.waitedFor = s.End, s.Wait, s.End-s.Start-s.Wait, s.Peer+1
			r.stampedPeers(c, s)
			a.finish(r, c, o)
		}
	}
}

// hostTime is when a record's event happened by CLOCK_MONOTONIC. A GPU stamp
// that no calibration maps is replaced by the time the record was appended.
func hostTime(rec *record.Record) int64 {
	if rec.Clock == record.ClockHost && rec.Stamp != 0 {
		return rec.Stamp
	}
	return rec.Mono
}

// op returns the slot of a sequence; nil when its collective has been handed
// over already (a late record) or is older than what is pending in its slot.
func (a *Agent) op(c *comm, seq uint64) *op {
	if len(c.ops) == 0 && !a.growOps(c, firstOps) {
		return nil
	}
	for {
		o := &c.ops[seq&uint64(len(c.ops)-1)]
		switch {
		case o.seq == seq:
			if o.done {
				return nil
			}
			return o
		case o.seq > seq:
			return nil
		case o.seq != 0 && !o.done && o.seq > c.finished && len(c.ops) < maxOps && a.growOps(c, 2*len(c.ops)):
			continue // pending indeed: a stream is many operations ahead
		case o.seq != 0 && !o.done:
			c.evicted++ // its end was lost, or there is no more room
		}
		*o = op{seq: seq, root: -1}
		return o
	}
}

// growOps makes a communicator's ring n long, unless all rings together are too long by then.
func (a *Agent) growOps(c *comm, n int) bool {
	if a.ops+n-len(c.ops) > allOps {
		return false
	}
	a.ops += n - len(c.ops)
	old := c.ops
	c.ops = make([]op, n)
	for i := range old {
		if old[i].seq != 0 {
			c.ops[old[i].seq&uint64(n-1)] = old[i]
		}
	}
	return true
}

// finish hands a finished collective to the sinks.
func (a *Agent) finish(r *rank, c *comm, o *op) {
	o.done = true
	out := a.describe(r, c, o)
	out.Anomalous = o.result != record.ResultOK || out.NWindows > 0 || out.PathChanged
	if o.started != 0 {
		if c.history.slow(o.coll, o.bytes, o.ended-o.started) {
			out.Anomalous = true
		}
		if r.job.stream != nil && !c.aside && o.meets() && r.reportable() && c.sampling.take(c.id, o.seq) {
			r.job.arrive(c, o)
		}
	}
	for _, s := range a.o.Sinks {
		s.Collective(out)
	}
	if out.Traced && !c.aside {
		a.traced(r, c, roots.Key{Comm: c.id, Coll: o.coll, Seq: o.seq}, collector.Traced{
			Rank: c.rank, First: cmp.Or(o.started, o.enqueued, o.ended) + out.RealOffset, Last: o.ended + out.RealOffset, Err: o.clockErr + out.MapErr, NodeClock: !out.JobClock,
		}, out.Anomalous)
	}
}

// describe fills the one Collective that is handed around.
func (a *Agent) describe(r *rank, c *comm, o *op) *collector.Collective {
	out := &a.out
	*out = collector.Collective{
		Job: r.job.name, Comm: c.name, CommID: c.id, Rank: c.rank, Size: c.size, World: r.p.Rank, Attempt: r.p.Attempt,
		Kind: o.coll, DType: o.dtype, Op: o.redop, Algo: o.algo, Proto: o.proto, Result: o.result, InPlace: o.inPlace,
		Root: o.root, Stream: o.stream, Channels: o.channels, Seq: o.seq, Bytes: o.bytes,
		Clock: o.clock, Replay: o.replay, ClockErr: o.clockErr,
		Enqueued: o.enqueued, Started: o.started, Ended: o.ended, Wait: o.wait, Transfer: o.transfer,
		Node: a.o.Node, Workload: r.workload, WaitedFor: o.waitedFor - 1, Rootless: c.aside, Former: o.ended != 0 && o.ended < a.began,
	}
	a.jobTime(r.job, out)
	if o.ended == 0 {
		out.SeenAt = record.Now()
	}
	if o.started != 0 {
		c.touching(o, out)
		if c.legsOf == o.seq && o.ended != 0 {
			out.Peers = c.legs
		}
	}
	return out
}

// leg takes in what one peer sent of a collective, whose own record follows.
func (c *comm) leg(rec *record.Record) {
	if c.legs == nil {
		c.legs = new(collector.Peers)
	}
	if c.legsOf != rec.Seq {
		c.legs.N, c.legsOf = 0, rec.Seq
	}
	if n := c.legs.N; n < collector.MaxPeers {
		c.legs.N++
		c.legs.Legs[n] = collector.Leg{
			Peer: rec.Peer, Reduce: record.PhaseCode(rec.Code) == record.PhaseReduce,
			First: rec.Stamp - max(rec.Dur, 0), Last: rec.Stamp, Wait: max(rec.Wait, 0), Stall: min(max(rec.Stall, 0), max(rec.Dur, 0)),
		}
	}
}

// touching fills in what happened to connections while o ran, and counts what finds no room.
func (c *comm) touching(o *op, out *collector.Collective) {
	for i := max(0, c.ntouched-maxTouched); i < c.ntouched; i++ {
		if w := &c.touched[i%maxTouched]; o.ended == 0 || w.Last >= o.started && w.First <= o.ended {
			if out.NWindows == collector.MaxWindows {
				out.LeftOut++
				continue
			}
			out.Windows[out.NWindows] = *w
			out.NWindows++
		}
	}
	out.PathChanged = c.links.touching(o, out)
	// Counters of ports move all the time: they have what room is left.
	out.PathChanged = c.ports.touching(o, out) || out.PathChanged
}

// meets reports whether o ended in order and kept every member until the last one had entered,
// so that its times bound their clocks.
func (o *op) meets() bool {
	return o.coll.Collective() && o.result == record.ResultOK && (o.bytes > 0 || !o.coll.HasData())
}

// comm returns the communicator at an index of the table, nil when it is not known.
func (r *rank) comm(i uint16) *comm {
	if int(i) < len(r.comms) {
		return r.comms[i]
	}
	return nil
}
