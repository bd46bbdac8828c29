package diagnosis

import "testing"

// TestStopped has a rank that is found stopped now and then, one that stops for good, and one that
// was stopped once.
func TestStopped(t *testing.T) {
	ev := &Evidence{Ranks: make([]Rank, 3)}
	var c crowds
	for pass := range 200 {
		for r, is := range [...]bool{pass%5 == 0, pass >= 100, pass >= 90 && pass < 105} {
			ev.Ranks[r].Proc = ProcRunning
			if is {
				ev.Ranks[r].Proc = ProcStopped
			}
		}
		c.look(ev)
	}
	if got := c.stopped(0); got < 0.15 || got > 0.25 {
		t.Errorf("stopped in every fifth look: %v", got)
	}
	if a, b := c.stopped(1), c.stopped(2); a != 0 || b != 0 {
		t.Errorf("stopped for good: %v, once: %v; want 0, neither goes on and is stopped again", a, b)
	}
	for range 400 {
		ev.Ranks[0].Proc, ev.Ranks[1].Proc = ProcRunning, ProcRunning
		c.look(ev)
	}
	if len(c.stops) > 0 {
		t.Errorf("%d ranks are remembered that have run for 400 looks", len(c.stops))
	}
}
