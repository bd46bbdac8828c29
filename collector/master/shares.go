package master

// A sample that several nodes report, each its part, was made up by none of them alone; one
// that a single node reports may have been. So samples are counted by who reports them, and
// when a table is full the node with most loses first: a node that invents samples crowds out
// only its own.

// shares is the weight of samples by the one node that reports them; several stands for samples
// that more than one reports.
type shares map[int32]int64

// quota is the largest weight that each single node may keep so that all fits into room, and
// that samples of several nodes may keep: these have half of room for themselves, and otherwise
// as much as each node.
func (s shares) quota(room int64) (one, shared int64) {
	fits := func(q int64) bool {
		sum := min(s[several], max(q, room/2))
		for by, w := range s {
			if by != several {
				sum += min(w, q)
			}
		}
		return sum <= room
	}
	lo, hi := int64(0), room+1 // fits(lo), and not hi unless all do
	for hi-lo > 1 {
		if mid := lo + (hi-lo)/2; fits(mid) {
			lo = mid
		} else {
			hi = mid
		}
	}
	return lo, max(lo, room/2)
}

// thin says which of n samples, oldest first, to keep: at most 1/2^halvings of their weight,
// and of each node's share the latest.
func thin(n, halvings int, of func(i int) (by int32, weight int64)) []bool {
	all, room := shares{}, int64(0)
	for i := range n {
		by, w := of(i)
		all[by] += w
		room += w
	}
	room >>= halvings
	one, shared := all.quota(room)
	kept, has := make([]bool, n), shares{}
	for i := n - 1; i >= 0; i-- {
		by, w := of(i)
		most := one
		if by == several {
			most = shared
		}
		if has[by]+w <= most {
			has[by] += w
			kept[i] = true
		}
	}
	return kept
}

// keep removes what is not kept from a slice, in place.
func keep[T any](all []T, kept []bool) []T {
	n := 0
	for i := range all {
		if kept[i] {
			all[n] = all[i]
			n++
		}
	}
	clear(all[n:])
	return all[:n]
}
