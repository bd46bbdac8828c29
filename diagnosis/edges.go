package diagnosis

import "slices"

// Norm is what is typical of costs of one kind (seconds, seconds per byte:
// larger is worse), and the limit beyond which one of them stands out: by factor,
// by floor, and by four robust standard deviations, whichever is farthest.
// Few costs hold no majority that could tell which of them are good (one bad rank
// of three spoils four of six edges), so of less than a dozen the best third is
// the norm. costs is reordered; none give (0, 0).
func Norm(costs []float64, factor, floor float64) (typical, limit float64) {
	const few = 12
	if len(costs) == 0 {
		return 0, 0
	}
	if len(costs) < few {
		typical = quantile(costs, 0.3)
		return typical, typical + max((factor-1)*typical, floor)
	}
	typical = median(costs)
	return typical, typical + max((factor-1)*typical, floor, 4*deviation(costs, typical))
}

// Edge is a measured entry of a delay matrix: a connection from rank Src to rank
// Dst, and whether it stands out.
type Edge struct {
	Src, Dst int32
	Bad      bool
}

// EdgePattern is one explanation of bad edges: CulpritConnection (Src → Dst),
// CulpritSource (a row: all that Src sends), CulpritDest (a column: all that Dst
// receives) or CulpritNode (all that crosses the border of node Src). With Block
// set, Src and Dst are nodes and not ranks. -1 stands for any.
type EdgePattern struct {
	Kind     CulpritKind
	Block    bool
	Src, Dst int32
	Edges    []int // that it explains, as indices
}

// ExplainEdges says what bad edges have in common, the largest explanation
// first; together the patterns hold every bad edge once. Blocks are looked for
// first, between nodes most of whose ranks cannot reach each other well; then
// rows and columns; what is left is single connections. node is the node of each
// rank, from 0.
func ExplainEdges(edges []Edge, node []int32) []EdgePattern {
	bad := map[cell]int{} // to its index
	var all, slow []cell
	for i, e := range edges {
		c := cell{e.Src, e.Dst}
		all = append(all, c)
		if e.Bad {
			bad[c] = i
			slow = append(slow, c)
		}
	}
	between := func(c cell) cell { return cell{node[c.src], node[c.dst]} }
	type count struct{ all, slow int }
	blocks := map[cell]count{}
	for _, c := range all {
		if b := between(c); b.src != b.dst {
			n := blocks[b]
			n.all++
			if _, ok := bad[c]; ok {
				n.slow++
			}
			blocks[b] = n
		}
	}
	var slowBlocks, allBlocks []cell
	for b, n := range blocks {
		allBlocks = append(allBlocks, b)
		if n.slow >= 2 && 4*n.slow >= 3*n.all {
			slowBlocks = append(slowBlocks, b)
		}
	}
	slices.SortFunc(slowBlocks, cell.compare)
	itself := func(n int32) int32 { return n }
	nodeOf := func(r int32) int32 { return node[r] }
	border, blockBorder := nodeOf, itself
	if len(node) == 0 || slices.Max(node) < 2 { // what crosses the border of one of two nodes crosses that of the other
		none := func(int32) int32 { return -1 }
		border, blockBorder = none, none
	}

	var found []EdgePattern
	for _, p := range patterns(slowBlocks, allBlocks, blockBorder) {
		for _, k := range p.culprits {
			f := edgePattern(k)
			f.Block = f.Kind != CulpritNode
			slow = slices.DeleteFunc(slow, func(c cell) bool {
				hit := f.holds(between(c), itself) && slices.Contains(p.cells, between(c))
				if hit {
					f.Edges = append(f.Edges, bad[c])
				}
				return hit
			})
			found = append(found, f)
		}
	}
	for _, p := range patterns(slow, all, border) {
		for _, k := range p.culprits {
			f := edgePattern(k)
			for _, c := range p.cells {
				if f.holds(c, nodeOf) {
					f.Edges = append(f.Edges, bad[c])
				}
			}
			found = append(found, f)
		}
	}
	return found
}

func (c cell) compare(d cell) int {
	if c.src != d.src {
		return int(c.src) - int(d.src)
	}
	return int(c.dst) - int(d.dst)
}

func edgePattern(k Culprit) EdgePattern {
	f := EdgePattern{Kind: k.Kind, Src: k.Rank, Dst: k.Peer}
	if k.Kind == CulpritDest {
		f.Src, f.Dst = -1, k.Rank
	}
	return f
}

// holds reports whether the pattern speaks of c.
func (p EdgePattern) holds(c cell, nodeOf func(int32) int32) bool {
	if p.Kind == CulpritNode {
		return (nodeOf(c.src) == p.Src) != (nodeOf(c.dst) == p.Src)
	}
	return (p.Src < 0 || p.Src == c.src) && (p.Dst < 0 || p.Dst == c.dst)
}
