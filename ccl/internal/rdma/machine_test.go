package rdma

import (
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// TestSchedules: whatever is lost, late or broken, at whichever end, bytes and
// lines arrive once, in order and intact, nothing counted is written again, and
// everything arrives as soon as one path stays up.
func TestSchedules(t *testing.T) {
	n := 12_000
	if testing.Short() {
		n = 1500
	}
	switches, resent := 0, 0
	for seed := range uint64(n) {
		s, err := run(seeded(seed), 200+int(seed%8)*200, false)
		if err != nil {
			s, err = run(seeded(seed), 200+int(seed%8)*200, true)
			if len(s.trace) > 120 {
				s.trace = s.trace[len(s.trace)-120:]
			}
			t.Fatalf("seed %d: %v\n%s\n%v", seed, err, strings.Join(s.trace, "\n"), s)
		}
		switches += s.switches
		resent += s.resent
	}
	t.Logf("%d switches, %d messages sent again", switches, resent)
	if switches < n || resent < n {
		t.Error("the schedules hardly break anything")
	}
}

// TestSchedulesShrink draws its schedules from rapid, which finds short ones.
func TestSchedulesShrink(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := func(n int) int { return rapid.IntRange(0, n-1).Draw(t, "") }
		if s, err := run(draw, rapid.IntRange(0, 200).Draw(t, "steps"), true); err != nil {
			t.Fatalf("%v\n%s\n%v", err, strings.Join(s.trace, "\n"), s)
		}
	})
}
