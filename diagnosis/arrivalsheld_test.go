package diagnosis

import (
	"math/rand/v2"
	"testing"
)

// TestHeldUpIsNotLate has one of two ranks late to a tenth of the collectives: since what the other one sent it in the
// collective before was lost on the way, or of its own. Samples show the one before of all, of some, or of none.
func TestHeldUpIsNotLate(t *testing.T) {
	const own, transfer, loss, count = int64(2e6), int64(3e6), int64(65e6), 2000
	for _, sampled := range []float64{1, 0.5, 0.1} {
		for _, straggler := range []bool{false, true} {
			r := rand.New(rand.NewPCG(7, uint64(10*sampled)))
			ev := &Evidence{Comms: []Comm{{Members: []Member{{World: 0}, {World: 1}}}}, Ranks: make([]Rank, 2)}
			w := &window{view: &view{ev: ev, comms: make([]commHistory, 1), state: []rankState{rankAlive, rankAlive}}}
			d := &arrivals{window: w, of: make([]arrivalsOf, 1)}
			end := [2]int64{1e9, 1e9}
			for seq := uint64(1); seq <= count; seq++ {
				away, lost := own, int64(0)
				if r.Float64() < 0.1 {
					if straggler {
						away += loss
					} else {
						lost = loss
					}
				}
				start := [2]int64{end[0] + own, end[1] + away}
				both := max(start[0], start[1])
				end = [2]int64{both + transfer, both + transfer + lost}
				if r.Float64() >= sampled {
					continue
				}
				ev.Arrivals = append(ev.Arrivals[:0], Arrival{Seq: seq, Start: start[:], End: append([]int64(nil), end[:]...)})
				w.now = end[1]
				d.take()
			}
			late := 0.0
			for i := range d.of[0].parts {
				if p := &d.of[0].parts[i]; p.rank == 1 {
					late += float64(p.late)
				}
			}
			switch held := heldUp(1, d.of[0].parts); {
			case sampled == 1 && !straggler:
				if late > 0 {
					t.Errorf("a rank that was held up is %v ms late, of its own", late/1e6)
				}
			case late == 0 || held == straggler:
				t.Errorf("%v of the collectives are sampled, straggler: %v; %v ms late, yet held up: %v",
					sampled, straggler, late/1e6, held)
			}
		}
	}
}
