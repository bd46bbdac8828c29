package diagnosis_test

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/diagnosistest"
)

// A pass that looks only at what has changed says what one that looks at
// everything says.
func TestRevisionsChangeNoVerdict(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := diagnosistest.Config{
			Seed: rapid.Uint64().Draw(t, "seed"),
			Faults: []diagnosistest.Fault{{
				Kind:   diagnosistest.FaultKind(rapid.IntRange(int(diagnosistest.Kill), int(diagnosistest.SlowAll)).Draw(t, "fault")),
				At:     6 * time.Second,
				Rank:   rapid.IntRange(0, 7).Draw(t, "rank"),
				Peer:   rapid.IntRange(0, 7).Draw(t, "peer"),
				Factor: 3,
			}},
			Survivors: diagnosistest.Reaction(rapid.IntRange(0, 3).Draw(t, "survivors")),
			ResizeAt:  rapid.IntRange(0, 30).Draw(t, "resize"),
		}
		whole, counted := diagnosis.New(diagnosis.Config{}), diagnosis.New(diagnosis.Config{})
		job := diagnosistest.New(cfg)
		revs := revisions{}
		for job.Now() < 12*time.Second {
			job.Advance(100 * time.Millisecond)
			ev := job.Evidence()
			want := whole.Diagnose(ev)
			revs.count(ev)
			got := counted.Diagnose(ev)
			for i := range ev.Comms {
				ev.Comms[i].Rev, ev.Comms[i].ConnRev = 0, 0
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Fatalf("after %v (-all +changed):\n%s", job.Now(), d)
			}
		}
	})
}

// revisions counts changes as the master does.
type revisions map[uint64]*counted

type counted struct {
	members      []diagnosis.Member
	conns        []diagnosis.Conn
	rev, connRev uint64
}

func (r revisions) count(ev *diagnosis.Evidence) {
	conns := make([][]diagnosis.Conn, len(ev.Comms))
	for _, c := range ev.Conns {
		conns[c.Comm] = append(conns[c.Comm], c)
	}
	for i := range ev.Comms {
		c := &ev.Comms[i]
		x := r[c.ID]
		if x == nil {
			x = &counted{}
			r[c.ID] = x
		}
		if x.rev == 0 || !slices.Equal(x.members, c.Members) {
			x.rev++
			x.members = slices.Clone(c.Members)
		}
		if x.connRev == 0 || !slices.Equal(x.conns, conns[i]) {
			x.connRev++
			x.conns = conns[i]
		}
		c.Rev, c.ConnRev = x.rev, x.connRev
	}
}
