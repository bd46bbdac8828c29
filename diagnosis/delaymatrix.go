package diagnosis

import (
	"math"
	"slices"
)

// byTransport has an entry for each value that a transport may have: evidence of another build's
// agents names some that this one does not know.
type byTransport[T any] [math.MaxUint8 + 1]T

// delay is a connection's entry in the delay matrix: ns from post to
// completion, or per megabyte where the transport tells only its rate; 0 when
// nothing is known.
func delay(c *Conn) float64 {
	switch {
	case c.LatencyNs > 0 && !math.IsInf(c.LatencyNs, 0):
		return c.LatencyNs
	case c.BytesPerSec > 0 && !math.IsInf(c.BytesPerSec, 0):
		return 1e15 / c.BytesPerSec
	}
	return 0
}

// DelayRatios returns a communicator's delay matrix as ratios to the median of
// the connections of the same transport: 1 is normal. It is row-major by source
// and has len(Members)² entries, NaN where there is no connection or nothing is
// known of it; of several connections of a pair the slowest counts. comm is an
// index into ev.Comms; dst is reused when it is large enough.
func DelayRatios(ev *Evidence, comm int, dst []float32) []float32 {
	n := len(ev.Comms[comm].Members)
	dst = zeroed(dst, n*n)
	for i := range dst {
		dst[i] = float32(math.NaN())
	}
	var norm byTransport[float64]
	var kind byTransport[[]float64]
	for i := range ev.Conns {
		if c := &ev.Conns[i]; int(c.Comm) == comm && delay(c) > 0 {
			kind[c.Transport] = append(kind[c.Transport], delay(c))
		}
	}
	for t := range kind {
		norm[t] = median(kind[t])
	}
	for i := range ev.Conns {
		c := &ev.Conns[i]
		d := delay(c)
		if int(c.Comm) != comm || d == 0 || c.Src < 0 || c.Dst < 0 || int(c.Src) >= n || int(c.Dst) >= n {
			continue
		}
		at := &dst[int(c.Src)*n+int(c.Dst)]
		if r := float32(d / norm[c.Transport]); !(*at >= r) {
			*at = r
		}
	}
	return dst
}

// cell is one slow or stalled entry of the job's delay matrix, world ranks.
type cell struct{ src, dst int32 }

// rowOrColumn names cells by what they have in common: all of one source, all
// of one destination, else the connections themselves.
func rowOrColumn(cells []cell) []Culprit {
	row, column := len(cells) > 1, len(cells) > 1
	distinct := false
	for _, c := range cells {
		row, column = row && c.src == cells[0].src, column && c.dst == cells[0].dst
		distinct = distinct || c != cells[0]
	}
	switch {
	case distinct && row:
		return []Culprit{{Kind: CulpritSource, Rank: cells[0].src, Peer: -1}}
	case distinct && column:
		return []Culprit{{Kind: CulpritDest, Rank: cells[0].dst, Peer: -1}}
	}
	var connections []Culprit
	for _, c := range cells {
		k := Culprit{Kind: CulpritConnection, Rank: c.src, Peer: c.dst}
		if !slices.Contains(connections, k) {
			connections = append(connections, k)
		}
	}
	return connections
}

// pattern is a set of slow cells with one explanation.
type pattern struct {
	culprits []Culprit
	cells    []cell
	two      [2]int32 // nodes, when all between them is slow and which of them cannot be told
}

// patterns explains slow cells, the largest explanation first: a row or column
// when most of what a rank sends or receives is slow, a block when most of what
// crosses a node's border is; the rest by connections, those with an end in
// common together. all are the cells with traffic, nodeOf maps ranks to nodes.
func patterns(slow, all []cell, nodeOf func(int32) int32) []pattern {
	return patternsBeside(slow, surroundings{all: all}, nodeOf)
}

// surroundings are cells around slow ones. Nothing is told of them by themselves.
type surroundings struct {
	beside  []cell // slow too, less surely: they count for a block
	lasting []cell // of these the ones that are so for long: they count for a row or a column as well
	all     []cell // with traffic
}

// patternsBeside is patterns where some further cells are slow too.
func patternsBeside(slow []cell, around surroundings, nodeOf func(int32) int32) []pattern {
	were := slow
	slow = slices.Clone(slow)
	var found []pattern
	for len(slow) > 0 && len(slow)+len(around.beside) > 1 {
		best, k := explain(slow, around, nodeOf)
		if k == nil {
			break
		}
		p := pattern{culprits: []Culprit{*k}}
		slow = slices.DeleteFunc(slow, func(c cell) bool {
			if best(c) {
				p.cells = append(p.cells, c)
				return true
			}
			return false
		})
		if k.Kind == CulpritNode {
			within := slices.Clone(p.cells)
			for _, c := range around.beside {
				if best(c) {
					within = append(within, c)
				}
			}
			p.whichOfTwo(k.Rank, within, func(c cell) bool { return slices.Contains(were, c) || slices.Contains(around.beside, c) }, around.all, nodeOf)
		}
		found = append(found, p)
	}
	for len(slow) > 0 {
		together := []cell{slow[0]}
		slow = slow[1:]
		for grown := true; grown; {
			grown = false
			slow = slices.DeleteFunc(slow, func(c cell) bool {
				joins := slices.ContainsFunc(together, func(t cell) bool {
					return t.src == c.src || t.dst == c.dst || t.src == c.dst || t.dst == c.src
				})
				if joins {
					together, grown = append(together, c), true
				}
				return joins
			})
		}
		p := pattern{cells: together}
		for _, c := range together {
			p.culprits = append(p.culprits, Culprit{Kind: CulpritConnection, Rank: c.src, Peer: c.dst})
		}
		found = append(found, p)
	}
	return found
}

// whichOfTwo judges a node whose slow connections (within, not all of which are told) all lead to one other
// node, by what both have with others: the one whose other connections are slow as well, or that has none. When neither
// is, whatever is wrong with one of them, or with what is between them, looks the same, and the
// pattern names its connections in place of a node.
func (p *pattern) whichOfTwo(node int32, within []cell, isSlow func(cell) bool, all []cell, nodeOf func(int32) int32) {
	other := int32(-1)
	for _, c := range within {
		a, b := nodeOf(c.src), nodeOf(c.dst)
		if a != node {
			a, b = b, a
		}
		if a != node || b == node || other >= 0 && b != other {
			return
		}
		other = b
	}
	if other < 0 {
		return
	}
	type share struct{ hit, total float64 }
	slowOf := func(n, but int32) share {
		s := share{0.5, 1} // of one without others nothing is known
		for _, c := range all {
			a, b := nodeOf(c.src), nodeOf(c.dst)
			if a == b || a != n && b != n || a == but || b == but {
				continue
			}
			if s.total++; isSlow(c) {
				s.hit++
			}
		}
		return s
	}
	one, two := slowOf(node, other), slowOf(other, node)
	// One connection of many that is slower than usual is so by chance.
	const clearly, many = 1.5, 0.25
	clear := func(a, b share) bool {
		return a.hit/a.total >= clearly*b.hit/b.total && (a.total == 1 || b.total == 1 || a.hit-b.hit >= many*a.total)
	}
	switch {
	case clear(one, two):
	case clear(two, one):
		p.culprits[0].Rank = other
	default:
		p.two = [2]int32{min(node, other), max(node, other)}
		p.culprits = p.culprits[:0]
		for _, c := range p.cells {
			p.culprits = append(p.culprits, Culprit{Kind: CulpritConnection, Rank: c.src, Peer: c.dst})
		}
	}
}

// explain returns the row, column or block that covers most slow cells; nil
// when none covers two of them and most of its own traffic.
func explain(slow []cell, around surroundings, nodeOf func(int32) int32) (func(cell) bool, *Culprit) {
	best := cover{slow: slow, surroundings: around}
	ranks := make([]int32, 0, 2*len(slow))
	for _, c := range slow {
		ranks = append(ranks, c.src, c.dst)
	}
	slices.Sort(ranks)
	ranks = slices.Compact(ranks)
	for _, r := range ranks {
		best.consider(Culprit{Kind: CulpritSource, Rank: r, Peer: -1}, func(c cell) bool { return c.src == r })
		best.consider(Culprit{Kind: CulpritDest, Rank: r, Peer: -1}, func(c cell) bool { return c.dst == r })
	}
	known := append(slices.Clone(slow), around.beside...)
	var nodes []int32
	for _, r := range ranks {
		if n := nodeOf(r); n >= 0 {
			nodes = append(nodes, n)
		}
	}
	slices.Sort(nodes)
	for _, n := range slices.Compact(nodes) {
		node := Culprit{Kind: CulpritNode, Rank: n, Peer: -1}
		out := func(c cell) bool { return nodeOf(c.src) == n && nodeOf(c.dst) != n }
		in := func(c cell) bool { return nodeOf(c.src) != n && nodeOf(c.dst) == n }
		best.consider(node, func(c cell) bool { return out(c) || in(c) })
		// One side of a node is a rank's where it is of one rank.
		if several(known, out, func(c cell) int32 { return c.src }) {
			best.consider(node, out)
		}
		if several(known, in, func(c cell) int32 { return c.dst }) {
			best.consider(node, in)
		}
	}
	if best.weight == 0 {
		return nil, nil
	}
	return best.in, &best.k
}

// cover finds the row, column or block that covers most slow cells.
type cover struct {
	slow []cell
	surroundings

	in     func(cell) bool // of the best
	k      Culprit
	weight float64 // 0 while there is none
}

// consider takes in, which is k's, for the best when it covers more.
func (best *cover) consider(k Culprit, in func(cell) bool) {
	hit, total := 0, 0
	var one cell // the first of them
	pairs := false
	count := func(c cell) {
		if hit == 0 {
			one = c
		}
		pairs = pairs || c != one && c != cell{one.dst, one.src}
		hit++
	}
	for _, c := range best.slow {
		if in(c) {
			count(c)
		}
	}
	further := best.lasting
	if k.Kind == CulpritNode {
		further = best.beside
	}
	if hit > 0 {
		for _, c := range further {
			if in(c) {
				count(c)
			}
		}
	}
	if !pairs { // both directions of one pair are a connection's: what is late one way is acknowledged late the other
		return
	}
	if hit < 2 || float64(hit) <= best.weight { // before a look at all, which may be many
		return
	}
	for _, c := range best.all {
		if in(c) {
			total++
		}
	}
	// Of two that cover as much, the one of which less is sound.
	weight := float64(hit)
	if len(best.beside) > 0 {
		weight *= weight / float64(max(total, hit))
	}
	// A rank has few connections, of which one may carry too little to show it; a node has many.
	most := 4*hit >= 3*total || k.Kind != CulpritNode && 3*hit >= 2*total
	if most && weight > best.weight {
		best.in, best.k, best.weight = in, k, weight
	}
}

// several reports whether the cells of one side have different ends.
func several(cells []cell, side func(cell) bool, end func(cell) int32) bool {
	first := int32(-1)
	return slices.ContainsFunc(cells, func(c cell) bool {
		if !side(c) {
			return false
		}
		if first < 0 {
			first = end(c)
		}
		return end(c) != first
	})
}
