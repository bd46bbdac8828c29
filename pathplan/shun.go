package pathplan

import (
	"maps"
	"time"
)

// A sender that finds no source port for its lane's path says so long before probes have
// proven anything: routes have left a link, and who hashes over it goes elsewhere. A hash
// differs from lane to lane, routes do not: all lanes of its tenant between the two leaves
// keep off the path for a while. Nobody else's do: a tenant's word moves its own lanes alone.

const (
	// shunFor is how long lanes keep off a path: longer than probes take to find a link that is gone.
	shunFor = 30 * time.Second
	// maxShuns bounds the paths that a tenant shuns; its word on more counts for nothing.
	maxShuns = 1024
)

// route is the paths between two leaves over a spine.
type route struct{ from, to, spine int32 }

// shun has lanes of a lane's tenant keep off the path that it is on, from the next Rebalance on.
func (p *Planner) shun(l *lane, now time.Time) {
	if l.up == none {
		return
	}
	p.keepOff(p.tenants[l.conn.id.Tenant], p.route(l, l.up), now.Add(shunFor))
}

// keepOff has a tenant's lanes keep off a path for a while.
func (p *Planner) keepOff(t *tenant, at route, until time.Time) {
	if len(t.shunned) >= maxShuns && t.shunned[at].IsZero() {
		return
	}
	if len(t.shunned) == 0 {
		t.shunned = map[route]time.Time{}
		p.shunning++
	}
	t.shunned[at] = until
}

// backoff is of a path that a tenant's lanes left because it lost segments: until when they keep off it, and for
// how long.
type backoff struct {
	until time.Time
	wait  time.Duration
}

// leaveLossy is keepOff of a path that loses: for longer each time that it still does when lanes are back.
func (p *Planner) leaveLossy(t *tenant, at route, now time.Time) {
	if len(t.backoffs) >= maxShuns {
		maps.DeleteFunc(t.backoffs, func(_ route, b backoff) bool { return now.Sub(b.until) >= relapse })
	}
	was, known := t.backoffs[at]
	if t.shunned[at].After(now) || !known && len(t.backoffs) >= maxShuns {
		return // they are leaving
	}
	wait := shunFor
	if known && now.Sub(was.until) < relapse {
		wait = min(forgetMost, 2*was.wait)
	}
	if t.backoffs == nil {
		t.backoffs = map[route]backoff{}
	}
	t.backoffs[at] = backoff{now.Add(wait), wait}
	p.keepOff(t, at, now.Add(wait))
}

func (p *Planner) route(l *lane, up int32) route {
	from, to := p.ends(l)
	return route{from, to, p.links[up].spine}
}

// shuns reports whether a lane keeps off the path over the spine of an uplink.
func (p *Planner) shuns(l *lane, up int32) bool {
	if p.shunning == 0 || up == none {
		return false
	}
	t := p.tenants[l.conn.id.Tenant]
	return len(t.shunned) > 0 && t.shunned[p.route(l, up)].After(p.now)
}

// unshun ends the shunning of some paths.
func (p *Planner) unshun(which func(r route, until time.Time) bool) {
	if p.shunning == 0 {
		return
	}
	for _, t := range p.tenants {
		if len(t.shunned) == 0 {
			continue
		}
		if maps.DeleteFunc(t.shunned, which); len(t.shunned) == 0 {
			p.shunning--
		}
	}
}

// leaveShunned moves lanes off paths that their tenants shun, wherever there is another as good.
func (r *rebalance) leaveShunned() {
	if r.shunning == 0 {
		return
	}
	var out []*lane
	for _, j := range r.jobs {
		if len(r.tenants[j.id.tenant].shunned) == 0 {
			continue
		}
		for _, c := range j.conns {
			for i := range c.lanes {
				if l := &c.lanes[i]; r.shuns(l, l.up) {
					out = append(out, l)
				}
			}
		}
	}
	for _, l := range inTurn(out) {
		t, at := r.tenants[l.conn.id.Tenant], r.route(l, l.up)
		r.reason = Dead
		if t.backoffs[at].until.Equal(t.shunned[at]) {
			r.reason = Lossy
		}
		if _, ok := r.index[l]; ok || r.left() > 0 {
			r.escape(l)
		}
	}
}
