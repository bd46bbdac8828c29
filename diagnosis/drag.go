package diagnosis

import (
	"math"
)

// drags finds ranks that cost their job a little, for long: from a tenth of a
// step, where stragglers asks for half as much again as usual. What a rank spends of
// its own is compared with what its own history says of the operations that it
// did, each communicator's for itself, and with what the middle rank of the same
// window spends beyond its own. The difference is summed over windows: what a
// window's edges cut from one is in the next, and noise grows with the root of
// their number at most. Both halves of a sum have to show it, so that it takes many
// windows and no single pause. Then it has to be far outside of what sums over as
// many windows are otherwise in this job, and felt by those who wait for it.
type drags struct {
	*window

	members []memberUsual
	first   []int32 // by communicator: its first in members
	ranks   []rankCost
	// What members of all communicators add to, or ask of, their ranks lies close together: they come in any order.
	did     []rankDid
	parts   []dragPart // the sums of shares
	weights []rankWeight
	// The stretch that is judged next: a step where the program marks them, else
	// as long as every communicator in use takes for an operation.
	at    int64 // its start, and the moment of members' sums; 0: of none
	last  int64 // length of the former one
	step0 uint64
	voids int
	ops0  []commWindow
	cut   opsCut
	// grown is, by communicator, the share of the last stretch that even its last
	// member was inside operations for longer than usual: all had come, and it was
	// the transfer that took longer.
	grown    []float32
	inside   []insideSums // by communicator
	windows  int32        // judged since forget
	lengths  [costWindows]float64
	typical  baseline               // own time an operation of the whole job
	pace     baseline               // of the job: time an operation
	paces    [costWindows]float32   // of the last windows, in parts of the usual one, but for what all ranks spend more
	short    float64                // the usual distance of a rank from its norm in a window, as a share of it
	usual    [len(horizons)]float64 // the same of means over so many windows
	joint    jointNoise
	phases   phases
	slow     []slowRank
	measured int32 // windows that noise has been measured in
	few      bool  // the window that is judged is of few steps
	// unexplained is the share of the last windows that the job has taken longer for its work than
	// usual, but for what the rank that costs most has spent of its own.
	unexplained float64
	onNode      [][]int32 // ranks by node, at the last stretch's end
	scratch     []float64
}

// memberUsual is what is normal for a member of a communicator, and its sums at the window's start.
type memberUsual struct {
	memberSums
	// Sums over the windows so far, the older ones counting less.
	n, ownNs, insideNs float32
}

// rankDid is what a rank did in the last window, and what its history says of the same operations; ns.
type rankDid struct {
	own, pred     float32 // of its own
	inside, usual float32 // inside operations
}

// rankWeight is what a window counts for in a rank's history.
type rankWeight struct {
	weight float32 // 0: nothing
	anew   bool    // the history starts anew
}

// rankCost is how far a rank has been from its norm in the last windows.
type rankCost struct {
	cost   [costWindows]float32   // excess over the norm as a share of the window, by window
	sums   [len(horizons)]float32 // over so many of the last windows
	noise  float32                // mean distance from the norm in a window
	lately float32                // what it has cost in the last windows, as a share of them, whatever that is
	past   pastCost
	seen   int32 // windows
	low    int32 // windows in a row with far less of its own than its history says
	above  int32 // windows far above the norm, less those far below
	odd    bool  // the last one is, and teaches little
}

const (
	costWindows = 24
	usualMemory = 1.0 / 64 // weight of a new window in what is normal
	minWindows  = 5        // that make a history
	youth       = 64       // windows of a history that is young
	lowWindows  = 3        // in a row with less than lowShare of what it says that end it
	lowShare    = 0.6
	leastCost   = 0.05 // of the job's time: less is nobody's business
	mostCost    = 0.35 // that one window counts for
)

// horizons are the numbers of windows that are summed.
var horizons = [...]int32{4, 8, 16, costWindows}

func (d *drags) forget() {
	*d = drags{window: d.window, scratch: d.scratch,
		phases: phases{doublings: d.phases.doublings}, cut: d.cut.forgotten(), members: d.members[:0], ops0: d.ops0[:0], grown: d.grown[:0], first: d.first[:0], ranks: d.ranks[:0], did: d.did[:0], parts: d.parts, slow: d.slow[:0]}
}

func (d *drags) find(found []finding) []finding {
	switch {
	case !d.align() || d.at == 0 || d.voids != d.window.voids:
		d.snapshot()
	case d.cut.open || d.complete():
		if d.cutDone() {
			d.judge()
		}
	}
	return d.findings(found)
}

// complete reports whether the stretch is over.
func (d *drags) complete() bool {
	elapsed := d.now - d.at
	if elapsed < int64(d.cfg.MinWindow) {
		return false
	}
	if d.view.step > 0 {
		return d.view.step > d.step0+1
	}
	any, waiting := false, false
	for i := range d.comms {
		h, c := &d.comms[i], &d.ops0[i]
		done := h.ops - min(c.ops, h.ops)
		any = any || done > 0
		waiting = waiting || (done > 0 || c.active) && done < d.phases.ops()*uint64(len(d.ev.Comms[i].Members))
	}
	return any && (!waiting || d.last > 0 && elapsed > 4*d.last)
}

// align makes members parallel to the evidence's, false when they are new.
func (d *drags) align() bool {
	n, same := int32(0), len(d.first) == len(d.ev.Comms)+1
	for ci := range d.ev.Comms {
		same = same && d.first[ci] == n
		n += int32(len(d.ev.Comms[ci].Members))
	}
	same = same && len(d.members) == int(n) && len(d.ranks) == len(d.ev.Ranks)
	if same {
		return true
	}
	d.forget()
	d.first = resized(d.first, len(d.ev.Comms)+1)
	n = 0
	for ci := range d.ev.Comms {
		d.first[ci] = n
		n += int32(len(d.ev.Comms[ci].Members))
	}
	d.first[len(d.ev.Comms)] = n
	d.members = zeroed(d.members, int(n))
	d.ranks, d.did = zeroed(d.ranks, len(d.ev.Ranks)), zeroed(d.did, len(d.ev.Ranks))
	return false
}

// judge judges the window that ends with this pass.
func (d *drags) judge() {
	elapsed := float64(d.cut.at - d.at)
	own, ops, active := d.sum(elapsed)
	if d.view.step == 0 && d.phases.uneven(own/max(ops, 1)) {
		d.phases.doublings++
		d.forget()
		return
	}
	usual := d.isUsual(own / max(ops, 1))
	common := d.common()
	d.lengths[d.windows%costWindows] = elapsed
	d.follow(elapsed/max(ops, 1)*active, common, usual)
	d.windows++
	d.few = d.fewSteps()
	d.measure(elapsed, common)
	d.accuse(elapsed)

	d.learn(usual, float32(common))
	d.begin()
}

// isUsual reports whether the job as a whole does what it does as a rule: neither a
// warm-up nor a pause of all teaches what is normal.
func (d *drags) isUsual(own float64) bool {
	if own <= 0 {
		return false
	}
	b := &d.typical
	settled := b.n >= 3
	ok := settled && own <= 1.5*b.mean && own >= b.mean/1.5
	b.learn(own)
	return ok
}

// follow follows how fast the job goes.
func (d *drags) follow(pace, common float64, usual bool) {
	now := float32(1)
	if d.pace.n >= minWindows {
		now = float32(min(pace/max(d.pace.mean, 1)/max(common, 1), 4))
	}
	d.paces[d.windows%costWindows] = now
	if usual && len(d.slow) == 0 && (now < 1.1 || d.windows%4 == 0) { // what lasts for long is usual at last
		d.pace.learn(pace)
	}
}

// slower is how much longer than usual the job takes for its work in the last windows, in
// parts of the time that it takes.
func (d *drags) slower(n int32) float64 {
	sum := float32(0)
	for k := range n {
		sum += d.paces[((d.windows-1-k)%costWindows+costWindows)%costWindows]
	}
	return 1 - float64(n)/float64(max(sum, 1e-3))
}

// mostlySlower is slower of the middle one of the last windows: a pause of all in one of them
// is no part of it.
func (d *drags) mostlySlower() float64 {
	const n = 6
	if d.windows < n {
		return 0
	}
	var v [n]float64
	for k := range int32(n) {
		v[k] = float64(d.paces[((d.windows-1-k)%costWindows+costWindows)%costWindows])
	}
	return 1 - 1/max(median(v[:]), 1e-3)
}

// common is how much slower than its history the middle rank is.
func (d *drags) common() float64 {
	v := d.scratch[:0]
	for r := range d.ranks {
		if x := &d.did[r]; x.pred > 0 && d.ranks[r].seen >= minWindows {
			v = append(v, float64(x.own)/float64(x.pred))
		}
	}
	d.scratch = v
	middle := 1.0
	switch {
	case len(v) > 2:
		middle = median(v)
	case len(v) == 2: // which of them is slow is told by what the other one spends, too
		middle = max(1, min(v[0], v[1]))
	}
	return max(middle, d.leastCommon())
}

// measure notes how far from its norm each rank is in this window.
func (d *drags) measure(elapsed, common float64) {
	at := (d.windows - 1) % costWindows
	short, most := d.scratch[:0], float32(0)
	for r := range d.ranks {
		x := &d.ranks[r]
		cost := float32(0)
		did := &d.did[r]
		known := did.pred > 0 && x.seen >= minWindows && d.state[r] == rankAlive && d.view.ranks[r].mark.seen < d.at
		if known {
			cost = float32((float64(did.own) - float64(did.pred)*common) / elapsed)
			if held := d.heldBack(int32(r)); held > 0 {
				cost = max(cost, held)
			}
			x.lately += (min(max(cost, -1), 1) - x.lately) / 3
			cost = min(max(cost, -mostCost), mostCost)
		}
		for h, n := range horizons {
			x.sums[h] += cost - x.cost[(d.windows-1-n%costWindows+costWindows)%costWindows]
		}
		x.cost[at] = cost
		most = max(most, x.sums[0]/float32(horizons[0]), x.lately)
		far := max(cost, -cost)
		x.odd = far > max(4*max(x.noise, float32(d.short)), 0.015)
		switch {
		case x.odd && cost > 0:
			x.above++
		case x.odd:
			x.above--
		}
		// Where three of a young rank's windows, and half of them, are far above the norm, the norm is odd.
		if x.seen < 4*minWindows && x.above > 2 && 2*x.above > x.seen-minWindows {
			x.odd = false
		}
		if known && !d.isNew(int32(r)) {
			x.remember(d.windows)
		}
		if known && !d.watched(int32(r)) {
			// What is far outside is a hiccup or a fault: it counts for little, or the norm would follow it.
			// So does what lasts: that is no noise, and a rank that is late is not one to excuse for it.
			weight := float32(1.0 / 32)
			if lasting := x.sums[1] / float32(horizons[1]); lasting > max(1.3*leastCost, 2*x.noise) {
				weight = 1.0 / 256
			}
			x.noise += (min(far, 2*max(x.noise, float32(d.short), 0.003)) - x.noise) * weight
			short = append(short, float64(cost))
		}
	}
	d.scratch = short
	d.measureNodes()
	apart(short)
	d.unexplained = d.mostlySlower() - float64(most)
	if len(short) == 0 {
		return
	}
	d.measured++
	d.short = d.wander(d.short, ordinary(short), d.measured)
	for h, n := range horizons {
		if d.measured < n {
			break
		}
		v := d.scratch[:0]
		for r := range d.ranks {
			if x := &d.ranks[r]; x.seen >= minWindows && !d.watched(int32(r)) {
				v = append(v, float64(x.sums[h])/float64(n))
			}
		}
		d.scratch = v
		apart(v)
		d.usual[h] = d.wander(d.usual[h], ordinary(v), d.measured-n+1)
	}
}

// apart makes signed distances from the norm what they are apart from what most of them have in
// common: while all wait for one rank, they spend less of their own, and that is no noise. Of few
// ranks most are not many.
func apart(v []float64) {
	shift := 0.0
	if len(v) >= 4 {
		shift = min(0, quantile(v, 0.75))
	}
	for i := range v {
		v[i] = math.Abs(v[i] - shift)
	}
}

// ordinary is what is usual among distances from the norm. It is no more than the middle one,
// for of two nodes one may be slow, scaled to what three of five do not exceed.
func ordinary(v []float64) float64 {
	const part, below = 0.6, 1.4 // of the absolute values of a normal distribution
	if lower := int(0.45 * float64(len(v)-1)); lower < int(part*float64(len(v)-1)) {
		return below * quantile(v, 0.45)
	}
	return quantile(v, part)
}

// wander lets a value follow another one that is far above it only slowly: while one
// rank is late, others that wait for it in the background spend less of their own.
func (d *drags) wander(v, now float64, n int32) float64 {
	if n > 8 {
		now = min(now, 1.5*v+0.002)
	}
	return v + (now-v)/float64(min(n, 32))
}

// learn lets the window teach what is normal: unless the job did something else, and
// but for ranks that are suspected. What all ranks spend more is none's norm.
func (d *drags) learn(usual bool, common float32) {
	for r := range d.ranks {
		if x := &d.ranks[r]; usual && d.did[r].own > 0 {
			x.seen++
			if !d.watched(int32(r)) {
				x.startAnew(&d.did[r])
			}
		}
	}
	d.weights = resized(d.weights, len(d.ranks))
	for r := range d.ranks {
		x, w := &d.ranks[r], rankWeight{}
		if usual && !d.watched(int32(r)) {
			w = rankWeight{weight: 1, anew: x.low == lowWindows}
			if x.odd {
				w.weight = 0.1
			}
		}
		d.weights[r] = w
	}
	inParts(len(d.ev.Comms), len(d.members), func(lo, hi int) {
		for ci := lo; ci < hi; ci++ {
			d.learnComm(ci, common)
		}
	})
}

// learnComm has what a communicator's members did teach what is usual for them, by their ranks' weights.
func (d *drags) learnComm(ci int, common float32) {
	members, of := d.ev.Comms[ci].Members, d.members[d.first[ci]:]
	for i := range members {
		m, u := &members[i], &of[i]
		before, now := u.memberSums, d.until(ci, i)
		u.memberSums = now // the next one's start
		if uint32(m.World) >= uint32(len(d.weights)) || now.ops <= before.ops || d.weights[m.World].weight == 0 {
			continue
		}
		if d.weights[m.World].anew {
			u.n, u.ownNs, u.insideNs = 0, 0, 0
		}
		n, own, in := float32(now.ops-before.ops), float32(now.own-before.own)/common, float32(now.inside-before.inside)
		weight := d.weights[m.World].weight
		keep := 1 - usualMemory*weight
		u.n, u.ownNs, u.insideNs = u.n*keep+n*weight, u.ownNs*keep+own*weight, u.insideNs*keep+in*weight
	}
}

// startAnew ends the history of a young rank that spends far less than it says in windows in a row.
// What a job's start has put into it, compiling a model, say, would be wrong for minutes, and by more
// for some ranks than for others. A rank that is late spends more, not less.
func (x *rankCost) startAnew(did *rankDid) {
	if did.pred <= 0 || did.own >= lowShare*did.pred || x.seen > youth || x.low == lowWindows {
		x.low = 0
	} else if x.low++; x.low == lowWindows {
		*x = rankCost{seen: 1, low: lowWindows}
	}
}

// begin begins a stretch.
func (d *drags) begin() {
	end := d.now
	if d.cut.open {
		end, d.cut.open = d.cut.at, false
	}
	if d.at > 0 {
		d.last = end - d.at
	}
	d.at, d.step0, d.voids = end, d.view.step, d.window.voids
	d.ops0 = resized(d.ops0, len(d.comms))
	for i := range d.comms {
		h, c := &d.comms[i], &d.ops0[i]
		*c = commWindow{ops: h.ops, active: h.ops > c.ops}
	}
}

// snapshot begins a stretch without a decision on the one before.
func (d *drags) snapshot() {
	d.cut.open = false
	d.begin()
	for ci := range d.ev.Comms {
		members, of := d.ev.Comms[ci].Members, d.members[d.first[ci]:]
		for i := range members {
			of[i].memberSums = sumsOf(&members[i])
		}
	}
}
