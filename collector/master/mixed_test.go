package master

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/record"
)

// Members that mean different operations by one number, as NCCL's may of a graph's replay and a call beside it, have not
// entered one together: nothing is said of when, and no clock is aligned by it.
func TestMixedArrivals(t *testing.T) {
	const now = int64(1e18)
	arrival := func(rank int32, seq uint64, kind record.CollKind, bytes uint64) *wire.Arrival {
		return &wire.Arrival{CommId: 7, Seq: seq, Coll: uint32(kind), Bytes: bytes, Rank: rank, MonoStartedNs: 3e8, MonoEndedNs: 4e8}
	}
	for name, x := range map[string]struct {
		a, b  *wire.Arrival
		mixed bool
	}{
		"alike":                  {arrival(0, 9, record.AllReduce, 8), arrival(1, 9, record.AllReduce, 8), false},
		"another kind":           {arrival(0, 9, record.AllReduce, 8), arrival(1, 9, record.AllGather, 8), true},
		"another size":           {arrival(0, 9, record.AllReduce, 8), arrival(1, 9, record.AllReduce, 16), true},
		"an agent of before":     {arrival(0, 9, record.AllReduce, 8), arrival(1, 9, record.AllReduce, 0), false},
		"the other one's before": {arrival(0, 9, record.AllReduce, 0), arrival(1, 9, record.AllReduce, 8), false},
	} {
		t.Run(name, func(t *testing.T) {
			s := newState("job", Limits{})
			first := report(4, 0)
			first.Arrivals = nil
			n := s.node("n0")
			s.merge(n, first, now)
			told := func(arrivals ...*wire.Arrival) {
				s.merge(n, &wire.Report{Sequence: 2, MonoSentNs: 1e9, Arrivals: arrivals}, now)
				if err := check(s); err != nil {
					t.Fatal(err)
				}
			}
			kept := map[uint64]int{}
			told(arrival(0, 8, record.AllReduce, 8), x.a, arrival(0, 10, record.AllReduce, 8))
			told(x.b, arrival(1, 10, record.AllReduce, 8), arrival(1, 8, record.AllReduce, 8))
			told(arrival(2, 9, record.AllReduce, 8), arrival(3, 9, record.AllReduce, 8))
			for _, a := range s.ev.Arrivals {
				for _, start := range a.Start {
					if start != 0 {
						kept[a.Seq]++
					}
				}
			}
			want := 4
			if x.mixed {
				want = 0
			}
			if kept[8] != 2 || kept[9] != want || kept[10] != 2 {
				t.Errorf("parts kept by number: %v, want 2 of 8 and of 10, and %d of 9", kept, want)
			}
			met := 0
			for _, m := range s.clock.meetings {
				if len(m.spans) > 0 {
					met++
				}
			}
			if wantMet := 3 - min(1, 4-want); met != wantMet {
				t.Errorf("%d collectives bound the clocks, want %d", met, wantMet)
			}
		})
	}
}
