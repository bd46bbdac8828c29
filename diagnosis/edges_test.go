package diagnosis_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// plane is a delay matrix of ranks on nodes of per ranks each.
type plane struct {
	ranks, per int
	node       []int32
	edges      []diagnosis.Edge
	cost       []float64
}

func drawPlane(t *rapid.T, minNodes, maxNodes, minPer int) *plane {
	nodes := rapid.IntRange(minNodes, maxNodes).Draw(t, "nodes")
	per := rapid.IntRange(minPer, 4).Draw(t, "per node")
	noise := rapid.Float64Range(0, 0.15).Draw(t, "noise")
	r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
	p := &plane{ranks: nodes * per, per: per}
	for i := range p.ranks {
		p.node = append(p.node, int32(i/per))
	}
	for s := range p.ranks {
		for d := range p.ranks {
			if s != d {
				p.edges = append(p.edges, diagnosis.Edge{Src: int32(s), Dst: int32(d)})
				base := 1.0
				if p.node[s] != p.node[d] {
					base = 10 // another kind
				}
				p.cost = append(p.cost, base*(1+noise*r.Float64()))
			}
		}
	}
	return p
}

// plant makes the edges that in tells three times as slow.
func (p *plane) plant(in func(src, dst int) bool) (n int) {
	for i, e := range p.edges {
		if in(int(e.Src), int(e.Dst)) {
			p.cost[i] *= 3
			n++
		}
	}
	return n
}

func (p *plane) judge() []diagnosis.EdgePattern {
	for _, across := range []bool{false, true} {
		var of []int
		var costs []float64
		for i, e := range p.edges {
			if (p.node[e.Src] != p.node[e.Dst]) == across {
				of, costs = append(of, i), append(costs, p.cost[i])
			}
		}
		_, limit := diagnosis.Norm(costs, 1.5, 0)
		for _, i := range of {
			p.edges[i].Bad = p.cost[i] > limit
		}
	}
	return diagnosis.ExplainEdges(p.edges, p.node)
}

func want(t *rapid.T, got []diagnosis.EdgePattern, edges int, kind diagnosis.CulpritKind, block bool, src, dst int) {
	t.Helper()
	if len(got) != 1 {
		t.Fatalf("want one pattern, got %+v", got)
	}
	g := got[0]
	if g.Kind != kind || g.Block != block || int(g.Src) != src || int(g.Dst) != dst || len(g.Edges) != edges {
		t.Fatalf("want %v (block %v) %d → %d of %d edges, got %+v", kind, block, src, dst, edges, g)
	}
}

func TestEdgesOfNoiseAloneAreGood(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		if got := drawPlane(t, 1, 5, 1).judge(); len(got) != 0 {
			t.Fatalf("patterns in noise: %+v", got)
		}
	})
}

func TestAPlantedEdgeIsNamed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPlane(t, 1, 4, 2)
		at := p.edges[rapid.IntRange(0, len(p.edges)-1).Draw(t, "edge")]
		p.plant(func(s, d int) bool { return s == int(at.Src) && d == int(at.Dst) })
		want(t, p.judge(), 1, diagnosis.CulpritConnection, false, int(at.Src), int(at.Dst))
	})
}

func TestAPlantedRowOrColumnIsNamed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPlane(t, 1, 4, 3) // of fewer ranks a node, a row may as well be a block
		r := rapid.IntRange(0, p.ranks-1).Draw(t, "rank")
		if rapid.Bool().Draw(t, "row") {
			n := p.plant(func(s, _ int) bool { return s == r })
			want(t, p.judge(), n, diagnosis.CulpritSource, false, r, -1)
		} else {
			n := p.plant(func(_, d int) bool { return d == r })
			want(t, p.judge(), n, diagnosis.CulpritDest, false, -1, r)
		}
	})
}

func TestAPlantedBlockIsNamed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPlane(t, 3, 5, 2)
		nodes := p.ranks / p.per
		a := rapid.IntRange(0, nodes-1).Draw(t, "from")
		b := (a + rapid.IntRange(1, nodes-1).Draw(t, "by")) % nodes
		n := p.plant(func(s, d int) bool { return s/p.per == a && d/p.per == b })
		want(t, p.judge(), n, diagnosis.CulpritConnection, true, a, b)
	})
}

func TestAPlantedNodeIsNamed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPlane(t, 5, 6, 1) // of fewer, most borders are bad
		bad := rapid.IntRange(0, p.ranks/p.per-1).Draw(t, "node")
		n := p.plant(func(s, d int) bool { return (s/p.per == bad) != (d/p.per == bad) })
		want(t, p.judge(), n, diagnosis.CulpritNode, false, bad, -1)
	})
}

func TestTwoNodesAreNotToldApart(t *testing.T) {
	got := diagnosis.ExplainEdges([]diagnosis.Edge{{Src: 0, Dst: 1, Bad: true}, {Src: 1, Dst: 0, Bad: true}}, []int32{0, 1})
	if len(got) != 2 || got[0].Kind != diagnosis.CulpritConnection || got[1].Kind != diagnosis.CulpritConnection {
		t.Errorf("%+v", got)
	}
}

func TestOneBadRankOfThree(t *testing.T) {
	typical, limit := diagnosis.Norm([]float64{9, 9, 1, 9, 1.1, 9}, 1.5, 0)
	if typical > 1.1 || limit > 2 {
		t.Errorf("typical %v, limit %v: the bad majority became the norm", typical, limit)
	}
}

func TestEveryBadEdgeIsExplainedOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPlane(t, 1, 4, 1)
		var bad []int
		for i := range p.edges {
			if p.edges[i].Bad = rapid.IntRange(0, 3).Draw(t, "bad") == 0; p.edges[i].Bad {
				bad = append(bad, i)
			}
		}
		var named []int
		for _, f := range diagnosis.ExplainEdges(p.edges, p.node) {
			named = append(named, f.Edges...)
		}
		slices.Sort(named)
		if !slices.Equal(named, bad) {
			t.Fatalf("bad %v, explained %v", bad, named)
		}
	})
}
