package master

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// A rank's GPU becomes evidence, its times on the master's clock, and goes with the next word without it.
func TestMergeGPU(t *testing.T) {
	s := newState("job", Limits{})
	n := s.node("n")
	const mono, now = int64(100e9), int64(5000e9)
	merge := func(seq uint64, w *wire.Rank) {
		w.WorldRank, w.WorldSize, w.Pid, w.CreatedUnixNs = 0, 1, 10, 1
		s.merge(n, &wire.Report{Sequence: seq, MonoSentNs: mono, Ranks: []*wire.Rank{w}}, now)
	}
	merge(1, &wire.Rank{Xid: 79, Gpu: &wire.GPU{Index: 3, MonoXidNs: mono - 2e9, MonoLostNs: mono - 1e9, Throttle: 0x40, MonoThrottledNs: mono - 3e9, MonoUnresponsiveNs: mono + 9e9}})
	want := diagnosis.GPU{Seen: true, Index: 3, XidAt: now - 2e9, LostAt: now - 1e9, Throttle: diagnosis.ThrottleHWThermal, ThrottledAt: now - 3e9, UnresponsiveAt: now}
	if r := s.ev.Ranks[0]; r.Xid != 79 || r.GPU != want {
		t.Errorf("got  %+v\nwant %+v", r.GPU, want)
	}
	merge(2, &wire.Rank{Gpu: &wire.GPU{Index: 1 << 20}})
	if g := s.ev.Ranks[0].GPU; g != (diagnosis.GPU{Seen: true, Index: 1<<16 - 1}) {
		t.Errorf("got %+v", g)
	}
	merge(3, &wire.Rank{})
	if g := s.ev.Ranks[0].GPU; g != (diagnosis.GPU{}) {
		t.Errorf("got %+v", g)
	}
}
