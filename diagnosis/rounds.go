package diagnosis

import (
	"math"
	"slices"
)

// round puts parts together to rounds. eachStep tells how many collectives come in a step, for where the times
// between them do not show it.
func (x *arrivalsOf) round(eachStep func() uint64) {
	if x.fresh >= mostPeriod/2 {
		x.period, x.fresh, x.bySteps = x.findPeriod(), 0, false
		if x.period == 1 {
			x.period = eachStep()
			x.bySteps = x.period > 1
		}
		x.phase = x.findPhase()
	}
	x.rounds.update(x, roundTime, x.period)
}

// eachStep is how many collectives of a communicator come in a step of the job, 1 where that is not known: by the
// program's marks, or as many as come for one of the communicator that has the fewest.
func (d *arrivals) eachStep(ci int32) uint64 {
	x := &d.of[ci]
	each := 0.0
	if x.step0 > 0 {
		if steps := d.view.step - min(x.step0, d.view.step); steps >= leastSteps {
			each = float64(x.seq-x.seq0) / float64(steps)
		}
	} else {
		all := func(i int32) float64 { return float64(d.comms[i].ops) / float64(max(1, len(d.ev.Comms[i].Members))) }
		least := all(ci)
		for _, o := range d.known {
			if n := all(o); n >= leastSteps && !d.comms[o].former {
				least = min(least, n)
			}
		}
		each = all(ci) / max(least, 1)
	}
	return uint64(max(1, math.Round(each)))
}

// grouped are parts put together to rounds, of so many collectives or of a time. Only the last round changes as
// parts come, so that to bring them up to date costs what has come.
type grouped struct {
	all   []arrivalPart
	begin int // part with which the last round begins
	over  int // rounds that have ended, or have been put together anew
	by    groupedBy
}

// groupedBy is what rounds depend on beside the last parts.
type groupedBy struct {
	time          int64
	period, phase uint64
	dropped       int
}

// update brings rounds up to date: of period collectives, 0: of as many as come in a time.
func (g *grouped) update(x *arrivalsOf, time int64, period uint64) {
	by := groupedBy{time, period, x.phase, x.dropped}
	if n := len(g.all); n > 0 && g.by == by {
		g.all = g.all[:n-1]
	} else {
		g.all, g.begin, g.over, g.by = g.all[:0], 0, g.over+1, by
	}
	begun := len(g.all)
	for i := g.begin; i < len(x.parts); i++ {
		p := &x.parts[i]
		if n := len(g.all); n > begun {
			r := &g.all[n-1]
			same := p.until-r.from < time
			if period > 0 {
				same = (p.seq+period-x.phase%period)/period == (r.seq+period-x.phase%period)/period
			}
			if same {
				r.join(p)
				continue
			}
			g.over++
		}
		g.all, g.begin = append(g.all, *p), i
	}
}

// findPeriod finds after how many collectives the times between them repeat; 1 where they do not, 0 where they do not
// come one by one.
func (x *arrivalsOf) findPeriod() uint64 {
	v, ok := x.between()
	if !ok {
		return 0
	}
	return uint64(repeatsAfter(v, 1, 0.3))
}

// between are the times between the last collectives, false when they do not come one by one.
func (x *arrivalsOf) between() (v []float64, ok bool) {
	p := x.lastParts()
	v = make([]float64, len(p))
	for i := range p {
		if p[i].seqs > 1 && i > 0 {
			return nil, false
		}
		v[i] = math.Sqrt(float64(max(0, p[i].until-p[i].from))) // a pause counts for less
	}
	return v, true
}

func (x *arrivalsOf) lastParts() []arrivalPart { return x.parts[max(0, len(x.parts)-4*mostPeriod):] }

// findPhase finds the collective of a period before which most time passes.
func (x *arrivalsOf) findPhase() (phase uint64) {
	v, ok := x.between()
	if !ok || x.period <= 1 {
		return 0
	}
	sums := make([]float64, x.period)
	for i, p := range x.lastParts() {
		sums[p.seq%x.period] += v[i]
	}
	for i := range sums {
		if sums[i] > sums[phase] {
			phase = uint64(i)
		}
	}
	return phase
}

// repeatsAfter is after how many values they repeat, 1 where they do not: they correlate by least with those
// before, of as many pairs. NaN is a value that is not known.
func repeatsAfter(v []float64, leastPairs, least float64) int {
	mean, known := 0.0, 0.0
	for _, y := range v {
		if !math.IsNaN(y) {
			mean, known = mean+y, known+1
		}
	}
	mean /= max(known, 1)
	alike := func(lag int) (c, pairs float64) {
		sum, a, b := 0.0, 0.0, 0.0
		for i := lag; i < len(v); i++ {
			if x, y := v[i]-mean, v[i-lag]-mean; !math.IsNaN(x) && !math.IsNaN(y) {
				sum, a, b, pairs = sum+x*y, a+x*x, b+y*y, pairs+1
			}
		}
		return sum / math.Sqrt(max(a*b, 1e-9)), pairs
	}
	var c [mostPeriod + 1]float64
	most := 0.0
	for lag := 1; lag <= min(mostPeriod, len(v)/3); lag++ {
		one, pairs := alike(lag)
		if c[lag] = one; pairs < leastPairs || one < periodSure/math.Sqrt(max(pairs, 1)) {
			c[lag] = 0 // by chance
		}
		most = max(most, c[lag])
	}
	if most < least {
		return 1
	}
	return max(1, slices.IndexFunc(c[:], func(x float64) bool { return x >= 0.7*most }))
}
