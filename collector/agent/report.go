package agent

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// maxArrivals bounds the arrivals that wait for a report.
const maxArrivals = 2048

// reported is what the master has been told of a rank on this stream; only differences from it
// are sent. The zero value is that of an entry that was never sent, since none that is sent has
// it.
type reported struct {
	rank  rankWords
	comms map[uint16]commWords
	conns map[uint32]connWords
}

type rankWords struct {
	said     bool
	pid      int32
	proc     diagnosis.ProcState
	procAt   int64
	cpu      float32
	io       bool
	mark     record.MarkCode
	markAt   int64
	step     uint64
	overflow uint64
	xid      uint32
	gpu      diagnosis.GPU

	starved, throttled, memory float32
	exit                       diagnosis.Exit
	stall                      uint32
	offCPU                     diagnosis.OffCPU
	lease                      time.Duration
	starting                   bool
	waitsIn                    diagnosis.WaitIn
}

type commWords struct {
	record.CommStatus
	peer int32
}

type connWords struct {
	record.ConnStatus
	outages uint64
}

// arrive notes a finished collective's arrival for the next report.
func (j *job) arrive(c *comm, o *op) {
	if len(j.arrivals) >= maxArrivals {
		j.arrivalsDropped++
		return
	}
	w := &wire.Arrival{
		CommId: c.id, Seq: o.seq, Coll: uint32(o.coll), Rank: c.rank, MonoStartedNs: o.started, MonoEndedNs: o.ended, StampErrorNs: o.clockErr,
	}
	if o.coll.Known() && o.coll.Traits().SamePayload() {
		w.Bytes = o.bytes
	}
	j.arrivals = append(j.arrivals, w)
}

// reportable reports whether the master needs to know of a rank: it has a place in the world,
// and no younger process has taken it.
func (r *rank) reportable() bool {
	return r.p.Rank >= 0 && r.p.Rank < r.p.WorldSize && !r.p.Superseded
}

// report builds a job's next report: what has changed since the last one, as far as one message
// holds it. The rest goes with the next report, which begins with the rank that was cut short,
// or with the one after it if that had come first already.
func (j *job) report() *wire.Report {
	rep := &wire.Report{Arrivals: j.arrivals, Traced: j.traced}
	j.arrivals, j.traced = nil, nil
	room := wire.MaxEntries - len(rep.Arrivals) - len(rep.Traced) - rasRoom - nicRoom
	first := j.first
	for i := range j.ranks {
		at := (first + i) % len(j.ranks)
		if r := j.ranks[at]; r.reportable() {
			room = r.report(rep, room)
		}
		if room == 0 {
			if j.first = at; i == 0 {
				j.first++
			}
			break
		}
	}
	return rep
}

// forget makes the next report a full one.
func (j *job) forget() {
	j.arrivals, j.traced, j.rasAt = nil, nil, 0
	j.nicsAt, j.nicsTold, j.nics = 0, 0, nil
	for _, r := range j.ranks {
		r.reported = reported{}
	}
}

// report appends the changes of one rank, at most room entries, and returns the room left.
// Connections go on where the last report was cut short.
func (r *rank) report(rep *wire.Report, room int) int {
	if said := &r.reported; said.comms == nil {
		said.comms, said.conns = map[uint16]commWords{}, map[uint32]connWords{}
	}
	room = r.reportProcess(rep, room)
	room = r.reportComms(rep, room)
	return r.reportConns(rep, room)
}

// reportProcess is report for what is true of the process.
func (r *rank) reportProcess(rep *wire.Report, room int) int {
	p, said := r.p, &r.reported
	mark, markAt := r.openMark()
	now := rankWords{
		true, cmp.Or(p.HostPID, p.PID), p.State, p.StateAt, p.CPU, p.IO, mark, markAt, r.step, p.CommOverflow + p.ConnOverflow + p.StampOverflow, p.Xid, p.GPU,
		steps(p.Starved), steps(p.Throttled), steps(p.MemoryPressure), p.Exit, r.stall.current(), offCPU(p.OffCPU),
		r.promise(), p.Starting, p.WaitsIn,
	}
	if now != said.rank {
		var calls []*wire.Call
		if now.stall != 0 && now.stall != said.rank.stall {
			calls = r.lastCalls()
		}
		if room < 1+len(calls) {
			return 0
		}
		said.rank = now
		w := &wire.Rank{
			WorldRank: p.Rank, WorldSize: p.WorldSize, Pid: now.pid, Attempt: p.Attempt, CreatedUnixNs: p.Created.UnixNano(),
			Proc: uint32(now.proc), MonoProcNs: now.procAt, Cpu: now.cpu, Io: now.io,
			Mark: uint32(now.mark), MonoMarkNs: now.markAt, Step: now.step, TableOverflow: now.overflow,
			Xid: now.xid, Starved: now.starved, Throttled: now.throttled, MemoryPressure: now.memory, Stall: now.stall, Calls: calls,
			FenceLeaseNs: now.lease.Nanoseconds(), FenceLeaseKept: now.lease > 0, Starting: now.starting, WaitsIn: uint32(now.waitsIn),
		}
		if o := &now.offCPU; *o != (diagnosis.OffCPU{}) {
			w.OffCpu = &wire.OffCPU{
				Disk: o.Disk, NcclStarved: o.NCCLStarved, ChildDisk: o.ChildDisk, ChildStarved: o.ChildStarved, WaitsFor: uint32(o.For), Resent: o.Resent,
			}
		}
		if e := &now.exit; e.By != diagnosis.ExitUnknown {
			w.Exit = &wire.Exit{By: uint32(e.By), Code: e.Code, Signal: e.Signal, MonoAtNs: e.At, Asked: e.Asked}
		}
		if g := &now.gpu; g.Seen {
			w.Gpu = &wire.GPU{
				Index: uint32(g.Index), Throttle: uint32(g.Throttle), MonoXidNs: g.XidAt, MonoLostNs: g.LostAt,
				MonoThrottledNs: g.ThrottledAt, MonoUnresponsiveNs: g.UnresponsiveAt,
			}
		}
		rep.Ranks = append(rep.Ranks, w)
		room -= 1 + len(calls)
	}
	return room
}

// reportComms is report for the rank's communicators.
func (r *rank) reportComms(rep *wire.Report, room int) int {
	p, said := r.p, &r.reported
	for i := range p.Comms {
		s := &p.Comms[i]
		c := r.comm(s.Index)
		if c == nil {
			continue
		}
		now := commWords{*s, -1}
		if c.peerSeq == s.Enqueued {
			now.peer = c.peer
		}
		was, again := said.comms[s.Index]
		again = again && was.Gen == s.Gen
		if again && now == was {
			continue
		}
		if room == 0 {
			return 0
		}
		said.comms[s.Index] = now
		w := &wire.Member{
			CommId: s.ID, WorldRank: p.Rank, Attempt: p.Attempt, Rank: s.Rank, Size: s.Size, State: uint32(s.State),
			Coll: uint32(s.Coll), Peer: now.peer, Bytes: s.Bytes, Enqueued: s.Enqueued, Started: s.Started, Finished: s.Finished,
			MonoEnqueuedNs: s.EnqueuedAt, MonoStartedNs: s.StartedAt, MonoFinishedNs: s.FinishedAt,
			Ops: s.Ops, OwnNs: s.OwnNs, WaitNs: s.WaitNs, TransferNs: s.TransferNs, MaxOwnNs: s.MaxOwnNs,
			CallsOnly: p.Source.CallsOnly() || s.Assumed(),
		}
		if !again {
			w.CommName = wireName(s.Name)
		}
		if !again || s.State != was.State || s.StateAt != was.StateAt {
			w.MonoStateNs = s.StateAt
		}
		if s.State == record.CommAborted && s.Fault != record.ResultOK {
			w.Fault, w.FaultPeer = uint32(s.Fault), s.FaultPeer
		}
		rep.Members = append(rep.Members, w)
		room--
	}
	return room
}

// reportConns is report for the rank's connections.
func (r *rank) reportConns(rep *wire.Report, room int) int {
	p, said := r.p, &r.reported
	first := r.firstConn
	for i := range p.Conns {
		at := (first + i) % len(p.Conns)
		s := &p.Conns[at]
		c := r.comm(s.Comm)
		if c == nil {
			continue
		}
		now := connWords{*s, r.outages(s)}
		was, again := said.conns[s.Index]
		again = again && was.Gen == s.Gen
		if again && now == was {
			continue
		}
		if room == 0 {
			r.firstConn = at
			return 0
		}
		said.conns[s.Index] = now
		w := &wire.Connection{
			CommId: c.id, Rank: c.rank, Peer: s.Peer, Channel: uint32(s.Channel), Transport: uint32(s.Transport),
			Posted: s.Posted, Completed: s.Completed, Received: s.Received,
			MonoPostedNs: s.PostedAt, MonoCompletedNs: s.CompletedAt, MonoReceivedNs: s.ReceivedAt,
			MonoTxBlockedNs: s.TxBlockedSince, MonoRxWaitingNs: s.RxWaitingSince,
			Windows: s.Windows, SlowWindows: s.SlowWindows,
			BytesPerSecond: float64(s.WindowBps), Cause: uint32(s.WindowCause), MonoWindowNs: s.WindowAt, LatencyNs: s.LatencyNs,
			Link: uint32(s.Link), MonoLinkNs: s.LinkAt, Switches: s.Switches, Resent: s.Resent, Outages: now.outages,
			RttNs: s.RTT,
		}
		if s.Transport.Stamped() { // its entry is the receiver's
			w.Rank, w.Peer = w.Peer, w.Rank
		}
		if !again || idle(&was.ConnStatus) || was.ID != s.ID || was.PeerID != s.PeerID {
			w.Name = wireName(connName(s))
			w.Address, w.Rail = record.AddressText(s.Address), uint32(s.Rail)
			if s.Transport.QueuePair() {
				w.QueuePair, w.PeerQueuePair = uint32(s.ID), s.PeerID
			}
		}
		rep.Connections = append(rep.Connections, w)
		room--
	}
	return room
}

// steps rounds a share down to a step that is worth a report; a healthy rank's is 0.
func steps(share float32) float32 {
	return float32(int(min(max(share, 0), 1)*20)) / 20
}

// offCPU rounds likewise.
func offCPU(o diagnosis.OffCPU) diagnosis.OffCPU {
	o.Disk, o.NCCLStarved, o.ChildDisk, o.ChildStarved = steps(o.Disk), steps(o.NCCLStarved), steps(o.ChildDisk), steps(o.ChildStarved)
	o.Resent -= o.Resent % 5
	return o
}

// wireName cuts a name to what a message may carry.
func wireName(s string) string {
	if len(s) > wire.MaxName {
		s = s[:wire.MaxName]
	}
	return strings.ToValidUTF8(s, "")
}

// connName tells a connection from all others, its queue pair's number included: a master of
// the version before knows it by nothing else.
func connName(s *record.ConnStatus) string {
	if !s.Transport.QueuePair() || s.ID == 0 {
		return s.Name
	}
	return fmt.Sprintf("%s qp %d", s.Name, s.ID)
}

// idle reports whether a connection has nothing to tell; the master keeps
// nothing of such a one, not even its name.
func idle(s *record.ConnStatus) bool {
	return s.Posted|s.Windows|uint64(s.TxBlockedSince) == 0 && s.Link == record.LinkNone
}
