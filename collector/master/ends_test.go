package master

import (
	"math"
	"testing"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// troubled is a report of two ranks in whose first one is everything that healthy ranks do not say.
func troubled() *wire.Report {
	r := report(2, 0)
	w := r.Ranks[0]
	w.Starved, w.Throttled, w.MemoryPressure = 0.5, 0.25, 0.75
	w.Exit = &wire.Exit{By: uint32(diagnosis.ExitSupervisor), Signal: 9, MonoAtNs: 5e8, Asked: true}
	w.Stall = 4
	for i := range uint64(3) {
		w.Calls = append(w.Calls, &wire.Call{CommId: 7, Seq: i + 1, Coll: uint32(record.Broadcast), Peer: 1, Bytes: 8, MonoAtNs: int64(1e8 * (i + 1))})
	}
	m := r.Members[0]
	m.State, m.MonoStateNs, m.Fault, m.FaultPeer = uint32(record.CommAborted), 6e8, uint32(record.ResultPeerLost), 1
	r.Connections[0].Outages, r.Connections[0].Resent, r.Connections[0].RttNs = 3, 4096, 7e6
	r.CpuPressure, r.MemoryPressure = 0.5, 2
	return r
}

func TestMergeTroubleOfARank(t *testing.T) {
	s := newState("job", small)
	n := s.node("n0")
	const now = int64(1e18)
	at := func(mono int64) int64 { return now - 1e9 + mono } // a report is sent at 1e9
	s.merge(n, troubled(), now)
	r, m, c := &s.ev.Ranks[0], &s.ev.Comms[0].Members[0], &s.ev.Conns[0]
	if r.Starved != 0.5 || r.Throttled != 0.25 || r.MemoryPressure != 0.75 || r.Exit != (diagnosis.Exit{By: diagnosis.ExitSupervisor, Signal: 9, At: at(5e8), Asked: true}) {
		t.Errorf("rank %+v", r)
	}
	if want := (diagnosis.Call{Comm: 7, Seq: 3, Coll: record.Broadcast, Peer: 1, Bytes: 8, At: at(3e8)}); len(r.Calls) != 3 || r.Calls[2] != want {
		t.Errorf("calls %+v", r.Calls)
	}
	if m.State != record.CommAborted || m.StateAt != at(6e8) || m.Fault != record.ResultPeerLost || m.FaultPeer != 1 {
		t.Errorf("member %+v", m)
	}
	if o := &s.ev.Comms[0].Members[1]; o.Fault != record.ResultOK || o.FaultPeer != -1 {
		t.Errorf("a member that nothing is told of: %+v", o)
	}
	if c.Outages != 3 || c.Resent != 4096 || c.RTTNs != 7e6 {
		t.Errorf("connection %+v", c)
	}
	if nd := s.ev.Nodes[0]; nd.CPUPressure != 0.5 || nd.MemoryPressure != 1 {
		t.Errorf("node %+v", nd)
	}

	// Later reports of the same stall and state leave out what has been said.
	next := troubled()
	next.Ranks[0].Calls, next.Members[0].MonoStateNs = nil, 0
	s.merge(n, next, now)
	if len(r.Calls) != 3 || s.ev.Comms[0].Members[0].StateAt != at(6e8) {
		t.Errorf("calls %v, state at %d", r.Calls, m.StateAt)
	}
	next.Members[0].State = uint32(record.CommLeft)
	s.merge(n, next, now)
	if m := &s.ev.Comms[0].Members[0]; m.StateAt != 0 || m.Fault != record.ResultOK {
		t.Errorf("another state: %+v", m)
	}
	next.Ranks[0].Stall = 0 // it moves on
	s.merge(n, next, now)
	if r.Calls != nil || s.calls != 0 {
		t.Errorf("calls %v, %d counted", r.Calls, s.calls)
	}

	// What an absent agent cannot tell is forgotten; that a process ended stays.
	s.merge(n, troubled(), now)
	s.disconnected(n)
	if r.Starved != 0 || r.Throttled != 0 || r.MemoryPressure != 0 || r.Exit.By != diagnosis.ExitSupervisor || len(r.Calls) != 3 || s.ev.Nodes[0].CPUPressure != 0 {
		t.Errorf("after its agent is gone: %+v", r)
	}
	// A later attempt starts with nothing of it.
	s.merge(n, report(2, 1), now+1)
	if r := &s.ev.Ranks[0]; r.Exit != (diagnosis.Exit{}) || r.Calls != nil || s.calls != 0 {
		t.Errorf("the next attempt: %+v", r)
	}
	// A master that has been started again, or asks for everything, hears it all again.
	s = newState("job", small)
	s.merge(s.node("n0"), troubled(), now)
	if r := s.ev.Ranks[0]; len(r.Calls) != 3 || r.Exit.By != diagnosis.ExitSupervisor {
		t.Errorf("after a restart: %+v", r)
	}
}

func TestMergeBoundsTrouble(t *testing.T) {
	nan := float32(math.NaN())
	s := newState("job", Limits{Calls: 40})
	n := s.node("n0")
	r := troubled()
	w := r.Ranks[0]
	w.Starved, w.Throttled, w.MemoryPressure, r.CpuPressure, r.MemoryPressure = nan, -1, float32(math.Inf(1)), nan, 7
	w.Exit.By = 200
	w.Calls = nil
	for i := range uint64(100) {
		w.Calls = append(w.Calls, &wire.Call{Seq: i, Coll: math.MaxUint32, Peer: math.MinInt32, MonoAtNs: math.MaxInt64})
	}
	w.Calls[99] = nil
	r.Ranks[1].Stall, r.Ranks[1].Calls = 1, w.Calls
	r.Ranks[1].Exit = &wire.Exit{By: uint32(diagnosis.ExitKernel), Signal: -3, MonoAtNs: math.MinInt64}
	r.Members[0].FaultPeer, r.Members[1].Fault, r.Members[1].State = 2, 99, uint32(record.CommAborted)
	s.merge(n, r, 1e18)
	a, b := &s.ev.Ranks[0], &s.ev.Ranks[1]
	if a.Starved != 0 || a.Throttled != 0 || a.MemoryPressure != 0 || a.Exit != (diagnosis.Exit{}) || s.ev.Nodes[0].CPUPressure != 0 || s.ev.Nodes[0].MemoryPressure != 1 {
		t.Errorf("rank %+v, node %+v", a, s.ev.Nodes[0])
	}
	if len(a.Calls) != diagnosis.MaxCalls || a.Calls[0].Seq != 68 || a.Calls[0].Coll != record.CollNone || a.Calls[0].Peer != -1 || a.Calls[0].At > 1e18 {
		t.Errorf("%d calls, the first %+v", len(a.Calls), a.Calls[0])
	}
	if b.Calls != nil || s.overflow != 1 || s.calls != len(a.Calls) || b.Exit != (diagnosis.Exit{}) {
		t.Errorf("beyond the limit: %d calls, overflow %d, %+v", len(b.Calls), s.overflow, b.Exit)
	}
	for i, m := range s.ev.Comms[0].Members {
		if m.FaultPeer != -1 || i == 1 && m.Fault != record.ResultOK {
			t.Errorf("member %d: %+v", i, m)
		}
	}
}

// TestMergeCallsOfEveryKind: a call of any kind that this version knows is told as it is.
func TestMergeCallsOfEveryKind(t *testing.T) {
	for kind := record.CollKind(0); kind < math.MaxUint8; kind++ {
		s := newState("job", small)
		r := troubled()
		r.Ranks[0].Calls = []*wire.Call{{CommId: 7, Seq: 1, Coll: uint32(kind)}}
		s.merge(s.node("n0"), r, 1e18)
		want := kind
		if !kind.Known() {
			want = record.CollNone
		}
		if calls := s.ev.Ranks[0].Calls; len(calls) != 1 || calls[0].Coll != want {
			t.Errorf("%v: %+v", kind, calls)
		}
	}
}

// The program's own abort is no fault; that another rank aborted is, and names it.
func TestFaultOf(t *testing.T) {
	for _, c := range []struct {
		state    record.CommState
		why      record.Result
		peer     int32
		want     record.Result
		wantPeer int32
	}{
		{record.CommAborted, record.ResultAborted, -1, record.ResultOK, -1},
		{record.CommAborted, record.ResultAborted, 2, record.ResultAborted, 2},
		{record.CommAborted, record.ResultTimeout, -1, record.ResultTimeout, -1},
		{record.CommAborted, record.ResultOK, 2, record.ResultOK, -1},
		{record.CommJoined, record.ResultPeerLost, 2, record.ResultOK, -1},
	} {
		w := &wire.Member{Size: 3, State: uint32(c.state), Fault: uint32(c.why), FaultPeer: c.peer}
		if why, peer := faultOf(w); why != c.want || peer != c.wantPeer {
			t.Errorf("%v %v %d: %v %d", c.state, c.why, c.peer, why, peer)
		}
	}
}
