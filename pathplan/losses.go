package pathplan

import (
	"maps"
	"slices"
	"time"
)

// What senders lose. A lane's sender says how many segments it has sent and how many of them were
// lost. Where a tenant's lanes lose on some path, and most of its others do not, its lanes leave
// the path. A job sends far more than probes do, so a link that loses 1 % shows in seconds. It is a
// tenant's word, so it moves that tenant's lanes alone; which link it is, for everybody, probes have
// to prove, and Suspects says where to look.

const (
	// lossBuckets of lossFor each are looked at together, and a link must lose in lossTold of them:
	// a queue that was full for a moment is no bad link.
	lossFor     = time.Second
	lossBuckets = 8
	lossTold    = 3
	// lossSettled is for how long a lane must have been on its path: its sender says so a moment
	// later, and finds out how much the path takes by losing some.
	lossSettled = 3 * time.Second
	// lossLeave is what a link must lose at least, and lossTimes how often what the tenant's links do.
	lossLeave = 0.002
	lossTimes = 5
	lossOdds  = 12
	// maxLossPaths bounds the paths of a bucket that losses are kept of.
	maxLossPaths = 1 << 14
	// suspectFor is for how long a link is suspected after it was last seen to lose.
	suspectFor = 10 * time.Second
	// lossSuspects bounds the links that one look at a tenant's losses names: the planner waits for it.
	lossSuspects = 8
)

// lossPath is where a lane's segments go: its ports and its links.
type lossPath struct{ src, up, down, dst int32 }

type sentLost struct{ sent, lost int }

// lossBucket is what a tenant's lanes have sent and lost in some time.
type lossBucket struct {
	from  time.Time
	paths map[lossPath]sentLost
	links map[int32]sentLost
}

// ObserveLosses takes in what lanes' senders say, and returns the path of each: none where it is not
// in the plan, or has not been on its path for long enough to be told of it.
func (p *Planner) ObserveLosses(now time.Time, lanes []LaneLoss) []Path {
	out := make([]Path, len(lanes))
	for i, x := range lanes {
		if l := p.lane(x.Conn, x.Lane); l != nil && l.up != none && x.Sent > 0 && p.sent(l, now, x.Sent, min(max(x.Lost, 0), x.Sent)) {
			out[i] = p.path(l.up, l.down)
		}
	}
	return out
}

// sent notes what a lane has sent; not while it may be of the lane's former path.
func (p *Planner) sent(l *lane, now time.Time, sent, lost int) bool {
	if l.sentOver != l.up {
		l.sentOver, l.sentFrom = l.up, now
	}
	if now.Sub(l.sentFrom) < lossSettled {
		return false
	}
	t := p.tenants[l.conn.id.Tenant]
	n := len(t.losses)
	if n == 0 || now.Sub(t.losses[n-1].from) >= lossFor {
		if n >= lossBuckets {
			t.losses = slices.Delete(t.losses, 0, n-lossBuckets+1)
		}
		t.losses = append(t.losses, lossBucket{from: now, paths: map[lossPath]sentLost{}, links: map[int32]sentLost{}})
		n = len(t.losses)
	}
	b := &t.losses[n-1]
	k := lossPath{l.conn.src[l.side], l.up, l.down, l.conn.dst[l.side]}
	was, known := b.paths[k]
	if !known && len(b.paths) >= maxLossPaths {
		return true
	}
	of := sentLost{sent, lost}
	b.paths[k] = was.plus(of)
	for _, id := range [2]int32{k.up, k.down} {
		b.links[id] = b.links[id].plus(of)
	}
	return true
}

// judgeLosses has tenants' lanes leave paths that lose.
func (p *Planner) judgeLosses(now time.Time) {
	for l, at := range p.suspects {
		if now.Sub(at) >= suspectFor {
			delete(p.suspects, l)
		}
	}
	for _, t := range p.tenants {
		t.losses = slices.DeleteFunc(t.losses, func(b lossBucket) bool { return now.Sub(b.from) > lossBuckets*lossFor })
		for _, s := range p.lossyLinks(t) {
			for _, l := range s.Links {
				p.suspects[p.byLink[l]] = now
			}
			for at := range p.losing(t, p.byLink[s.Links[0]]) {
				p.leaveLossy(t, at, now)
			}
		}
	}
}

// losing is a tenant's paths over a link that have lost anything.
func (p *Planner) losing(t *tenant, over int32) map[route]bool {
	out := map[route]bool{}
	for i := range t.losses {
		for k, n := range t.losses[i].paths {
			if (k.up == over || k.down == over) && n.lost > 0 {
				out[route{p.links[k.up].leaf, p.links[k.down].leaf, p.links[k.up].spine}] = true
			}
		}
	}
	return out
}

// lossyLinks is which links a tenant's losses speak of: the smallest set that explains them, of those
// that lose much more than its links do otherwise. Where it may as well be a host's own link, lanes
// have nowhere to go.
func (p *Planner) lossyLinks(t *tenant) (out []Suspect) {
	links := map[int32]sentLost{}
	for i := range t.losses {
		for id, n := range t.losses[i].links {
			links[id] = links[id].plus(n)
		}
	}
	usual := usualLoss(links)
	least := max(lossLeave, lossTimes*usual)
	much := func(id int32) bool {
		n := links[id]
		return n.lost >= lossTold && float64(n.lost) >= least*float64(n.sent) && t.told(id, least/2) >= lossTold
	}
	if !slices.ContainsFunc(slices.Collect(maps.Keys(links)), much) {
		return nil
	}
	sum := map[lossPath]sentLost{}
	for i := range t.losses {
		for k, n := range t.losses[i].paths {
			sum[k] = sum[k].plus(n)
		}
	}
	probes := make([]Probe, 0, len(sum))
	for k, n := range sum {
		up, down := &p.links[k.up], &p.links[k.down]
		src, dst := p.fabric.ports[k.src].Port.String(), p.fabric.ports[k.dst].Port.String()
		probes = append(probes, Probe{Over: []Link{{From: src, To: up.From}, up.Link, down.Link, {From: down.To, To: dst}}, Sent: n.sent, Lost: n.lost})
	}
	f := explain(probes, InferOptions{Floor: max(p.opt.LossMax, 2*usual), Odds: lossOdds}, lossSuspects)
	if f == nil {
		return nil
	}
	for _, s := range f.suspects() {
		elsewhere := slices.ContainsFunc(s.Links, func(l Link) bool { _, ours := p.byLink[l]; return !ours })
		if !elsewhere && s.Loss >= least && much(p.byLink[s.Links[0]]) {
			out = append(out, s)
		}
	}
	return out
}

func (a sentLost) plus(b sentLost) sentLost { return sentLost{a.sent + b.sent, a.lost + b.lost} }

// told is in how many buckets a link lost such a share or more.
func (t *tenant) told(over int32, share float64) (n int) {
	for i := range t.losses {
		if of := t.losses[i].links[over]; of.lost > 0 && float64(of.lost) >= share*float64(of.sent) {
			n++
		}
	}
	return n
}

// usualLoss is what half of a tenant's links lose no more than.
func usualLoss(links map[int32]sentLost) float64 {
	const few = 50 // segments of which nothing can be told
	shares := make([]float64, 0, len(links))
	for _, n := range links {
		if n.sent >= few {
			shares = append(shares, float64(n.lost)/float64(n.sent))
		}
	}
	if len(shares) == 0 {
		return 0
	}
	slices.Sort(shares)
	return shares[(len(shares)-1)/2]
}

// Suspects are links that senders have lost segments on lately, by tenants' word: one of those that
// are named together does, and nobody has proven which.
func (p *Planner) Suspects() (out []Link) {
	for l := range p.suspects {
		out = append(out, p.links[l].Link)
	}
	slices.SortFunc(out, compareLinks)
	return out
}
