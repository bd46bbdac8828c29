package master

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/internal/accept"
	"github.com/lockstep-ccl/lockstep/internal/crowd"
)

// TestPaused checks that ages are void after this master, or most agents, did not run.
func TestPaused(t *testing.T) {
	m := &Master{o: Options{Interval: 100 * time.Millisecond}, state: newState("job", Limits{})}
	const second = int64(time.Second)
	now := 1000 * second
	agents := 3
	for i := range agents {
		n := m.state.node(string(rune('a' + i)))
		m.state.nodes[n].stream = &stream{}
		m.state.ev.Nodes[n].LastSeen = now
	}
	heard := func(n ...int) {
		for _, i := range n {
			m.state.ev.Nodes[i].LastSeen = now
		}
	}
	step := func(what string, d int64, want bool) {
		t.Helper()
		now += d
		if got := m.paused(now); got != want {
			t.Errorf("%s: paused %v", what, got)
		}
	}
	step("first pass", second/10, false)
	heard(0, 1, 2)
	step("on time", second/10, false)
	step("late by a second", second, true)
	step("nobody heard since", second/10, true)
	heard(0)
	step("one heard", second/10, true)
	heard(1)
	step("most heard", second/10, false)
	heard(0, 1)
	step("one silent", second/2, false)
	heard(0, 1)
	step("still one", second/10, false)
	heard(0)
	step("still one", second*4/10, false)
	heard(0)
	step("two of three silent", second/10, true)
	m.state.ev.Nodes[1].Lost, m.state.ev.Nodes[2].Lost = true, true
	step("both given up", second/10, false)
	m.state.nodes[0].lateAt = now
	step("the only one left overslept", second/10, true)
}

// A master that did not run for a while has missed its agents' reports: they are
// not lost for it.
func TestPausedMasterLosesNoAgent(t *testing.T) {
	m := &Master{listener: nobodyCalls(t), o: Options{Job: "job", Interval: 100 * time.Millisecond, Patience: 3 * time.Second}, state: newState("job", Limits{}), engine: never{}, log: slog.New(slog.DiscardHandler), started: time.Now()}
	n := m.state.node("a")
	m.state.nodes[n].stream = &stream{}
	m.state.merge(n, report(2, 0), m.now())
	ago := func(d time.Duration) int64 { return m.now() - int64(d) }
	m.state.ev.Nodes[n].LastSeen, m.lastTick = ago(10*time.Second), ago(10*time.Second)
	m.pass()
	if m.state.ev.Nodes[n].Lost || !m.state.ev.Paused || m.Snapshot().Ranks[diagnosis.ProcRunning] != 2 {
		t.Errorf("after a pause: %+v, paused %v, ranks %v", m.state.ev.Nodes[n], m.state.ev.Paused, m.Snapshot().Ranks)
	}
	m.resumed, m.lastTick = ago(4*time.Second), ago(100*time.Millisecond)
	m.o.Interval = time.Minute // the test itself may not run for a while
	m.pass()
	if !m.state.ev.Nodes[n].Lost {
		t.Error("not lost, though it was not heard after the pause")
	}
}

// BenchmarkPass is what the master adds to a diagnosis pass of a job of 65,536
// ranks on 8,192 nodes.
func BenchmarkPass(b *testing.B) {
	const nodes, perNode = 8192, 8
	m := &Master{listener: nobodyCalls(b), o: Options{Job: "job", Interval: 100 * time.Millisecond}, state: newState("job", Limits{}), engine: never{}, log: slog.New(slog.DiscardHandler), started: time.Now()}
	for i := range nodes {
		n := m.state.node(fmt.Sprint("n", i))
		m.state.nodes[n].stream = &stream{}
		r := &wire.Report{MonoSentNs: 1}
		for k := range int32(perNode) {
			rank := int32(i*perNode) + k
			r.Ranks = append(r.Ranks, &wire.Rank{WorldRank: rank, WorldSize: nodes * perNode, Pid: rank, CreatedUnixNs: 1})
			for c := range uint64(4) {
				r.Members = append(r.Members, &wire.Member{CommId: uint64(i)*4 + c, WorldRank: rank, Rank: k, Size: perNode})
			}
		}
		m.state.merge(n, r, m.now())
	}
	b.ReportAllocs()
	for b.Loop() {
		m.pass()
	}
}

type never struct{}

func (never) Diagnose(*diagnosis.Evidence) []diagnosis.Verdict { return nil }

// nobodyCalls is the listener of a master that has been made by hand.
func nobodyCalls(t testing.TB) *crowd.Listener {
	ln, err := accept.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l, err := crowd.Limit(ln, 1, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}
