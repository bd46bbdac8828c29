package agent

import "testing"

// TestSampling: members pick the same collectives, and a stricter one's picks are a subset.
func TestSampling(t *testing.T) {
	a, b := sampling{}, sampling{}
	for range 50_000 {
		a.seen++
	}
	b.seen = 70_000
	a.tune(1, 64)
	b.tune(1, 64)
	if a.zeros == 0 || b.zeros < a.zeros {
		t.Fatalf("zeros %d and %d", a.zeros, b.zeros)
	}
	picked := 0
	for seq := range uint64(50_000) {
		x, y := a.take(10, seq), b.take(10, seq)
		if y && !x {
			t.Fatalf("%d is picked by the stricter one only", seq)
		}
		if x {
			picked++
		}
	}
	if picked < 16 || picked > 128 {
		t.Errorf("%d picked of 50,000, want about 64", picked)
	}
}
