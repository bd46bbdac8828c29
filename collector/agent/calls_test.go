package agent

import (
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// stalled is a job of two ranks in one communicator of four, and what steps its agent.
type stalled struct {
	t   *testing.T
	a   *Agent
	j   *job
	p   [2]*source.Process
	now int64
}

func newStalled(t *testing.T) *stalled {
	s := &stalled{t: t, a: newAgent(t), now: 1e9}
	for i := range s.p {
		p := process()
		p.Rank = int32(i)
		p.Comms = p.Comms[:1]
		p.Comms[0].Rank, p.Comms[0].State = int32(i), record.CommJoined
		s.p[i] = p
		s.j = s.a.rank(p).job
	}
	return s
}

// call makes rank i call its next operation; it ends when end says so.
func (s *stalled) call(i int, end bool) {
	c := &s.p[i].Comms[0]
	c.Enqueued, c.Started, c.Coll, c.Bytes, c.EnqueuedAt = c.Enqueued+1, c.Started+1, record.AllReduce, 64, s.now
	if end {
		c.Finished = c.Started
		s.a.fold(s.p[i], []record.Record{whole(0, c.Started, s.now)})
	}
}

// pass lets time go by, and returns the calls of each rank that the next report has; told says
// that it has an entry for it.
func (s *stalled) pass(ns int64) (calls [2][]*wire.Call, told [2]*wire.Rank) {
	s.now += ns
	s.j.stalls(s.now)
	for _, w := range s.j.report().Ranks {
		calls[w.WorldRank], told[w.WorldRank] = w.Calls, w
	}
	return calls, told
}

func TestLastCallsOfAStall(t *testing.T) {
	s := newStalled(t)
	s.pass(0)
	for range 50 {
		for i := range s.p {
			s.call(i, true)
			s.p[i].Comms[0].MaxOwnNs = 1e12 // who computes is given its time
		}
		if calls, told := s.pass(heldAfter - 1); calls[0] != nil || calls[1] != nil || told[0] != nil {
			t.Fatalf("healthy ranks: %v, %v", calls, told)
		}
	}
	s.call(0, false) // rank 0 waits, rank 1 does not come
	if calls, _ := s.pass(1); calls[0] != nil {
		t.Errorf("%d calls at once", len(calls[0]))
	}
	calls, told := s.pass(heldAfter)
	if len(calls[0]) != diagnosis.MaxCalls || len(calls[1]) != diagnosis.MaxCalls || told[0].Stall != 1 || told[1].Stall != 1 {
		t.Fatalf("held up: %d and %d calls, %v", len(calls[0]), len(calls[1]), told)
	}
	for i, want := range []uint64{51, 50} {
		for k, c := range calls[i] {
			if c.Seq != want-uint64(diagnosis.MaxCalls-1-k) || c.CommId != 10 || record.CollKind(c.Coll) != record.AllReduce || c.Bytes != 64 || c.Peer != -1 || c.MonoAtNs == 0 {
				t.Errorf("rank %d: call %d of %d is %v", i, k, len(calls[i]), c)
			}
		}
	}
	s.p[0].CPU = 0.5
	if calls, told := s.pass(heldAfter); calls[0] != nil || told[0] == nil || told[0].Stall != 1 {
		t.Errorf("told again in the same stall: %v", told)
	}
	s.j.forget() // the master asks for everything
	if calls, _ := s.pass(1); len(calls[0]) != diagnosis.MaxCalls || len(calls[1]) != diagnosis.MaxCalls {
		t.Errorf("a full report has %d and %d calls", len(calls[0]), len(calls[1]))
	}
	s.p[1].State = diagnosis.ProcGone
	if _, told := s.pass(1); told[1] == nil || told[1].Stall != 1 {
		t.Errorf("a rank that died held up: %v", told[1])
	}
	s.p[0].Comms[0].Finished++
	if calls, told := s.pass(1); calls[0] != nil || told[0] == nil || told[0].Stall != 0 {
		t.Errorf("moving on: %v", told[0])
	}
	s.call(0, false)
	s.pass(1)
	if calls, told := s.pass(heldAfter); len(calls[0]) == 0 || told[0].Stall != 2 {
		t.Errorf("the next stall: %v", told[0])
	}
}

// A rank that nobody here waits for is held up when it is away for longer than ever.
func TestAwayForLongerThanEver(t *testing.T) {
	s := newStalled(t)
	s.call(0, true)
	s.p[0].Comms[0].MaxOwnNs = 3e9
	s.pass(0)
	if calls, _ := s.pass(2e9); calls[0] != nil {
		t.Errorf("away for less than before: %v", calls[0])
	}
	if calls, _ := s.pass(2e9); len(calls[0]) != 1 || calls[1] != nil {
		t.Errorf("away for longer: %v; has called nothing ever: %v", calls[0], calls[1])
	}
}

// What is new in reports costs a healthy rank's nothing.
func TestHealthyReportsAreAsLongAsEver(t *testing.T) {
	s := newStalled(t)
	s.p[0].Conns = []record.ConnStatus{{ConnEntry: record.ConnEntry{Peer: 2, Transport: record.TransportTCP, Name: "tcp"}, Posted: 1}}
	s.a.learn(s.a.ranks[s.p[0]])
	s.pass(0) // names and states go once
	for i := range s.p {
		s.call(i, true)
		s.p[i].CPU = 0.9
	}
	s.p[0].Conns[0].Posted = 100
	s.now += 1e8
	s.j.stalls(s.now)
	plain := proto.Size(s.j.report())
	for i := range s.p {
		s.call(i, true)
		s.p[i].CPU = 0.8
		s.p[i].Starved, s.p[i].Throttled, s.p[i].MemoryPressure = 0.04, 0.03, 0.02
		s.p[i].Comms[0].Fault, s.p[i].Comms[0].FaultPeer = record.ResultPeerLost, 3 // means nothing of one that is joined
	}
	s.p[0].Conns[0].Posted = 101
	s.now += 1e8
	s.j.stalls(s.now)
	if got := s.j.report(); len(got.Ranks) != 2 || len(got.Members) != 2 || len(got.Connections) != 1 || proto.Size(got) != plain {
		t.Errorf("%d bytes, were %d: %v", proto.Size(got), plain, got)
	}
}

// What is worth a report is told when it changes, and again in a full report.
func TestReportsTroubleOfARank(t *testing.T) {
	s := newStalled(t)
	p := s.p[0]
	p.Conns = []record.ConnStatus{{ConnEntry: record.ConnEntry{Peer: 2, Transport: record.TransportTCP, Name: "tcp"}, Posted: 1}}
	s.a.learn(s.a.ranks[p])
	s.pass(0)
	p.Starved, p.Throttled, p.MemoryPressure = 0.31, 2, 0.5
	p.Exit = diagnosis.Exit{By: diagnosis.ExitSupervisor, Signal: 9, At: 77, Asked: true}
	p.Comms[0].State, p.Comms[0].StateAt, p.Comms[0].Fault, p.Comms[0].FaultPeer = record.CommAborted, 70, record.ResultPeerLost, 3
	p.Conns[0].Resent, p.Conns[0].RTT = 5, 7e6
	link := func(code record.LinkState) record.Record {
		return record.Record{Kind: record.KindLink, Code: uint8(code)}
	}
	s.a.fold(p, []record.Record{link(record.LinkUp), link(record.LinkDown), link(record.LinkDown), link(record.LinkUp), link(record.LinkDown), link(record.LinkSwitched), link(record.LinkDown)})
	for range 2 {
		rep := s.j.report()
		var w *wire.Rank
		for _, r := range rep.Ranks {
			if r.WorldRank == 0 {
				w = r
			}
		}
		if w == nil || w.Starved != 0.3 || w.Throttled != 1 || w.MemoryPressure != 0.5 ||
			!proto.Equal(w.Exit, &wire.Exit{By: uint32(diagnosis.ExitSupervisor), Signal: 9, MonoAtNs: 77, Asked: true}) {
			t.Errorf("rank %v", w)
		}
		var m *wire.Member
		for _, x := range rep.Members {
			if x.WorldRank == 0 {
				m = x
			}
		}
		if m == nil || m.MonoStateNs != 70 || m.Fault != uint32(record.ResultPeerLost) || m.FaultPeer != 3 {
			t.Errorf("member %v", m)
		}
		if len(rep.Connections) != 1 || rep.Connections[0].Outages != 2 || rep.Connections[0].Resent != 5 || rep.Connections[0].RttNs != 7e6 {
			t.Errorf("connections %v", rep.Connections)
		}
		s.j.forget()
	}
}
