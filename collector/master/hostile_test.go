package master

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

func TestWhatCannotBeIsRefused(t *testing.T) {
	const now = int64(1e18)
	for name, lie := range map[string]func(r *wire.Report){
		"created in the future":     func(r *wire.Report) { r.Ranks[0].CreatedUnixNs = now + skew + 1 },
		"created never":             func(r *wire.Report) { r.Ranks[0].CreatedUnixNs = 0 },
		"an attempt out of reach":   func(r *wire.Report) { r.Ranks[0].Attempt = maxLeap + 1 },
		"more members than a world": func(r *wire.Report) { r.Members[0].CommId, r.Members[0].Size = 99, 3 },
	} {
		t.Run(name, func(t *testing.T) {
			s := newState("job", Limits{})
			n := s.node("n")
			s.merge(n, report(2, 0), now)
			r := report(2, 0)
			r.Ranks[0].CreatedUnixNs++
			lie(r)
			r.Ranks, r.Members, r.Connections, r.Arrivals = r.Ranks[:1], r.Members[:1], nil, nil
			s.merge(n, r, now)
			if err := check(s); err != nil || s.refused == 0 || s.attempt != 0 || len(s.ev.Comms) != 1 || s.ev.Ranks[0].Node != n {
				t.Errorf("%v; %d refused, attempt %d, %d communicators", err, s.refused, s.attempt, len(s.ev.Comms))
			}
		})
	}
	t.Run("an attempt out of reach, of a rank that had ended", func(t *testing.T) {
		s := newState("job", Limits{})
		n := s.node("n")
		s.merge(n, life(1, 0, now-1, diagnosis.ProcGone), now)
		s.merge(n, life(1, maxLeap+1, now, diagnosis.ProcRunning), now)
		if s.attempt != maxLeap+1 {
			t.Errorf("attempt %d", s.attempt)
		}
	})
}

// A place in a communicator stays with the rank whose agent is heard.
func TestAnotherNodesMemberStays(t *testing.T) {
	const now = int64(1e18)
	s := newState("job", Limits{})
	a, b := s.node("a"), s.node("b")
	all := report(2, 0)
	first, second := report(2, 0), report(2, 0)
	first.Ranks, first.Members = all.Ranks[:1], all.Members[:1]
	first.Connections, first.Arrivals, second.Connections, second.Arrivals = nil, nil, nil, nil
	s.merge(a, first, now)
	second.Ranks = second.Ranks[1:]
	second.Members = second.Members[1:]
	second.Members[0].Rank = 0
	s.merge(b, second, now)
	if m := s.ev.Comms[0].Members[0]; m.World != 0 || s.refused != 1 || !s.nodes[b].denied {
		t.Errorf("member %+v, %d refused", m, s.refused)
	}
	s.ev.Nodes[a].Lost = true
	s.disconnected(a)
	if !s.nodes[b].stale {
		t.Error("what was refused is not asked for again")
	}
	s.merge(b, second, now)
	if m := s.ev.Comms[0].Members[0]; m.World != 1 {
		t.Errorf("member %+v", m)
	}
	if err := check(s); err != nil {
		t.Error(err)
	}
}

// What a report of the most entries costs does not grow with what is known:
// entries that supersede processes are worked through together.
func TestSupersededProcessesAreForgottenTogether(t *testing.T) {
	const now, ranks = int64(1e18), 64
	s := newState("job", Limits{})
	n := s.node("n")
	s.merge(n, life(ranks, 0, now-1, diagnosis.ProcRunning), now)
	for id := range uint64(8) {
		r := report(ranks, 0)
		for _, m := range r.Members {
			m.CommId = 1000 + id
		}
		r.Ranks, r.Connections, r.Arrivals = nil, nil, nil
		s.merge(n, r, now)
	}
	before := s.revisions
	next := report(ranks, 0)
	next.Members, next.Connections, next.Arrivals = nil, nil, nil
	s.merge(n, next, now)
	// One revision a communicator, not one for each of its members that went.
	if got := s.revisions - before; got != uint64(len(s.ev.Comms)) {
		t.Errorf("%d revisions of %d communicators", got, len(s.ev.Comms))
	}
	for c := range s.comms {
		if s.comms[c].present != 0 || s.comms[c].leftAt != now {
			t.Errorf("communicator %d: %+v", c, s.comms[c])
		}
	}
	var flip []*wire.Rank
	for i := range 100 {
		flip = append(flip, &wire.Rank{WorldSize: ranks, Attempt: uint32(1 + i), CreatedUnixNs: now + int64(i), Proc: uint32(diagnosis.ProcRunning)})
	}
	epochs := s.epochs
	s.merge(n, &wire.Report{Sequence: 9, MonoSentNs: 1e9, Ranks: flip}, now)
	if s.epochs != epochs+1 {
		t.Errorf("one report brought the job into %d epochs", s.epochs-epochs)
	}
	if err := check(s); err != nil {
		t.Error(err)
	}
}
