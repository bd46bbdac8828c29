package diagnosis

import (
	"math"
	"math/rand/v2"
	"testing"
)

// TestDragStatistics: a single pause is no cost, however long; what lasts is.
func TestDragStatistics(t *testing.T) {
	x := rankCost{}
	for i := range x.cost[:8] {
		x.cost[i] = 0.1
	}
	if got := x.trimmed(8, 8); got < 0.099 || got > 0.101 {
		t.Errorf("eight windows of 0.1: %v", got)
	}
	if !x.lasts(8, 8, 0.05) || !x.lasts(8, 4, 0.05) {
		t.Error("eight windows alike do not last")
	}
	x = rankCost{}
	x.cost[5] = mostCost
	if got := x.trimmed(8, 8); got != 0 {
		t.Errorf("one pause costs %v", got)
	}
	if x.lasts(8, 8, 0.01) || x.lasts(8, 4, 0.01) {
		t.Error("one pause lasts")
	}
	if m := x.mean(8, 2, 1); m != float64(float32(mostCost)) {
		t.Errorf("the window before the last two costs %v", m)
	}
}

// TestWander: what is usual follows at once while little is known, and slowly later.
func TestWander(t *testing.T) {
	d := &drags{}
	if v := d.wander(0, 0.1, 1); v != 0.1 {
		t.Errorf("the first value is %v", v)
	}
	if v := d.wander(0.1, 10, 20); v > 0.11 {
		t.Errorf("one wild value moves 0.1 to %v", v)
	}
}

// TestQuietBefore: what is new had a quiet stretch before it, twice as long as what lies between
// its parts; and windows of many steps show nothing of that.
func TestQuietBefore(t *testing.T) {
	const h, now = 2, 24 // the horizon of 16 of 24 windows
	costs := func(slow ...int) *rankCost {
		x := &rankCost{past: pastCost{of: now}}
		for _, ago := range slow {
			x.cost[now-1-ago] = 0.3
		}
		return x
	}
	for name, c := range map[string]struct {
		x         *rankCost
		few, want bool
	}{
		"two bursts":                       {costs(0, 1, 2, 6, 7, 8), true, true},
		"windows of many steps":            {costs(0, 1, 2, 6, 7, 8), false, false},
		"a pause every seven windows":      {costs(0, 7, 14, 21), true, false},
		"bursts as far apart as it is old": {costs(0, 1, 12, 13), true, false},
		"one more, and longer ago":         {costs(0, 1, 6, 7, 14, 15), true, false},
	} {
		if got := c.x.isNew(now, h, 0.1, c.few); got != c.want {
			t.Errorf("%s: new %v, want %v", name, got, c.want)
		}
	}
}

// TestCostBefore: what a rank cost before a fault is what was known when that began, however long it lasts
// without a verdict.
func TestCostBefore(t *testing.T) {
	w := &window{view: &view{ev: &Evidence{Ranks: make([]Rank, 1)}}}
	d := &drags{window: w, ranks: make([]rankCost, 1)}
	x, since := &d.ranks[0], int64(0)
	play := func(n int, cost float32) {
		for range n {
			at := d.windows % costWindows
			for h, k := range horizons {
				x.sums[h] += cost - x.cost[(d.windows-k%costWindows+costWindows)%costWindows]
			}
			x.cost[at], d.lengths[at] = cost, 1e9
			d.windows++
			d.at += 1e9
			x.remember(d.windows)
		}
	}
	for _, quiet := range []int{11, 4 * costWindows} { // before it is remembered by when it was, and after
		*x, d.windows, d.at = rankCost{}, 0, 0
		play(quiet, 0.02)
		since = d.at
		play(1, 0.3)
		before := d.before(0, since)
		play(5*costWindows, 0.3)
		if later := d.before(0, since); later.known && later.most < 0.29 {
			t.Errorf("after %d windows: %v is known of before at last", quiet, later.most)
		}
		if !before.known || before.most > 0.1 || d.isHabit(0, &before, since, 0.3) {
			t.Errorf("after %d windows: known %v, cost %v, taken for a habit", quiet, before.known, before.most)
		}
		d.forgive(0, &before)
		if again := d.before(0, d.at); quiet > costWindows && again.most > 0.1 {
			t.Errorf("after %d windows: a fault of %v is a habit", quiet, again.most)
		}
	}
}

// TestRepeatsAfter finds after how many values a series repeats, also where some are not known; noise does not repeat.
func TestRepeatsAfter(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	series := func(n, period int, known float64) (v []float64) {
		for i := range n {
			x := 1 + 0.2*rng.NormFloat64()
			if period > 0 && i%period == 0 {
				x += 5
			}
			if rng.Float64() >= known {
				x = math.NaN()
			}
			v = append(v, x)
		}
		return v
	}
	for _, c := range []struct {
		n, period int
		known     float64
		want      int
	}{{256, 10, 1, 10}, {256, 9, 0.5, 9}, {512, 10, 0.4, 10}, {256, 0, 1, 1}, {512, 0, 0.5, 1}, {20, 10, 1, 1}, {0, 0, 1, 1}} {
		if got := repeatsAfter(series(c.n, c.period, c.known), 1, 0.3); got != c.want {
			t.Errorf("%+v: repeats after %d", c, got)
		}
	}
}
