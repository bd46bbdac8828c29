package pathplan

import (
	"math"
	"time"
)

const (
	smooth    = 0.3         // weight of the newest measurement of others' load
	quiet     = 0.05        // others' load below this share of a link is noise
	derateMax = 0.75        // a link is never taken for slower than a quarter
	forget    = time.Minute // after which a derated link has half of it back
	// forgetMost is the same of one that was derated again and again, each time within relapse
	// of having recovered: lanes must not go to and fro.
	forgetMost = 16 * time.Minute
	relapse    = 10 * time.Minute
	// fewFor is for how many times Persist a link's lanes have to say so together: one of a link that
	// has no other needs longer to be believed than four do.
	fewFor = 4
	// excuseFor is how long it may take to find out about the link that lanes have suffered from.
	excuseFor = 15 * time.Second
	// aliveFrom is the part of what is fair from which on a link's lanes, together, are not slowed by it: TCP
	// connections share a link unevenly, and most of them are then slower than one.
	aliveFrom = 0.8
)

// Observe takes in measurements. What a link carries beyond its planned lanes is somebody
// else's, and the plan makes room for it. A link is taken for slower than its rate when its lanes
// say network for Persist, three of four of them and fewFor times as long together, while most of
// the fabric's do not, and carry together less than is fair. That wears off in minutes, so that a
// link which is well again is tried again. Names that are not in the plan are passed over: they may
// have gone a moment ago.
func (p *Planner) Observe(now time.Time, links []LinkLoad, lanes []LaneSignal) {
	p.now = now
	for _, m := range links {
		id, ok := p.byLink[m.Link]
		if !ok || m.Rate < 0 || m.Rate > MaxRate {
			continue
		}
		k := &p.links[id]
		k.measured = m.Rate
		if now.Sub(k.changed) < 2*p.opt.Persist {
			continue // lanes have come or gone since: whose load it was is not known
		}
		others := m.Rate - k.planned
		if float64(others) < quiet*float64(k.rate) {
			others = 0
		}
		k.background += int64(smooth * float64(others-k.background))
	}
	for _, s := range lanes {
		l := p.lane(s.Conn, s.Lane)
		if l == nil {
			continue
		}
		l.heard = now
		if s.Part > 0 {
			l.part = s.Part
		}
		if s.Nowhere {
			p.shun(l, now)
		}
		switch {
		case !s.Congested:
			l.congested = time.Time{}
		case l.congested.IsZero():
			l.congested = now
		}
	}
	if now.Sub(p.judged) >= p.opt.Persist {
		p.unshun(func(_ route, until time.Time) bool { return !until.After(now) })
		p.judge(now)
		p.judgeLosses(now)
	}
}

// lane is a connection's lane, nil where it has none of that number, or there is no such connection.
func (p *Planner) lane(id ConnID, n int) *lane {
	j := p.jobs[jobID{id.Tenant, id.Job}]
	if j == nil {
		return nil
	}
	c := j.conns[id.Conn]
	if c == nil || n < 0 || n >= len(c.lanes) {
		return nil
	}
	return &c.lanes[n]
}

// excuse takes back that links of a leaf, or of a spine, were taken for slower a moment ago: one of
// them has died, which the lanes of the others had to cross, too, or is back. And routes have
// changed there: switches that hash anew had lanes collide where none was planned to. A link that
// was blamed for longer stays so; the lanes have no say for a while, neither against a link nor for it.
func (p *Planner) excuse(now time.Time, of *link) {
	for i := range p.links {
		k := &p.links[i]
		if k.spine != of.spine && k.leaf != of.leaf {
			continue
		}
		for _, l := range k.lanes {
			l.congested, l.excused = time.Time{}, now
		}
		if k.derate > k.before && now.Sub(k.blamed) < excuseFor {
			k.derate, k.derated = k.before, time.Time{}
			k.refresh()
		}
	}
}

// judge derates links whose lanes say network, and lets former ones recover.
func (p *Planner) judge(now time.Time) {
	type votes struct {
		heard, congested int
		known            int           // lanes whose part is known
		parts            float64       // the sum of theirs
		said             time.Duration // for how long the congested lanes have said so, together
	}
	of := make([]votes, len(p.links))
	var all votes
	for i := range p.links {
		for _, l := range p.links[i].lanes {
			if now.Sub(l.heard) > 3*p.opt.Persist || now.Sub(l.moved) < fewFor*p.opt.Persist || now.Sub(l.excused) < fewFor*p.opt.Persist {
				continue
			}
			of[i].heard++
			if l.part > 0 {
				of[i].known++
				of[i].parts += l.part
			}
			if !l.congested.IsZero() && now.Sub(l.congested) >= p.opt.Persist {
				of[i].congested++
				of[i].said += now.Sub(l.congested)
			}
		}
		if p.links[i].up {
			all.heard += of[i].heard
			all.congested += of[i].congested
		}
	}
	for i := range p.links {
		k := &p.links[i]
		blamed := of[i].said >= fewFor*p.opt.Persist && 4*of[i].congested >= 3*of[i].heard && 2*all.congested < all.heard &&
			of[i].parts <= aliveFrom*float64(of[i].known)
		switch {
		case blamed && now.Sub(k.changed) >= 2*p.opt.Persist:
			switch {
			case k.derate > 0:
			case !k.freed.IsZero() && now.Sub(k.freed) < relapse+k.forget:
				k.forget = min(forgetMost, 2*k.forget)
			default:
				k.forget = forget
			}
			if now.Sub(k.derated) >= excuseFor {
				k.blamed, k.before = now, k.derate
			}
			k.derate = min(derateMax, k.derate+0.25*(1-k.derate))
			k.changed, k.derated = now, now
		case k.derate == 0 || blamed:
			continue
		default:
			if k.derate *= math.Exp2(-float64(now.Sub(p.judged)) / float64(k.forget)); k.derate < p.opt.MinGain {
				k.derate, k.freed = 0, now
			}
		}
		k.refresh()
	}
	p.judged = now
}
