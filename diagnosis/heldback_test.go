package diagnosis

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/record"
)

// TestHeldBack: a rank that takes seconds for a step because of its quota is slow, not hung, when
// others wait for it, and only then.
func TestHeldBack(t *testing.T) {
	for _, c := range []struct {
		name      string
		throttled float32
		late      bool // the others wait for rank 2
		mark      record.MarkCode
		want      string
	}{
		{"waited for", 0.9, true, record.MarkNone, "confirmed"},
		{"nobody waits", 0.9, false, record.MarkNone, ""},
		{"not much", 0.15, true, record.MarkNone, ""},
		{"while it saves", 0.9, true, record.MarkCheckpoint, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := New(Config{})
			ev := &Evidence{Job: "job", Now: 1e12, Nodes: []Node{{Name: "a"}}, Ranks: make([]Rank, 4), Comms: []Comm{{ID: 1, Name: "world", Members: make([]Member, 4)}}}
			for i := range ev.Ranks {
				ev.Ranks[i] = Rank{PID: int32(100 + i), Proc: ProcRunning, CPU: 0.08, ProcAt: ev.Now}
				ev.Comms[0].Members[i] = Member{World: int32(i), Coll: record.AllReduce, Peer: -1, Bytes: 4096}
			}
			var last []Verdict
			for pass := range 160 { // 16 s, in steps of 2 s
				ev.Now += 100e6
				ev.Nodes[0].LastSeen = ev.Now
				ev.Ranks[2].Throttled, ev.Ranks[2].Mark, ev.Ranks[2].MarkAt = c.throttled, c.mark, 1e12
				n := uint64(pass/20 + 1)
				for i := range ev.Comms[0].Members {
					m := &ev.Comms[0].Members[i]
					m.Enqueued, m.Started, m.Finished, m.Ops = n, n, n-1, n-1
					m.StartedAt, m.EnqueuedAt = ev.Now-int64(pass%20)*100e6, ev.Now-int64(pass%20)*100e6
					m.FinishedAt = m.StartedAt
					if i == 2 && c.late || !c.late && pass%20 < 18 {
						m.Enqueued, m.Started = n-1, n-1
					}
				}
				if vs := e.Diagnose(ev); len(vs) > 0 {
					last = vs
				}
			}
			got := ""
			for _, v := range last {
				if v.Class == NoncommunicationSlow && len(v.Culprits) == 1 && v.Culprits[0].Rank == 2 {
					got = v.Level.String()
				}
				if v.Class != NoncommunicationSlow && c.want != "" {
					t.Errorf("%v %v", v.Class, v.Culprits)
				}
			}
			if got != c.want {
				t.Errorf("%q, want %q: %+v", got, c.want, last)
			}
		})
	}
}
