package agent

import (
	"math/rand/v2"
	"testing"

	"github.com/lockstep-ccl/lockstep/record"
)

// TestHistory: durations spread by a factor of two are normal, one four times
// the median is not, and a lasting change becomes normal.
func TestHistory(t *testing.T) {
	var h history
	rng := rand.New(rand.NewPCG(1, 2))
	usual := func(scale float64) int64 { return int64(scale * (1 + rng.Float64())) }
	alarms := 0
	for range 10_000 {
		if h.slow(record.AllReduce, 1<<20, usual(1e6)) {
			alarms++
		}
	}
	if alarms > 0 {
		t.Errorf("%d alarms on the usual", alarms)
	}
	if !h.slow(record.AllReduce, 1<<20, 8e6) || h.slow(record.AllReduce, 1<<10, 8e6) || h.slow(record.Broadcast, 1<<20, 8e6) {
		t.Error("four times the median must be slow for this kind and size, and nothing else")
	}
	for range 1000 {
		h.slow(record.AllReduce, 1<<20, usual(8e6))
	}
	if h.slow(record.AllReduce, 1<<20, 12e6) {
		t.Error("the new usual is slow still")
	}
	for i := range 1000 {
		h.slow(record.CollKind(i), 1, 1)
	}
	if len(h.baselines) > maxBaselines {
		t.Errorf("%d baselines", len(h.baselines))
	}
}
