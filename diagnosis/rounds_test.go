package diagnosis

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// TestRoundsAsTheyCome brings rounds up to date while parts come, grow, are dropped, and are put together
// otherwise: they are always those of all parts at once, and what has ended is told.
func TestRoundsAsTheyCome(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 1))
	for range 200 {
		x, now, seq, period := arrivalsOf{}, int64(0), uint64(1), uint64(0)
		var g grouped
		ended, over := []arrivalPart(nil), 0
		for range 300 {
			switch n := r.IntN(40); {
			case n == 0:
				x.drop(r.IntN(len(x.parts) + 1))
			case n == 1:
				period, x.phase = uint64(r.IntN(6)), uint64(r.IntN(6))
			case n < 10 && len(x.parts) > 0:
				now += r.Int64N(100e6)
				x.parts[len(x.parts)-1].join(&arrivalPart{from: now, until: now, seq: seq, seqs: 1, n: 1, rank: int32(r.IntN(4)), late: r.Float32(), took: 1})
				seq++
			default:
				p := arrivalPart{from: now, seq: seq, seqs: 1, n: 1, rank: int32(r.IntN(4)), late: r.Float32(), took: r.Float32()}
				now += r.Int64N(700e6)
				p.until = now
				x.parts = append(x.parts, p)
				seq++
			}
			if r.IntN(3) == 0 {
				continue
			}
			var whole grouped
			g.update(&x, roundTime, period)
			whole.update(&x, roundTime, period)
			if !slices.Equal(g.all, whole.all) {
				t.Fatalf("rounds as they came %+v, of all parts %+v", g.all, whole.all)
			}
			n := max(0, len(g.all)-1)
			if before := ended; g.over == over && !slices.Equal(before, g.all[:n]) {
				t.Fatalf("rounds that have ended are %+v, were %+v: not told", g.all[:n], before)
			}
			ended, over = slices.Clone(g.all[:n]), g.over
		}
	}
}
