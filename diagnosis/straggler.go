package diagnosis

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"slices"
)

// ownHistory is what is normal for a rank: own time and time inside
// collectives, ns an operation, over all its communicators. Own time excludes
// all waiting, so it grows at the rank that is late and at none that it delays.
type ownHistory struct {
	own, inside baseline
	spread      float64 // mean distance of a window from the norm, as a ratio
	windows     lateWindows
}

// slowRank is a rank whose own time has grown, with the window that says so.
type slowRank struct {
	streak
	rank    int32
	comm    int32 // where its peers felt it most when it was told first: another name would be another alert
	felt    int32 // where they feel it most
	peers   int   // direct ones
	own     float64
	base    float64     // its history's, or its peers' while there is none
	common  float64     // how much slower the middle of all ranks was
	alone   bool        // judged by its peers: no history yet
	unsure  bool        // alone, and it may have another part in the program than they
	growth  float64     // of the middle peer's time inside collectives, ns in the window
	excess  float64     // of its own time, ns in the window
	ahead   float64     // drags: by how much its middle peer was inside collectives for longer than it, ns
	alike   bool        // drags: it has peers that do the same, and ahead is measured
	waited  float64     // inside collectives for longer than usual, ns in the window
	windows lateWindows // since the first late one
	allCost float64     // of the windows in which it was slow, no more than mostCost of one, ns
	fresh   bool        // drags: it is no habit
	node    bool        // drags: it is beyond its bar as one of its node's ranks, not by itself
	unfelt  int         // windows in a row that its peers did not feel
	before  costBefore  // what it cost before the first late one
	last    int         // sampled collectives that it entered last, of
	of      int
}

// maxSlow bounds the ranks or connections that one window can find slow.
const maxSlow = 64

// stragglers finds ranks whose own work takes longer than it did, or than that
// of ranks that do the same.
type stragglers struct {
	*window
	history []ownHistory // by world rank
	all     lateWindows  // of all ranks together
	slow    []slowRank
	scratch []float64
	drags   *drags
}

func (d *stragglers) forget() {
	d.history, d.slow, d.all = d.history[:0], d.slow[:0], lateWindows{}
}

func (d *stragglers) find(found []finding) []finding {
	if d.closed {
		d.history = resized(d.history, len(d.sums))
		d.judge()
	}
	return d.findings(found)
}

// judge judges the window that ends with this pass. A rank is slow when
// its own time per operation is far above its history and that of the middle
// rank is not (before there is a history: far above its peers'), when that costs
// a good share of the window, and when its peers were inside collectives longer
// for it while it was not.
func (d *stragglers) judge() {
	elapsed := float64(d.now - d.start)
	ratios := d.scratch[:0]
	for r := range d.sums {
		if h := &d.history[r]; d.settled(&h.own) {
			if own, _, ops := d.delta(int32(r)); ops > 0 {
				ratios = append(ratios, own/ops/max(h.own.mean, 1))
			}
		}
	}
	common := max(1, median(ratios))
	owns := ratios[:0]
	for r := range d.sums {
		if own, _, ops := d.delta(int32(r)); ops > 0 {
			owns = append(owns, own)
		}
	}
	middle := median(owns)
	d.scratch = owns

	var suspects []slowRank
	for r := range d.sums {
		own, inside, ops := d.delta(int32(r))
		hist := &d.ranks[r]
		if ops <= 0 || hist.mark.seen >= d.start {
			continue // it did nothing, or what its mark says
		}
		h := &d.history[r]
		s := slowRank{rank: int32(r), own: own / ops, common: common}
		slow := false
		if d.settled(&h.own) {
			rel := s.own / max(h.own.mean*common, 1)
			s.base, s.excess = h.own.mean, own-h.own.mean*common*ops
			s.waited = inside - h.inside.mean*ops
			slow = rel >= max(d.cfg.OwnRatio, 1+4*min(h.spread, 0.5))
		} else {
			s.alone, s.excess = true, own-middle
			slow = own >= d.cfg.PeerRatio*middle
		}
		if slow && s.excess >= d.cfg.SlowShare*elapsed {
			suspects = append(suspects, s)
		}
	}
	if len(suspects) > maxSlow {
		slices.SortFunc(suspects, func(a, b slowRank) int {
			return cmp.Or(cmp.Compare(b.excess, a.excess), cmp.Compare(a.rank, b.rank))
		})
		suspects = suspects[:maxSlow]
	}
	late := slices.Clone(suspects)
	if len(suspects) > 0 {
		suspects = d.felt(suspects, elapsed)
	}
	for i := range suspects {
		d.slowAgain(&suspects[i])
	}
	for i := range late {
		d.notFelt(&late[i], suspects)
	}
	for i := 0; i < len(d.slow); i++ {
		s := &d.slow[i]
		_, _, ops := d.delta(s.rank)
		if over := ops > 0 && !hasRank(late, s.rank) && s.normal(d.window); over || s.unfelt > 1 && s.level == 0 {
			d.byChance(s)
			d.slow = slices.Delete(d.slow, i, i+1)
			i--
		}
	}
	d.countLate(late)
	d.learnOwn(common)
}

// felt keeps the suspects whose direct peers, in some communicator, were held
// up for them while they were not held up themselves, and judges those without
// a history by their peers.
func (d *stragglers) felt(suspects []slowRank, elapsed float64) []slowRank {
	at := make(map[int32]int, len(suspects))
	for i := range suspects {
		at[suspects[i].rank] = i
	}
	type evidence struct {
		growth, own []float64 // of all peers; of those that do the same work
		others      []int32   // pipeline neighbours: they do other work
		unlike      []float64 // own of peers with other communicators: they may do other work
	}
	var roles []uint64
	if slices.ContainsFunc(suspects, func(s slowRank) bool { return s.alone }) {
		roles = d.roles()
	}
	seen := make([]evidence, len(suspects))
	inWindow := func(ci int) bool { return !d.comms[ci].former && d.comms[ci].ops > d.ops[ci].ops }
	visit := func(p2p bool) {
		for ci := range d.ev.Comms {
			if !inWindow(ci) || d.comms[ci].p2p != p2p {
				continue
			}
			members := d.ev.Comms[ci].Members
			for i := range members {
				k, ok := at[members[i].World]
				if !ok {
					continue
				}
				s, x := &suspects[k], &seen[k]
				_, mine, _ := d.delta(s.rank)
				from := len(x.growth)
				// Members of a communicator with several stages of a pipeline do several kinds of work.
				alike := !p2p && !slices.ContainsFunc(members, func(m Member) bool { return slices.Contains(x.others, m.World) })
				for j := 0; j < len(members); j += 1 + len(members)/256 {
					w := d.world(members[j].World)
					if w < 0 || w == s.rank {
						continue
					}
					own, inside, ops := d.delta(w)
					if ops == 0 {
						continue
					}
					grown := inside - mine
					if h := &d.history[w]; d.settled(&h.inside) && !s.alone {
						grown = inside - h.inside.mean*ops
					}
					x.growth = append(x.growth, grown)
					if p2p {
						x.others = append(x.others, w)
					} else if alike && s.alone && roles[w] != roles[s.rank] {
						x.unlike = append(x.unlike, own)
					} else if alike {
						x.own = append(x.own, own)
					}
				}
				if from < len(x.growth) {
					if g := median(slices.Clone(x.growth[from:])); s.peers == 0 || g > s.growth {
						s.growth, s.felt = g, int32(ci)
					}
					s.peers = max(s.peers, len(x.growth)-from)
				}
			}
		}
	}
	visit(true)
	visit(false)
	kept := suspects[:0]
	for i := range suspects {
		s, x := &suspects[i], &seen[i]
		own, _, ops := d.delta(s.rank)
		if s.alone {
			// The first rank does things for the others from the start in many programs.
			if s.unsure = s.rank == 0; len(x.own) == 0 {
				s.unsure, x.own = true, x.unlike
			}
			if len(x.own) == 0 {
				continue
			}
			peers := median(x.own)
			s.base, s.excess = peers/ops, own-peers
			if own < d.cfg.PeerRatio*peers || s.excess < d.cfg.SlowShare*elapsed {
				continue
			}
		}
		// Who is held up itself is not what others wait for, unless they are held up for longer than it
		// by what it spends: a rank whose transfers have become slow as well.
		if held := s.waited > s.excess/2 && s.growth-s.waited < s.excess/2; s.peers > 0 && s.growth >= 0.3*s.excess && !held {
			kept = append(kept, *s)
		}
	}
	return kept
}

// roles tells by a number for each rank which communicators it is in, by name without numbers and by size: ranks
// that do the same work have the same.
func (d *stragglers) roles() []uint64 {
	roles := make([]uint64, len(d.sums))
	for ci := range d.ev.Comms {
		if d.comms[ci].former {
			continue
		}
		c := &d.ev.Comms[ci]
		p := partOf(c)
		h := fnv.New64a()
		fmt.Fprintf(h, "%s %d", p.name, p.size)
		sum := h.Sum64()
		for i := range c.Members {
			if w := d.world(c.Members[i].World); w >= 0 {
				roles[w] += sum
			}
		}
	}
	return roles
}

func hasRank(slow []slowRank, rank int32) bool {
	return slices.ContainsFunc(slow, func(s slowRank) bool { return s.rank == rank })
}

// slowAt returns what is kept of a slow rank; nil when there are too many.
func (d *stragglers) slowAt(rank int32) *slowRank {
	at := slices.IndexFunc(d.slow, func(x slowRank) bool { return x.rank == rank })
	if at < 0 {
		if len(d.slow) == maxSlow {
			return nil
		}
		d.slow = append(d.slow, slowRank{rank: rank, before: d.drags.before(rank, d.start)})
		at = len(d.slow) - 1
	}
	return &d.slow[at]
}

// notFelt notes that a rank was late without its peers alone feeling it. Their
// reports may be a window behind, and the rank's own window may hold one long
// wait more than its share: the window ends by the job's steps, in the midst of
// the rank's. So one such window counts once the next one is felt; it never
// counts as recovered, and teaches nothing.
func (d *stragglers) notFelt(s *slowRank, felt []slowRank) {
	if hasRank(felt, s.rank) {
		return
	}
	if x := d.slowAt(s.rank); x != nil {
		if x.slow == 0 && x.unfelt == 0 {
			x.since = d.start
		}
		x.unfelt++
	}
}

// slowAgain counts a slow window of a rank.
func (d *stragglers) slowAgain(s *slowRank) {
	x := d.slowAt(s.rank)
	if x == nil {
		return
	}
	s.streak, s.comm, s.windows, s.before = x.streak, s.felt, x.windows, x.before
	if x.level > 0 {
		s.comm = x.comm
	}
	s.slow += min(x.unfelt, 1)
	s.allCost = x.allCost + min(s.excess, mostCost*float64(d.now-d.start))
	level := s.level
	if s.again(d.window, s.alone, d.isNoChance(s) && d.isRule(s)); s.unsure {
		s.level = max(level, min(s.level, Suspected)) // whether it is slow, or does more, cannot be told
	}
	s.last, s.of = d.enteredLast(s.rank, s.comm, s.since)
	if s.level == Confirmed {
		d.drags.forgive(s.rank, &s.before)
	}
	*x = *s
}

// learnOwn lets the ranks that nothing is wrong with teach what is normal. While a rank is told
// to be late, what others wait for it is not: else they would not feel it for long.
func (d *stragglers) learnOwn(common float64) {
	told := slices.ContainsFunc(d.slow, func(s slowRank) bool { return s.level > 0 })
	for r := range d.sums {
		own, inside, ops := d.delta(int32(r))
		hist := &d.ranks[r]
		if ops == 0 || hist.mark.seen >= d.start {
			continue
		}
		if len(d.slow) > 0 && slices.ContainsFunc(d.slow, func(s slowRank) bool { return s.rank == int32(r) }) {
			continue
		}
		h := &d.history[r]
		if d.settled(&h.own) {
			off := own/ops/max(h.own.mean*common, 1) - 1
			h.spread += (min(1, max(off, -off)) - h.spread) / 8
		}
		h.own.learn(own / ops)
		if !told || !d.settled(&h.inside) {
			h.inside.learn(inside / ops)
		}
	}
}

// findings reports stragglers; three quarters of a node's ranks together are the node.
func (d *stragglers) findings(found []finding) []finding {
	told := func(s *slowRank) bool { return s.level > 0 }
	byNode := map[int32]int{}
	for i := range d.slow {
		if s := &d.slow[i]; told(s) {
			byNode[nodeOf(d.ev, s.rank)]++
		}
	}
	onNode := make(map[int32]int, len(byNode))
	if len(byNode) > 0 {
		for r := range d.state {
			if d.state[r] == rankAlive {
				onNode[nodeOf(d.ev, int32(r))]++
			}
		}
	}
	done := map[int32]bool{}
	for i := range d.slow {
		s := &d.slow[i]
		if !told(s) {
			continue
		}
		node := nodeOf(d.ev, s.rank)
		whole := node >= 0 && len(d.ev.Nodes) > 1 && onNode[node] > 1 && (4*byNode[node] >= 3*onNode[node] || d.drags.whole(node))
		if whole && done[node] {
			continue
		}
		f := finding{}
		f.Class, f.Level, f.Since, f.Victims = NoncommunicationSlow, s.level, s.since, s.peers
		if whole {
			done[node] = true
			f.ordered = true // the node sums up the ranks that were told before it
			f.blame(Culprit{Kind: CulpritNode, Rank: -1, Peer: -1, Node: d.ev.Nodes[node].Name, Reason: reasonStraggler})
			for j := range d.slow {
				if x := &d.slow[j]; told(x) && nodeOf(d.ev, x.rank) == node {
					f.blame(d.rankCulprit(x.rank, reasonStraggler))
				}
			}
		} else {
			f.blame(d.rankCulprit(s.rank, reasonStraggler))
		}
		c := &d.ev.Comms[s.comm]
		f.setComm(c)
		f.lastOf(c)
		d.whyLate(&f, s)
		found = append(found, f)
	}
	return found
}
