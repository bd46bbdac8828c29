package bootstrap

import "testing"

// TestCrowdLeaves: many ranks that leave at once do not cost one that stays its
// connection: it hears of each, and that nobody is lost.
func TestCrowdLeaves(t *testing.T) {
	const n = 400
	controls := mustJoin(t, n)
	last := controls[n-1]
	if err := each(controls[1:n-1], (*Control).Close); err != nil {
		t.Fatal(err)
	}
	ctx := testContext(t)
	for range n - 2 {
		select {
		case e := <-last.Events():
			if e.Kind != Left {
				t.Fatalf("event %d of rank %d: %v", e.Kind, e.Rank, e.Err)
			}
		case <-ctx.Done():
			t.Fatal("not all were seen to leave")
		}
	}
}
