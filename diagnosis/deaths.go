package diagnosis

import (
	"cmp"
	"slices"

	"github.com/lockstep-ccl/lockstep/record"
)

// deathTie is how far apart two deaths may be seen and yet have happened in
// either order: agents look at processes a few times a second, each at its own
// moments; one agent sees what is gone in one sweep.
const (
	deathTie     = 250e6
	deathTieNode = 20e6
	// killPatience is how long the death of most of a job in one moment is taken
	// for its end from outside (a cancelled job, a restart).
	killPatience = 10e9
)

// dead is a rank that died while others counted on it.
type dead struct {
	rank  int32
	at    int64
	comm  int32 // a communicator that it was in, -1 when none
	peers int   // live members of its communicators that have not given up on it
	gave  int   // members that have aborted since
	clean bool  // it had aborted or left its own communicators: it followed another's fault
	left  bool  // it had left one in good order
}

func earlier(a, b dead) int { return cmp.Compare(a.at, b.at) }

// deaths finds the process whose death broke step. The survivors get errors,
// abort and often exit soon after, so of several dead the first is to blame,
// and one that had aborted its communicators follows one that had not.
func (e *Engine) deaths(found []finding) []finding {
	p := &e.pass
	var all []dead
	for r := range p.state {
		if p.state[r] == rankGone {
			all = append(all, dead{rank: int32(r), at: p.ev.Ranks[r].ProcAt, comm: -1, clean: true})
		}
	}
	joining := e.countOn(all)
	progressing := func(d *dead) bool {
		return p.lastFinish > d.at+int64(e.cfg.SuspectAfter) && p.now-p.lastFinish < int64(e.cfg.SuspectAfter)
	}
	all = slices.DeleteFunc(all, func(d dead) bool {
		switch {
		case d.comm < 0: // in no communicator: it matters while one forms
			return d.left || !joining
		case p.alive == 0: // all have ended: only their states tell a fault from the job's end
			return d.clean || d.gave == 0
		}
		return d.peers == 0 && (d.gave == 0 || progressing(&d))
	})
	if slices.ContainsFunc(all, func(d dead) bool { return !d.clean }) {
		all = slices.DeleteFunc(all, func(d dead) bool { return d.clean })
	}
	if len(all) == 0 {
		return found
	}
	first := slices.MinFunc(all, earlier)
	if e.followsLoss(first.at) {
		return found // told by lostNodes, when it is certain
	}
	all = slices.DeleteFunc(all, func(d dead) bool {
		tie := int64(deathTie)
		if p.ev.Ranks[d.rank].Node == p.ev.Ranks[first.rank].Node {
			tie = deathTieNode
		}
		return d.at-first.at > tie
	})
	age := p.known(first.rank) - max(first.at, e.resumed)
	if e.consequence(first.at) || age < int64(e.cfg.GoneAfter)/2 || (2*len(all) > len(p.state) && age < killPatience) {
		return found
	}
	f := finding{hang: true, still: age}
	f.Class, f.Level, f.Since = NoncommunicationHang, Suspected, first.at
	if age >= int64(e.cfg.GoneAfter) {
		f.Level = Confirmed
	}
	if node, ok := e.wholeNode(all); ok {
		f.blame(Culprit{Kind: CulpritNode, Rank: -1, Peer: -1, Node: node, Reason: reasonGone})
	}
	slices.SortStableFunc(all, earlier)
	for _, d := range all {
		f.blame(e.rankCulprit(d.rank, reasonGone))
		f.Victims = max(f.Victims, d.peers+d.gave)
	}
	if first.comm >= 0 {
		c := &p.ev.Comms[first.comm]
		f.setComm(c)
		for i := range c.Members {
			if m := &c.Members[i]; m.Open() && inComm(m) && (f.Seq == 0 || p.world(m.World) >= 0 && p.state[m.World] == rankAlive) {
				f.Seq, f.Coll = m.Finished+1, m.Coll
			}
		}
	}
	e.whyGone(&f, &first, len(all))
	return append(found, f)
}

// countOn fills in who counts on the dead, and reports whether some
// communicator is still forming.
func (e *Engine) countOn(all []dead) (joining bool) {
	p := &e.pass
	at := make(map[int32]int, len(all))
	for i := range all {
		at[all[i].rank] = i
	}
	for ci := range p.ev.Comms {
		if e.comms[ci].former {
			continue
		}
		joining = joining || e.comms[ci].joining
		c := &p.ev.Comms[ci]
		live, gave, here := 0, 0, false
		for i := range c.Members {
			w := p.world(c.Members[i].World)
			if w < 0 {
				continue
			}
			here = here || p.state[w] == rankGone
			switch {
			case c.Members[i].State == record.CommAborted:
				gave++
			case p.state[w] != rankGone && p.state[w] != rankExited && inComm(&c.Members[i]):
				live++
			}
		}
		if !here {
			continue
		}
		for i := range c.Members {
			w := p.world(c.Members[i].World)
			if w < 0 || p.state[w] != rankGone {
				continue
			}
			d := &all[at[w]]
			if c.Members[i].State == record.CommLeft {
				d.left = true
				continue
			}
			if c.Members[i].State != record.CommAborted {
				d.clean = false
			}
			if d.comm < 0 || live+gave > d.peers+d.gave {
				d.comm, d.peers, d.gave = int32(ci), live, gave
			}
		}
	}
	return joining
}

// wholeNode reports whether the dead are all ranks of one node of several.
func (e *Engine) wholeNode(all []dead) (string, bool) {
	p := &e.pass
	node := p.ev.Ranks[all[0].rank].Node
	if len(all) < 2 || len(p.ev.Nodes) < 2 || node < 0 || int(node) >= len(p.ev.Nodes) {
		return "", false
	}
	on := 0
	for r := range p.ev.Ranks {
		if p.ev.Ranks[r].Node == node && p.state[r] != rankAbsent {
			on++
		}
	}
	for i := range all {
		if p.ev.Ranks[all[i].rank].Node != node {
			return "", false
		}
	}
	return p.ev.Nodes[node].Name, on == len(all)
}

// abandoned makes ranks that gave up a communicator after a member's death, or
// while its node is silent, and have done nothing since, wait for that member.
func (e *Engine) abandoned() {
	p, s := &e.pass, &e.hang
	if !p.sick && !p.lost {
		return
	}
	for ci := range p.ev.Comms {
		c := &p.ev.Comms[ci]
		if e.comms[ci].former {
			continue
		}
		dead, at := int32(-1), int64(0)
		for i := range c.Members {
			w := p.world(c.Members[i].World)
			if w < 0 || !inComm(&c.Members[i]) {
				continue
			}
			if p.state[w].sick() {
				dead, at = w, p.ev.Ranks[w].ProcAt
				break // one is enough: blame need not follow to each
			}
			if p.state[w] == rankLost {
				dead, at = w, p.heard(w)
			}
		}
		if dead < 0 {
			continue
		}
		for i := range c.Members {
			m := &c.Members[i]
			w := p.world(m.World)
			if w >= 0 && m.State == record.CommAborted && s.inside[w] == 0 && s.active[w] < at+int64(e.cfg.ConfirmAfter) {
				e.graph.wait(waitEdge{from: w, to: dead, comm: int32(ci), since: at})
			}
		}
	}
}
