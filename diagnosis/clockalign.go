package diagnosis

// Clocks of different nodes are compared by causality: nobody leaves a
// barrier-like collective before its last member has entered. If stamp + d maps
// another node's clock to the reference's, every such collective says
//
//	d ≤ first end on the reference − last start on the other
//	d ≥ last start on the reference − first end on the other
//
// and many of them narrow d down to about one small collective, whatever the
// mapping of the agents' clocks left.

// clockBound is what is known of d, ns.
type clockBound struct{ lo, hi int64 }

// offset returns the best d and how far it may be wrong.
func (b clockBound) offset() (d, err int64) { return (b.lo + b.hi) / 2, (b.hi - b.lo + 1) / 2 }

// alignClocks bounds, for every node, the offset of its clock to the reference
// node's from the sampled collectives of one communicator.
func alignClocks(ev *Evidence, comm, reference int32) []clockBound {
	bounds := make([]clockBound, len(ev.Nodes))
	for n := range bounds {
		bounds[n] = clockBound{-never, never}
	}
	type span struct{ lastStart, firstEnd int64 }
	spans := make([]span, len(ev.Nodes))
	for i := range ev.Arrivals {
		a := &ev.Arrivals[i]
		if a.Comm != comm || !a.Coll.Synchronizes() || int(comm) >= len(ev.Comms) {
			continue
		}
		clear(spans)
		members := ev.Comms[comm].Members
		for m := range members {
			n := nodeOf(ev, members[m].World)
			if n < 0 || m >= len(a.Start) || m >= len(a.End) {
				continue
			}
			s := &spans[n]
			s.lastStart = max(s.lastStart, a.Start[m])
			if a.End[m] > 0 && (s.firstEnd == 0 || a.End[m] < s.firstEnd) {
				s.firstEnd = a.End[m]
			}
		}
		ref := spans[reference]
		for n := range bounds {
			if b, s := &bounds[n], spans[n]; s.lastStart > 0 && int32(n) != reference {
				if ref.firstEnd > 0 {
					b.hi = min(b.hi, ref.firstEnd-s.lastStart)
				}
				if s.firstEnd > 0 {
					b.lo = max(b.lo, ref.lastStart-s.firstEnd)
				}
			}
		}
	}
	for n := range bounds {
		// The agents' own bound helps where it agrees with causality.
		b, own := &bounds[n], ev.Nodes[n].MapError+ev.Nodes[reference].MapError
		if int32(n) == reference {
			own = 0
		}
		switch lo, hi := max(b.lo, -own), min(b.hi, own); {
		case lo <= hi:
			*b = clockBound{lo, hi}
		case b.lo > b.hi: // drifted while the samples were taken
			*b = clockBound{b.hi, b.lo}
		case b.lo == -never:
			b.lo = b.hi
		case b.hi == never:
			b.hi = b.lo
		}
	}
	return bounds
}

// enteredLast counts the sampled collectives of a communicator since a moment
// that a rank entered last, and those of which that can be told.
func (v *view) enteredLast(rank, comm int32, since int64) (last, of int) {
	ev := v.ev
	reference := nodeOf(ev, rank)
	if reference < 0 || len(ev.Arrivals) == 0 {
		return 0, 0
	}
	bounds := alignClocks(ev, comm, reference)
	members := ev.Comms[comm].Members
	me := -1
	for m := range members {
		if members[m].World == rank {
			me = m
		}
	}
	for i := range ev.Arrivals {
		a := &ev.Arrivals[i]
		if a.Comm != comm || a.Coll.PointToPoint() || me < 0 || me >= len(a.Start) || a.Start[me] < since || a.Start[me] == 0 {
			continue
		}
		known, first := 0, false
		for m := range members {
			n := nodeOf(ev, members[m].World)
			if m == me || n < 0 || m >= len(a.Start) || a.Start[m] == 0 {
				continue
			}
			known++
			d, err := bounds[n].offset()
			first = first || a.Start[m]+d-err >= a.Start[me]
		}
		if known == 0 {
			continue
		}
		of++
		if !first {
			last++
		}
	}
	return last, of
}

func nodeOf(ev *Evidence, world int32) int32 {
	if world < 0 || int(world) >= len(ev.Ranks) {
		return -1
	}
	if n := ev.Ranks[world].Node; n >= 0 && int(n) < len(ev.Nodes) {
		return n
	}
	return -1
}
