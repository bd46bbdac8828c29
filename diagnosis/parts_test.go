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

// TestShares: every communicator is in one share, in order, and the shares of many members are about as large.
func TestShares(t *testing.T) {
	members := make([]Member, 300)
	rapid.Check(t, func(t *rapid.T) {
		sizes := rapid.SliceOfN(rapid.IntRange(0, 300), 0, 2000).Draw(t, "sizes")
		if rapid.Bool().Draw(t, "many") {
			for range 400 {
				sizes = append(sizes, 300)
			}
		}
		ev, all := &Evidence{}, 0
		for _, n := range sizes {
			ev.Comms = append(ev.Comms, Comm{Members: members[:n]})
			all += n
		}
		of := shares(nil, ev)
		at, most := 0, 0
		for _, x := range of {
			if x.lo != at || x.hi < x.lo {
				t.Fatalf("a share of %d to %d after %d", x.lo, x.hi, at)
			}
			n := 0
			for ci := x.lo; ci < x.hi; ci++ {
				n += sizes[ci]
			}
			at, most = x.hi, max(most, n)
		}
		if at != len(sizes) {
			t.Fatalf("shares end at %d of %d", at, len(sizes))
		}
		if all >= manyItems && most > all/mostShares+600 {
			t.Errorf("a share of %d of %d members", most, all)
		}
		seen := make([]atomic.Int32, len(sizes))
		inShares(of, func(_, lo, hi int) {
			for ci := lo; ci < hi; ci++ {
				seen[ci].Add(1)
			}
		})
		for ci := range seen {
			if seen[ci].Load() != 1 {
				t.Errorf("communicator %d is in %d shares", ci, seen[ci].Load())
			}
		}
	})
}
