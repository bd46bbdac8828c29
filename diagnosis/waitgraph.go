package diagnosis

// waitGraph says who waits for whom. Its first nodes are the job's world ranks;
// further nodes stand for operations that miss members (so that n waiters and k
// missing members cost n+k edges, not n·k) and for stalled connections. A node
// without an outgoing edge waits for nobody: blame ends there.
//
// Waiting is conjunctive (a rank proceeds when everything it waits for has
// moved), so blame spreads over every edge, and a circle is a deadlock.
type waitGraph struct {
	out, in []int32 // per node: index of its newest edge, -1 when none
	edges   []waitEdge
	seen    []uint8
	queue   []int32
	order   []int32 // Tarjan's scratch
	low     []int32
	path    []int32
	calls   []call
}

type waitEdge struct {
	from, to        int32
	nextOut, nextIn int32
	comm            int32 // index of the communicator that makes from wait, -1 when none
	conn            bool  // seen at a connection rather than by who entered
	holds           int32 // 1 + a connection that may hold what from waits for, 0 when none does
	since           int64 // from has waited at least since then, 0 when not known
}

type call struct{ node, edge int32 }

const (
	reachable = 1 << iota // from a starting point of blame
	explained             // reaches a node that waits for nobody
	counted               // scratch of upstream
)

func (g *waitGraph) reset(ranks int) {
	g.out, g.in, g.seen = g.out[:0], g.in[:0], g.seen[:0]
	g.edges = g.edges[:0]
	for range ranks {
		g.node()
	}
}

func (g *waitGraph) node() int32 {
	g.out, g.in, g.seen = append(g.out, -1), append(g.in, -1), append(g.seen, 0)
	return int32(len(g.out) - 1)
}

func (g *waitGraph) wait(e waitEdge) {
	if e.from == e.to {
		return
	}
	i := int32(len(g.edges))
	e.nextOut, e.nextIn = g.out[e.from], g.in[e.to]
	g.out[e.from], g.in[e.to] = i, i
	g.edges = append(g.edges, e)
}

// blame follows every wait from the starting nodes. It returns, each in
// ascending order, the nodes reached that wait for nobody, and the circles that
// no such node explains (the innermost ones only: what waits for a circle is
// its victim).
func (g *waitGraph) blame(starts []int32) (ends []int32, circles [][]int32) {
	g.queue = g.queue[:0]
	for _, s := range starts {
		g.mark(s, reachable)
	}
	for i := 0; i < len(g.queue); i++ {
		for e := g.out[g.queue[i]]; e >= 0; e = g.edges[e].nextOut {
			g.mark(g.edges[e].to, reachable)
		}
	}
	reached := len(g.queue)
	for n := range g.out {
		if g.seen[n]&reachable != 0 && g.out[n] < 0 {
			ends = append(ends, int32(n))
		}
	}
	g.queue = g.queue[:0]
	for _, n := range ends {
		g.mark(n, explained)
	}
	for i := 0; i < len(g.queue); i++ {
		for e := g.in[g.queue[i]]; e >= 0; e = g.edges[e].nextIn {
			if from := g.edges[e].from; g.seen[from]&reachable != 0 {
				g.mark(from, explained)
			}
		}
	}
	if len(g.queue) < reached {
		circles = g.circles()
	}
	return ends, circles
}

func (g *waitGraph) mark(n int32, bit uint8) {
	if g.seen[n]&bit == 0 {
		g.seen[n] |= bit
		g.queue = append(g.queue, n)
	}
}

// upstream calls visit for every node that waits, directly or not, for one of
// the given nodes.
func (g *waitGraph) upstream(of []int32, visit func(node int32)) {
	g.queue = g.queue[:0]
	for _, n := range of {
		g.mark(n, counted)
	}
	for i := 0; i < len(g.queue); i++ {
		if i >= len(of) {
			visit(g.queue[i])
		}
		for e := g.in[g.queue[i]]; e >= 0; e = g.edges[e].nextIn {
			g.mark(g.edges[e].from, counted)
		}
	}
	for _, n := range g.queue {
		g.seen[n] &^= counted
	}
}

// circles returns the strongly connected components of the reached but
// unexplained nodes that no edge leaves (Tarjan, iterative).
func (g *waitGraph) circles() [][]int32 {
	n := len(g.out)
	g.order, g.low = zeroed(g.order, n), zeroed(g.low, n)
	g.path, g.calls = g.path[:0], g.calls[:0]
	component := make([]int32, n) // 1 + index into found, 0 while open
	var found [][]int32
	next := int32(0)
	open := func(v int32) {
		next++
		g.order[v], g.low[v] = next, next
		g.path = append(g.path, v)
		g.calls = append(g.calls, call{v, g.out[v]})
	}
	for root := range n {
		if g.seen[root]&(reachable|explained) != reachable || g.order[root] != 0 {
			continue
		}
		for open(int32(root)); len(g.calls) > 0; {
			c := &g.calls[len(g.calls)-1]
			if c.edge >= 0 {
				w := g.edges[c.edge].to
				c.edge = g.edges[c.edge].nextOut
				if g.order[w] == 0 {
					open(w)
				} else if component[w] == 0 {
					g.low[c.node] = min(g.low[c.node], g.order[w])
				}
				continue
			}
			v := c.node
			g.calls = g.calls[:len(g.calls)-1]
			if len(g.calls) > 0 {
				parent := g.calls[len(g.calls)-1].node
				g.low[parent] = min(g.low[parent], g.low[v])
			}
			if g.low[v] != g.order[v] {
				continue
			}
			var scc []int32
			for {
				w := g.path[len(g.path)-1]
				g.path = g.path[:len(g.path)-1]
				component[w] = int32(len(found) + 1)
				scc = append(scc, w)
				if w == v {
					break
				}
			}
			found = append(found, scc)
		}
	}
	var innermost [][]int32
	for i, scc := range found {
		leaves := false
		for _, v := range scc {
			for e := g.out[v]; e >= 0; e = g.edges[e].nextOut {
				leaves = leaves || component[g.edges[e].to] != int32(i+1)
			}
		}
		if !leaves {
			sortInt32(scc)
			innermost = append(innermost, scc)
		}
	}
	return innermost
}
