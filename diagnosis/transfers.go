package diagnosis

import "slices"

// transfers finds communicators inside one node whose operations take longer once all have
// entered, where no connection tells anything: NVLink that has lost lanes, for instance. It
// goes by what drags sees of them: even the member that came last is inside for longer
// than its history says, and the job takes longer by a good part of that. A rank that is
// late leaves no such trace, for it does not wait for itself.
type transfers struct {
	*window
	drags *drags

	judged int32     // stretches
	noise  []float32 // by communicator: how far from none the growth is as a rule
	slow   []slowTransfer
	last   []insideSums // by communicator, at the end of the stretch before
	usual  []baseline   // by communicator: ns of transfer an operation
	// denied is, by communicator, that what its members were inside for longer in the last stretch
	// is not transfer, by their own word.
	denied []bool
}

// insideSums are sums over a communicator's members: operations, and ns inside of them before
// the last one had come and after.
type insideSums struct{ ops, wait, transfer uint64 }

// slowTransfer is a communicator whose transfers have grown.
type slowTransfer struct {
	streak
	comm, node int32
	grown      float64 // share of the time of the last stretch
}

const (
	leastGrown    = 0.08 // of the time: less is not told
	transferFirst = 8    // stretches that make a history
)

func (d *transfers) forget() {
	d.judged, d.noise, d.slow, d.last, d.usual, d.denied = 0, d.noise[:0], d.slow[:0], d.last[:0], d.usual[:0], d.denied[:0]
}

func (d *transfers) find(found []finding) []finding {
	if d.drags.windows < d.judged {
		d.forget()
	}
	if d.drags.windows > d.judged && len(d.drags.grown) == len(d.ev.Comms) {
		d.judged = d.drags.windows
		d.judge()
	}
	return d.findings(found)
}

// judge judges the drags' last stretch.
func (d *transfers) judge() {
	d.noise = resized(d.noise, len(d.ev.Comms))
	d.last, d.usual = resized(d.last, len(d.ev.Comms)), resized(d.usual, len(d.ev.Comms))
	d.denied = resized(d.denied, len(d.ev.Comms))
	seen := d.drags.windows >= transferFirst && !d.lost
	var all []insideNode // filled when one has grown
	for ci := range d.ev.Comms {
		g := float64(d.drags.grown[ci])
		at := slices.IndexFunc(d.slow, func(s slowTransfer) bool { return s.comm == int32(ci) })
		bar := max(leastGrown, 5*float64(d.noise[ci]))
		node, slow := int32(-1), false
		d.denied[ci] = !d.transferred(int32(ci), g)
		if seen && g >= bar && d.drags.slower(1) >= g/3 {
			if node = d.inside(int32(ci)); node >= 0 {
				if all == nil {
					all = d.insideNodes()
				}
				others := d.others(all, int32(ci), node)
				slow = len(others) > 0 && g-max(0, median(others)) >= bar && d.transferred(int32(ci), g)
			}
		}
		switch {
		case slow && at < 0 && len(d.slow) < maxSlow:
			d.slow = append(d.slow, slowTransfer{comm: int32(ci), node: node})
			at = len(d.slow) - 1
		case !slow && at >= 0 && d.drags.ops0[ci].active && d.slow[at].lessen(d.window):
			d.slow = slices.Delete(d.slow, at, at+1)
			continue
		}
		if slow && at >= 0 {
			points := 1
			if g >= 2*bar {
				points = 2
			}
			d.slow[at].grown = g
			d.slow[at].add(d.window, d.now-d.drags.last, points, true)
		}
		d.learn(int32(ci), at < 0)
		if at < 0 {
			far := float32(max(g, -g))
			d.noise[ci] += (min(far, 2*max(d.noise[ci], 0.01)) - d.noise[ci]) / 16
		}
	}
}

// transferred reports whether a communicator's operations take longer once all have come, by
// the members' own word: when they come late in turns, each of them is inside for longer, too.
// Where waiting is not told apart, what all are inside for has to do.
func (d *transfers) transferred(ci int32, grown float64) bool {
	a, b, usual := d.last[ci], d.drags.inside[ci], &d.usual[ci]
	if b.wait == 0 || b.ops <= a.ops || b.transfer < a.transfer || usual.n == 0 {
		return true
	}
	more := float64(b.transfer-a.transfer) - usual.mean*float64(b.ops-a.ops)
	return more/float64(len(d.ev.Comms[ci].Members)) >= grown/2*float64(d.drags.last)
}

// learn takes down what the stretch has shown of a communicator's transfers.
func (d *transfers) learn(ci int32, usual bool) {
	a, b := d.last[ci], d.drags.inside[ci]
	if usual && a.ops > 0 && b.ops > a.ops && b.transfer >= a.transfer {
		d.usual[ci].learn(float64(b.transfer-a.transfer) / float64(b.ops-a.ops))
	}
	d.last[ci] = b
}

// inside returns the node that a communicator is inside of, -1 when it is not, tells of
// connections, or carries sends; or when its members do other things or are short of CPU.
func (d *transfers) inside(ci int32) int32 {
	for _, m := range d.ev.Comms[ci].Members {
		r := d.world(m.World)
		if r < 0 || d.state[r] != rankAlive || d.ranks[r].mark.seen >= d.now-d.drags.last || d.crowded(r) {
			return -1
		}
	}
	return d.within(ci)
}

// within returns the node that all members of a communicator are on, -1 when there is none, it tells
// of connections, or carries sends.
func (d *transfers) within(ci int32) int32 {
	h := &d.comms[ci]
	if h.former || h.p2p || len(d.connsOf(ci)) > 0 {
		return -1
	}
	members := d.ev.Comms[ci].Members
	node := int32(-1)
	for i := range members {
		r := d.world(members[i].World)
		if r < 0 {
			return -1
		}
		n := nodeOf(d.ev, r)
		if n < 0 || i > 0 && n != node {
			return -1
		}
		node = n
	}
	return node
}

// insideNode is a communicator that is inside a node, and how much it has grown.
type insideNode struct {
	comm, node int32
	grown      float64
}

func (d *transfers) insideNodes() (all []insideNode) {
	for ci := range d.ev.Comms {
		if d.drags.grown[ci] != 0 {
			if n := d.inside(int32(ci)); n >= 0 {
				all = append(all, insideNode{int32(ci), n, float64(d.drags.grown[ci])})
			}
		}
	}
	return all
}

// others returns how much those communicators have grown that a communicator can be compared
// with: those of other ranks. What its own ranks do elsewhere goes over the same connections
// and waits for the same GPUs.
func (d *transfers) others(all []insideNode, ci, node int32) (grown []float64) {
	for _, x := range all {
		if x.comm != ci && (x.node != node || !shareRank(&d.ev.Comms[x.comm], &d.ev.Comms[ci])) {
			grown = append(grown, x.grown)
		}
	}
	return grown
}

// findings reports the nodes of communicators with slow transfers, unless something else
// explains them.
func (d *transfers) findings(found []finding) []finding {
	done := map[int32]bool{}
	for i := range d.slow {
		s := &d.slow[i]
		if s.level == 0 || done[s.node] || slices.ContainsFunc(found, func(f finding) bool {
			return f.hang || slices.ContainsFunc(f.Culprits, func(k Culprit) bool { return k.Node == d.ev.Nodes[s.node].Name })
		}) {
			continue
		}
		done[s.node] = true
		worst := s
		for j := range d.slow {
			if x := &d.slow[j]; x.node == s.node && x.level > 0 && x.grown > worst.grown {
				worst = x
			}
		}
		f := finding{}
		f.Class, f.Level, f.Since = CommunicationSlow, worst.level, worst.since
		f.blame(Culprit{Kind: CulpritNode, Rank: -1, Peer: -1, Node: d.ev.Nodes[s.node].Name, Reason: reasonNetwork})
		c := &d.ev.Comms[worst.comm]
		f.Victims = len(c.Members)
		f.setComm(c)
		f.lastOf(c)
		f.why("all members of %s are inside its operations for %.0f %% of the time longer than usual, the last one to come as well: the transfer takes longer",
			c.Name, 100*worst.grown)
		f.why("they are all on %s, and nothing tells of the connections between them (NVLink?)", d.ev.Nodes[s.node].Name)
		f.why("so for %s, since %s", plural(worst.slow, "window", "windows"), clock(worst.since))
		found = append(found, f)
	}
	return found
}
