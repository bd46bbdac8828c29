package master

import (
	"log/slog"
	"math"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// stands is a state in which ranks 0 to n-1 are members of one communicator of the same order.
func stands(n int, at int64) *state {
	s := newState("job", Limits{})
	s.ev.Nodes = []diagnosis.Node{{Name: "node0", LastSeen: at}}
	s.nodes = []node{{stream: &stream{}}}
	c := diagnosis.Comm{ID: 7, Name: "dp"}
	for i := range n {
		s.ev.Ranks = append(s.ev.Ranks, diagnosis.Rank{Proc: diagnosis.ProcRunning, PID: int32(100 + i)})
		s.ranks = append(s.ranks, process{})
		c.Members = append(c.Members, diagnosis.Member{World: int32(i), State: record.CommJoined, Coll: record.AllReduce, Peer: -1, Enqueued: 5, Started: 5, Finished: 5, FinishedAt: at - 3e9})
	}
	s.ev.Comms = []diagnosis.Comm{c}
	return s
}

func enter(m *diagnosis.Member, at int64) {
	m.Enqueued, m.Started, m.EnqueuedAt, m.StartedAt = m.Finished+1, m.Finished+1, at, at
}

func TestViewSaysForWhomRanksWait(t *testing.T) {
	const now = int64(1000e9)
	for _, tt := range []struct {
		name    string
		change  func(*state)
		rank    int
		waits   []int32
		waited  int
		entered bool
	}{
		{"a member that has not entered", func(s *state) {
			for i := range 7 {
				enter(&s.ev.Comms[0].Members[i], now-2e9)
			}
		}, 3, []int32{7}, 1, false},
		{"more than are named", func(s *state) { enter(&s.ev.Comms[0].Members[0], now-2e9) }, 0, []int32{1, 2, 3, 4}, 7, false},
		{"one that has only just entered asks for nobody", func(s *state) { enter(&s.ev.Comms[0].Members[0], now-1e6) }, 0, nil, 0, false},
		{"a member nobody has reported", func(s *state) {
			s.ev.Comms[0].Members[5] = nobody
			for i := range 8 {
				if i != 5 {
					enter(&s.ev.Comms[0].Members[i], now-2e9)
				}
			}
		}, 0, []int32{-1}, 1, false},
		{"a connection of an operation that all are in", func(s *state) {
			for i := range 8 {
				enter(&s.ev.Comms[0].Members[i], now-2e9)
			}
			s.ev.Conns = []diagnosis.Conn{{Src: 2, Dst: 3, RxWaitingSince: now - 2e9}, {Src: 4, Dst: 5}}
		}, 3, []int32{2}, 1, true},
		{"the peer of a receive", func(s *state) {
			m := &s.ev.Comms[0].Members[4]
			enter(m, now-2e9)
			m.Coll, m.Peer = record.Recv, 6
		}, 4, []int32{6}, 1, false},
		{"who is in another kind, where sends are counted along", func(s *state) {
			for i := range 8 {
				m := &s.ev.Comms[0].Members[i]
				m.Finished, m.Started = uint64(5+i), uint64(5+i)
				if i != 2 {
					enter(m, now-2e9)
				} else {
					m.Coll = record.Send
				}
			}
		}, 7, []int32{2}, 1, false},
	} {
		s := stands(8, now)
		tt.change(s)
		in := s.view(now).Ranks[tt.rank].In
		if in == nil || !cmp.Equal(in.WaitsFor, tt.waits) || in.Waited != tt.waited || in.Entered != tt.entered {
			t.Errorf("%s: %+v, want %v of %d, entered %v", tt.name, in, tt.waits, tt.waited, tt.entered)
		}
	}
}

func TestViewShowsTheLongestStay(t *testing.T) {
	const now = int64(1000e9)
	s := stands(4, now)
	tp := diagnosis.Comm{ID: 8, Name: "tp", Members: []diagnosis.Member{s.ev.Comms[0].Members[2], s.ev.Comms[0].Members[3]}}
	s.ev.Comms = append(s.ev.Comms, tp)
	enter(&s.ev.Comms[0].Members[2], now-1e9)
	enter(&s.ev.Comms[1].Members[0], now-4e9)
	v := s.view(now)
	if in := v.Ranks[2].In; in == nil || in.Comm != "tp" || in.CommRank != 0 || in.Seq != 6 || !cmp.Equal(in.WaitsFor, []int32{3}) {
		t.Errorf("rank 2 is in %+v", in)
	}
	if v.Ranks[3].In != nil || v.Ranks[3].Last.UnixNano() != now-3e9 {
		t.Errorf("rank 3 is in %+v, last %v", v.Ranks[3].In, v.Ranks[3].Last)
	}
	if v.Comms[0].Name != "tp" || v.Comms[0].Open != 1 || !cmp.Equal(v.Comms[0].World, []int32{2, 3}) {
		t.Errorf("communicators %+v", v.Comms)
	}
	s.nodes[0].stream = nil
	if s.view(now).Ranks[0].Seen {
		t.Error("a rank whose agent has left is seen")
	}
}

// What was measured before a hang says nothing of what is after it.
func TestDelaysGoStale(t *testing.T) {
	const now = int64(1000e9)
	s := stands(3, now)
	for src := range int32(3) {
		for dst := range int32(3) {
			if src != dst {
				s.ev.Conns = append(s.ev.Conns, diagnosis.Conn{Src: src, Dst: dst, LatencyNs: 1000, LastWindowAt: now - 1e9})
			}
		}
	}
	s.ev.Conns[0].LatencyNs, s.ev.Conns[0].LastWindowAt = 9000, now-delayFor
	m := delayMatrices(&s.ev, now)[0]
	if !math.IsNaN(float64(m.Ratio[1])) || m.Ratio[2] != 1 || !cmp.Equal(m.World, []int32{0, 1, 2}) {
		t.Errorf("matrix %+v", m)
	}
}

// A view of a large job in a hang is made in well under the half second for which it is kept.
func BenchmarkView(b *testing.B) {
	const now = int64(1000e9)
	s := stands(4096, now)
	for i := range 4095 {
		enter(&s.ev.Comms[0].Members[i], now-2e9)
	}
	for c := range 4096 {
		s.ev.Comms = append(s.ev.Comms, diagnosis.Comm{ID: uint64(c), Name: "tp", Members: s.ev.Comms[0].Members[c&^7 : c&^7+8]})
	}
	b.ResetTimer()
	for range b.N {
		s.view(now)
	}
}

// A page puts the view beside the incidents of now: when a restart has closed them, the
// ranks that it ended, and their delays, are not shown as those of a healthy job.
func TestViewIsOfTheAttempt(t *testing.T) {
	m := &Master{listener: nobodyCalls(t), o: Options{Job: "job", Interval: 100 * time.Millisecond, Patience: 3 * time.Second}, state: newState("job", Limits{}), engine: never{}, log: slog.New(slog.DiscardHandler), started: time.Now()}
	n := m.state.node("a")
	m.state.nodes[n].stream = &stream{}
	first := report(2, 0)
	for _, r := range first.Ranks {
		r.Proc = uint32(diagnosis.ProcGone)
	}
	m.state.merge(n, first, m.now())
	m.pass()
	if v := m.View(); len(v.Ranks) != 2 || v.Ranks[0].Proc != diagnosis.ProcGone {
		t.Fatalf("of the first attempt: %+v", v.Ranks)
	}
	m.delay = []collector.DelayMatrix{{}}
	next := report(2, 0)
	for _, r := range next.Ranks {
		r.Attempt, r.CreatedUnixNs = 1, r.CreatedUnixNs+1
	}
	m.state.merge(n, next, m.now())
	m.pass()
	s := m.Snapshot()
	if v := m.View(); s.Attempt != 1 || len(v.Ranks) != 2 || v.Ranks[0].Proc == diagnosis.ProcGone || len(s.Delay) > 0 {
		t.Errorf("attempt %d is shown with ranks %+v and delays %+v", s.Attempt, v.Ranks, s.Delay)
	}
}
