package diagnosis

import (
	"cmp"
	"math"
	"slices"
)

// This file tells what a rank is late by in most steps from a pause once in a while, by the
// moments at which ranks enter sampled collectives.

// isRule reports whether a rank that has been late in the window is so as a rule.
func (d *stragglers) isRule(s *slowRank) bool {
	since := d.start
	if s.slow > 0 && s.since > 0 {
		since = s.since
	}
	if !s.alone && s.before.known && !d.drags.isHabit(s.rank, &s.before, since, s.allCost/float64(d.now-since)) {
		return true
	}
	return d.lateAsARule(s, since)
}

const (
	fewestArrivals = 8
	fewestSteps    = 4 // that they are of
	// leastLate is which part of a rank's excess the collectives have to show at least: others
	// of its communicators show the rest.
	leastLate = 0.3
	// ruleShare is which part of its lateness is left when no step counts for more than
	// ruleMost of what a step has on average.
	ruleShare, ruleMost = 0.65, 1.5
	// stepsAlike is how well times have to correlate a step later, over pairsOfSteps at least: of few pairs
	// some do by chance.
	stepsAlike, pairsOfSteps = 0.7, 24
)

// lateAsARule reports whether a rank comes late to the collectives of most steps since a
// moment, and not once in many steps by far more. Each sampled collective has the moments
// at which its members came. Any communicator may show it: to those that ranks meet in after
// another one they come together.
func (d *stragglers) lateAsARule(s *slowRank, since int64) bool {
	if d.showsRule(s, s.felt, since) {
		return true
	}
	for ci := range d.comms {
		if int32(ci) != s.felt && d.showsRule(s, int32(ci), since) {
			return true
		}
	}
	return false
}

// showsRule is lateAsARule of one communicator.
func (d *stragglers) showsRule(s *slowRank, ci int32, since int64) bool {
	if h := &d.comms[ci]; h.p2p || h.former {
		return false
	}
	late, seqs := d.lateness(s.rank, ci, since)
	n := float64(len(late))
	if n < fewestArrivals || !d.sameWork(s.rank, ci) {
		return false
	}
	all := 0.0
	for _, l := range late {
		all += l
	}
	if all <= 0 || all/n < leastLate*s.excess/max(1, d.opsEach(ci)) {
		return false
	}
	each, sure := d.collectivesPerStep(ci)
	if mostlyLate(late, all, each) {
		return true
	}
	if sure {
		return false
	}
	each = float64(d.repeatsAfter(s.rank, ci))
	return n >= fewestSteps*each && mostlyLate(late, all, each) && sameInEach(late, seqs, all, uint64(each))
}

// sameInEach reports whether it is the same one or two of every so many collectives that show
// most of a lateness: a pause that has another rhythm than the steps falls on all of them.
func sameInEach(late []float64, seqs []uint64, all float64, each uint64) bool {
	sums := make([]float64, each)
	for i, l := range late {
		sums[seqs[i]%each] += l
	}
	slices.Sort(sums)
	most := 0.0
	for _, sum := range sums[max(0, len(sums)-2):] {
		most += sum
	}
	return most >= ruleShare*all
}

// mostlyLate reports whether most steps have their part of a lateness, given how many of these
// collectives are a step's. Who varies is early as often as late: what it is early counts
// against it.
func mostlyLate(late []float64, all, each float64) bool {
	sum, often, n := 0.0, 0, float64(len(late))
	most, least := ruleMost*each*all/n, all/n/3
	for _, l := range late {
		sum += min(max(l, -most), most)
		switch {
		case l >= least:
			often++
		case l <= -least:
			often--
		}
	}
	return sum >= ruleShare*all && float64(often) >= n/(2*each)
}

// sameWork reports whether a rank's peers in a communicator do what it does: none of them is
// its neighbour in a pipeline, whose stages come at times of their own.
func (d *stragglers) sameWork(rank, comm int32) bool {
	members := d.ev.Comms[comm].Members
	for i := range d.comms {
		if h := &d.comms[i]; !h.p2p || h.former {
			continue
		}
		of := d.ev.Comms[i].Members
		in := func(r int32) bool { return slices.ContainsFunc(of, func(m Member) bool { return m.World == r }) }
		if in(rank) && slices.ContainsFunc(members, func(m Member) bool { return m.World != rank && in(m.World) }) {
			return false
		}
	}
	return true
}

// opsEach is how many operations a member of a communicator did in the window.
func (w *window) opsEach(ci int32) float64 {
	h, c := &w.comms[ci], &w.ops[ci]
	return float64(h.ops-min(c.ops, h.ops)) / float64(max(1, len(w.ev.Comms[ci].Members)))
}

// collectivesPerStep is how many operations of a communicator a step has, surely where the
// program marks steps. Elsewhere the communicator with the fewest operations tells how many
// it has at least.
func (d *stragglers) collectivesPerStep(ci int32) (each float64, sure bool) {
	if steps := d.view.step - min(d.step, d.view.step); steps > 0 {
		return max(1, d.opsEach(ci)/float64(steps)), true
	}
	all := func(i int) float64 { return float64(d.comms[i].ops) / float64(max(1, len(d.ev.Comms[i].Members))) }
	least := all(int(ci))
	for i := range d.comms {
		if d.opsEach(int32(i)) > 0 && !d.comms[i].former {
			least = min(least, all(i))
		}
	}
	return max(2, all(int(ci))/max(1, least)), false
}

// repeatsAfter is after how many collectives of a communicator the times repeat that a rank's
// peers spend of their own before each: a step's, where steps are alike. What the rank itself
// spends has no part in it: a pause every so many steps repeats as well.
func (d *stragglers) repeatsAfter(rank, comm int32) int {
	members := d.ev.Comms[comm].Members
	var of []*Arrival
	for i := range d.ev.Arrivals {
		if a := &d.ev.Arrivals[i]; a.Comm == comm && !a.Coll.PointToPoint() {
			of = append(of, a)
		}
	}
	slices.SortFunc(of, func(a, b *Arrival) int { return cmp.Compare(a.Seq, b.Seq) })
	of = of[max(0, len(of)-8*mostPeriod):]
	var v, peers []float64
	for i := 1; i < len(of); i++ {
		a, last := of[i], of[i-1]
		if a.Seq-last.Seq > mostPeriod {
			v = v[:0]
			continue
		}
		for n := last.Seq + 1; n < a.Seq; n++ {
			v = append(v, math.NaN()) // not sampled
		}
		peers = peers[:0]
		for m := range members {
			if members[m].World != rank && a.Seq == last.Seq+1 && m < len(a.Start) && m < len(last.End) && a.Start[m] > 0 && last.End[m] > 0 {
				peers = append(peers, float64(max(0, a.Start[m]-last.End[m])))
			}
		}
		own := math.NaN()
		if len(peers) > 0 {
			own = math.Sqrt(median(peers)) // what all do once in a while counts for less
		}
		v = append(v, own)
	}
	return repeatsAfter(v[max(0, len(v)-8*mostPeriod):], pairsOfSteps, stepsAlike)
}

// lateness returns by how much later than its middle peer a rank has entered each sampled
// collective of a communicator since a moment, ns, and which these are.
func (v *view) lateness(rank, comm int32, since int64) (late []float64, seqs []uint64) {
	ev := v.ev
	reference := nodeOf(ev, rank)
	members := ev.Comms[comm].Members
	me := slices.IndexFunc(members, func(m Member) bool { return m.World == rank })
	if reference < 0 || me < 0 || len(ev.Arrivals) == 0 {
		return nil, nil
	}
	bounds := alignClocks(ev, comm, reference)
	var others []float64
	for i := range ev.Arrivals {
		a := &ev.Arrivals[i]
		if a.Comm != comm || a.Coll.PointToPoint() || me >= len(a.Start) || a.Start[me] < since || a.Start[me] == 0 {
			continue
		}
		others = others[:0]
		for m := range members {
			n := nodeOf(ev, members[m].World)
			if m == me || n < 0 || m >= len(a.Start) || a.Start[m] == 0 {
				continue
			}
			d, _ := bounds[n].offset()
			others = append(others, float64(a.Start[me]-a.Start[m]-d))
		}
		if len(others) > 0 {
			late, seqs = append(late, median(others)), append(seqs, a.Seq)
		}
	}
	return late, seqs
}
