package service

import (
	"math"
	"slices"
	"time"

	"github.com/lockstep-ccl/lockstep/pathplan"
)

// Which links are bad, by what probers tell. A link is blamed when that is proven: whatever
// other links may lose, what was told is e^12 times less likely were this one well, and still
// e^8 times when any one host's word is left out. What cannot be told apart is blamed on
// nobody, and gets more probes. A link that loses everything shows in a second's probes, one
// that loses 1 % in some thousand: so several windows are looked at, the shortest first.
//
// A window over which a link went bad, or well, is of two times, and paths that were probed more
// in the one than in the other differ by more than their links do: a well link would get the
// blame for what is left. So a longer window leaves out what crossed a link that is bad by now,
// and all of a spine's probes of before one of its links was well again.

// bucket is what was told in some time, by path and hosts.
type bucket struct {
	from   time.Time
	probes map[probeKey]*pathplan.Probe
}

// probeKey is what a probe crossed: its access and the link to the spine; from there on, if it
// went to the end; whose word it is.
type probeKey struct {
	access, up, down, last pathplan.Link
	src, dst               string
	over                   int
}

// finding is what probes say of a link. What is not recent is of a window that may be of
// before it was well again.
type finding struct {
	state  pathplan.LinkState
	recent bool
}

// badLink is a link that was found bad.
type badLink struct {
	state pathplan.LinkState
	since time.Time
	last  time.Time // when it was last found
}

const (
	bucketFor  = 2 * time.Second
	suspectAt  = 1.5 // what is looked at closely: a natural logarithm of odds, as the next two
	provenAt   = 12
	confirmAt  = 8
	wellAt     = 7
	slowLooks  = 4                // long windows are looked at as much less often
	wellAfter  = 2 * time.Second  // for how long a bad link must not be found; doubled with each time that it was
	wellMost   = time.Minute      // and no more than this
	forgetBad  = 10 * time.Minute // after which it counts as the first time again
	downAt     = 0.9              // loss from which a link is down
	upAgain    = 0.5              // and from which it is no more
	maxBlinds  = 1 << 14
	maxUnsure  = 256
	wellFactor = 3 // what a link that is well again must be told from: what it lost, by this
)

// windows are how many buckets are looked at.
func (p *prober) windows() []int {
	n := max(1, int(p.o.Window/bucketFor))
	return []int{1, n, 2 * n, 4 * n, 8 * n}
}

// tell notes what became of probes.
func (p *prober) tell(now time.Time, pr pathplan.Probe) {
	if pr.Sent <= 0 {
		return
	}
	n := len(p.told)
	if n == 0 || now.Sub(p.told[n-1].from) >= bucketFor {
		p.told = append(p.told, bucket{from: now, probes: map[probeKey]*pathplan.Probe{}})
		n++
	}
	k := probeKey{access: pr.Over[0], up: pr.Over[1], src: pr.Hosts[0], dst: pr.Hosts[1], over: len(pr.Over)}
	if len(pr.Over) > 2 {
		k.down = pr.Over[2]
	}
	if len(pr.Over) > 3 {
		k.last = pr.Over[3]
	}
	probes := p.told[n-1].probes
	if old := probes[k]; old != nil {
		old.Sent += pr.Sent
		old.Lost += pr.Lost
	} else if len(probes) < maxBucket {
		probes[k] = &pr
	}
}

// judge begins a round when it is time, and says which links are bad.
func (p *prober) judge(now time.Time) {
	if now.Sub(p.last) >= p.o.Every {
		p.last = now
		p.round(now)
	}
	if !p.heard || now.Sub(p.judged) < p.o.Every/2 {
		return
	}
	p.heard, p.judged = false, now
	p.looks++
	windows := p.windows()
	for len(p.told) > windows[len(windows)-1] || len(p.told) > 0 && now.Sub(p.told[0].from) > 8*p.o.Window+bucketFor {
		p.told = p.told[1:]
	}
	p.traces = slices.DeleteFunc(p.traces, func(t traced) bool { return now.Sub(t.at) > absentFor })
	p.blind(now)
	found, unsure := map[pathplan.Link]finding{}, map[pathplan.Link]bool{}
	merged, next := map[probeKey]*pathplan.Probe{}, len(p.told)
	for i, w := range windows {
		if i > 1 && (p.looks%slowLooks != 0 || len(p.told) <= windows[i-1]) {
			break
		}
		for ; next > 0 && next > len(p.told)-w; next-- {
			p.merge(merged, &p.told[next-1])
		}
		probes := make([]pathplan.Probe, 0, len(merged))
		for _, pr := range merged {
			if i == 0 || !p.explained(pr, found) {
				probes = append(probes, *pr)
			}
		}
		for _, s := range pathplan.Infer(probes, pathplan.InferOptions{Odds: suspectAt, Proof: provenAt, Word: confirmAt}) {
			p.suspect(s, i == 0, found, unsure)
		}
	}
	p.absent(found)
	for l, b := range p.bad {
		r := l.Reverse() // a cable's other direction
		if _, ours := p.s.o.Fabric.addrs[r]; ours && b.state.Down && now.Sub(b.since) < p.o.Window {
			unsure[r] = true
		}
	}
	before := p.unsure
	p.unsure = map[pathplan.Link]time.Time{}
	for l := range unsure {
		if _, is := found[l]; !is && p.bad[l] == nil && len(p.unsure) < maxUnsure {
			p.unsure[l] = now
			if since, was := before[l]; was {
				p.unsure[l] = since
			}
		}
	}
	if len(p.unsure) > 0 {
		p.s.o.Log.Debug("links may be bad, and are looked at closely", "links", p.unsure)
	}
	p.apply(now, found)
}

// suspect takes in what a window says; a shorter window's word comes first.
func (p *prober) suspect(s pathplan.Suspect, recent bool, found map[pathplan.Link]finding, unsure map[pathplan.Link]bool) {
	for _, l := range s.Links {
		if _, ours := p.s.o.Fabric.addrs[l]; !ours {
			continue // a host's
		}
		if _, known := found[l]; s.Proven && !known {
			found[l] = finding{pathplan.LinkState{Loss: s.Loss, Down: s.Loss > downAt}, recent}
		} else if !s.Proven {
			unsure[l] = true
		}
	}
}

// explained reports whether probes crossed a link that is known to be bad: what they lost says
// nothing of another.
func (p *prober) explained(pr *pathplan.Probe, found map[pathplan.Link]finding) bool {
	return slices.ContainsFunc(pr.Over, func(l pathplan.Link) bool {
		_, now := found[l]
		return now || p.bad[l] != nil
	})
}

// merge adds a bucket to a window, but what was told over a spine before all of its links were well.
func (p *prober) merge(into map[probeKey]*pathplan.Probe, b *bucket) {
	for k, pr := range b.probes {
		if at, ok := p.mended[k.up.To]; ok && !b.from.After(at) {
			continue
		}
		if old := into[k]; old != nil {
			old.Sent += pr.Sent
			old.Lost += pr.Lost
		} else {
			own := *pr
			into[k] = &own
		}
	}
}

// blind tells of hosts between which packets are lost, where no switch says on which link.
func (p *prober) blind(now time.Time) {
	if now.Sub(p.warned) < p.o.Window && len(p.blinds) < maxBlinds {
		return
	}
	p.warned = now
	for _, s := range pathplan.Infer(p.blinds, pathplan.InferOptions{}) {
		p.s.o.Log.Warn("packets are lost, and no switch says where", "between", s.Links[0].From, "and", s.Links[0].To, "loss", s.Loss)
	}
	p.blinds = nil
}

// apply tells the planner which links are bad, and which are no more.
func (p *prober) apply(now time.Time, found map[pathplan.Link]finding) {
	for l, f := range found {
		b := p.bad[l]
		switch {
		case b == nil:
			b = &badLink{since: now}
			p.bad[l] = b
			if now.Sub(p.cleared[l]) > forgetBad {
				p.found[l] = 0
			}
			p.found[l]++
		case !f.recent:
			continue
		case b.state.Down != f.state.Down && (f.state.Down || f.state.Loss < upAgain):
		default:
			b.last = now
			continue
		}
		b.last, b.state = now, f.state
		p.s.o.Log.Warn("link is bad", "link", l.String(), "down", f.state.Down, "loss", f.state.Loss)
		_ = p.s.planner.SetLink(now, l, f.state)
		p.s.decided(Decision{At: now, Link: l, State: f.state})
	}
	for l, b := range p.bad {
		wait := min(wellMost, wellAfter<<min(8, max(0, p.found[l]-1)))
		if f, still := found[l]; still && f.recent || now.Sub(b.last) < wait || !p.well(now, l, b) {
			continue
		}
		p.s.o.Log.Info("link is well again", "link", l.String())
		_ = p.s.planner.SetLink(now, l, pathplan.LinkState{})
		p.s.decided(Decision{At: now, Link: l, Since: b.since})
		delete(p.bad, l)
		p.cleared[l] = now
		p.mended[p.spineOf(l)] = now
	}
}

func (p *prober) spineOf(l pathplan.Link) string {
	if p.leaf[l.From] {
		return l.To
	}
	return l.From
}

// well reports whether probes of late say that a bad link loses nothing any more: in one of
// the windows they are e^7 times likelier so than if it lost a third of what it did.
func (p *prober) well(now time.Time, l pathplan.Link, b *badLink) bool {
	const floor = 0.0005
	lost := max(min(b.state.Loss, 1)/wellFactor, 4*floor)
	odds, hosts := 0.0, map[string]bool{}
	for i := len(p.told) - 1; i >= 0 && p.told[i].from.After(b.last); i-- {
		for _, pr := range p.told[i].probes {
			if !slices.Contains(pr.Over, l) {
				continue
			}
			others := 1 - floor // how likely a probe survives the other links
			for _, o := range pr.Over {
				if bad := p.bad[o]; o != l && bad != nil {
					others *= max(0.001, 1-bad.state.Loss)
				}
			}
			if pr.Sent > pr.Lost {
				hosts[pr.Hosts[0]] = true
			}
			odds -= float64(pr.Sent-pr.Lost) * math.Log1p(-lost)
			odds += float64(pr.Lost) * math.Log((1-others)/(1-others*(1-lost)))
		}
		if odds >= wellAt && (len(hosts) > 1 || hosts[""] || p.probersAt(l) < 2) {
			return true
		}
	}
	return false
}

// probersAt is how many hosts could tell of a link from its leaf; of a link down, any.
func (p *prober) probersAt(l pathplan.Link) int {
	if p.leaf[l.From] {
		return len(p.some(l.From, 2))
	}
	return len(p.hosts)
}
