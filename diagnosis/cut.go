package diagnosis

// This file cuts a job's work in two at the same operations for all members of a
// communicator. Nodes report at moments of their own, so what one pass knows of the members
// differs by an operation or two; where a step has few operations and these are unlike, that
// is more than a slow rank costs.

// memberSums are a member's monotone sums: operations, and ns outside and inside of them.
type memberSums struct{ ops, own, inside uint64 }

func sumsOf(m *Member) memberSums { return memberSums{m.Ops, m.OwnNs, m.WaitNs + m.TransferNs} }

// opsCut is the end of a stretch.
type opsCut struct {
	open   bool // the stretch is over, and some members have not been told of up to there
	at     int64
	target []uint64     // by communicator: operations of each of its members
	sums   []memberSums // parallel to drags.members: as told when it had done these; ops is 0 before
	exact  bool         // it is cut so; else a member's sums are what is known of it
}

const (
	// cutWithin is how long reports may take.
	cutWithin = 400e6
	// cutOps are operations of a member in a stretch of which one more or less is no matter.
	cutOps = 32
	// cutLeast is how many times the shortest window a stretch is at least: in a shorter one
	// what is waited for at its end would count for more than what it mends.
	cutLeast = 3
	// cutMembers are the most that are looked at in each pass.
	cutMembers = 1 << 15
)

func (c *opsCut) forgotten() opsCut { return opsCut{target: c.target[:0], sums: c.sums[:0]} }

// cutDone takes down what members have done up to the cut, and reports whether it is all of them.
func (d *drags) cutDone() bool {
	c := &d.cut
	if !c.open {
		c.open, c.at = true, d.now
		c.exact = len(d.members) <= cutMembers && d.now-d.at >= cutLeast*int64(d.cfg.MinWindow)
		if !c.exact {
			return true
		}
		c.target, c.sums = resized(c.target, len(d.ev.Comms)), zeroed(c.sums, len(d.members))
		for ci := range d.ev.Comms {
			c.target[ci] = 0
			h, members := &d.comms[ci], len(d.ev.Comms[ci].Members)
			if h.p2p || h.ops-min(h.ops, d.ops0[ci].ops) > cutOps*uint64(members) {
				continue // each member counts for itself; or one more of so many is no matter
			}
			for i := range d.ev.Comms[ci].Members {
				c.target[ci] = max(c.target[ci], d.ev.Comms[ci].Members[i].Ops)
			}
		}
	}
	all := true
	late := d.now-c.at >= cutWithin
	for ci := range d.ev.Comms {
		sums := c.sums[d.first[ci]:]
		for i := range d.ev.Comms[ci].Members {
			m := &d.ev.Comms[ci].Members[i]
			switch {
			case sums[i].ops > 0:
			case m.Ops >= c.target[ci] || late:
				sums[i] = sumsOf(m)
			default:
				all = false
			}
		}
	}
	return all || late
}

// until is what a member had done at the cut.
func (d *drags) until(comm, member int) memberSums {
	if d.cut.open && d.cut.exact {
		return d.cut.sums[int(d.first[comm])+member]
	}
	return sumsOf(&d.ev.Comms[comm].Members[member])
}

// leastCommon is how much faster than its history the middle rank counts for at most. Where all
// have done the same operations, what is few of them is common to all.
func (d *drags) leastCommon() float64 {
	if d.cut.exact {
		return 0.6
	}
	return 0.95
}
