package diagnosis

import (
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"
)

// TestInParts: every index is in one part.
func TestInParts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 20_000).Draw(t, "n")
		items := rapid.SampledFrom([]int{0, manyItems - 1, manyItems, 1 << 20}).Draw(t, "items")
		visits := make([]atomic.Int32, n)
		inParts(n, items, func(lo, hi int) {
			for i := lo; i < hi; i++ {
				visits[i].Add(1)
			}
		})
		for i := range visits {
			if k := visits[i].Load(); k != 1 {
				t.Fatalf("index %d is in %d parts", i, k)
			}
		}
	})
}
