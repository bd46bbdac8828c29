package ccl

import (
	"cmp"
	"errors"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/engine"
	"github.com/lockstep-ccl/lockstep/ccl/internal/gpu"
	"github.com/lockstep-ccl/lockstep/ccl/internal/transport"
	"github.com/lockstep-ccl/lockstep/record"
)

// log writes a communicator's part of the flight recorder: live words that say
// what has been called and what is open, and one record of each operation when it
// ends. Only what has to queue, or lasts, is also told of before. Where it can be
// this is done while the operation has to wait anyhow: its start is noted after
// its first bytes went out, and the sums of a brief one after those of the next.
type log struct {
	rec    *record.Writer // nil: off
	live   *record.Comm
	proc   *process
	id     uint64
	board  transport.Board // nil without local peers
	remote bool            // there are members on other nodes
	gpu    *gpu.Recording  // nil on a CPU rank, or off

	started int64
	lasting bool          // the running operation has been told of
	whole   record.Record // of the last operation: only what differs is written
	flushed uint64        // operations since links last published their counters
	sums    sums          // not yet added
}

// sums is what AddPhases takes of one operation.
type sums struct {
	own, wait, transfer int64
	bytes               uint64
	due                 bool
}

// addSums adds what is due.
func (l *log) addSums() {
	if s := &l.sums; s.due {
		s.due = false
		l.live.AddPhases(s.own, s.wait, s.transfer, s.bytes)
	}
}

func newLog(p *process, cfg *Config, e record.CommEntry) (log, error) {
	l := log{rec: p.rec, proc: p, id: e.ID}
	if p.rec != nil && cfg.Device != CPU {
		var err error
		l.gpu, err = gpu.Record(cfg.Device.Ordinal(), p.rec, func(why error) {
			if p.once("stamps are collected") {
				cfg.logger().Warn("GPUs cannot write to the flight recorder's file, so the host brings their stamps there, and the last milliseconds of a process that dies are missing: set LOCKSTEP_RUNTIME_DIR to a directory in memory, as /dev/shm", "rank", e.Rank, "err", why)
			}
		})
		switch {
		case errors.Is(err, gpu.ErrNoAccess): // the job matters more
			if p.once("no stamps") {
				cfg.logger().Warn("no flight recorder of what runs on GPUs: set LOCKSTEP_RUNTIME_DIR to a directory in memory, as /dev/shm", "rank", e.Rank, "err", err)
			}
		case err != nil:
			return l, err
		default:
			e.Device, e.Stamps, e.Copies = l.gpu.Device(), gpuStamps, gpuCopies
		}
	}
	l.live, _ = p.rec.AddComm(e) // a full table is counted there
	l.whole = record.Record{Kind: record.KindWhole, Comm: l.live.Index()}
	return l, nil
}

// How many operations on device memory the recorder keeps of a communicator.
const (
	gpuStamps = 1024
	gpuCopies = 256
)

// state records what became of the communicator.
func (l *log) state(s record.CommState) {
	l.live.SetState(s)
	l.tell(s, record.ResultOK, -1)
}

// aborted records that the communicator is over, why, and whom that names.
func (l *log) aborted(f *failure) {
	why, peer := f.result(), int32(f.peer)
	l.live.Aborted(why, peer)
	l.tell(record.CommAborted, why, peer)
}

func (l *log) tell(s record.CommState, why record.Result, peer int32) {
	l.rec.Append(&record.Record{
		Mono: record.Now(), Kind: record.KindComm, Comm: l.live.Index(), Code: uint8(s), Result: why, Peer: peer, Value: l.id,
	})
}

// enqueue notes a call. One that runs next has no record of its own: it is
// taken to start at once (the sweeper sees to it, within 2 ms, if nobody does).
func (l *log) enqueue(op *operation, seq uint64, next bool) {
	if l.rec == nil {
		return
	}
	if next {
		l.live.Enqueued(seq, 0, op.coll, op.bytes)
		return
	}
	now := record.Now()
	l.live.Enqueued(seq, now, op.coll, op.bytes)
	l.writeEnqueue(op, seq, now)
}

func (l *log) writeEnqueue(op *operation, seq uint64, at int64) {
	op.logged = true
	l.rec.Append(&record.Record{
		Mono: at, Kind: record.KindEnqueue, Flags: op.flags(), Comm: l.live.Index(), Seq: seq,
		Coll: op.coll, DType: op.dtype, Op: op.redop, Root: op.root, Bytes: op.bytes, Stream: op.stream,
	})
}

func (op *operation) flags() uint8 {
	if op.inPlace {
		return record.FlagInPlace
	}
	return 0
}

// start notes that an operation began to run at the time at.
func (l *log) start(op *operation, seq uint64, at int64) {
	if l.rec == nil {
		return
	}
	l.started, l.lasting = at, false
	if op.proxy != nil {
		if s, ok := l.live.HostStamp(seq); ok { // the GPU came to it before it was seen to
			l.started = min(l.started, l.gpu.Mono(s.Start))
		}
	}
	if l.asksBoard(op) {
		l.board.Enter(op.collective, l.started)
	}
	l.live.Started(seq, l.started)
	l.addSums()
}

// lasts tells of an operation that goes on for long: its record at the end may
// never come, and until then the ring has nothing of it but its call, if that.
func (l *log) lasts(op *operation, seq uint64, s *algo.Schedule) {
	if l.rec == nil || l.lasting {
		return
	}
	l.lasting = true
	if !op.logged {
		l.writeEnqueue(op, seq, l.started)
	}
	l.rec.Append(&record.Record{
		Mono: l.started, Kind: record.KindStart, Comm: l.live.Index(), Seq: seq,
		Coll: op.coll, Algo: s.Algo, Proto: s.Proto, Chan: 1, Stamp: l.started,
	})
}

const (
	// brief operations are not split into phases: the parts would be shorter
	// than what it takes to tell them apart.
	brief = 5_000 // ns
	// flushEvery bounds how many brief operations pass before links publish.
	flushEvery = 64
)

// end notes an operation's end and what its time was spent on.
func (l *log) end(c *Comm, op *operation, seq uint64, result record.Result) {
	if l.rec == nil {
		return
	}
	now, flags := record.Now(), op.flags()
	ended, met := now, meeting{}
	if op.proxy != nil {
		var ok bool
		if ended, met, ok = l.stamped(op.proxy, seq, now); ok {
			flags |= record.FlagStamped
		}
	}
	took := ended - l.started
	wait, peer := int64(0), int32(-1)
	if took >= brief {
		var entered int64
		peer, entered = l.lastEntry(c, op, met)
		wait = min(max(entered-l.started, 0), took)
	}
	if took >= legsFrom {
		l.writeLegs(c.eng.Legs(), seq, ended, int(took/legCost))
	}
	s, r := c.executor.plans.last, &l.whole
	r.Mono, r.Flags, r.Seq = ended, flags, seq
	r.Coll, r.DType, r.Op, r.Algo, r.Proto, r.Code = op.coll, op.dtype, op.redop, s.Algo, s.Proto, uint8(result)
	r.Root, r.Peer, r.Bytes, r.Stream, r.Dur, r.Wait = op.root, peer, op.bytes, op.stream, took, wait
	l.rec.Append(r)
	l.live.Finished(seq, ended)
	own := int64(0)
	if prev := l.proc.lastEnd.Load(); prev != 0 {
		own = l.started - prev
	}
	l.proc.lastEnd.Store(ended)
	l.sums = sums{own, wait, took - wait, op.bytes, true}
	if l.flushed++; took >= brief || l.flushed >= flushEvery {
		l.flushed = 0
		l.addSums()
		c.eng.Flush(now)
	}
}

const (
	// legBytes is the size from which on an operation's legs are timed, legBytesApart where bytes cross nodes:
	// what takes long enough for a few looks at the clock to be nothing.
	legBytes      = 1 << 20
	legBytesApart = 8 << 10
	// legsFrom is how long an operation takes whose legs are recorded, and legCost the time for which it
	// may have one record, ns: some 50 ns each, so half a percent at most.
	legsFrom = 100_000
	legCost  = 10_000
)

// asksLegs reports whether what each peer sends is to be timed.
func (l *log) asksLegs(op *operation) bool {
	return l.rec != nil && op.coll.Collective() && (op.bytes >= legBytes || l.remote && op.bytes >= legBytesApart)
}

// writeLegs records what each peer has sent of an operation that has ended, before the operation's own record.
func (l *log) writeLegs(legs []engine.Leg, seq uint64, ended int64, most int) {
	for i := range legs[:min(len(legs), most)] {
		g := &legs[i]
		asked, last := cmp.Or(g.Asked, l.started), cmp.Or(g.Ended, ended)
		came := max(asked, g.Came)
		code := record.PhaseReceive
		if g.Reduce {
			code = record.PhaseReduce
		}
		l.rec.Append(&record.Record{
			Mono: last, Kind: record.KindPhase, Comm: l.live.Index(), Seq: seq, Code: uint8(code), Index: uint8(i), Peer: g.Peer,
			Stamp: last, Dur: max(last-came, 0), Wait: came - asked, Stall: g.Stall,
		})
	}
}

// meeting is what the GPU says of the node's ranks in an operation between nodes: who
// came last, -1 when nobody came after this rank, and when.
type meeting struct {
	told bool
	peer int32
	at   int64
}

// stamped takes an operation's start and end from what the GPU has stamped. now is for
// one that has no end there: it has failed, or is not recorded.
func (l *log) stamped(p proxyOp, seq uint64, now int64) (end int64, met meeting, ok bool) {
	s, ok := l.live.HostStamp(seq)
	if !ok || s.End == 0 {
		return now, met, false
	}
	// Both are off by the same little; the length is exact.
	end = min(l.gpu.Mono(s.End), now)
	l.started = end - (s.End - s.Start)
	if met.peer, met.told = p.Met(s.Peer); met.peer >= 0 {
		met.at = l.started + s.Wait
	}
	return end, met, true
}

// asksBoard reports whether members of this node say on the board when they
// enter op; asksEngine whether others, or all, are known by their bytes.
func (l *log) asksBoard(op *operation) bool  { return l.board != nil && op.collective != 0 }
func (l *log) asksEngine(op *operation) bool { return l.rec != nil && (l.remote || !l.asksBoard(op)) }

// lastEntry is the member that entered the operation last, of those that this
// rank needs, and when; 0 when nobody is known to have come after this rank.
// Ranks of this node say so on the board, unless the GPU has met them, others by their
// first bytes.
func (l *log) lastEntry(c *Comm, op *operation, met meeting) (peer int32, at int64) {
	peer, at = c.eng.Arrived()
	if met.at > at {
		return met.peer, met.at
	}
	if met.told || !l.asksBoard(op) {
		return peer, at
	}
	if peer >= 0 && c.mesh.Local(int(peer)) {
		peer, at = -1, 0 // the board knows better
	}
	look := func(m int) {
		if t := l.board.Entered(m, op.collective); t > at {
			peer, at = int32(m), t
		}
	}
	if role := op.coll.Traits().Root; role == record.RootFrom {
		if c.rank != int(op.root) {
			look(int(op.root))
		}
		return peer, at
	} else if role == record.RootTo && c.rank != int(op.root) {
		return peer, at
	}
	for _, m := range c.place.Local {
		if m != c.rank {
			look(m)
		}
	}
	return peer, at
}
