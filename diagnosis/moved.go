package diagnosis

import (
	"cmp"
	"math"
)

// movedBefore is what was found of a communicator's rounds, and of which.
type movedBefore struct {
	key movedKey
	of  []movedComm // by horizon, but for how sure: that goes by the time since
}

// movedKey tells rounds apart: of which kind, and how many there have been.
type movedKey struct{ kind, n int }

// judgeMoved judges how long a communicator's last rounds take once all have entered, by the rounds before.
func (d *arrivals) judgeMoved(ci int32) {
	x := &d.of[ci]
	if d.comms[ci].former || len(d.moved) == maxSlow {
		return
	}
	// Where a round is as many as come in a time, less of it has many as well.
	rounds, key := x.rounds.all, movedKey{1, x.rounds.over}
	switch {
	case x.period == 0:
		x.short.update(x, shortRound, 0)
		rounds, key = x.short.all, movedKey{2, x.short.over}
	case x.bySteps: // what one takes has nothing to do with those beside it
		rounds, key = x.parts, movedKey{3, x.appended + x.dropped}
	}
	if b := &x.moved; b.key != key { // the last round may be a part, and does not count
		b.key, b.of = key, b.of[:0]
		d.tooks = d.tooks[:0]
		for i := range rounds {
			d.tooks = append(d.tooks, float64(rounds[i].took)/float64(max(1, rounds[i].n)))
		}
		for _, h := range lateHorizons {
			if h > len(rounds)/2 || h > 32 {
				break
			}
			if s, ok := d.movedOver(ci, rounds, h); ok {
				b.of = append(b.of, s)
			}
		}
	}
	best := movedComm{}
	for _, s := range x.moved.of {
		s.level = d.levelBy(s.chance, s.since, lateSuspected, lateConfirmed)
		s.likely = d.levelBy(s.chance, s.since, likelySuspected, likelyConfirmed)
		if cmp.Or(cmp.Compare(s.level, best.level), cmp.Compare(s.likely, best.likely), cmp.Compare(s.cost, best.cost)) > 0 {
			best = s
		}
	}
	if best.likely > 0 {
		d.moved = append(d.moved, best)
	}
}

// movedOver judges the last h rounds.
func (d *arrivals) movedOver(ci int32, rounds []arrivalPart, h int) (s movedComm, ok bool) {
	n := len(rounds) - 1 // the last one may be a part
	last, tooks, before := rounds[n-h:n], d.tooks[n-h:n], d.tooks[:n-h]
	sum, ops := 0.0, 0.0
	for i, took := range tooks {
		sum, ops = sum+took*float64(last[i].seqs), ops+float64(last[i].seqs)
	}
	all := float64(last[h-1].until - last[0].from)
	// What it costs is above a bound where their median is below one: hardly ever, and counted at once.
	if bound := (sum - leastMoved*all) / max(ops, 1) * (1 + 1e-6); bound <= 0 || !medianBelow(before, bound) {
		return s, false
	}
	v := append(d.scratch[:0], before...)
	d.scratch = v
	usual := median(v)
	s = movedComm{comm: ci, then: usual}
	s.now = sum / max(ops, 1)
	s.cost = min((sum-usual*ops)/max(all, 1), slowerSince(rounds, n-h))
	if s.cost < leastMoved {
		return s, false
	}
	chance, times, first := exceeds(v, tooks, usual)
	s.chance, s.times, s.of = chance, times, h
	if first >= 0 {
		s.since = last[first].from
	}
	return s, chance < 0
}

// exceeds is about the logarithm of the chance that so many of the last values are as far above those
// before: above what hardly one of these exceeds, or what none does. It returns how many are, and the
// first of them, -1 for none. It reorders before.
func exceeds(before, last []float64, usual float64) (chance float64, times, first int) {
	first = -1
	for _, q := range [...]float64{0.85, 1} {
		bar, more, n, at := quantile(before, q), 0, 0, -1
		for _, y := range before {
			if y > bar {
				more++
			}
		}
		for i, y := range last {
			if y > max(bar, 1.3*usual) {
				if n++; at < 0 {
					at = i
				}
			}
		}
		p := float64(more+1) / float64(len(before)+1)
		if c := logBinomial(len(last), n, p); c < chance {
			chance, times, first = c, n, at
		}
	}
	return chance, times, first
}

// levelBy is the level of something of a chance (its logarithm) that goes on since a moment.
func (v *view) levelBy(chance float64, since int64, suspected, confirmed float64) Level {
	lasted := v.now - since
	switch {
	case chance <= math.Log(confirmed) && lasted >= int64(v.cfg.SlowConfirmAfter):
		return Confirmed
	case chance <= math.Log(suspected) && lasted >= int64(v.cfg.SlowSuspectAfter):
		return Suspected
	}
	return 0
}

// logBinomial is about the logarithm of the chance that of n, each of chance p, as many as k or more come.
func logBinomial(n, k int, p float64) float64 {
	if float64(k) <= float64(n)*p || p >= 1 {
		return 0
	}
	return logChoose(n, k) + float64(k)*math.Log(p) + float64(n-k)*math.Log(1-p)
}
