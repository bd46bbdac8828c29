package diagnosis

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/lockstep-ccl/lockstep/record"
)

// TestBlameAgainstClosure compares blame and upstream with the transitive
// closure of random graphs.
func TestBlameAgainstClosure(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 12).Draw(t, "nodes")
		var g waitGraph
		g.reset(n)
		var reach [12][12]bool
		var out [12]bool
		node := rapid.IntRange(0, n-1)
		for range rapid.IntRange(0, 2*n).Draw(t, "edges") {
			from, to := node.Draw(t, "from"), node.Draw(t, "to")
			g.wait(waitEdge{from: int32(from), to: int32(to)})
			if from != to {
				reach[from][to], out[from] = true, true
			}
		}
		for k := range n {
			for i := range n {
				for j := range n {
					reach[i][j] = reach[i][j] || reach[i][k] && reach[k][j]
				}
			}
		}
		starts := rapid.SliceOfNDistinct(rapid.Int32Range(0, int32(n-1)), 1, n, rapid.ID[int32]).Draw(t, "starts")

		var wantEnds []int32
		var wantCircles [][]int32
		inCircle := map[int]bool{}
		for i := range n {
			reached := slices.ContainsFunc(starts, func(s int32) bool { return int(s) == i || reach[s][i] })
			if !reached {
				continue
			}
			if !out[i] {
				wantEnds = append(wantEnds, int32(i))
				continue
			}
			// i is in an innermost circle when everything it reaches reaches it.
			innermost := reach[i][i]
			for j := range n {
				innermost = innermost && (!reach[i][j] || reach[j][i])
			}
			if innermost && !inCircle[i] {
				var circle []int32
				for j := range n {
					if reach[i][j] {
						circle = append(circle, int32(j))
						inCircle[j] = true
					}
				}
				wantCircles = append(wantCircles, circle)
			}
		}
		ends, circles := g.blame(starts)
		slices.SortFunc(circles, slices.Compare[[]int32])
		slices.SortFunc(wantCircles, slices.Compare[[]int32])
		if !slices.Equal(ends, wantEnds) {
			t.Fatalf("ends %v, want %v", ends, wantEnds)
		}
		if !slices.EqualFunc(circles, wantCircles, slices.Equal[[]int32]) {
			t.Fatalf("circles %v, want %v", circles, wantCircles)
		}
		for i := range n {
			var got, want []int32
			g.upstream([]int32{int32(i)}, func(n int32) { got = append(got, n) })
			for j := range n {
				if j != i && reach[j][i] {
					want = append(want, int32(j))
				}
			}
			slices.Sort(got)
			if !slices.Equal(got, want) {
				t.Fatalf("upstream of %d is %v, want %v", i, got, want)
			}
		}
	})
}

func TestQuantile(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := rapid.SliceOfN(rapid.Float64Range(0, 100), 1, 50).Draw(t, "v")
		q := rapid.Float64Range(0, 1).Draw(t, "q")
		sorted := slices.Sorted(slices.Values(v))
		if got, want := quantile(v, q), sorted[int(q*float64(len(v)-1))]; got != want {
			t.Fatalf("quantile %v, want %v", got, want)
		}
	})
}

func TestPatterns(t *testing.T) {
	nodes := func(r int32) int32 { return r / 4 } // four ranks a node
	var all []cell
	for s := range int32(12) {
		for d := range int32(12) {
			if s/4 != d/4 {
				all = append(all, cell{s, d})
			}
		}
	}
	pick := func(in func(cell) bool) (found []cell) {
		for _, c := range all {
			if in(c) {
				found = append(found, c)
			}
		}
		return found
	}
	for _, c := range []struct {
		name string
		slow []cell
		want []Culprit
	}{
		{"cell", []cell{{1, 5}}, []Culprit{{Kind: CulpritConnection, Rank: 1, Peer: 5}}},
		{"row", pick(func(c cell) bool { return c.src == 5 }), []Culprit{{Kind: CulpritSource, Rank: 5, Peer: -1}}},
		{"column", pick(func(c cell) bool { return c.dst == 2 }), []Culprit{{Kind: CulpritDest, Rank: 2, Peer: -1}}},
		{"most of a row", pick(func(c cell) bool { return c.src == 5 && c.dst != 0 }), []Culprit{{Kind: CulpritSource, Rank: 5, Peer: -1}}},
		{"block", pick(func(c cell) bool { return nodes(c.src) == 1 || nodes(c.dst) == 1 }), []Culprit{{Kind: CulpritNode, Rank: 1, Peer: -1}}},
		{"two of one rank's many", []cell{{1, 5}, {1, 6}}, []Culprit{{Kind: CulpritConnection, Rank: 1, Peer: 5}, {Kind: CulpritConnection, Rank: 1, Peer: 6}}},
	} {
		got := patterns(c.slow, all, nodes)
		if len(got) != 1 || !slices.Equal(got[0].culprits, c.want) {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
	var star []cell // rank 0 with four others, each on a node of its own
	for r := range int32(4) {
		star = append(star, cell{0, r + 1}, cell{r + 1, 0})
	}
	alone := func(r int32) int32 { return r }
	if got := patternsBeside([]cell{{0, 4}}, surroundings{beside: []cell{{4, 0}}, all: star}, alone); len(got) != 1 || got[0].culprits[0] != (Culprit{Kind: CulpritConnection, Peer: 4}) {
		t.Errorf("both directions of one pair, all that its node has: %+v", got)
	}
	// One that is told and one that is slow beside it, of all that come to rank 5: of the other for a while, or for long.
	into5 := surroundings{beside: []cell{{2, 5}}, all: []cell{{1, 5}, {2, 5}, {1, 6}, {2, 7}, {8, 7}, {5, 8}, {6, 9}}}
	if got := patternsBeside([]cell{{1, 5}}, into5, nodes); len(got) != 1 || got[0].culprits[0] != (Culprit{Kind: CulpritConnection, Rank: 1, Peer: 5}) {
		t.Errorf("a connection and one that is slow now and then: %+v", got)
	}
	into5.lasting = into5.beside
	if got := patternsBeside([]cell{{1, 5}}, into5, nodes); len(got) != 1 || got[0].culprits[0] != (Culprit{Kind: CulpritDest, Rank: 5, Peer: -1}) {
		t.Errorf("a connection and one that is slow for long: %+v", got)
	}
	// All that comes to node 0 from node 1, of which one is told, and one from node 2: it is node 0.
	into0 := surroundings{beside: []cell{{5, 1}, {6, 2}, {7, 3}, {8, 0}}, all: []cell{{4, 0}, {5, 1}, {6, 2}, {7, 3}, {8, 0}, {0, 4}, {1, 5}, {2, 6}, {3, 7}, {0, 8}, {7, 8}, {8, 7}}}
	if got := patternsBeside([]cell{{4, 0}}, into0, nodes); len(got) != 1 || got[0].culprits[0] != (Culprit{Kind: CulpritNode, Rank: 0, Peer: -1}) || got[0].two[1] != 0 {
		t.Errorf("all that comes to a node from two others: %+v", got)
	}
	two := patterns([]cell{{0, 4}, {8, 7}}, all, nodes)
	if len(two) != 2 {
		t.Errorf("two cells with nothing in common are one pattern: %+v", two)
	}
}

// TestMostNamed: several ranks say of one that it called another operation; it, and one that has
// heard of it, say so of others.
func TestMostNamed(t *testing.T) {
	name := func(from, to int32) naming { return naming{from: from, to: to, comm: 1, why: record.ResultMismatch} }
	for _, c := range []struct {
		told []naming
		odd  int32
		by   int
	}{
		{[]naming{name(1, 0), name(4, 0), name(2, 0), name(0, 3), name(5, 3), name(3, 3)}, 0, 3},
		{[]naming{name(1, 0), name(2, 0), name(0, 3), name(3, 3), name(4, 3), name(5, 3)}, 0, 2},
		{[]naming{name(1, 0), name(0, 1)}, -1, 0},
		{[]naming{name(1, 0), name(2, 0), name(3, 4), name(0, 4)}, -1, 0},
		{[]naming{name(1, 0), name(1, 0)}, -1, 0},
		{[]naming{{from: 1, to: 0, comm: 2, why: record.ResultMismatch}, {from: 2, to: 0, comm: 1, why: record.ResultPeerLost}, name(3, 0)}, -1, 0},
	} {
		if odd, by := mostNamed(c.told, 1); odd != c.odd || len(by) != c.by {
			t.Errorf("%+v: rank %d, named by %v; want %d, by %d", c.told, odd, by, c.odd, c.by)
		}
	}
}

// TestCrowds: who is always short of CPU is not crowded by that; what lasts for some windows does
// not become usual, and who gets more than before is soon expected to.
func TestCrowds(t *testing.T) {
	ev := &Evidence{Ranks: make([]Rank, 2), Nodes: make([]Node, 1)}
	v := &view{ev: ev}
	pass := func(windows int, a, b float32) {
		ev.Ranks[0].Starved, ev.Ranks[1].Throttled = a, b
		for range windows {
			v.crowds.learn(ev)
		}
	}
	pass(crowdFirst-1, 0.15, 0)
	if !v.crowded(0) || v.crowded(1) {
		t.Error("before anything is usual, 15 % is crowded, and nothing is not")
	}
	pass(20, 0.15, 0)
	if v.crowded(0) {
		t.Error("as short of CPU as ever")
	}
	pass(20, 0.15, 0.15)
	if !v.crowded(1) {
		t.Error("what has lasted for 20 windows is usual")
	}
	if pass(40, 0, 0.15); v.crowds.ranks[0] > 0.01 {
		t.Errorf("usual: %v, 40 windows after it was over", v.crowds.ranks[0])
	}
	ev.Ranks[0].Starved = 0.35
	if v.crowds.ranks[0] = 0.35; !v.crowded(0) {
		t.Error("a third of the time is crowded, usual or not")
	}
	ev.Ranks = append(ev.Ranks, Rank{Node: 0})
	if v.crowds.learn(ev); v.crowded(2) {
		t.Error("a rank more")
	}
}
