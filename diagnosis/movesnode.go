package diagnosis

import "slices"

// This file tells of a communicator inside one node, of which no connection tells anything, that its
// collectives take longer once all members have entered.

// movedOthersGrown is by which part of what a communicator has grown others like it may have grown as well.
const movedOthersGrown = 0.5

// toldNode adds the node that a communicator lies inside of: NVLink that has lost lanes, for instance.
func (d *moves) toldNode(found []finding, s *movedComm) []finding {
	node := d.transfers.inside(s.comm)
	if node < 0 || d.othersMoved(s, node) || d.foundAt(found, node) {
		return found
	}
	c := &d.ev.Comms[s.comm]
	f := finding{}
	f.Class, f.Level, f.Since, f.Victims = CommunicationSlow, s.level, s.since, len(c.Members)
	f.blame(Culprit{Kind: CulpritNode, Rank: -1, Peer: -1, Node: d.ev.Nodes[node].Name, Reason: reasonNetwork})
	f.setComm(c)
	f.lastOf(c)
	f.why("once all members of %s have entered, its collectives take %s each, before %s; so in %d of the last %d rounds", c.Name, millis(s.now), millis(s.then), s.times, s.of)
	f.why("they are all on %s, and nothing tells of the connections between them (NVLink?); those of other ranks take as long as before", d.ev.Nodes[node].Name)
	f.why("the job loses %.0f %% of its time to it, since %s", 100*s.cost, clock(s.since))
	return append(found, f)
}

// othersMoved reports whether the collectives of other ranks inside nodes have grown likewise since, or
// whether there are none to compare with.
func (d *moves) othersMoved(s *movedComm, node int32) bool {
	var grown, alike []float64
	mine := partOf(&d.ev.Comms[s.comm])
	for _, ci := range d.late.known {
		if len(grown) == mostAlike {
			break
		}
		if ci == s.comm || int(ci) >= len(d.ev.Comms) {
			continue
		}
		at := d.transfers.within(ci)
		if at < 0 || at == node && shareRank(&d.ev.Comms[ci], &d.ev.Comms[s.comm]) {
			continue
		}
		if g, ok := d.late.of[ci].grownSince(s.since); ok {
			grown = append(grown, g)
			if partOf(&d.ev.Comms[ci]) == mine {
				alike = append(alike, g)
			}
		}
	}
	if len(alike) > 0 { // others carry other messages
		grown = alike
	}
	return len(grown) == 0 || median(grown)-1 > movedOthersGrown*(s.now/max(s.then, 1)-1)
}

// grownSince is how many times as long a collective has taken since a moment as before.
func (x *arrivalsOf) grownSince(since int64) (ratio float64, ok bool) {
	var took, n [2]float64
	for i := range x.rounds.all {
		p, k := &x.rounds.all[i], 0
		if p.from >= since {
			k = 1
		}
		took[k], n[k] = took[k]+float64(p.took), n[k]+float64(p.n)
	}
	if n[0] < 4 || n[1] < 4 || took[0] <= 0 {
		return 0, false
	}
	return took[1] / n[1] * n[0] / took[0], true
}

// foundAt reports whether something of a node has been found, or a hang.
func (d *moves) foundAt(found []finding, node int32) bool {
	name := d.ev.Nodes[node].Name
	return slices.ContainsFunc(found, func(f finding) bool {
		return f.hang || slices.ContainsFunc(f.Culprits, func(k Culprit) bool { return k.Node == name })
	})
}
