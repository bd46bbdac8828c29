package nic

import (
	"cmp"
	"slices"
)

// Pair is a path between two ranks: the positions of a port of each.
type Pair struct{ A, B int }

// Rails pairs the ports of two ranks, which are in Select's order. The best path is first. Ports of one
// subnet are on one rail and are paired, at any distance. Ports without a known subnet, or whose subnets
// do not match, are paired by order, and so are all InfiniBand ports of one subnet prefix. Paths that
// share no port come before those that do. Both ranks get the same pairs if both pass the lower rank's
// ports as a.
func Rails(a, b []Port) []Pair {
	var same, other []Pair
	for i := range a {
		for j := range b {
			switch {
			case !connectable(&a[i], &b[j]):
			case sameSubnet(&a[i], &b[j]):
				same = append(same, Pair{i, j})
			default:
				other = append(other, Pair{i, j})
			}
		}
	}
	byOrder := func(p, q Pair) int {
		return cmp.Or(cmp.Compare(p.A+p.B, q.A+q.B), cmp.Compare(max(p.A, p.B), max(q.A, q.B)), cmp.Compare(p.A, q.A))
	}
	slices.SortFunc(same, byOrder)
	slices.SortFunc(other, byOrder)

	var apart, sharing []Pair
	usedA, usedB := map[int]bool{}, map[int]bool{}
	for _, p := range append(same, other...) {
		if usedA[p.A] || usedB[p.B] {
			sharing = append(sharing, p)
			continue
		}
		usedA[p.A], usedB[p.B] = true, true
		apart = append(apart, p)
	}
	return append(apart, sharing...)
}

// connectable reports whether two ports have the same link layer and the same kind of GID.
func connectable(a, b *Port) bool {
	return a.Layer == b.Layer && (a.Layer == InfiniBand || a.Addr.Is4() == b.Addr.Is4())
}

func sameSubnet(a, b *Port) bool {
	if a.Layer == InfiniBand {
		return [8]byte(a.GID[:8]) == [8]byte(b.GID[:8])
	}
	return a.Subnet.IsValid() && a.Subnet == b.Subnet
}
