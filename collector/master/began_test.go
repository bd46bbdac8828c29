package master

import (
	"log/slog"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// The first agent that comes back to a master may tell of an attempt that is over, on a node that the job has left.
// That is no verdict, and no answer to who asks which attempt runs.
func TestTheFirstWordIsOfAFormerAttempt(t *testing.T) {
	m := &Master{listener: nobodyCalls(t), o: Options{Job: "job", Interval: 100 * time.Millisecond, Patience: 3 * time.Second}, state: newState("job", Limits{}),
		engine: diagnosis.New(diagnosis.Config{}), log: slog.New(slog.DiscardHandler), started: time.Now()}
	if m.pass(); !m.Snapshot().Settling {
		t.Error("who has heard nobody knows no attempt")
	}
	tell := func(node string, attempt uint32, rank int32, proc diagnosis.ProcState) {
		n := m.state.node(node)
		m.state.nodes[n].stream = &stream{}
		r := report(2, 0)
		r.Ranks = []*wire.Rank{r.Ranks[rank]}
		r.Members = nil
		r.Ranks[0].Attempt, r.Ranks[0].Proc = attempt, uint32(proc)
		r.Ranks[0].CreatedUnixNs += int64(attempt) * 1e9
		m.state.merge(n, r, m.now())
		for range 12 { // more than a death takes to be confirmed
			m.pass()
		}
	}
	tell("left", 4, 0, diagnosis.ProcGone)
	if s := m.Snapshot(); !s.Settling || len(s.Incidents) > 0 {
		t.Errorf("settling %v, incidents %+v", s.Settling, s.Incidents)
	}
	tell("b", 5, 0, diagnosis.ProcRunning)
	tell("c", 5, 1, diagnosis.ProcRunning)
	if s := m.Snapshot(); s.Settling || s.Attempt != 5 || len(s.Incidents) > 0 {
		t.Errorf("settling %v, attempt %d, incidents %+v", s.Settling, s.Attempt, s.Incidents)
	}
}

// A job of which nothing lives is told in time all the same.
func TestAMasterThatComesTooLate(t *testing.T) {
	m := &Master{listener: nobodyCalls(t), o: Options{Job: "job", Interval: 100 * time.Millisecond, Patience: 3 * time.Second}, state: newState("job", Limits{}),
		engine: never{}, log: slog.New(slog.DiscardHandler), started: time.Now()}
	n := m.state.node("a")
	m.state.nodes[n].stream = &stream{}
	r := report(2, 0)
	for _, x := range r.Ranks {
		x.Proc = uint32(diagnosis.ProcGone)
	}
	m.state.merge(n, r, m.now())
	m.pass()
	if !m.Snapshot().Settling {
		t.Error("it judges at once")
	}
	m.started = m.started.Add(-time.Duration(settleFor))
	if m.pass(); m.Snapshot().Settling {
		t.Error("it settles for ever")
	}
}
