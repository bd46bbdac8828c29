package diagnosis

import (
	"cmp"
	"slices"
)

// ownHistory is what is normal for a rank: own time and time inside
// collectives, ns an operation, over all its communicators. Own time excludes
// all waiting, so it grows at the rank that is late and at none that it delays.
type ownHistory struct {
	own, inside baseline
	spread      float64 // mean distance of a window from the norm, as a ratio
}

// slowRank is a rank whose own time has grown, with the window that says so.
type slowRank struct {
	streak
	rank   int32
	comm   int32 // where its peers felt it most when it was told first: another name would be another alert
	felt   int32 // where they feel it most
	peers  int   // direct ones
	own    float64
	base   float64 // its history's, or its peers' while there is none
	common float64 // how much slower the middle of all ranks was
	alone  bool    // judged by its peers: no history yet
	growth float64 // of the middle peer's time inside collectives, ns in the window
	excess float64 // of its own time, ns in the window
	waited float64 // inside collectives for longer than usual, ns in the window
	unfelt int     // windows in a row that its peers did not feel
	last   int     // sampled collectives that it entered last, of
	of     int
}

// maxSlow bounds the ranks or connections that one window can find slow.
const maxSlow = 64

// stragglers judges the window that ends with this pass. A rank is slow when
// its own time per operation is far above its history and that of the middle
// rank is not (before there is a history: far above its peers'), when that costs
// a good share of the window, and when its peers were inside collectives longer
// for it while it was not.
func (e *Engine) stragglers() {
	p := &e.pass
	elapsed := float64(p.now - e.window.start)
	ratios := e.scratch[:0]
	for r := range e.sums {
		if h := &e.ranks[r].own; e.known(&h.own) {
			if own, _, ops := e.delta(int32(r)); ops > 0 {
				ratios = append(ratios, own/ops/max(h.own.mean, 1))
			}
		}
	}
	common := max(1, median(ratios))
	owns := ratios[:0]
	for r := range e.sums {
		if own, _, ops := e.delta(int32(r)); ops > 0 {
			owns = append(owns, own)
		}
	}
	middle := median(owns)
	e.scratch = owns

	var suspects []slowRank
	for r := range e.sums {
		own, inside, ops := e.delta(int32(r))
		hist := &e.ranks[r]
		if ops <= 0 || hist.mark.seen >= e.window.start {
			continue // it did nothing, or what its mark says
		}
		h := &hist.own
		s := slowRank{rank: int32(r), own: own / ops, common: common}
		slow := false
		if e.known(&h.own) {
			rel := s.own / max(h.own.mean*common, 1)
			s.base, s.excess = h.own.mean, own-h.own.mean*common*ops
			s.waited = inside - h.inside.mean*ops
			slow = rel >= max(e.cfg.OwnRatio, 1+4*min(h.spread, 0.5))
		} else {
			s.alone, s.excess = true, own-middle
			slow = own >= e.cfg.PeerRatio*middle
		}
		if slow && s.excess >= e.cfg.SlowShare*elapsed {
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
		suspects = e.felt(suspects, elapsed)
	}
	for i := range suspects {
		e.slowAgain(&suspects[i])
	}
	for i := range late {
		e.notFelt(&late[i], suspects)
	}
	for i := 0; i < len(e.slowRanks); i++ {
		s := &e.slowRanks[i]
		_, _, ops := e.delta(s.rank)
		if over := ops > 0 && !hasRank(late, s.rank) && s.normal(e); over || s.unfelt > 1 && s.level == 0 {
			e.slowRanks = slices.Delete(e.slowRanks, i, i+1)
			i--
		}
	}
	e.learnOwn(common)
}

// delta returns what a rank did in the window: own time and time inside
// collectives, ns, and operations.
func (e *Engine) delta(r int32) (own, inside, ops float64) {
	a, b := &e.window.sums[r], &e.sums[r]
	if b.ops <= a.ops || b.own < a.own || b.inside < a.inside {
		return 0, 0, 0
	}
	return float64(b.own - a.own), float64(b.inside - a.inside), float64(b.ops - a.ops)
}

// felt keeps the suspects whose direct peers, in some communicator, were held
// up for them while they were not held up themselves, and judges those without
// a history by their peers.
func (e *Engine) felt(suspects []slowRank, elapsed float64) []slowRank {
	p := &e.pass
	at := make(map[int32]int, len(suspects))
	for i := range suspects {
		at[suspects[i].rank] = i
	}
	type evidence struct {
		growth, own []float64 // of all peers; of those that do the same work
		others      []int32   // pipeline neighbours: they do other work
	}
	seen := make([]evidence, len(suspects))
	inWindow := func(ci int) bool { return !e.comms[ci].former && e.comms[ci].ops > e.comms[ci].ops0 }
	visit := func(p2p bool) {
		for ci := range p.ev.Comms {
			if !inWindow(ci) || e.comms[ci].p2p != p2p {
				continue
			}
			members := p.ev.Comms[ci].Members
			for i := range members {
				k, ok := at[members[i].World]
				if !ok {
					continue
				}
				s, x := &suspects[k], &seen[k]
				_, mine, _ := e.delta(s.rank)
				from := len(x.growth)
				// Members of a communicator with several stages of a pipeline do several kinds of work.
				alike := !p2p && !slices.ContainsFunc(members, func(m Member) bool { return slices.Contains(x.others, m.World) })
				for j := 0; j < len(members); j += 1 + len(members)/256 {
					w := p.world(members[j].World)
					if w < 0 || w == s.rank {
						continue
					}
					own, inside, ops := e.delta(w)
					if ops == 0 {
						continue
					}
					grown := inside - mine
					if h := &e.ranks[w].own; e.known(&h.inside) && !s.alone {
						grown = inside - h.inside.mean*ops
					}
					x.growth = append(x.growth, grown)
					if p2p {
						x.others = append(x.others, w)
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
		own, _, ops := e.delta(s.rank)
		if s.alone {
			if len(x.own) == 0 {
				continue
			}
			peers := median(x.own)
			s.base, s.excess = peers/ops, own-peers
			if own < e.cfg.PeerRatio*peers || s.excess < e.cfg.SlowShare*elapsed {
				continue
			}
		}
		if s.peers > 0 && s.growth >= 0.3*s.excess && s.waited <= s.excess/2 {
			kept = append(kept, *s)
		}
	}
	return kept
}

func hasRank(slow []slowRank, rank int32) bool {
	return slices.ContainsFunc(slow, func(s slowRank) bool { return s.rank == rank })
}

// slowAt returns what is kept of a slow rank; nil when there are too many.
func (e *Engine) slowAt(rank int32) *slowRank {
	at := slices.IndexFunc(e.slowRanks, func(x slowRank) bool { return x.rank == rank })
	if at < 0 {
		if len(e.slowRanks) == maxSlow {
			return nil
		}
		e.slowRanks = append(e.slowRanks, slowRank{rank: rank})
		at = len(e.slowRanks) - 1
	}
	return &e.slowRanks[at]
}

// notFelt notes that a rank was late without its peers alone feeling it. Their
// reports may be a window behind, and the rank's own window may hold one long
// wait more than its share: the window ends by the job's steps, in the midst of
// the rank's. So one such window counts once the next one is felt; it never
// counts as recovered, and teaches nothing.
func (e *Engine) notFelt(s *slowRank, felt []slowRank) {
	if hasRank(felt, s.rank) {
		return
	}
	if x := e.slowAt(s.rank); x != nil {
		if x.slow == 0 && x.unfelt == 0 {
			x.since = e.window.start
		}
		x.unfelt++
	}
}

// slowAgain counts a slow window of a rank.
func (e *Engine) slowAgain(s *slowRank) {
	x := e.slowAt(s.rank)
	if x == nil {
		return
	}
	s.streak, s.comm = x.streak, s.felt
	if x.level > 0 {
		s.comm = x.comm
	}
	s.slow += min(x.unfelt, 1)
	s.again(e, s.alone, true)
	s.last, s.of = e.enteredLast(s.rank, s.comm, s.since)
	*x = *s
}

// learnOwn lets the ranks that nothing is wrong with teach what is normal.
func (e *Engine) learnOwn(common float64) {
	for r := range e.sums {
		own, inside, ops := e.delta(int32(r))
		hist := &e.ranks[r]
		if ops == 0 || hist.mark.seen >= e.window.start {
			continue
		}
		if len(e.slowRanks) > 0 && slices.ContainsFunc(e.slowRanks, func(s slowRank) bool { return s.rank == int32(r) }) {
			continue
		}
		h := &hist.own
		if e.known(&h.own) {
			off := own/ops/max(h.own.mean*common, 1) - 1
			h.spread += (min(1, max(off, -off)) - h.spread) / 8
		}
		h.own.learn(own / ops)
		h.inside.learn(inside / ops)
	}
}
