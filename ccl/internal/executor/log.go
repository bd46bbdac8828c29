package executor

import (
	"cmp"
	"errors"
	"log/slog"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/engine"
	"github.com/lockstep-ccl/lockstep/ccl/internal/failure"
	"github.com/lockstep-ccl/lockstep/ccl/internal/gpu"
	"github.com/lockstep-ccl/lockstep/ccl/internal/transport"
	"github.com/lockstep-ccl/lockstep/record"
)

// Log writes a communicator's part of the flight recorder. Live words say which operations have been
// called, started and finished. One record tells of each operation when it ends. An operation that
// queues, or that lasts, has records before that, too.
//
// Log writes while the operation has to wait anyway, if it can. It writes the start after the first
// bytes are sent, and the sums of a brief operation after the next one's first bytes.
type Log struct {
	rec    *record.Writer // nil if recording is off
	live   *record.Comm
	proc   *Process
	id     uint64          // the communicator's
	board  transport.Board // nil without local peers
	remote bool            // there are members on other nodes
	gpu    *gpu.Recording  // nil on a CPU rank, or if recording is off
	rank   int
	place  *algo.Place
	mesh   *transport.Mesh
	eng    *engine.Engine

	started int64         // when the running operation started
	lasting bool          // lasts has recorded the running operation
	whole   record.Record // record of the last operation; the next one changes only what differs
	flushed uint64        // number of operations since links last published their counters
	sums    sums          // of the last operation
}

// sums has the arguments of AddPhases for one operation.
type sums struct {
	own, wait, transfer int64
	bytes               uint64
	due                 bool // they have not been added
}

// addSums adds the sums that are due.
func (l *Log) addSums() {
	if s := &l.sums; s.due {
		s.due = false
		l.live.AddPhases(s.own, s.wait, s.transfer, s.bytes)
	}
}

// NewLog opens a communicator's part of p's recorder. device is the CUDA ordinal of the GPU that
// stamps operations, -1 on a CPU rank. NewLog warns once per process if the GPU cannot write stamps
// to the recorder's file. It fails if CUDA does.
func NewLog(p *Process, device int, e record.CommEntry, warn *slog.Logger) (*Log, error) {
	l := &Log{rec: p.rec, proc: p, id: e.ID}
	if p.rec != nil && device >= 0 {
		var err error
		l.gpu, err = gpu.Record(device, p.rec, func(why error) {
			if p.Once("stamps are collected") {
				warn.Warn("GPUs cannot write to the flight recorder's file, so the host brings their stamps there, and the last milliseconds of a process that dies are missing: set LOCKSTEP_RUNTIME_DIR to a directory in memory, as /dev/shm", "rank", e.Rank, "err", why)
			}
		})
		switch {
		case errors.Is(err, gpu.ErrNoAccess): // the job runs without GPU stamps
			if p.Once("no stamps") {
				warn.Warn("no flight recorder of what runs on GPUs: set LOCKSTEP_RUNTIME_DIR to a directory in memory, as /dev/shm", "rank", e.Rank, "err", err)
			}
		case err != nil:
			return nil, err
		default:
			e.Device, e.Stamps, e.Copies = l.gpu.Device(), gpuStamps, gpuCopies
		}
	}
	l.live, _ = p.rec.AddComm(e) // the writer counts it if the table is full
	l.whole = record.Record{Kind: record.KindWhole, Comm: l.live.Index()}
	return l, nil
}

// connect gives the log what it asks which rank entered an operation last.
func (l *Log) connect(rank int, place *algo.Place, mesh *transport.Mesh, eng *engine.Engine) {
	l.rank, l.place, l.mesh, l.eng = rank, place, mesh, eng
	l.board, l.remote = mesh.Board(), len(place.Local) < place.Size
}

// Live returns the communicator's live words, which may be nil.
func (l *Log) Live() *record.Comm { return l.live }

// GPU returns what the communicator's GPU records, which may be nil.
func (l *Log) GPU() *gpu.Recording { return l.gpu }

// Close adds the sums that are due.
func (l *Log) Close() { l.addSums() }

// How many operations on device memory the recorder keeps per communicator.
const (
	gpuStamps = 1024
	gpuCopies = 256
)

// State records a change of the communicator's state.
func (l *Log) State(s record.CommState) {
	l.live.SetState(s)
	l.tell(s, record.ResultOK, -1)
}

// Aborted records that the communicator has failed, why, and the peer that f names.
func (l *Log) Aborted(f *failure.Failure) {
	why, peer := f.Result(), int32(f.Peer)
	l.live.Aborted(why, peer)
	l.tell(record.CommAborted, why, peer)
}

// tell writes a comm record.
func (l *Log) tell(s record.CommState, why record.Result, peer int32) {
	l.rec.Append(&record.Record{
		Mono: record.Now(), Kind: record.KindComm, Comm: l.live.Index(), Code: uint8(s), Result: why, Peer: peer, Value: l.id,
	})
}

// enqueue notes a call. An operation that runs next gets no enqueue record. Readers assume that it
// starts at once, and the sweeper has it started within 2 ms if no goroutine waits for it.
func (l *Log) enqueue(op *Operation, seq uint64, next bool) {
	if l.rec == nil {
		return
	}
	if next {
		l.live.Enqueued(seq, 0, op.Coll, op.Bytes)
		return
	}
	now := record.Now()
	l.live.Enqueued(seq, now, op.Coll, op.Bytes)
	l.writeEnqueue(op, seq, now)
}

func (l *Log) writeEnqueue(op *Operation, seq uint64, at int64) {
	op.logged = true
	l.rec.Append(&record.Record{
		Mono: at, Kind: record.KindEnqueue, Flags: op.flags(), Comm: l.live.Index(), Seq: seq,
		Coll: op.Coll, DType: op.DType, Op: op.Op, Root: op.Root, Bytes: op.Bytes, Stream: op.stream,
	})
}

func (op *Operation) flags() uint8 {
	if op.InPlace {
		return record.FlagInPlace
	}
	return 0
}

// start notes that an operation started at time at.
func (l *Log) start(op *Operation, seq uint64, at int64) {
	if l.rec == nil {
		return
	}
	l.started, l.lasting = at, false
	if op.Proxy != nil {
		if s, ok := l.live.HostStamp(seq); ok { // the GPU reached it before the host noticed
			l.started = min(l.started, l.gpu.Mono(s.Start))
		}
	}
	if l.asksBoard(op) {
		l.board.Enter(op.collective, l.started)
	}
	l.live.Started(seq, l.started)
	l.addSums()
}

// lasts records the start of an operation that lasts. If it never ends, this is the only record that
// says so.
func (l *Log) lasts(op *Operation, seq uint64, s *algo.Schedule) {
	if l.rec == nil || l.lasting {
		return
	}
	l.lasting = true
	if !op.logged {
		l.writeEnqueue(op, seq, l.started)
	}
	l.rec.Append(&record.Record{
		Mono: l.started, Kind: record.KindStart, Comm: l.live.Index(), Seq: seq,
		Coll: op.Coll, Algo: s.Algo, Proto: s.Proto, Chan: 1, Stamp: l.started,
	})
}

const (
	// An operation shorter than brief is not split into phases, since telling them apart would take
	// longer than they do.
	brief = 5_000 // ns
	// flushEvery is how many brief operations may pass before links publish their counters.
	flushEvery = 64
)

// end records an operation that ran by s: its end, and how it spent its time.
func (l *Log) end(op *Operation, seq uint64, s *algo.Schedule, result record.Result) {
	if l.rec == nil {
		return
	}
	now, flags := record.Now(), op.flags()
	ended, met := now, lastArrival{}
	if op.Proxy != nil {
		var ok bool
		if ended, met, ok = l.stamped(op.Proxy, seq, now); ok {
			flags |= record.FlagStamped
		}
	}
	took := ended - l.started
	wait, peer := int64(0), int32(-1)
	if took >= brief {
		var entered int64
		peer, entered = l.lastEntry(op, met)
		wait = min(max(entered-l.started, 0), took)
	}
	if took >= legsFrom {
		l.writeLegs(l.eng.Legs(), seq, ended, int(took/legCost))
	}
	r := &l.whole
	r.Mono, r.Flags, r.Seq = ended, flags, seq
	r.Coll, r.DType, r.Op, r.Algo, r.Proto, r.Code = op.Coll, op.DType, op.Op, s.Algo, s.Proto, uint8(result)
	r.Root, r.Peer, r.Bytes, r.Stream, r.Dur, r.Wait = op.Root, peer, op.Bytes, op.stream, took, wait
	l.rec.Append(r)
	l.live.Finished(seq, ended)
	own := int64(0)
	if prev := l.proc.lastEnd.Load(); prev != 0 {
		own = l.started - prev
	}
	l.proc.lastEnd.Store(ended)
	l.sums = sums{own, wait, took - wait, op.Bytes, true}
	if l.flushed++; took >= brief || l.flushed >= flushEvery {
		l.flushed = 0
		l.addSums()
		l.eng.Flush(now)
	}
}

const (
	// legBytes is the size from which an operation's legs are timed, legBytesApart if there are
	// members on other nodes. Such an operation takes so long that reading the clock a few times
	// costs nothing in comparison.
	legBytes      = 1 << 20
	legBytesApart = 8 << 10
	// legsFrom is the duration in ns from which legs are recorded. An operation may have one leg's
	// record for each legCost ns. A record costs some 50 ns, so they cost at most half a percent.
	legsFrom = 100_000
	legCost  = 10_000
)

// asksLegs reports whether the engine is to time the legs of op.
func (l *Log) asksLegs(op *Operation) bool {
	return l.rec != nil && op.Coll.Collective() && (op.Bytes >= legBytes || l.remote && op.Bytes >= legBytesApart)
}

// writeLegs records the legs of an operation that ended at time ended, at most most of them. It comes
// before the operation's own record. The GPU's stamps may put the operation's start or end before
// the host noticed, so legs are cut to the operation.
func (l *Log) writeLegs(legs []engine.Leg, seq uint64, ended int64, most int) {
	for i := range legs[:min(len(legs), most)] {
		g := &legs[i]
		last := min(cmp.Or(g.Ended, ended), ended)
		asked := min(max(g.Asked, l.started), last)
		came := min(max(g.Came, asked), last)
		code := record.PhaseReceive
		if g.Reduce {
			code = record.PhaseReduce
		}
		l.rec.Append(&record.Record{
			Mono: last, Kind: record.KindPhase, Comm: l.live.Index(), Seq: seq, Code: uint8(code), Index: uint8(i), Peer: g.Peer,
			Stamp: last, Dur: last - came, Wait: came - asked, Stall: min(g.Stall, last-came),
		})
	}
}

// lastArrival is what the GPU's stamp says about the ranks of this node in an operation between
// nodes.
type lastArrival struct {
	told bool  // it says something
	peer int32 // the rank that entered last, -1 if none entered after this rank
	at   int64 // when that was
}

// stamped takes an operation's start and end from the GPU's stamps. If there is no stamp of its end,
// since it has failed or is not stamped, end is now and ok is false.
func (l *Log) stamped(p Proxy, seq uint64, now int64) (end int64, met lastArrival, ok bool) {
	s, ok := l.live.HostStamp(seq)
	if !ok || s.End == 0 {
		return now, met, false
	}
	// The mapping to host time shifts both stamps by the same error, so the length is exact.
	end = min(l.gpu.Mono(s.End), now)
	l.started = end - (s.End - s.Start)
	if met.peer, met.told = p.Met(s.Peer); met.peer >= 0 {
		met.at = l.started + s.Wait
	}
	return end, met, true
}

// asksBoard reports whether the ranks of this node write to the board when they enter op.
func (l *Log) asksBoard(op *Operation) bool { return l.board != nil && op.collective != 0 }

// asksEngine reports whether the engine is to record arrivals: first bytes show when ranks entered op
// that do not write to the board.
func (l *Log) asksEngine(op *Operation) bool { return l.rec != nil && (l.remote || !l.asksBoard(op)) }

// lastEntry returns the rank that entered the operation last, of those that this rank needs, and when.
// If none is known to have entered after this rank, peer is -1 and at is 0. For ranks of this node it
// asks the GPU's stamp or else the board, and for others the engine.
func (l *Log) lastEntry(op *Operation, met lastArrival) (peer int32, at int64) {
	peer, at = l.eng.Arrived()
	if met.at > at {
		return met.peer, met.at
	}
	if met.told || !l.asksBoard(op) {
		return peer, at
	}
	if peer >= 0 && l.mesh.Local(int(peer)) {
		peer, at = -1, 0 // the board is more exact
	}
	look := func(m int) {
		if t := l.board.Entered(m, op.collective); t > at {
			peer, at = int32(m), t
		}
	}
	if role := op.Coll.Traits().Root; role == record.RootFrom {
		if l.rank != int(op.Root) {
			look(int(op.Root))
		}
		return peer, at
	} else if role == record.RootTo && l.rank != int(op.Root) {
		return peer, at
	}
	for _, m := range l.place.Local {
		if m != l.rank {
			look(m)
		}
	}
	return peer, at
}
