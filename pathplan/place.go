package pathplan

import (
	"slices"
)

// takeSides puts lanes on sides and shares the connection's bytes out: evenly over both
// sides, by the rates of their ports where those differ, and within a side over its lanes.
func (p *Planner) takeSides(c *conn) {
	can := [2]bool{p.usable(c.src, c.dst, Left), p.usable(c.src, c.dst, Right)}
	var n [2]int
	for i := range c.lanes {
		l := &c.lanes[i]
		l.side = p.home(c, i)
		if !can[l.side] && can[1-l.side] {
			l.side = 1 - l.side
		}
		n[l.side]++
	}
	p.shareOut(c, n)
}

// home is the side that a lane belongs on when both are well.
func (p *Planner) home(c *conn, i int) Side {
	both := c.src[Left] != none && c.dst[Left] != none && c.src[Right] != none && c.dst[Right] != none
	switch {
	case !both && c.src[Right] != none && c.dst[Right] != none:
		return Right
	case !both:
		return Left
	case len(c.lanes) > 1:
		return Side(i % 2)
	case p.busy(c, Right) < p.busy(c, Left):
		return Right
	}
	return Left
}

// busy is what other connections use of the two ports of a side.
func (p *Planner) busy(c *conn, side Side) (n int64) {
	for end, id := range [2]int32{c.src[side], c.dst[side]} {
		for _, t := range p.fabric.ports[id].uses[end] {
			n += t.use
		}
	}
	return n - 2*c.use[side]
}

// shareOut divides a connection's bytes, given how many lanes are on each side.
func (p *Planner) shareOut(c *conn, n [2]int) {
	var rate [2]int64
	for side := range 2 {
		if n[side] > 0 {
			rate[side] = min(p.fabric.ports[c.src[side]].Rate, p.fabric.ports[c.dst[side]].Rate)
		}
	}
	left := int(float64(ShareUnit) * (float64(rate[Left]) / float64(rate[Left]+rate[Right])))
	share := [2]int{left, ShareUnit - left}
	p.setUse(c, [2]int64{c.weight * int64(share[Left]), c.weight * int64(share[Right])})
	for i := range c.lanes {
		l := &c.lanes[i]
		l.share = share[l.side] / n[l.side]
		share[l.side] -= l.share
		n[l.side]--
	}
}

// setUse counts what a connection uses of its ports.
func (p *Planner) setUse(c *conn, use [2]int64) {
	for side := range 2 {
		for end, id := range [2]int32{c.src[side], c.dst[side]} {
			if id == none {
				continue
			}
			pt := &p.fabric.ports[id]
			list := pt.uses[end]
			i := slices.IndexFunc(list, func(t tenancy) bool { return t.tenant == c.id.Tenant })
			if i < 0 {
				i, list = len(list), append(list, tenancy{tenant: c.id.Tenant})
			}
			if list[i].use += use[side] - c.use[side]; list[i].use == 0 {
				list = slices.Delete(list, i, i+1)
			}
			pt.uses[end] = list
			if !pt.dirty {
				pt.dirty = true
				p.dirty = append(p.dirty, id)
			}
		}
	}
	c.use = use
}

// part is what a connection may take of a port, in bit/s: tenants have equal parts, a
// tenant's connections theirs by weight.
func (pt *port) part(end int, c *conn, side Side) int64 {
	for _, t := range pt.uses[end] {
		if t.tenant == c.id.Tenant {
			return int64(float64(pt.Rate) * (float64(c.use[side]) / float64(t.use)) / float64(len(pt.uses[end])))
		}
	}
	return 0
}

// reload reckons the loads of connections on ports where something has changed.
func (p *Planner) reload() {
	for _, id := range p.dirty {
		pt := &p.fabric.ports[id]
		pt.dirty = false
		for end := range pt.conns {
			for _, c := range pt.conns[end] {
				p.reloadConn(c)
			}
		}
	}
	p.dirty = p.dirty[:0]
}

// reloadConn: a side's lanes carry what the ports at both ends have for the connection,
// by their shares.
func (p *Planner) reloadConn(c *conn) {
	var demand, shares [2]int64
	for i := range c.lanes {
		shares[c.lanes[i].side] += int64(c.lanes[i].share)
	}
	for side := range Right + 1 {
		if shares[side] > 0 {
			demand[side] = min(p.fabric.ports[c.src[side]].part(0, c, side), p.fabric.ports[c.dst[side]].part(1, c, side))
		}
	}
	for i := range c.lanes {
		l := &c.lanes[i]
		if shares[l.side] > 0 {
			p.setLoad(l, int64(float64(demand[l.side])*float64(l.share)/float64(shares[l.side])))
		}
	}
}

func (p *Planner) setLoad(l *lane, load int64) {
	if l.up != none {
		p.links[l.up].planned += load - l.load
		p.links[l.down].planned += load - l.load
	}
	l.load = load
}

// ends are the leaves that a lane joins.
func (p *Planner) ends(l *lane) (from, to int32) {
	return p.fabric.ports[l.conn.src[l.side]].leaf, p.fabric.ports[l.conn.dst[l.side]].leaf
}

// place counts a lane on a path. It must be on none.
func (p *Planner) place(l *lane, up, down int32) {
	l.up, l.down = up, down
	if up == none {
		return
	}
	for i, id := range [2]int32{up, down} {
		k := &p.links[id]
		k.planned += l.load
		k.changed = p.now
		l.at[i] = len(k.lanes)
		k.lanes = append(k.lanes, l)
	}
}

// unplace takes a lane off its path and gives its source port back.
func (p *Planner) unplace(l *lane) {
	p.takePort(l, 0)
	p.lift(l)
}

// lift takes a lane off its path.
func (p *Planner) lift(l *lane) {
	if l.up == none {
		return
	}
	for i, id := range [2]int32{l.up, l.down} {
		k := &p.links[id]
		k.planned -= l.load
		k.changed = p.now
		last := k.lanes[len(k.lanes)-1]
		k.lanes[l.at[i]], last.at[i] = last, l.at[i]
		k.lanes[len(k.lanes)-1] = nil
		k.lanes = k.lanes[:len(k.lanes)-1]
	}
	l.up, l.down = none, none
}

// choose finds the best path for a lane that is on none: its links well rather than lossy,
// the fuller of the two as empty as possible, then not one that a sister lane has.
func (p *Planner) choose(l *lane) (up, down int32, ok bool) {
	from, to := p.ends(l)
	if from == to {
		return none, none, true
	}
	ups, downs := p.uplinks(from), p.downlinks(to)
	table := p.table(l.conn, l.side)
	up, down = none, none
	var class uint8
	var most, sum float64
	var sisters int
	for s := range ups {
		u, d := p.best(ups[s]), p.best(downs[s])
		if u == none || d == none || p.shuns(l, u) || !p.steers(table, l, u, d) {
			continue
		}
		c, a, b := p.class(u, d), p.links[u].with(l.load), p.links[d].with(l.load)
		m, n := max(a, b), p.sisters(l, u)
		switch {
		case up == none, c < class:
		case c > class || m > most:
			continue
		case m == most && (n > sisters || n == sisters && a+b >= sum):
			continue
		}
		up, down, class, most, sum, sisters = u, d, c, m, a+b, n
	}
	return up, down, up != none
}

// sisters counts lanes of the same connection on a link.
func (p *Planner) sisters(l *lane, up int32) (n int) {
	for i := range l.conn.lanes {
		if o := &l.conn.lanes[i]; o != l && o.up == up {
			n++
		}
	}
	return n
}

// settle puts a lane that is on no path on the best one. A lane that no path's source port
// is known for hashes as it would without a plan.
func (p *Planner) settle(l *lane) bool {
	up, down, ok := p.choose(l)
	if !ok {
		return false
	}
	return p.put(l, up, down)
}

// put places a lane with a source port of the path.
func (p *Planner) put(l *lane, up, down int32) bool {
	if !p.opt.Steered && up != none {
		port := p.pick(p.table(l.conn, l.side), l, up, down)
		if port == 0 {
			return false
		}
		p.takePort(l, port)
	}
	p.place(l, up, down)
	return true
}

// placeFresh gives new lanes paths, then evens out among them.
func (p *Planner) placeFresh(fresh []*lane) {
	for _, l := range fresh {
		if !l.conn.gone && l.port != 0 && !p.adopt(l) {
			l.port = 0
		}
	}
	for _, l := range fresh {
		if !l.conn.gone && l.port == 0 {
			p.settle(l)
		}
	}
	p.evenFresh(fresh)
}

// adopt leaves a lane on the source port that it has. Its path is known when the map is.
func (p *Planner) adopt(l *lane) bool {
	port := l.port
	l.port = 0
	if p.opt.Steered || !p.free(l, port) {
		return false
	}
	from, to := p.ends(l)
	if from != to {
		if t := p.table(l.conn, l.side); t != nil {
			up, down, ok := t.path(port)
			if !ok || p.class(up, down) != well {
				return false
			}
			p.place(l, up, down)
		}
	}
	l.pass = 0 // runs already: not to be moved as a new one is
	p.takePort(l, port)
	return true
}
