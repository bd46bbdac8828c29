package diagnosis

import (
	"math"
	"slices"
)

// mean is a rank's mean cost of the last n windows but for the skip last ones.
func (x *rankCost) mean(windows, skip, n int32) float64 {
	sum := float32(0)
	for k := skip; k < skip+n; k++ {
		sum += x.cost[((windows-1-k)%costWindows+costWindows)%costWindows]
	}
	return float64(sum) / float64(n)
}

func (d *drags) watched(rank int32) bool { return len(d.slow) > 0 && hasRank(d.slow, rank) }

// bar is what a rank's mean cost over a horizon has to exceed: what is never seen by
// chance of so many ranks, in units of what this job's and this rank's are like. together is by how much less it
// wanders together with others.
func (d *drags) bar(r int32, h int, together float64) float64 {
	noise := d.usual[h]
	for n := range h { // not known yet: no better than over fewer windows
		if d.measured < horizons[h]+4 {
			noise = max(noise, 0.8*d.usual[n])
		}
	}
	// What sums over many windows are like is not known by a few of them, of which each is in many sums: until then
	// they wander no less than what comes at random.
	if d.measured < manySums*horizons[h] {
		noise = max(noise, d.usual[0]*math.Sqrt(float64(horizons[0])/float64(horizons[h])))
	}
	restless := max(1, float64(d.ranks[r].noise)/max(d.short, 1e-6))
	k := 2.5 + 1.4*math.Sqrt(2*math.Log(20*float64(len(d.ranks))))
	young := 1 + 6/float64(max(min(d.measured, d.ranks[r].seen), 1)) // little is known yet, of the job or of the rank
	return max(leastCost*young, d.hungry(r), k*noise*min(restless, 8)*young/together)
}

// manySums is how many sums over windows of their own tell what they are like.
const manySums = 6

// alike is by how much less ranks that are slow together, all of a node, wander as one than each by itself.
func (d *drags) alike(r int32, h int) float64 {
	node := nodeOf(d.ev, r)
	if !d.wholeFor(node, horizons[h]) {
		return 1
	}
	root := math.Sqrt(float64(min(len(d.onNode[node]), mostTogether)))
	if d.joint.n == 0 {
		return root
	}
	return min(max(1, d.joint.less()), root)
}

// jointNoise tells by how much less a node's ranks wander as one than each by itself: those that wander by themselves
// by the root of their number, and those that share their work, as a tensor-parallel group shares its sequences, not at
// all. As long as little is known they are taken for the former.
type jointNoise struct {
	one   float64 // mean distance from the norm of the mean of a node's ranks in a window
	ratio float64 // of that to a rank's
	n     float64 // windows, and what is taken for as many
}

const (
	ownWay   = 16 // windows for which the root of their number counts
	farJoint = 3  // times as far as nodes have been: that is a fault, of one of them or not
)

func (x *jointNoise) less() float64 { return 1 / max(x.ratio, 1e-3) }

// measureNodes notes how nodes wander in this window, beside their ranks, apart from what all have in common. A node of
// which a rank is far outside, or watched, tells nothing: it may be slow.
func (d *drags) measureNodes() {
	at := (d.windows - 1) % costWindows
	cost := func(r int32) (float64, bool) {
		if int(r) >= len(d.ranks) || d.state[r] != rankAlive || d.ranks[r].seen < minWindows || d.ranks[r].odd || d.watched(r) {
			return 0, false
		}
		return float64(d.ranks[r].cost[at]), true
	}
	all, n := 0.0, 0.0
	for r := range d.ranks {
		if c, ok := cost(int32(r)); ok {
			all, n = all+c, n+1
		}
	}
	one, each, nodes := 0.0, 0.0, 0.0
	for _, ranks := range d.onNode {
		sum, far, of := 0.0, 0.0, 0
		for _, r := range ranks {
			if c, ok := cost(r); ok {
				sum, far, of = sum+c-all/n, far+math.Abs(c-all/n), of+1
			}
		}
		if k := float64(of); of > 1 && of == len(ranks) {
			one, each, nodes = one+math.Abs(sum/k), each+far/k, nodes+1
		}
	}
	if nodes < 2 {
		return
	}
	x := &d.joint
	if x.n == 0 {
		*x = jointNoise{one: one / nodes, ratio: 1 / math.Sqrt(mostTogether), n: ownWay}
	}
	if one/nodes > farJoint*x.one || each == 0 {
		return
	}
	x.n = min(x.n+1, 64)
	x.one += (one/nodes - x.one) / x.n
	x.ratio += (one/each - x.ratio) / x.n
}

// mostTogether of a node's ranks count as so many that wander by themselves: they share a host.
const mostTogether = 4

// hungry is the share of time in which a rank waits for a CPU that others have: on a
// crowded machine ranks differ by what they get, and none of them is slow. What it always waits is in
// its norm already, and differs by less. What its own quota holds it back is its own affair.
func (d *drags) hungry(r int32) float64 {
	x := &d.ev.Ranks[r]
	others := max(0, x.Starved-x.Throttled)
	usual, _ := d.crowds.usually(r, -1)
	always := min(usual, others)
	return 1.5*float64(others-always) + 0.5*float64(always)
}

// heldBack is the share of time for which a rank's quota keeps it from running, beyond the usual:
// it is late inside of collectives as well, which is nobody's own time.
func (d *drags) heldBack(r int32) float32 {
	const slack = 0.05
	return max(0, d.ev.Ranks[r].Throttled-d.crowds.usuallyHeld(r)-slack)
}

// worst is the horizon at which a rank exceeds its bar by most: its cost there, by how much,
// whether it is none that the rank had before, and whether that is by the bar of its node's ranks together.
func (d *drags) worst(r int32) (cost, over float64, fresh, node bool) {
	x := &d.ranks[r]
	told := d.isNew(r) // what has been found new stays so
	for h, n := range horizons {
		if d.measured < n+2 || float64(x.sums[h]) < leastCost*float64(n) {
			continue
		}
		c := x.trimmed(d.windows, n)
		if !d.few { // a window's steps average out, and a few windows are hardly a second
			if h == 0 {
				continue
			}
			c = min(c, d.mostOf(x, n))
		}
		if c < leastCost || !x.lasts(d.windows, n, c/3) {
			continue
		}
		if d.slower(n) < c/2 {
			continue // the job as a whole is not slower for it
		}
		is := told || x.isNew(d.windows, h, c, d.few)
		if !is && !x.mostly(d.windows, n, 1) {
			continue // it has always been away once in a while
		}
		if o := c / d.bar(r, h, d.alike(r, h)); o > over {
			cost, over, fresh, node = c, o, is, c < d.bar(r, h, 1)
		}
	}
	return cost, over, fresh, node
}

// mostOf is what a rank has cost in three quarters of the last n windows, two in a row, at least: what comes in every
// third of a few steps is in every second window.
func (d *drags) mostOf(x *rankCost, n int32) float64 {
	v := d.scratch[:0]
	for k := range n - 1 {
		v = append(v, x.mean(d.windows, k, 2))
	}
	d.scratch = v
	return quantile(v, 0.25)
}

// trimmed is a rank's mean cost of the last n windows but for the largest.
func (x *rankCost) trimmed(windows, n int32) float64 {
	sum, most := float32(0), float32(0)
	for k := range n {
		c := x.cost[((windows-1-k)%costWindows+costWindows)%costWindows]
		sum, most = sum+c, max(most, c)
	}
	return float64(sum-most) / float64(n-1)
}

// lasts reports whether most parts of the last n windows cost so much: both halves
// of few windows, three quarters of many.
func (x *rankCost) lasts(windows, n int32, least float64) bool {
	parts, want := int32(4), 3
	if n == horizons[0] {
		parts, want = 2, 2
	}
	for k := range parts {
		if x.mean(windows, k*n/parts, n/parts) >= least {
			want--
		}
	}
	return want <= 0
}

// goesOn reports whether the last windows show what those before them did: for what
// has been told already the last one, so that it ends soon after its cause.
func (d *drags) goesOn(r int32, cost float64) bool {
	n := int32(2)
	if i := slices.IndexFunc(d.slow, func(s slowRank) bool { return s.rank == r }); i >= 0 && d.slow[i].level > 0 {
		n = 1
	}
	return d.ranks[r].mean(d.windows, 0, n) >= 0.3*cost
}
