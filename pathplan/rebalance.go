package pathplan

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"
)

// turn is how long a tenant's moves count against it when tenants take turns.
const turn = time.Minute

// SetLink says how a link is. Lanes on it move with the next Rebalance. A host's access
// link (from Port.String() to its leaf, or back) may be named too: where it is down, the
// NIC's other port carries all.
func (p *Planner) SetLink(now time.Time, l Link, s LinkState) error {
	if err := s.check(); err != nil {
		return fmt.Errorf("state of link %.300s: %w", l, err)
	}
	class := well
	switch {
	case s.Down || s.Loss >= 0.9:
		class = dead
	case s.Loss > p.opt.LossMax:
		class = lossy
	}
	if id, ok := p.byLink[l]; ok {
		k := &p.links[id]
		if k.class > well && class == well {
			k.back = now
			p.unshun(func(r route, _ time.Time) bool { return r.spine == k.spine })
		}
		if (k.class == dead) != (class == dead) {
			p.excuse(now, k)
			p.resided[k.leaf] = struct{}{}
		}
		k.state, k.class = s, class
		return nil
	}
	id, ok := p.access[l]
	if !ok {
		if id, ok = p.access[l.Reverse()]; !ok {
			return fmt.Errorf("state of link %.300s: not in the topology: %w", l, ErrUnknown)
		}
	}
	if pt := &p.fabric.ports[id]; pt.down != (class == dead) {
		pt.down = class == dead
		p.resided[pt.leaf] = struct{}{}
	}
	return nil
}

// rebalance is one call of Rebalance.
type rebalance struct {
	*Planner
	now    time.Time
	most   int
	before []lane // as they were
	moved  []*lane
	index  map[*lane]int
	reason Reason
	why    []Reason
}

// Rebalance returns at most most moves, most urgent first, and takes them as done: lanes
// leave dead links, then lossy ones, then the fullest (a link whose lanes say network counts
// as fuller). Without news it comes to an end: each move for evenness makes the fullest link
// of a leaf emptier by MinGain at least, and a lane that has moved stays for Hold. Tenants
// take turns.
func (p *Planner) Rebalance(now time.Time, most int) []Move {
	r := &rebalance{Planner: p, now: now, most: most, index: map[*lane]int{}}
	p.now = now
	if most <= 0 {
		return nil
	}
	r.sides()
	r.leave()
	r.leaveShunned()
	r.steer()
	p.reload()
	r.spread()
	if !p.opt.EqualShares {
		r.evenShares()
	}
	return r.moves()
}

// left is how many more lanes may move.
func (r *rebalance) left() int { return r.most - len(r.moved) }

// moving notes how a lane was, once.
func (r *rebalance) moving(l *lane) {
	if _, ok := r.index[l]; ok {
		return
	}
	r.index[l] = len(r.moved)
	r.moved = append(r.moved, l)
	r.before = append(r.before, *l)
	r.why = append(r.why, r.reason)
	l.moves++
	t := r.tenants[l.conn.id.Tenant]
	if r.now.Sub(t.since) > turn {
		t.since, t.moved = r.now, 0
	}
	t.moved++
}

// movable: a lane that moves anyway, or, while there are moves left, one that has stayed
// for Hold.
func (r *rebalance) movable(l *lane, before int) bool {
	if _, ok := r.index[l]; ok {
		return true
	}
	return before < r.left() && r.rested(l)
}

func (r *rebalance) rested(l *lane) bool { return r.now.Sub(l.moved) >= r.opt.Hold }

// order: lanes that move anyway, then of the tenant whose turn it is, then those that have
// stayed longest.
func (r *rebalance) order(lanes []*lane) {
	slices.SortStableFunc(lanes, func(a, b *lane) int {
		_, x := r.index[a]
		_, y := r.index[b]
		if x != y {
			if x {
				return -1
			}
			return 1
		}
		return cmp.Or(cmp.Compare(r.turns(a), r.turns(b)), a.moved.Compare(b.moved))
	})
}

func (r *rebalance) turns(l *lane) int {
	if t := r.tenants[l.conn.id.Tenant]; r.now.Sub(t.since) <= turn {
		return t.moved
	}
	return 0
}

// sides moves lanes whose side no longer joins their NICs, and those back whose side does
// again.
func (r *rebalance) sides() {
	if len(r.resided) == 0 {
		return
	}
	wait := map[int32]struct{}{}
	for i := range r.fabric.ports {
		pt := &r.fabric.ports[i]
		if _, ok := r.resided[pt.leaf]; !ok {
			continue
		}
		for _, list := range pt.conns {
			for _, c := range list {
				if !r.reside(c) {
					wait[pt.leaf] = struct{}{}
				}
			}
		}
	}
	r.resided = wait
}

// reside puts a connection's lanes on the sides where they belong. It reports false where
// that has to wait.
func (r *rebalance) reside(c *conn) bool {
	can := [2]bool{r.usable(c.src, c.dst, Left), r.usable(c.src, c.dst, Right)}
	if !can[Left] && !can[Right] {
		return true // nowhere to go
	}
	var change, must bool
	for i := range c.lanes {
		l := &c.lanes[i]
		want := r.home(c, i)
		if len(c.lanes) == 1 && can[l.side] {
			want = l.side // its place was a choice
		}
		if !can[want] {
			want = 1 - want
		}
		change = change || want != l.side
		must = must || !can[l.side]
	}
	if !change {
		return true
	}
	for i := range c.lanes {
		if !must && !r.rested(&c.lanes[i]) {
			return false
		}
	}
	if len(c.lanes) > r.left() {
		return false
	}
	r.reason = Returned
	if must {
		r.reason = Dead
	}
	for i := range c.lanes {
		r.moving(&c.lanes[i])
	}
	r.takeSides(c)
	r.reload()
	for i := range c.lanes {
		if l := &c.lanes[i]; l.side != r.before[r.index[l]].side {
			r.unplace(l)
			r.settle(l)
		}
	}
	return true
}

// leave moves lanes off dead and lossy links. Tenants take turns.
func (r *rebalance) leave() {
	for _, class := range []uint8{dead, lossy} {
		r.reason = Dead
		if class == lossy {
			r.reason = Lossy
		}
		var out []*lane
		for i := range r.links {
			k := &r.links[i]
			if k.class != class {
				continue
			}
			for _, l := range k.lanes {
				if k.up || r.links[l.up].class != class {
					out = append(out, l)
				}
			}
		}
		for _, l := range inTurn(out) {
			if _, ok := r.index[l]; !ok && r.left() == 0 {
				continue
			}
			r.escape(l)
		}
	}
}

// escape moves a lane to the best path, if that is any better than where it is.
func (r *rebalance) escape(l *lane) {
	was := place{l, l.up, l.down, l.port}
	r.lift(l)
	up, down, ok := r.choose(l)
	if ok && (r.shuns(l, was.up) && r.class(up, down) == r.class(was.up, was.down) || r.class(up, down) < r.class(was.up, was.down) || r.loss(up, down) < r.loss(was.up, was.down)/2) {
		r.place(l, was.up, was.down)
		r.moving(l)
		r.lift(l)
		if r.put(l, up, down) {
			return
		}
	}
	r.place(l, was.up, was.down)
}

func (p *Planner) loss(up, down int32) float64 {
	if up == none {
		return 0
	}
	return p.links[up].state.Loss + p.links[down].state.Loss
}

// inTurn sorts lanes so that tenants, and within one its jobs, take turns.
func inTurn(lanes []*lane) []*lane {
	slices.SortFunc(lanes, compareLanes)
	type place struct {
		inJob, inTenant int
		lane            *lane
	}
	count := map[jobID]int{}
	out := make([]place, len(lanes))
	for i, l := range lanes {
		id := jobID{l.conn.id.Tenant, l.conn.id.Job}
		out[i] = place{inJob: count[id], lane: l}
		count[id]++
	}
	slices.SortStableFunc(out, func(a, b place) int {
		return cmp.Or(cmp.Compare(a.lane.conn.id.Tenant, b.lane.conn.id.Tenant), cmp.Compare(a.inJob, b.inJob))
	})
	ofTenant := map[string]int{}
	for i := range out {
		t := out[i].lane.conn.id.Tenant
		out[i].inTenant = ofTenant[t]
		ofTenant[t]++
	}
	slices.SortStableFunc(out, func(a, b place) int { return cmp.Compare(a.inTenant, b.inTenant) })
	for i := range out {
		lanes[i] = out[i].lane
	}
	return lanes
}

func compareLanes(a, b *lane) int {
	x, y := a.conn.id, b.conn.id
	return cmp.Or(cmp.Compare(x.Tenant, y.Tenant), cmp.Compare(x.Job, y.Job), cmp.Compare(x.Conn, y.Conn), cmp.Compare(a.index, b.index))
}

// steer gives lanes that hash as they like a path, when a map has become known.
func (r *rebalance) steer() {
	if !r.unsteered {
		return
	}
	r.reason = Uneven
	var out []*lane
	for _, j := range r.jobs {
		for _, c := range j.conns {
			for i := range c.lanes {
				l := &c.lanes[i]
				if from, to := r.ends(l); l.up == none && from != to && r.table(c, l.side) != nil {
					out = append(out, l)
				}
			}
		}
	}
	r.unsteered = false
	for _, l := range inTurn(out) {
		if up, down, ok := r.choose(l); ok {
			if !r.rested(l) || r.left() == 0 {
				r.unsteered = true
				continue
			}
			r.moving(l)
			r.put(l, up, down)
		}
	}
}

// spread evens out links by chains, worst leaf first.
func (r *rebalance) spread() {
	type uneven struct {
		v      vertex
		spread float64
	}
	var list []uneven
	for v := range vertex(2 * len(r.leaves)) {
		most, least := 0.0, math.Inf(1)
		for _, id := range r.linksOf(v, r.chain.list) {
			most, least = max(most, r.links[id].load()), min(least, r.links[id].load())
		}
		if most-least > r.opt.MinGain {
			list = append(list, uneven{v, most - least})
		}
	}
	slices.SortStableFunc(list, func(a, b uneven) int { return cmp.Compare(b.spread, a.spread) })
	r.reason = Uneven
	for _, u := range list {
		r.even(u.v, r.opt.MinGain, r)
	}
}

// moves are the lanes that are not as they were.
func (r *rebalance) moves() []Move {
	out := make([]Move, 0, len(r.moved))
	for i, l := range r.moved {
		was := &r.before[i]
		if was.up == l.up && was.down == l.down && was.port == l.port && was.side == l.side && was.share == l.share {
			continue
		}
		if was.up != l.up || was.down != l.down || was.port != l.port {
			l.moved, l.congested, l.part = r.now, time.Time{}, 0 // what it said was of another path
		}
		out = append(out, Move{Assignment: r.assignment(r.now, l), From: r.path(was.up, was.down), FromPort: was.port, Reason: r.because(i, l)})
	}
	slices.SortStableFunc(out, func(a, b Move) int { return cmp.Compare(a.Reason, b.Reason) })
	return out
}

// because is why a lane has moved. Moves for evenness have a reason of their own where a
// link's lanes said network, or a link came back.
func (r *rebalance) because(i int, l *lane) Reason {
	was := &r.before[i]
	if r.why[i] != Uneven || was.up == none || l.up == none {
		return r.why[i]
	}
	if r.links[was.up].derate > 0 || r.links[was.down].derate > 0 {
		return Congested
	}
	for _, id := range [2]int32{l.up, l.down} {
		if back := r.links[id].back; !back.IsZero() && r.now.Sub(back) < turn {
			return Returned
		}
	}
	return Uneven
}
