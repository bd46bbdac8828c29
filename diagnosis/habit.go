package diagnosis

import "slices"

// This file tells a rank that has become slow from one that is away once in a while, as it
// has always been: rank 0 saves every hundred short steps, say. What such pauses cost is not
// in the norm, for a window with a pause is far from it; so what sums over windows came to
// before is remembered, too.

// pastCost is the most that a rank has cost, by when that was: over each horizon, less the
// largest window, and over the shortest one with it.
type pastCost struct {
	old  [len(horizons) + 1]float32 // at least costWindows ago
	last [len(horizons) + 1]float32 // in the costWindows before these
	now  [len(horizons) + 1]float32
	n    int32 // turns from now to last to old
	of   int32 // windows that it is of
}

const (
	// keepPast is what is left of an old cost after another costWindows.
	keepPast = 0.98
	// newCost is by how much a cost exceeds those of before when it is no habit.
	newCost = 1.5
	// quietWindows are how many windows show that there was nothing of it before.
	quietWindows = 5
	// mostSteps are few.
	mostSteps = 3
	// pastKnown is after how many turns the old costs are of many windows.
	pastKnown = 3
)

// remember notes what the last windows cost, all told.
func (x *rankCost) remember(windows int32) {
	p := &x.past
	p.of++
	for h, n := range horizons {
		if x.sums[h] > max(p.now[h], leastCost/2)*float32(n-1) {
			p.now[h] = max(p.now[h], float32(x.trimmed(windows, n)))
		}
	}
	p.now[len(horizons)] = max(p.now[len(horizons)], x.sums[0]/float32(horizons[0]))
	if p.of%costWindows > 0 {
		return
	}
	for h := range p.old {
		p.old[h] = max(keepPast*p.old[h], p.last[h])
	}
	p.last, p.now = p.now, [len(horizons) + 1]float32{}
	p.n = min(p.n+1, pastKnown)
}

// isNew reports whether a cost over a horizon is none that the rank had before: by what
// is remembered, or else by the windows before it. None of these may cost as much: what comes
// again and again within the horizon would have been there, too.
func (x *rankCost) isNew(windows int32, h int, cost float64, few bool) bool {
	if x.past.n == pastKnown {
		return cost >= newCost*float64(x.past.old[h])
	}
	if !few { // the first windows of all tell, and most pairs of the last ones
		before := x.past.old[h]
		if x.past.n == 1 {
			before = x.past.last[h]
		}
		return x.past.n > 0 && cost >= newCost*float64(before) && x.mostly(windows, horizons[h], 2)
	}
	gap, first := x.gap(windows, horizons[h], cost)
	quiet := int32(0)
	for k := first; k < min(x.past.of, costWindows) && x.mean(windows, k, 1) < cost; k++ {
		quiet++
	}
	return quiet >= max(quietWindows, 2*gap)
}

// fewSteps reports whether windows are of few steps: then a pause that comes every so many
// is alone in its window, and windows in a row show what goes on for some steps.
func (d *drags) fewSteps() bool {
	if d.view.step > 0 {
		return d.view.step-min(d.step0, d.view.step) <= mostSteps
	}
	least := uint64(never)
	for i := range d.comms {
		h, c := &d.comms[i], &d.ops0[i]
		if n := h.ops - min(c.ops, h.ops); n > 0 && !h.former {
			least = min(least, n/uint64(max(1, len(d.ev.Comms[i].Members))))
		}
	}
	return least <= 2*mostSteps
}

// gap is how many windows lie at most between those of the last n that cost more than that,
// or since the last of them; first is how many windows ago the first of them began.
func (x *rankCost) gap(windows, n int32, cost float64) (most, first int32) {
	for k := range n {
		if x.mean(windows, k, 1) >= cost {
			most, first = max(most, k-first), k+1
		}
	}
	return most, first
}

// isNew reports whether a suspect's cost has been found to be new.
func (d *drags) isNew(rank int32) bool {
	return slices.ContainsFunc(d.slow, func(s slowRank) bool { return s.rank == rank && s.fresh })
}

// mostly reports whether most stretches of so many of the last n windows show what their mean says: pauses are
// in few.
func (x *rankCost) mostly(windows, n, stretch int32) bool {
	count, of, least := int32(0), n-stretch+1, x.mean(windows, 0, n)/2
	for k := range of {
		if x.mean(windows, k, stretch) >= least {
			count++
		}
	}
	return 5*count >= 3*of
}

// costBefore is what is known of what a rank cost before a moment.
type costBefore struct {
	past  pastCost // as it was then
	most  float64  // over the shortest horizon
	known bool     // not of a young job
}

// windowsSince is how many windows reach back to a moment.
func (d *drags) windowsSince(since int64) (n int32) {
	for at := d.at; n < min(d.windows, costWindows) && at > since; n++ {
		at -= int64(d.lengths[(d.windows-1-n)%costWindows])
	}
	return n
}

func (d *drags) costOf(rank int32) *rankCost {
	if len(d.ranks) != len(d.ev.Ranks) || uint32(rank) >= uint32(len(d.ranks)) {
		return nil
	}
	return &d.ranks[rank]
}

// before returns what a rank cost before a moment, by what is remembered of it, or else by
// the windows before that. Whoever finds it slow keeps it: as time goes on, none of these
// windows is left, and what is remembered is the fault.
func (d *drags) before(rank int32, since int64) (b costBefore) {
	x := d.costOf(rank)
	if x == nil {
		return b
	}
	if b.past = x.past; x.past.n == pastKnown {
		b.most, b.known = float64(x.past.old[len(horizons)]), true
		return b
	}
	n := min(d.windows, costWindows, x.past.of)
	after := min(n, d.windowsSince(since))
	for k := after; k+horizons[0] <= n; k++ {
		b.most = max(b.most, x.mean(d.windows, k, horizons[0]))
	}
	b.known = n-after >= minWindows
	return b
}

// isHabit reports whether a rank cost nearly as much before a moment as it has since. What a
// window's edge puts into the one is missing in the next, so all since then count, and not
// only those that were slow.
func (d *drags) isHabit(rank int32, b *costBefore, since int64, cost float64) bool {
	if x := d.costOf(rank); x != nil {
		if after := d.windowsSince(since); after > 1 {
			cost = x.mean(d.windows, 0, after)
		}
	}
	return cost < newCost*b.most
}

// forgive makes what a rank cost before a fault all that is remembered of it: the fault is
// no habit that excuses the next one.
func (d *drags) forgive(rank int32, b *costBefore) {
	if x := d.costOf(rank); x != nil {
		x.past = b.past
	}
}
