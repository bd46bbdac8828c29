package jobsim

import (
	"maps"
	"slices"
	"time"
)

// This file says what is right of a slow network between nodes.

// outside makes the fault of all connections of a rank or its node that cross nodes.
func (m *maker) outside(kind FaultKind, t Truth, extra time.Duration) bool {
	a, b, ok := m.pair(true)
	if !ok {
		return false
	}
	if kind == ReceiveSlow {
		a = b
	}
	node := m.node(a)
	f := m.slowness(m.share(), func(x, y int32) bool {
		return m.node(int(x)) != m.node(int(y)) && (m.node(int(x)) == node || m.node(int(y)) == node)
	})
	if f == 0 {
		return false
	}
	if extra > 0 {
		f = 1
	}
	j := m.wired()
	m.dearest = 0
	for _, c := range j.comms {
		for i := range c.edges {
			if e := &c.edges[i]; m.crosses(kind, a, c.members[e.src].World, c.members[e.dst].World) {
				m.dearest = max(m.dearest, m.costs(c.slot, f))
			}
		}
	}
	t.Between = m.betweenTwo(kind, a, f, extra)
	switch kind {
	case NodeSlow:
		t.Nodes = []int32{node}
		for _, p := range t.Between { // of two nodes both are right for the links between them
			t.Nodes = append(t.Nodes, p[0], p[1])
		}
	case SwitchSlow:
		t.Between = nil
		for r := range j.ranks {
			for p := range m.c.Cluster.Ports {
				if j.leaf(int32(r), uint8(p)) == j.leaf(int32(a), 0) {
					t.Touches = append(t.Touches, int32(r))
					if n := j.ranks[r].node; len(t.Nodes) == 0 || t.Nodes[len(t.Nodes)-1] != n {
						t.Nodes = append(t.Nodes, n)
					}
				}
			}
		}
		t.Ranks = t.Touches
		if len(t.Nodes) == m.nodes() {
			return false // all of them: nobody's
		}
	default:
		if !m.c.Cluster.GPU {
			t.Nodes = []int32{node} // its one card
		}
		out, in := map[int32]bool{}, map[int32]bool{}
		for _, c := range j.comms {
			for i := range c.edges {
				e := &c.edges[i]
				x, y := c.members[e.src].World, c.members[e.dst].World
				if j.ranks[x].node == j.ranks[y].node || !m.felt(c.slot, f, extra) {
					continue
				}
				if j.nic(x) == j.nic(int32(a)) {
					out[y] = true
					t.Sources = append(t.Sources, x)
				}
				if j.nic(y) == j.nic(int32(a)) {
					in[x] = true
					t.Dests = append(t.Dests, y)
				}
			}
		}
		// One cell of the matrix is all that there is of a row or a column with one connection.
		if kind == SendSlow {
			t.Dests = nil
			if len(out) == 1 {
				for y := range out {
					t.Pairs = append(t.Pairs, [2]int32{int32(a), y})
				}
			}
		}
		if kind == ReceiveSlow {
			t.Sources = nil
			if len(in) == 1 {
				for x := range in {
					t.Pairs = append(t.Pairs, [2]int32{x, int32(a)})
				}
			}
		}
	}
	t.Classes = commSlow
	return m.slow(Fault{Kind: kind, Rank: a, Factor: f, Extra: extra}, t)
}

// crosses reports whether a fault at a rank's card or node is on the way from one rank to another.
func (m *maker) crosses(kind FaultKind, a int, x, y int32) bool {
	j, at := m.wired(), int32(a)
	switch {
	case j.ranks[x].node == j.ranks[y].node:
		return false
	case kind == SendSlow:
		return j.nic(x) == j.nic(at)
	case kind == ReceiveSlow:
		return j.nic(y) == j.nic(at)
	}
	return j.ranks[x].node == j.ranks[at].node || j.ranks[y].node == j.ranks[at].node
}

// costs is what a slower slot costs a step, ns.
func (m *maker) costs(s slot, f float64) float64 { return float64(m.slotTime(s)) * (f - 1) }

// felt reports whether a slower slot costs enough of a step to be told: a tenth, or, where none does by
// itself, nearly as much as the one that costs most.
func (m *maker) felt(s slot, f float64, extra time.Duration) bool {
	return extra > 0 || m.costs(s, f) >= min(0.1*float64(m.s.Step), 0.75*m.dearest)
}

// betweenTwo is the pair of nodes, in both orders where that applies, that all
// connections of a fault at a rank's node lie between; nil when there are more nodes:
// then, and only then, the node can be told from the link.
func (m *maker) betweenTwo(kind FaultKind, a int, f float64, extra time.Duration) (between [][2]int32) {
	j := m.wired()
	node := m.node(a)
	others := map[int32]bool{}
	for _, c := range j.comms {
		for i := range c.edges {
			e := &c.edges[i]
			x, y := c.members[e.src].World, c.members[e.dst].World
			nx, ny := j.ranks[x].node, j.ranks[y].node
			if nx == ny || !m.felt(c.slot, f, extra) {
				continue
			}
			if kind != ReceiveSlow && nx == node && (kind == NodeSlow || j.nic(x) == j.nic(int32(a))) {
				others[ny] = true
			}
			if kind != SendSlow && ny == node && (kind == NodeSlow || j.nic(y) == j.nic(int32(a))) {
				others[nx] = true
			}
		}
	}
	if len(others) != 1 || m.c.Cluster.GPU && kind != NodeSlow { // a GPU's card is told apart by its rail
		return nil
	}
	for o := range others {
		if kind != ReceiveSlow {
			between = append(between, [2]int32{node, o})
		}
		if kind != SendSlow {
			between = append(between, [2]int32{o, node})
		}
	}
	return between
}

// allOf adds the ranks of which all that they send to other nodes or take from there is slow, and the
// nodes of which all that crosses their border is: that looks the same whatever slows it.
func (m *maker) allOf(t *Truth, slow func(src, dst int32) bool) {
	j := m.wired()
	type share struct{ slow, all map[[2]int32]bool }
	sent, taken, nodes := map[int32]share{}, map[int32]share{}, map[int32]share{}
	count := func(of map[int32]share, k int32, at [2]int32) {
		if of[k].all == nil {
			of[k] = share{map[[2]int32]bool{}, map[[2]int32]bool{}}
		}
		if of[k].all[at] = true; slow(at[0], at[1]) {
			of[k].slow[at] = true
		}
	}
	for _, c := range j.comms {
		for i := range c.edges {
			e := &c.edges[i]
			x, y := c.members[e.src].World, c.members[e.dst].World
			if !e.told || j.ranks[x].node == j.ranks[y].node {
				continue
			}
			at := [2]int32{x, y}
			count(sent, x, at)
			count(taken, y, at)
			count(nodes, j.ranks[x].node, at)
			count(nodes, j.ranks[y].node, at)
		}
	}
	add := func(to *[]int32, of map[int32]share) {
		for _, k := range slices.Sorted(maps.Keys(of)) {
			if n := len(of[k].slow); n > 1 && n == len(of[k].all) {
				*to = append(*to, k)
			}
		}
	}
	add(&t.Sources, sent)
	add(&t.Dests, taken)
	add(&t.Nodes, nodes)
}
