package diagnosis

import (
	"cmp"
	"math"
	"slices"
)

// This file makes findings of what ranks cost their job.

// farOver is by how many times a cost exceeds its bar when two windows of it are enough.
const farOver = 3.5

// mostFelt is how many times as long as a rank is late its peers may wait for it.
const mostFelt = 4

// leastAhead is which part of its lateness a rank waits less than its peers.
const leastAhead = 0.5

// accuse counts the ranks whose cost is beyond their bar and felt.
func (d *drags) accuse(elapsed float64) {
	var suspects []slowRank
	var resting []int32 // their sum is beyond the bar, but the last windows are not
	d.groupByNode()
	for r := range d.ranks {
		if d.ranks[r].sums[0] <= 0 && d.ranks[r].sums[1] <= 0 {
			continue
		}
		if d.lost {
			break // what its ranks do is not known, nor whom they hold up
		}
		if cost, over, fresh, node := d.worst(int32(r)); over >= 1 && !d.goesOn(int32(r), cost) {
			resting = append(resting, int32(r))
		} else if over >= 1 {
			x := &d.did[r]
			suspects = append(suspects, slowRank{rank: int32(r), own: float64(x.own), base: float64(x.pred), excess: cost * elapsed, fresh: fresh, node: node})
			switch {
			case over >= farOver:
				suspects[len(suspects)-1].slow = 3
			case over >= 2:
				suspects[len(suspects)-1].slow = 2
			default:
				suspects[len(suspects)-1].slow = 1
			}
		}
	}
	if len(suspects) > maxSlow {
		slices.SortFunc(suspects, func(a, b slowRank) int { return cmp.Compare(b.excess, a.excess) })
		suspects = suspects[:maxSlow]
	}
	for i := range suspects {
		s := &suspects[i]
		at := slices.IndexFunc(d.slow, func(x slowRank) bool { return x.rank == s.rank })
		if at < 0 {
			if len(d.slow) == maxSlow {
				continue
			}
			d.slow = append(d.slow, slowRank{rank: s.rank})
			at = len(d.slow) - 1
		}
		x := &d.slow[at]
		d.feel(s, x)
		x.fresh, x.node = x.fresh || s.fresh, x.node || s.node
		x.own, x.base, x.excess = s.own, s.base, s.excess
		// Its peers wait for it about as long as it is late. When they wait for much longer, it is not
		// for that, unless it is short of CPU: then it is late inside of collectives, too; or unless something
		// else holds up all of them, and it waits less than they do by what it is late.
		explained := x.growth <= mostFelt*x.waited || d.crowded(s.rank) || x.alike && x.ahead >= x.waited
		// Histories may have been taught by different windows. Whom others wait for waits less than they do, whatever
		// history says.
		ahead := x.ahead >= leastAhead*x.waited || d.crowded(s.rank)
		x.add(d.window, d.at, s.slow, x.growth >= 0.3*x.waited && explained && ahead)
	}
	for i := 0; i < len(d.slow); i++ {
		s := &d.slow[i]
		if !hasRank(suspects, s.rank) && !(s.level < Confirmed && slices.Contains(resting, s.rank)) && s.lessen(d.window) {
			d.slow = slices.Delete(d.slow, i, i+1)
			i--
		}
	}
}

// feel adds up what the middle peer of a suspect was inside collectives for longer
// than usual, in the communicator where that is most, or in all that it is in, beside the suspect's
// own excess: where ranks meet in many small communicators, each is told of a part.
func (d *drags) feel(s, x *slowRank) {
	best, at, peers := 0.0, int32(-1), 0
	ahead, alike := math.Inf(-1), false
	whole := math.Inf(-1)
	for ci := range d.ev.Comms {
		if d.comms[ci].former || d.comms[ci].ops <= d.ops0[ci].ops {
			continue
		}
		members, of := d.ev.Comms[ci].Members, d.members[d.first[ci]:]
		me := slices.IndexFunc(members, func(m Member) bool { return m.World == s.rank })
		if me < 0 {
			continue
		}
		v := d.scratch[:0]
		for j := 0; j < len(members); j += 1 + len(members)/256 {
			u, now := &of[j], d.until(ci, j)
			if j == me || now.ops <= u.ops || u.n == 0 || d.together(s.rank, members[j].World) {
				continue
			}
			v = append(v, float64(now.inside-u.inside)-float64(u.insideNs/u.n)*float64(now.ops-u.ops))
		}
		d.scratch = v
		n := len(v)
		if n == 0 {
			continue
		}
		if g := median(v); at < 0 || g > best {
			best, at, peers = g, int32(ci), n
		}
		v = v[:0]
		for j := 0; j < len(members); j += 1 + len(members)/256 {
			if w := members[j].World; j != me && uint32(w) < uint32(len(d.ranks)) && d.did[w].usual > 0 && !d.together(s.rank, w) {
				v = append(v, float64(d.did[w].inside-d.did[w].usual))
			}
		}
		if d.scratch = v; len(v) > 0 {
			whole = max(whole, median(v))
		}
		if d.comms[ci].p2p {
			continue // its stages are unlike
		}
		v = v[:0]
		for j := 0; j < len(members); j += 1 + len(members)/256 {
			if w := members[j].World; j != me && uint32(w) < uint32(len(d.ranks)) && d.did[w].own > 0 && !d.together(s.rank, w) {
				v = append(v, float64(d.did[w].inside-d.did[s.rank].inside))
			}
		}
		if d.scratch = v; len(v) > 0 {
			ahead, alike = max(ahead, median(v)), true
		}
	}
	if at < 0 {
		return
	}
	if !alike {
		ahead = s.excess
	}
	x.alike, x.ahead = alike, 0.8*x.ahead+ahead
	x.growth = 0.8*x.growth + max(best, whole)
	x.waited = 0.8*x.waited + s.excess
	if x.level == 0 {
		x.comm = at
	}
	x.felt, x.peers = at, peers
}

// together reports whether two ranks are slow together, on one node.
func (d *drags) together(a, b int32) bool {
	return nodeOf(d.ev, a) >= 0 && nodeOf(d.ev, a) == nodeOf(d.ev, b) && d.watched(b)
}

// findings reports the ranks that drag; those of a node that drag together, or have been told because they do,
// are the node.
func (d *drags) findings(found []finding) []finding {
	done := map[int32]bool{}
	for i := range d.slow {
		s := &d.slow[i]
		if s.level == 0 {
			continue
		}
		f := finding{}
		f.Class, f.Level, f.Since, f.Victims = NoncommunicationSlow, s.level, s.since, s.peers
		if node := nodeOf(d.ev, s.rank); node >= 0 && (s.node || d.whole(node)) {
			if done[node] {
				continue
			}
			done[node] = true
			f.ordered = true
			f.blame(Culprit{Kind: CulpritNode, Rank: -1, Peer: -1, Node: d.ev.Nodes[node].Name, Reason: reasonStraggler})
		}
		f.blame(d.rankCulprit(s.rank, reasonStraggler))
		c := &d.ev.Comms[s.comm]
		f.setComm(c)
		f.lastOf(c)
		d.whyDrags(&f, s)
		found = append(found, f)
	}
	return found
}

// groupByNode notes which ranks are on which node.
func (d *drags) groupByNode() {
	d.onNode = resized(d.onNode, len(d.ev.Nodes))
	for i := range d.onNode {
		d.onNode[i] = d.onNode[i][:0]
	}
	for r := range d.ranks {
		if node := nodeOf(d.ev, int32(r)); node >= 0 {
			d.onNode[node] = append(d.onNode[node], int32(r))
		}
	}
}

// whole reports whether all ranks of a node are slow together: the most of them by
// half of what the worst of them is.
func (d *drags) whole(node int32) bool {
	return d.windows >= horizons[0] && d.wholeFor(node, horizons[0])
}

// wholeFor is whole by the last n windows.
func (d *drags) wholeFor(node, n int32) bool {
	if uint32(node) >= uint32(len(d.onNode)) || len(d.onNode) < 2 {
		return false
	}
	v := d.scratch[:0]
	for _, r := range d.onNode[node] {
		if int(r) < len(d.ranks) && d.state[r] == rankAlive {
			v = append(v, d.ranks[r].mean(d.windows, 0, n))
		}
	}
	d.scratch = v
	if len(v) < 2 {
		return false
	}
	most, mean := slices.Max(v), 0.0
	slices.Sort(v)
	for _, c := range v {
		mean += c / float64(len(v))
	}
	return v[0] >= most/4 && v[(len(v)-1)/4] >= 0.5*most && mean >= leastCost/2
}

// add counts what a window shows: 1, or 2 where it is beyond doubt.
func (s *streak) add(w *window, start int64, points int, certain bool) {
	if s.slow == 0 {
		s.since = start
	}
	s.slow += points
	s.clean = 0
	if !certain {
		return
	}
	lasted := w.now - s.since
	if s.slow >= w.cfg.SuspectWindows && lasted >= int64(w.cfg.SlowSuspectAfter) {
		s.level = max(s.level, Suspected)
	}
	if s.slow >= w.cfg.ConfirmWindows+1 && lasted >= int64(w.cfg.SlowConfirmAfter) {
		s.level = Confirmed
	}
}

// lessen counts a window that shows nothing and reports whether it is over.
func (s *streak) lessen(w *window) bool {
	s.clean++
	s.slow = max(0, min(s.slow, 8)-1)
	return s.slow == 0 || s.clean >= w.cfg.RecoverWindows
}
