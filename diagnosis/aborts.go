package diagnosis

import (
	"cmp"
	"slices"

	"github.com/lockstep-ccl/lockstep/record"
)

// This file reads what ranks said when they gave up: an abort names whom the error
// was about, so those that fell follow those that they named, and blame ends at who
// named nobody.

const (
	// abortSlack is how far apart the end of a failed operation and the abort it
	// belongs to may be stamped.
	abortSlack = 5e6
	// dyingFor is how long a process may take from closing its connections, which its
	// peers see, to being gone: memory of GPUs is given back, a core is written.
	dyingFor = 3e9
)

// naming is a rank's word on why a communicator is over for it.
type naming struct {
	from, to int32 // world ranks
	comm     int32
	at       int64
	why      record.Result
}

// namings returns what ranks said when they gave up communicators, oldest first. Ranks
// that work in others since have come to terms with it and are left out.
func (v *view) namings() []naming {
	if v.toldBuilt {
		return v.told
	}
	v.toldBuilt, v.told = true, v.told[:0]
	if !v.aborted {
		return v.told
	}
	last := map[int32]int64{}
	for ci := range v.ev.Comms {
		if h := &v.comms[ci]; h.former || !h.aborted {
			continue
		}
		members := v.ev.Comms[ci].Members
		for i := range members {
			m := &members[i]
			if m.State != record.CommAborted || m.Fault == record.ResultOK || m.FaultPeer < 0 || int(m.FaultPeer) >= len(members) {
				continue
			}
			from, to := v.world(m.World), v.world(members[m.FaultPeer].World)
			if from >= 0 && to >= 0 {
				v.told = append(v.told, naming{from: from, to: to, comm: int32(ci), at: m.StateAt, why: m.Fault})
				last[from] = 0
			}
		}
	}
	if len(v.told) == 0 {
		return v.told
	}
	for ci := range v.ev.Comms {
		if v.comms[ci].former {
			continue
		}
		for i := range v.ev.Comms[ci].Members {
			m := &v.ev.Comms[ci].Members[i]
			if at, ok := last[m.World]; ok && !m.failedLast() {
				last[m.World] = max(at, m.FinishedAt)
			}
		}
	}
	v.told = slices.DeleteFunc(v.told, func(n naming) bool { return n.at > 0 && last[n.from] > n.at+int64(v.cfg.SuspectAfter) })
	slices.SortStableFunc(v.told, func(a, b naming) int { return cmp.Compare(a.at, b.at) })
	return v.told
}

// aborts follows who named whom to where that ends.
type aborts struct {
	*view
	graph waitGraph
	ends  []int32 // ranks that others named and that named nobody, or only themselves
	cuts  []cut   // pairs that lost each other while both were alive
}

// cut is a pair of ranks that cannot reach each other, by the word of one or both.
type cut struct {
	a, b   int32 // world ranks; a said it first
	comm   int32
	at     int64
	mutual bool
}

// follow works out the pass's ends and cuts.
func (x *aborts) follow() {
	x.ends, x.cuts = x.ends[:0], x.cuts[:0]
	told := x.namings()
	if len(told) == 0 {
		return
	}
	x.graph.reset(len(x.state))
	var starts []int32
	for i := range told {
		x.graph.wait(waitEdge{from: told[i].from, to: told[i].to, comm: told[i].comm, since: told[i].at})
		starts = append(starts, told[i].from)
	}
	ends, circles := x.graph.blame(starts)
	for _, r := range ends {
		if !slices.ContainsFunc(told, func(n naming) bool { return n.to == r && n.from != r }) {
			continue // it named itself only, and so did nobody
		}
		if x.cutOff(told, r) {
			x.cuts = append(x.cuts, x.firstCuts(told, []int32{r})...)
			continue
		}
		x.ends = append(x.ends, r)
	}
	for _, circle := range circles {
		x.cuts = append(x.cuts, x.firstCuts(told, circle)...)
	}
	slices.SortStableFunc(x.cuts, func(a, b cut) int { return cmp.Compare(a.at, b.at) })
}

// cutOff reports whether a rank was there when others lost it: it lives and reports,
// it heard itself that it was given up, or it ended much later.
func (x *aborts) cutOff(told []naming, r int32) bool {
	first := int64(never)
	for i := range told {
		n := &told[i]
		if n.to != r || n.why != record.ResultPeerLost {
			continue
		}
		if n.from == r {
			return true
		}
		first = min(first, n.at)
	}
	if first == never || first == 0 {
		return false
	}
	switch x.state[r] {
	case rankAlive:
		return x.heard(r) > first+dyingFor/2
	case rankGone, rankExited:
		return x.endedAt(r) > first+dyingFor
	}
	return false // stopped, or nobody hears of it
}

// firstCuts returns the pairs that a group of ranks was lost over. In each communicator
// the first word on a rank is somebody's own, the later ones may repeat it; who is lost
// gives up and ends, and that is what the others see of it.
func (x *aborts) firstCuts(told []naming, lost []int32) []cut {
	var cuts []cut
	for i := range told {
		n := &told[i]
		if n.why != record.ResultPeerLost || n.from == n.to || !slices.Contains(lost, n.to) || len(lost) > 1 && !slices.Contains(lost, n.from) {
			continue
		}
		k := slices.IndexFunc(cuts, func(c cut) bool { return c.comm == n.comm && (c.b == n.to || c.a == n.to && c.b == n.from) })
		if k < 0 {
			if len(lost) > 1 || len(cuts) == 0 || n.at-cuts[0].at < deathTie {
				cuts = append(cuts, cut{a: n.from, b: n.to, comm: n.comm, at: n.at})
			}
			continue
		}
		c := &cuts[k]
		c.mutual = c.mutual || c.a == n.to && c.b == n.from
		if near := x.connected(n.comm, n.from, n.to); c.b == n.to && near && !x.connected(c.comm, c.a, c.b) && n.at-c.at < deathTie {
			c.a, c.at = n.from, n.at // clocks differ, and only neighbours see for themselves
		}
	}
	return cuts
}

// connected reports whether a communicator has a connection between two ranks.
func (v *view) connected(ci, a, b int32) bool {
	for _, k := range v.connsOf(ci) {
		c := &v.ev.Conns[k]
		src, dst := v.end(c, c.Src), v.end(c, c.Dst)
		if src == a && dst == b || src == b && dst == a {
			return true
		}
	}
	return false
}

// endedAt is when a rank's process ended: by the word of who reaped it, else when
// its agent saw it gone.
func (v *view) endedAt(r int32) int64 {
	if e := &v.ev.Ranks[r].Exit; e.By != ExitUnknown && e.At > 0 {
		return e.At
	}
	return v.ev.Ranks[r].ProcAt
}
