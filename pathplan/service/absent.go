package service

import (
	"slices"
	"time"

	"github.com/lockstep-ccl/lockstep/pathplan"
)

// Links that no packet takes any more, since routes have left them or they were dead from the
// start, are no part of any probed path. They are known by what is missing: of so many source
// ports whose paths have names none crosses them.

// traced is what one task told of ports and where they went.
type traced struct {
	at       time.Time
	src, dst string // hosts
	from, to []string
	named    int                   // ports whose whole path has a name
	took     map[pathplan.Link]int // ports, by link
	reached  map[string]int        // ports that came to a spine
	passed   map[string]int        // ports heard of from the far leaf only, by the spine before
}

const (
	// absentFrom is how many source ports of named paths must have been traced from a leaf for
	// a link that none takes to be absent.
	absentFrom = 192
	// absentTo is how many must have come to a spine for a link from there that none takes to be.
	absentTo = 32
	// absentBack is the same where the cable's other direction is down: hardly ever is one alone.
	absentBack = 8
	// absentFor is for how long none may have taken it.
	absentFor = 2500 * time.Millisecond
	// passedMin is how many ports that a spine passed on, and did not answer for itself, show
	// that it is reached.
	passedMin = 4
)

// evidence is of one link, that it might be absent.
type evidence struct {
	ports  int
	hosts  map[string]bool // who says so
	seen   bool
	passed int
}

// down reports whether a link is known to carry nothing.
func (p *prober) down(l pathplan.Link, found map[pathplan.Link]finding) bool {
	b := p.bad[l]
	return found[l].state.Down || b != nil && b.state.Down
}

// absent adds links that nobody's traces take, by the word of two hosts where there are two.
func (p *prober) absent(found map[pathplan.Link]finding) {
	of := map[pathplan.Link]*evidence{}
	get := func(l pathplan.Link) *evidence {
		e := of[l]
		if e == nil {
			e = &evidence{hosts: map[string]bool{}}
			of[l] = e
		}
		return e
	}
	heardLeaf := map[string]bool{}
	for i := range p.traces {
		t := &p.traces[i]
		for l := range t.took {
			get(l).seen = true
			if !p.leaf[l.From] {
				heardLeaf[l.To] = true
			}
		}
		for _, spine := range p.s.o.Fabric.Spines {
			near := slices.ContainsFunc(t.from, func(leaf string) bool { return t.took[pathplan.Link{From: leaf, To: spine}] > 0 })
			for _, leaf := range t.from {
				e := get(pathplan.Link{From: leaf, To: spine})
				e.ports += t.named
				if t.named > 0 {
					e.hosts[t.src] = true
				}
				if !near {
					e.passed += t.passed[spine]
				}
			}
			for _, leaf := range t.to {
				e := get(pathplan.Link{From: spine, To: leaf})
				e.ports += t.reached[spine] / len(t.to)
				if t.reached[spine] > 0 {
					e.hosts[t.src], e.hosts[t.dst] = true, true
				}
			}
		}
	}
	var ups, downs []pathplan.Link
	for l := range p.s.o.Fabric.addrs {
		if p.leaf[l.From] {
			ups = append(ups, l)
		} else {
			downs = append(downs, l)
		}
	}
	for _, l := range append(ups, downs...) { // what is found of an uplink counts for its downlink
		e := of[l]
		if e == nil || e.seen || e.passed >= passedMin {
			continue
		}
		enough, witnesses := absentFrom, 2
		if !p.leaf[l.From] {
			// A leaf that answers nobody is not known to be cut off, and who is told of by its
			// own hosts only has three of them: one at this end, and two at others.
			if enough, witnesses = absentTo, 3; !heardLeaf[l.To] {
				continue
			}
			if p.down(l.Reverse(), found) {
				enough, witnesses = absentBack, 1
			}
		} else if ports := p.byLeaf[l.From]; len(ports) > 0 && p.alone[ports[0].Host] {
			witnesses = 1
		}
		if e.ports >= enough && len(e.hosts) >= witnesses {
			found[l] = finding{pathplan.LinkState{Down: true, Loss: 1}, true}
		}
	}
}
