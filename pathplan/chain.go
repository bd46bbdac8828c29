package pathplan

import "slices"

// Evening out is edge colouring: leaves' two sides (up, down) are the vertices of a
// bipartite graph, lanes its edges, spines the colours, and a plan is even when each vertex
// has each colour as often (Kőnig, de Werra: there is such a colouring whenever all links
// are there). A lane that leaves spine a for b at an uplink that a fills too much may fill b
// too much at the downlink of its other end; then another lane there leaves b for a, and so
// on: an alternating chain. It ends where there is room. Loads and rates may differ: no step
// makes the fuller of the two links at a vertex fuller than it was.

// maxChain bounds how many links one search looks at.
const maxChain = 4096

// step is a lane that takes another path, and the step that made it necessary.
type step struct {
	lane       *lane
	up, down   int32
	full, left int32 // where it arrives: the link that it fills, and the one that it leaves
	before     int32 // index of the step before, or none
	depth      int
}

// chainSearch is the memory of searches, kept so that they need none.
type chainSearch struct {
	steps []step
	undo  []place
	seen  []uint64 // by link: the search that has come by
	pass  uint64
	lanes []*lane
	list  []int32
}

// mover says which lanes may be moved, and is told which were.
type mover interface {
	// movable: may this lane move in a chain of so many others before it?
	movable(l *lane, before int) bool
	// order puts lanes that should move rather than others first.
	order(lanes []*lane)
	// moving is told before a lane leaves its path.
	moving(l *lane)
}

// far is the other link of a lane on a link.
func (l *lane) far(up bool) int32 {
	if up {
		return l.down
	}
	return l.up
}

// relieve takes a lane's worth off link a in favour of link b of the same vertex, by the
// shortest chain there is. It reports whether there was one.
func (p *Planner) relieve(a, b int32, gain float64, m mover) bool {
	s := &p.chain
	if len(s.seen) != len(p.links) {
		s.seen = make([]uint64, len(p.links))
	}
	s.pass++
	s.steps = s.steps[:0]
	la, lb := &p.links[a], &p.links[b]
	limit := la.load() - gain
	s.seen[a] = s.pass
	for _, l := range p.candidates(a, m, 0) {
		if lb.with(l.load) > limit || la.with(-l.load) > limit {
			continue
		}
		if p.extend(l, a, b, none, m) {
			return p.apply(int32(len(s.steps)-1), m)
		}
	}
	for i := int32(0); int(i) < min(len(s.steps), maxChain); i++ {
		if p.follow(i, m) {
			return p.apply(int32(len(s.steps)-1), m)
		}
	}
	return false
}

// candidates are the lanes of a link that may move, those first that should.
func (p *Planner) candidates(id int32, m mover, before int) []*lane {
	s := &p.chain
	s.lanes = s.lanes[:0]
	for _, l := range p.links[id].lanes {
		if m.movable(l, before) {
			s.lanes = append(s.lanes, l)
		}
	}
	m.order(s.lanes)
	return s.lanes
}

// extend adds the step of lane l from link x to link y of one vertex. It reports whether
// the chain ends with it.
func (p *Planner) extend(l *lane, x, y int32, before int32, m mover) bool {
	s := &p.chain
	up := p.links[x].up
	from := l.far(up)
	to := from // parallel links between the same switches: the other end stays
	if p.links[x].spine != p.links[y].spine {
		to = p.partner(l, up, p.links[y].spine)
	}
	if to == none || p.links[to].class > well || p.links[y].class > well {
		return false
	}
	st := step{lane: l, before: before, up: y, down: to, full: to, left: from}
	if before != none {
		st.depth = s.steps[before].depth + 1
	}
	if !up {
		st.up, st.down = to, y
	}
	if p.shuns(l, st.up) || !p.opt.Steered && !p.steers(p.table(l.conn, l.side), l, st.up, st.down) {
		return false
	}
	if to == from {
		s.steps = append(s.steps, st)
		return true
	}
	f, t := &p.links[from], &p.links[to]
	if t.with(l.load) <= max(f.load(), t.load()) {
		s.steps = append(s.steps, st)
		return true
	}
	if s.seen[to] != s.pass {
		s.seen[to] = s.pass
		s.steps = append(s.steps, st)
	}
	return false
}

// partner is the link of a lane's other vertex to a spine.
func (p *Planner) partner(l *lane, up bool, spine int32) int32 {
	from, to := p.ends(l)
	if up {
		return p.best(p.downlinks(to)[spine])
	}
	return p.best(p.uplinks(from)[spine])
}

// follow makes room for a step where its lane arrives: another lane there goes the other
// way.
func (p *Planner) follow(i int32, m mover) bool {
	st := p.chain.steps[i]
	full, left := st.full, st.left
	f, r := &p.links[full], &p.links[left]
	limit := max(f.load(), r.load())
	for _, l := range p.candidates(full, m, st.depth+1) {
		if f.with(st.lane.load-l.load) > limit || r.with(l.load-st.lane.load) > limit || p.inChain(i, l) {
			continue
		}
		if p.extend(l, full, left, i, m) {
			return true
		}
	}
	return false
}

func (p *Planner) inChain(i int32, l *lane) bool {
	for ; i != none; i = p.chain.steps[i].before {
		if p.chain.steps[i].lane == l {
			return true
		}
	}
	return false
}

// place is where a lane was.
type place struct {
	lane     *lane
	up, down int32
	port     uint16
}

// apply moves the lanes of a chain, the last first: it goes where there is room, and makes
// room for the one before. Where two lanes of a chain want the same source port, nothing
// moves.
func (p *Planner) apply(last int32, m mover) bool {
	undo := p.chain.undo[:0]
	for i := last; i != none; i = p.chain.steps[i].before {
		st := &p.chain.steps[i]
		l := st.lane
		m.moving(l)
		undo = append(undo, place{l, l.up, l.down, l.port})
		p.lift(l)
		if !p.put(l, st.up, st.down) {
			for _, was := range slices.Backward(undo) {
				p.lift(was.lane)
				p.takePort(was.lane, was.port)
				p.place(was.lane, was.up, was.down)
			}
			return false
		}
	}
	p.chain.undo = undo
	return true
}

// vertex is a leaf's uplinks (even) or downlinks (odd): leaf*2, leaf*2+1.
type vertex int32

// linksOf lists a vertex's links that are not dead.
func (p *Planner) linksOf(v vertex, into []int32) []int32 {
	firsts := p.uplinks(int32(v / 2))
	if v%2 == 1 {
		firsts = p.downlinks(int32(v / 2))
	}
	into = into[:0]
	for _, first := range firsts {
		for id := first; id != none; id = p.links[id].next {
			if p.links[id].class != dead {
				into = append(into, id)
			}
		}
	}
	return into
}

// even evens out the links of one vertex, fullest first, and reports whether it changed
// anything.
func (p *Planner) even(v vertex, gain float64, m mover) (changed bool) {
	list := p.linksOf(v, p.chain.list)
	p.chain.list = list
	byLoad := func(a, b int32) int {
		switch x, y := p.links[a].load(), p.links[b].load(); {
		case x > y:
			return -1
		case x < y:
			return 1
		}
		return int(a - b)
	}
	tries := 4 * len(list)
	for again := true; again && tries > 0; {
		again = false
		slices.SortFunc(list, byLoad)
	search:
		for _, a := range list {
			for _, b := range slices.Backward(list) {
				if p.links[a].load()-p.links[b].load() <= gain {
					break
				}
				if p.relieve(a, b, gain, m) {
					changed, again = true, true
					break search
				}
				if tries--; tries <= 0 {
					break search
				}
			}
		}
	}
	return changed
}

// freshMover moves the lanes that this call has placed.
type freshMover struct{ pass uint64 }

func (m freshMover) movable(l *lane, _ int) bool { return l.pass == m.pass }
func (freshMover) order([]*lane)                 {}
func (freshMover) moving(*lane)                  {}

// evenFresh evens out among lanes that nobody uses yet: their order does not matter then.
func (p *Planner) evenFresh(fresh []*lane) {
	seen := make([]bool, 2*len(p.leaves))
	var vertices []vertex
	for _, l := range fresh {
		if l.conn.gone || l.up == none {
			continue
		}
		for i, id := range [2]int32{l.up, l.down} {
			if v := vertex(2*p.links[id].leaf) + vertex(i); !seen[v] {
				seen[v] = true
				vertices = append(vertices, v)
			}
		}
	}
	m := freshMover{p.pass}
	for range 4 {
		changed := false
		for _, v := range vertices {
			changed = p.even(v, 1e-9, m) || changed
		}
		if !changed {
			return
		}
	}
}
