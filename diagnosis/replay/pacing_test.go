package replay

import (
	"testing"
	"time"
)

// TestPacing: a job whose passes cost much, or take much room, is recorded in fewer of
// them; a pass that was interrupted changes nothing.
func TestPacing(t *testing.T) {
	const pass = 100 * time.Millisecond
	for _, c := range []struct {
		name  string
		costs []time.Duration
		bytes int64
		want  time.Duration
	}{
		{"small", []time.Duration{time.Millisecond}, 1000, 0},
		{"interrupted now and then", []time.Duration{time.Millisecond, time.Second, time.Second}, 1000, 0},
		{"a fifth of a core", []time.Duration{20 * time.Millisecond}, 1000, 2*pass - pass/2},
		{"three minutes would take twice the room", []time.Duration{time.Millisecond}, 2 * (64 << 20) / 1800, 2*pass - pass/2},
	} {
		t.Run(c.name, func(t *testing.T) {
			var p pacing
			for i := range 7 {
				p.observe(c.costs[i%len(c.costs)], c.bytes)
			}
			if got := p.interval(pass, 64<<20); got != 0 {
				t.Errorf("%v before enough is known", got)
			}
			for i := range 100 {
				p.observe(c.costs[i%len(c.costs)], c.bytes)
			}
			if got := p.interval(pass, 64<<20); got < c.want-time.Millisecond || got > c.want+time.Millisecond {
				t.Errorf("the next pass after %v, want %v", got, c.want)
			}
		})
	}
}

// TestSkips: each reason has a name of its own.
func TestSkips(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range Skips() {
		seen[s.String()] = true
	}
	if len(seen) != int(numSkips) || seen[numSkips.String()] {
		t.Errorf("%v", seen)
	}
}
