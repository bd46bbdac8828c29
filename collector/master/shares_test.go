package master

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/record"
)

// However samples weigh and whoever tells of them: what stays fits, each node keeps the latest of
// its own, and nobody loses who has less than an equal share.
func TestThin(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type sample struct {
			by int32
			w  int64
		}
		all := make([]sample, rapid.IntRange(1, 300).Draw(t, "n"))
		total, tellers := int64(0), map[int32]int64{}
		for i := range all {
			all[i] = sample{rapid.SampledFrom([]int32{several, 0, 1, 2, 2, 2, 2, 2, 2}).Draw(t, "by"), rapid.Int64Range(1, 50).Draw(t, "weight")}
			total += all[i].w
			tellers[all[i].by] += all[i].w
		}
		halvings := rapid.IntRange(1, 4).Draw(t, "halvings")
		room := total >> halvings
		kept := thin(len(all), halvings, func(i int) (int32, int64) { return all[i].by, all[i].w })
		sum, has := int64(0), map[int32]int64{}
		for i, k := range kept {
			if k {
				sum += all[i].w
				has[all[i].by] += all[i].w
			}
		}
		if sum > room {
			t.Fatalf("%d kept of %d, room for %d", sum, total, room)
		}
		for by, w := range tellers {
			share := room / int64(2*len(tellers))
			if by == several {
				share = room / 2
			}
			if w <= share && has[by] != w {
				t.Errorf("%d has %d of its %d, room for %d", by, has[by], w, room)
			}
		}
	})
}

// One agent of the job that invents samples as fast as it may crowds out its own: those that the
// others tell of together, and those of the others alone, stay, for judging slowness and for the clock.
func TestALiarsArrivalsAreItsOwn(t *testing.T) {
	const now = int64(1e18)
	const ranks = 4
	s := newState("job", Limits{Arrivals: 1 << 16})
	for n := range int32(ranks) { // a rank a node, all in one communicator
		r := report(ranks, 0)
		r.Ranks, r.Members, r.Connections, r.Arrivals = r.Ranks[n:n+1], r.Members[n:n+1], nil, nil
		s.merge(s.node(string('a'+n)), r, now)
	}
	arrival := func(n int32, seq uint64) *wire.Arrival {
		return &wire.Arrival{CommId: 7, Seq: seq, Coll: uint32(record.AllReduce), Rank: n, MonoStartedNs: 3e8, MonoEndedNs: 4e8}
	}
	const liar = ranks - 1
	invented := uint64(1 << 40)
	const honest = 200
	for seq := range uint64(honest) {
		for n := range int32(liar) {
			s.mergeArrival(n, arrival(n, seq), now)
		}
		s.mergeArrival(0, arrival(0, 1<<50+seq), now) // nobody else has told of it yet
		for range 200 {
			invented++
			s.mergeArrival(liar, arrival(liar, invented), now)
		}
	}
	if err := check(s); err != nil {
		t.Fatal(err)
	}
	for _, from := range []uint64{0, 1 << 50} {
		for seq := range uint64(honest) {
			if _, ok := s.arrived[arrivalKey{0, from + seq}]; !ok {
				t.Fatalf("the sample of collective %d was crowded out", from+seq)
			}
		}
	}
	together := 0
	for _, m := range s.clock.meetings {
		if len(m.spans) == liar {
			together++
		}
	}
	if together != honest {
		t.Errorf("%d of %d meetings of several nodes are left", together, honest)
	}
}
