package master

// A table of samples is full of what somebody told. What several nodes tell of, each its part, no
// one of them has made up; of what one alone tells nobody knows. So samples are counted by who
// tells of them, and who has most gives way first: one that invents crowds out its own.

// shares counts the weight of samples, by the node that alone tells of them (several: not alone).
type shares map[int32]int64

// quota is the most of the weights of single nodes that fit into room, and of what several tell:
// that has half of room for itself, and as much as each of them.
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

// thin says which of n samples, in the order in which they came, to keep: at most 1/2^halvings
// of their weight, the latest of each node's share.
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
