package diagnosis

import (
	"cmp"
	"math"
	"slices"
	"sync"
)

// This file judges who comes late again and again.

// lateRank is a rank that is late again and again.
type lateRank struct {
	rank, comm  int32
	level       Level
	since, last int64 // entry of its first and of its last late one
	times, of   int   // late rounds, and rounds since the first of them
	gap         int   // most rounds from one of them to the next
	before      int   // rounds before
	own, others int   // late ones of these, and of other members in all
	cost        float64
	late        float64 // at least, ns
	next        float64 // the latest of all that are not as late, but for its own since, ns
}

const (
	// lateTimes is how often a rank has to be late.
	lateTimes = 4
	// lateMost is the share of all lateness that is looked at: the largest.
	lateMost = 0.8
	// asLate is which part of it counts as being as late.
	asLate = 0.7
	// lateOften is how many times as often as before a rank that has become late is.
	lateOften = 5
	// The chance of as many times, by how often others are as late.
	lateSuspected, lateConfirmed = 1e-6, 1e-8
	// The chance that it has not begun only then, by its own late rounds.
	beganSuspected, beganConfirmed = 1e-2, 1e-3
	// lateWorth is a chance that is worth looking at communicators that are alike, of which so many are.
	lateWorth = 1e-3
	mostAlike = 16
	// leastElsewhere communicators with ranks that are as late, and a quarter of those that are looked at, say that
	// something else is behind it.
	leastElsewhere = 2
	// spendsLeast is which part of its lateness a rank spends of its own in windows of the same time: of one
	// window mostCost counts at most, and rounds and windows do not end together.
	spendsLeast = 0.5
	// spendsMost is the same where ranks elsewhere are as late: those that one of them holds up spend some more, too,
	// of what they do meanwhile.
	spendsMost = 0.6
	// mostLost is how many times a rank's lateness the job may lose for it to be the cause.
	mostLost = 3
	// stillCosts is which part of it goes on.
	stillCosts = 0.3
)

// lateHorizons are the numbers of rounds that are looked at.
var lateHorizons = [...]int{6, 8, 12, 16, 24, 32, 48, 64, 96, 128}

// judge looks at who has been late of late.
func (d *arrivals) judge() {
	d.late, d.moved = d.late[:0], d.moved[:0]
	if d.lost {
		return
	}
	for _, ci := range d.known {
		d.of[ci].round(func() uint64 { return d.eachStep(ci) })
		d.judgeMoved(ci)
	}
	for _, ci := range d.known {
		x := &d.of[ci]
		n := len(x.rounds.all)
		if d.comms[ci].former || n < lateHorizons[0]+lateTimes {
			continue
		}
		for k := n - 1; k >= max(0, n-lateHorizons[0]); k-- { // who was not late lately is not
			r := x.rounds.all[k].rank
			if r < 0 || slices.ContainsFunc(x.rounds.all[k+1:], func(p arrivalPart) bool { return p.rank == r }) {
				continue
			}
			d.judgeOne(ci, r)
		}
	}
	slices.SortStableFunc(d.late, func(a, b lateRank) int { return cmp.Compare(b.cost, a.cost) })
	if len(d.late) > maxSlow {
		d.late = d.late[:maxSlow]
	}
}

// judgeOne looks at one rank in one communicator.
func (d *arrivals) judgeOne(ci, r int32) {
	x := &d.of[ci]
	if uint32(r) >= uint32(len(d.state)) || d.state[r] != rankAlive {
		return
	}
	best, alone := lateRank{}, sync.OnceValue(func() bool { return d.onlyHere(r, ci) })
	l := lateness{rank: r}
	for _, h := range lateHorizons {
		if h > len(x.rounds.all)*2/3 {
			break
		}
		// Nearly all ranks are of no interest, and looked at once for all horizons.
		if l.over(x.rounds.all, h); l.times < lateTimes-1 || l.share() < (1-1e-6)*leastCost {
			continue
		}
		if s, ok := d.over(ci, r, h, alone); ok && (s.level > best.level || s.level == best.level && s.cost > best.cost) {
			best = s
		}
	}
	if best.level == 0 {
		return
	}
	if i := slices.IndexFunc(d.late, func(s lateRank) bool { return s.rank == r }); i >= 0 {
		if s := &d.late[i]; best.level > s.level || best.level == s.level && best.cost > s.cost {
			*s = best
		}
		return
	}
	d.late = append(d.late, best)
}

// over judges a rank by the last h rounds of a communicator. alone reports whether it is in no other one.
func (d *arrivals) over(ci, r int32, h int, alone func() bool) (s lateRank, ok bool) {
	x := &d.of[ci]
	rounds := x.rounds.all[len(x.rounds.all)-h:]
	v := d.scratch[:0]
	sum := 0.0
	for i := range rounds {
		if rounds[i].rank == r {
			v = append(v, float64(rounds[i].late))
			sum += float64(rounds[i].late)
		}
	}
	d.scratch = v
	s = lateRank{rank: r, comm: ci, cost: latenessOf(r, rounds)}
	if len(v) < lateTimes-1 || s.cost < max(leastCost, d.drags.hungry(r)) {
		return s, false
	}
	slices.SortFunc(v, func(a, b float64) int { return cmp.Compare(b, a) })
	part := 0.0
	for i := 0; i < len(v) && part < lateMost*sum; i++ {
		part += v[i]
		s.times, s.late = i+1, v[i]
	}
	if s.times < lateTimes-1 {
		return s, false
	}
	first := d.count(&s, len(x.rounds.all)-h)
	if first < 0 {
		return s, false
	}
	// None of its pauses: it was not away like that before.
	if s.before < max(8, 2*s.gap, h/2) || float64(s.own)*lateOften > float64(s.times)*float64(s.before)/float64(s.of) {
		return s, false
	}
	// Calls that overlap are late by the same lateness one after the other: the job loses it once. When it
	// loses many times as much, something else is wrong.
	slower := slowerSince(x.rounds.all, first)
	if slower > mostLost*s.cost {
		return s, false
	}
	late := min(latenessOf(r, x.rounds.all[first:]), slower)
	if s.cost = min(s.cost, slower); s.cost < max(leastCost, d.drags.hungry(r)) || !d.spends(r, s.since, spendsLeast*late) && (!alone() || heldUp(r, x.rounds.all[first:])) || d.recovered(&s) {
		return s, false
	}
	if !d.spends(r, s.since, spendsMost*late) && d.elsewhere(&s) {
		return s, false
	}
	chance, lasted := d.chance(&s), d.now-s.since
	// Of samples, which show a habit now and then, its own before have to tell that it has begun.
	sampled := x.period == 0
	switch {
	case chance <= math.Log(lateConfirmed) && s.times >= lateTimes && lasted >= int64(d.cfg.SlowConfirmAfter) && (!sampled || s.logBegan() <= math.Log(beganConfirmed)):
		s.level = Confirmed
	case chance <= math.Log(lateSuspected) && lasted >= int64(d.cfg.SlowSuspectAfter) && (!sampled || s.logBegan() <= math.Log(beganSuspected)):
		s.level = Suspected
	}
	return s, s.level > 0
}

// logBegan is about the logarithm of the chance that of a rank's late rounds as few are among those before, if they
// come at random: what other ranks never do may be a habit of this one.
func (s *lateRank) logBegan() float64 {
	// Of n rounds k are late: the chance that no more than own of them are among the first.
	n, k, sum := s.before+s.of, s.own+s.times, 0.0
	for own := range s.own + 1 {
		sum += math.Exp(logChoose(s.before, own) + logChoose(s.of, k-own) - logChoose(n, k))
	}
	return math.Log(sum)
}

// logChoose is the logarithm of how many sets of k there are of n.
func logChoose(n, k int) float64 {
	if k < 0 || k > n {
		return math.Inf(-1)
	}
	a, _ := math.Lgamma(float64(n) + 1)
	b, _ := math.Lgamma(float64(k) + 1)
	c, _ := math.Lgamma(float64(n-k) + 1)
	return a - b - c
}

// count counts when a rank was late, as much as s says, since a round, and how often before and others
// were. It returns the first round of these, -1 when there is none or they are over.
func (d *arrivals) count(s *lateRank, since int) (first int) {
	rounds := d.of[s.comm].rounds.all
	first, last := -1, -1
	for i := range rounds {
		p := &rounds[i]
		switch as := float64(p.late) >= asLate*s.late; {
		case p.rank < 0:
		case !as:
			if p.rank != s.rank || i < since {
				s.next = max(s.next, float64(p.late))
			}
		case p.rank != s.rank:
			s.others++
		case i < since:
			s.own++
		case first < 0:
			first, last, s.since, s.last = i, i, p.from, p.until
		default:
			s.gap = max(s.gap, i-last)
			last, s.last = i, p.until
		}
	}
	s.before, s.of = first, len(rounds)-first
	if len(rounds)-1-last > 2*s.gap+1 {
		return -1
	}
	return first
}

// chance is about the logarithm of the chance that a rank is late as often as it has been, by how often
// members are.
func (d *arrivals) chance(s *lateRank) float64 {
	seen, of := float64(s.own+s.others), float64(s.of)
	// One more as late as the latest of the others may come any time; what is many times later is as many times
	// rarer. Not so where a round is a time: of a pause every so many short steps it holds one now and then.
	more := 1.0
	if d.of[s.comm].period > 0 {
		more = min(1, s.next/(asLate*s.late))
	}
	exposed := float64(len(d.ev.Comms[s.comm].Members)-1)*float64(len(d.of[s.comm].rounds.all)) + float64(s.before)
	if c := logTail(float64(s.times), of*(seen+more)/exposed); c > math.Log(lateWorth) {
		return c
	}
	// What happens here is not made rare by communicators in which it does not.
	others, by := d.alike(s.comm, s.since, asLate*s.late)
	mean := of * (seen/exposed + (seen+others+more)/(exposed+by))
	c := logTail(float64(s.times), mean)
	if c <= math.Log(lateSuspected) {
		// Where one rank's come together, as many are fewer causes.
		together := d.together(s.comm, s.before, s.of, asLate*s.late)
		c = logTail(float64(s.times)/together, mean/together)
	}
	return c
}

// alike counts how often members of communicators like one were so late before a moment, of how many
// times that they could have been.
func (d *arrivals) alike(ci int32, since int64, least float64) (times, of float64) {
	members, looked := len(d.ev.Comms[ci].Members), 0
	for _, o := range d.known {
		x := &d.of[o]
		if looked == mostAlike {
			break
		}
		if o == ci || len(d.ev.Comms[o].Members) != members || (x.period == 0) != (d.of[ci].period == 0) || d.comms[o].former {
			continue
		}
		looked++
		for i := range x.rounds.all {
			if p := &x.rounds.all[i]; p.until < since {
				of += float64(members)
				if p.rank >= 0 && float64(p.late) >= least {
					times++
				}
			}
		}
	}
	return times, of
}

// elsewhere reports whether ranks of other nodes are as late in communicators like one since the same moment: what
// holds up so many is none of them.
func (d *arrivals) elsewhere(s *lateRank) bool {
	node, members := nodeOf(d.ev, s.rank), len(d.ev.Comms[s.comm].Members)
	looked, late := 0, 0
	for _, o := range d.known {
		x := &d.of[o]
		if looked == mostAlike {
			break
		}
		if o == s.comm || len(d.ev.Comms[o].Members) != members || d.comms[o].former {
			continue
		}
		looked++
		times := 0
		for i := len(x.rounds.all) - 1; i >= 0 && x.rounds.all[i].from >= s.since; i-- {
			if p := &x.rounds.all[i]; p.rank >= 0 && p.rank != s.rank && float64(p.late) >= asLate*s.late && nodeOf(d.ev, p.rank) != node {
				times++
			}
		}
		if 2*times >= s.times {
			late++
		}
	}
	return late >= leastElsewhere && 4*late >= looked
}

// together is by how many times the number of a member's late rounds, of so many in a row, varies more than
// that of rare and independent ones: its variance by its mean, over those before a round.
func (d *arrivals) together(ci int32, before, of int, least float64) float64 {
	rounds, members := d.of[ci].rounds.all[:before], float64(len(d.ev.Comms[ci].Members))
	count := map[int32]float64{}
	sum, squares, n := 0.0, 0.0, 0.0
	for len(rounds) >= of {
		clear(count)
		for i := range rounds[:of] {
			if p := &rounds[i]; p.rank >= 0 && float64(p.late) >= least {
				count[p.rank]++
			}
		}
		for _, c := range count {
			sum, squares = sum+c, squares+c*c
		}
		n += members
		rounds = rounds[of:]
	}
	if sum == 0 {
		return 1
	}
	mean := sum / n
	return max(1, (squares/n-mean*mean)/mean)
}

// logTail is about the logarithm of the chance that what comes mean times as a rule comes n times or more.
func logTail(n, mean float64) float64 {
	if n <= mean {
		return 0
	}
	lg, _ := math.Lgamma(n + 1)
	return n*math.Log(mean) - mean - lg
}

// slowerSince is the share of the time since a round by which the communicator's collectives take longer
// than before.
func slowerSince(rounds []arrivalPart, first int) float64 {
	since, before := rounds[first:], rounds[:first]
	each := func(p []arrivalPart) float64 {
		seqs := 0.0
		for i := range p {
			seqs += float64(p[i].seqs)
		}
		return float64(p[len(p)-1].until-p[0].from) / max(seqs, 1)
	}
	n := max(4, min(len(since), len(before)/3))
	var usual []float64
	for at := len(before); at >= n; at -= n {
		usual = append(usual, each(before[at-n:at]))
	}
	if len(usual) == 0 {
		return 0
	}
	return 1 - median(usual)/max(each(since), 1)
}

// latenessOf is the share of the time of some rounds that a rank is late.
func latenessOf(r int32, rounds []arrivalPart) float64 {
	l := lateness{rank: r}
	l.over(rounds, len(rounds))
	return l.share()
}

// lateness sums up how late a rank is over the last rounds.
type lateness struct {
	rank               int32
	rounds, times      int
	late, all, sampled float64 // collectives: all, and the sampled ones
	took               float64 // by the rounds
}

// over goes on to the last h rounds, at least as many as before.
func (l *lateness) over(rounds []arrivalPart, h int) {
	n := len(rounds)
	for i := n - 1 - l.rounds; i >= n-h; i-- {
		p := &rounds[i]
		if l.all, l.sampled = l.all+float64(p.seqs), l.sampled+float64(p.n); p.rank == l.rank {
			l.late, l.times = l.late+float64(p.late), l.times+1
		}
	}
	l.rounds, l.took = h, float64(rounds[n-1].until-rounds[n-h].from)
}

// share is the share of their time.
func (l *lateness) share() float64 {
	return l.late / max(l.took, 1) * max(1, l.all/max(l.sampled, 1))
}

// onlyHere reports whether a rank is in no other communicator that is in use: then nobody else
// can have held it up.
func (d *arrivals) onlyHere(r, ci int32) bool {
	for k := range d.ev.Comms {
		if int32(k) == ci || d.comms[k].former || d.comms[k].ops == 0 {
			continue
		}
		if slices.ContainsFunc(d.ev.Comms[k].Members, func(m Member) bool { return m.World == r }) {
			return false
		}
	}
	return true
}

// spends reports whether a rank's own time has grown since a moment by so much, a good part of what it has been late
// for since then: who is late since others held it up has spent no more of its own.
func (d *arrivals) spends(r int32, since int64, cost float64) bool {
	n := d.drags.windowsSince(since)
	return n > 0 && uint32(r) < uint32(len(d.drags.ranks)) && d.drags.ranks[r].mean(d.drags.windows, 0, n) >= cost
}

// heldUp reports whether a rank is late where the collective before is not known, and not where it is: then it was
// in that one for longer than others, as when what they sent it was lost on the way.
func heldUp(r int32, rounds []arrivalPart) bool {
	late, n, knownLate, knownN := 0.0, 0.0, 0.0, 0.0
	for i := range rounds {
		p := &rounds[i]
		n, knownN = n+float64(p.n), knownN+float64(p.knownN)
		if p.rank == r {
			late, knownLate = late+float64(p.late), knownLate+float64(p.knownLate)
		}
	}
	return knownN > 0 && knownLate/knownN < spendsLeast*late/max(n, 1)
}

// recovered reports whether a rank that cost its job in nearly every window has not since it was late
// last: the next sampled collective may be seconds away.
func (d *arrivals) recovered(s *lateRank) bool {
	g := d.drags
	n := d.drags.windowsSince(s.last) - 1 // it reaches over the last one
	if int(n) < d.cfg.RecoverWindows || uint32(s.rank) >= uint32(len(g.ranks)) {
		return false
	}
	x, all, costly := &g.ranks[s.rank], d.drags.windowsSince(s.since), int32(0)
	least := stillCosts * x.mean(g.windows, n, max(1, all-n))
	for k := n; k < all; k++ {
		if x.mean(g.windows, k, 1) >= least {
			costly++
		}
	}
	return least > 0 && 5*costly >= 4*(all-n) && x.mean(g.windows, 0, int32(d.cfg.RecoverWindows)) < least
}

// findings reports the ranks that are late again and again.
func (d *arrivals) findings(found []finding) []finding {
	for i := range d.late {
		s := &d.late[i]
		if int(s.comm) >= len(d.ev.Comms) || int(s.rank) >= len(d.state) || d.state[s.rank] != rankAlive || slices.ContainsFunc(found, func(f finding) bool { return f.hang }) {
			continue
		}
		c := &d.ev.Comms[s.comm]
		f := finding{}
		f.Class, f.Level, f.Since, f.Victims = NoncommunicationSlow, s.level, s.since, len(c.Members)-1
		if node := nodeOf(d.ev, s.rank); d.drags.wholeFor(node, d.drags.windowsSince(s.since)) {
			f.ordered = true
			f.blame(Culprit{Kind: CulpritNode, Rank: -1, Peer: -1, Node: d.ev.Nodes[node].Name, Reason: reasonStraggler})
		}
		f.blame(d.rankCulprit(s.rank, reasonStraggler))
		f.setComm(c)
		f.lastOf(c)
		f.why("rank %d has been later than all others in %d of the last %d rounds of collectives of %s, by %s or more; before that it was so %s in %d rounds, and others %s in all",
			s.rank, s.times, s.of, c.Name, millis(s.late), plural(s.own, "time", "times"), s.before, plural(s.others, "time", "times"))
		f.why("the job loses %.0f%% of its time to it", 100*s.cost)
		f.whyOffCPU(d.ev, s.rank)
		f.why("so since %s, last at %s", clock(s.since), clock(s.last))
		found = append(found, f)
	}
	return found
}
