package pathplan

import (
	"slices"
	"time"
)

// A sender that finds no source port for its lane's path says so long before probes have
// proven anything: routes have left a link, and whoever hashes over it goes elsewhere. Its
// lane shuns the spine for a while, and nobody else's does: a tenant's word moves its own
// lanes alone.

const (
	// shunFor is how long a lane keeps away: longer than probes take to find a link that is gone.
	shunFor = 30 * time.Second
	// maxShuns bounds the spines that a lane shuns; the oldest is tried again.
	maxShuns = 4
)

// shun is a spine that a lane keeps away from.
type shun struct {
	spine int32
	until time.Time
}

// shun has a lane keep away from the spine that it is on, from the next Rebalance on.
func (p *Planner) shun(l *lane, now time.Time) {
	if l.up == none {
		return
	}
	spine := p.links[l.up].spine
	list := slices.DeleteFunc(p.shunned[l], func(s shun) bool { return s.spine == spine || !s.until.After(now) })
	if len(list) == maxShuns {
		list = slices.Delete(list, 0, 1)
	}
	p.shunned[l] = append(list, shun{spine, now.Add(shunFor)})
}

// shuns reports whether a lane keeps away from the spine of an uplink.
func (p *Planner) shuns(l *lane, up int32) bool {
	if len(p.shunned) == 0 || up == none {
		return false
	}
	return slices.ContainsFunc(p.shunned[l], func(s shun) bool { return s.spine == p.links[up].spine && s.until.After(p.now) })
}

// trust ends the shunning of a spine, one of whose links is back.
func (p *Planner) trust(spine int32) {
	p.unshun(func(_ *lane, s shun) bool { return s.spine == spine })
}

// forgetShuns drops what is over.
func (p *Planner) forgetShuns(now time.Time) {
	p.unshun(func(l *lane, s shun) bool { return l.conn.gone || !s.until.After(now) })
}

func (p *Planner) unshun(which func(l *lane, s shun) bool) {
	for l, list := range p.shunned {
		if list = slices.DeleteFunc(list, func(s shun) bool { return which(l, s) }); len(list) == 0 {
			delete(p.shunned, l)
		} else {
			p.shunned[l] = list
		}
	}
}

// leaveShunned moves lanes off spines that they shun, wherever there is another as good.
func (r *rebalance) leaveShunned() {
	var out []*lane
	for l := range r.shunned {
		if !l.conn.gone && r.shuns(l, l.up) {
			out = append(out, l)
		}
	}
	r.reason = Dead
	for _, l := range inTurn(out) {
		if _, ok := r.index[l]; ok || r.left() > 0 {
			r.escape(l)
		}
	}
}
