package master

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// life is a report of n ranks of an attempt whose processes were created at a time,
// in a communicator of their own.
func life(n int32, attempt uint32, created int64, proc diagnosis.ProcState) *wire.Report {
	r := report(n, attempt)
	for i := range r.Ranks {
		r.Ranks[i].CreatedUnixNs, r.Ranks[i].Proc = created, uint32(proc)
		r.Members[i].CommId, r.Connections[i].CommId, r.Arrivals[i].CommId = uint64(created), uint64(created), uint64(created)
	}
	return r
}

// A job whose launcher was started again counts its restarts from 0 again.
func TestStartedAnew(t *testing.T) {
	const second, now = int64(1e9), int64(1e18)
	former := func(proc diagnosis.ProcState) (s *state, a, b int32) {
		s = newState("job", Limits{})
		a, b = s.node("a"), s.node("b")
		s.merge(a, life(2, 3, now, proc), now)
		return s, a, b
	}
	is := func(t *testing.T, s *state, attempt uint32, node int32, comm int64) {
		t.Helper()
		if err := check(s); err != nil || s.attempt != attempt || s.seen != 2 || s.ev.Ranks[0].Node != node || len(s.ev.Comms) != 1 || s.ev.Comms[0].ID != uint64(comm) {
			t.Errorf("%v; attempt %d, %d ranks seen, rank 0 on node %d, communicators %+v; want attempt %d, 2 ranks, node %d, communicator %d",
				err, s.attempt, s.seen, s.ev.Ranks[0].Node, s.ev.Comms, attempt, node, comm)
		}
	}
	t.Run("on the same node", func(t *testing.T) {
		s, a, b := former(diagnosis.ProcRunning) // the agent was not there when it ended
		s.merge(a, life(2, 0, now+second, diagnosis.ProcRunning), now)
		is(t, s, 0, a, now+second)
		if !s.nodes[a].stale || !s.nodes[b].stale || s.anew != 1 {
			t.Error("what was refused is not asked for again")
		}
		s.merge(b, life(2, 3, now, diagnosis.ProcGone), now) // a late word
		is(t, s, 0, a, now+second)
		s.merge(a, life(2, 1, now+2*second, diagnosis.ProcRunning), now+2*skew)
		is(t, s, 1, a, now+2*second)
	})
	t.Run("on another node", func(t *testing.T) {
		s, _, b := former(diagnosis.ProcExited)
		s.merge(b, life(2, 0, now+second, diagnosis.ProcRunning), now) // by its clock, which may be wrong
		if s.attempt != 3 {
			t.Errorf("attempt %d", s.attempt)
		}
		s.merge(b, life(2, 0, now+2*skew, diagnosis.ProcRunning), now+2*skew)
		is(t, s, 0, b, now+2*skew)
	})
	t.Run("a smaller one, before a master that knows neither", func(t *testing.T) {
		live, late := life(1, 0, now+2*skew, diagnosis.ProcRunning), life(2, 3, now, diagnosis.ProcGone)
		late.Ranks, late.Members, late.Connections, late.Arrivals = late.Ranks[1:], late.Members[1:], late.Connections[1:], late.Arrivals[1:]
		for name, order := range map[string][]*wire.Report{"late words first": {late, live}, "late words last": {live, late}} {
			s := newState("job", Limits{})
			for _, r := range order {
				n := s.node("a")
				if r == late {
					n = s.node("b")
				}
				s.merge(n, r, now+2*skew)
			}
			if err := check(s); err != nil || s.attempt != 0 || len(s.ev.Ranks) != 1 || s.ev.Ranks[0].Proc != diagnosis.ProcRunning {
				t.Errorf("%s: %v; attempt %d, ranks %+v", name, err, s.attempt, s.ev.Ranks)
			}
		}
	})
	t.Run("not while the former one runs", func(t *testing.T) {
		s, a, b := former(diagnosis.ProcRunning)
		s.merge(b, life(2, 0, now+2*skew, diagnosis.ProcRunning), now+2*skew)
		is(t, s, 3, a, now)
	})
	t.Run("not for the dead", func(t *testing.T) {
		s, a, b := former(diagnosis.ProcGone)
		s.merge(b, life(2, 2, now+2*skew, diagnosis.ProcGone), now+2*skew)
		is(t, s, 3, a, now)
	})
}

// A job that is restarted with nothing to count its restarts leaves nothing behind.
func TestRestartsWithoutACount(t *testing.T) {
	s := newState("job", small)
	n := s.node("n")
	now := int64(1e18)
	for range 100 {
		s.merge(n, life(8, 0, now, diagnosis.ProcRunning), now)
		now += leftFor + 1
		s.collect(now)
		if err := check(s); err != nil {
			t.Fatal(err)
		}
	}
	if len(s.ev.Comms) != 1 || s.overflow != 0 {
		t.Errorf("%d communicators, %d that found no room", len(s.ev.Comms), s.overflow)
	}
}

// What has ended has ended, whether its agent is there or not.
func TestTheDeadStayDead(t *testing.T) {
	s := newState("job", Limits{})
	n := s.node("n")
	for _, proc := range []diagnosis.ProcState{diagnosis.ProcGone, diagnosis.ProcExited} {
		s.merge(n, life(2, 0, 1+int64(proc), proc), 1e18)
		s.disconnected(n)
		if got := s.ev.Ranks[1].Proc; got != proc {
			t.Errorf("state %v after the agent left, want %v", got, proc)
		}
	}
}
