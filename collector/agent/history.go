package agent

import (
	"math"
	"math/bits"

	"github.com/lockstep-ccl/lockstep/record"
)

const (
	maxBaselines = 64   // of a communicator: kinds × sizes
	warm         = 64   // observations before anything is called slow
	pace         = 0.02 // how far an estimate moves at each observation, in doublings
	atLeast      = 50e3 // ns above the median, below which nothing is worth a trace
)

// history is how long a communicator's collectives have taken, by kind and
// size (in powers of two), on this rank.
type history struct {
	baselines []baseline
	last      int // the one looked up last: loops repeat themselves
}

// baseline tracks the median and the median deviation of log2(duration), each
// by steps of a fixed size towards the side where the observation lies
// ("frugal" streaming quantiles). Outliers, however far off, move them by one step.
type baseline struct {
	coll   record.CollKind
	size   uint8
	n      uint32
	median float64
	spread float64
}

// slow takes in one duration (ns), and reports whether it is far beyond what the
// same collective has taken so far: twice the median, and four deviations.
func (h *history) slow(coll record.CollKind, bytes uint64, ns int64) bool {
	b := h.find(coll, uint8(bits.Len64(bytes)))
	if b == nil || ns <= 0 {
		return false
	}
	x := math.Log2(float64(ns))
	slow := b.n >= warm && x > b.median+max(1, 4*1.4826*b.spread) && float64(ns)-math.Exp2(b.median) > atLeast
	if b.n == 0 {
		b.median, b.spread = x, 0.1
	}
	if b.n < math.MaxUint32 {
		b.n++
	}
	step := max(pace, 1/float64(b.n+1))
	d := x - b.median
	b.median += math.Copysign(min(step, math.Abs(d)), d)
	e := math.Abs(d) - b.spread
	b.spread += math.Copysign(min(step, math.Abs(e)), e)
	return slow
}

func (h *history) find(coll record.CollKind, size uint8) *baseline {
	if h.last < len(h.baselines) {
		if b := &h.baselines[h.last]; b.coll == coll && b.size == size {
			return b
		}
	}
	for i := range h.baselines {
		if b := &h.baselines[i]; b.coll == coll && b.size == size {
			h.last = i
			return b
		}
	}
	if len(h.baselines) == maxBaselines {
		return nil
	}
	h.last = len(h.baselines)
	h.baselines = append(h.baselines, baseline{coll: coll, size: size})
	return &h.baselines[h.last]
}
