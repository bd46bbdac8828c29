package diagnosis

import "github.com/lockstep-ccl/lockstep/record"

// A node that goes down takes its agent with it: nobody sees its ranks die. What
// is seen is that others give up the communicators they share with them, and end.

// late is what is known of a node whose report is overdue.
type late struct {
	ranks bool  // of this attempt, not seen to have ended
	alive int64 // last time that others finished what takes its ranks, too
	comm  int32 // shared with it, and given up by most members, -1 when none is
	gave  int   // members of it that have aborted or died
	// without: others have formed a communicator since and work there.
	without bool

	counted int32 // 1 + the communicator being looked at
}

// lateNodes looks at every communicator with members on nodes whose report is
// overdue; the result is by node.
func (e *Engine) lateNodes() []late {
	p := &e.pass
	nodes := make([]late, len(p.ev.Nodes))
	for n := range nodes {
		nodes[n].comm = -1
	}
	overdue := func(world int32) *late {
		n := nodeOf(p.ev, world)
		if n < 0 || p.asOf[n] >= p.now || p.state[world] == rankGone || p.state[world] == rankExited {
			return nil
		}
		return &nodes[n]
	}
	var here []*late
	newest := int64(0)
	for ci := range p.ev.Comms {
		if e.comms[ci].former {
			continue
		}
		members, h := p.ev.Comms[ci].Members, &e.comms[ci]
		here = here[:0]
		gave, finished := 0, int64(0)
		for i := range members {
			m := &members[i]
			w := p.world(m.World)
			if w < 0 {
				continue
			}
			if x := overdue(w); x != nil {
				x.ranks = true
				if inComm(m) && x.counted != int32(ci)+1 {
					x.counted = int32(ci) + 1
					here = append(here, x)
				}
				continue
			}
			if m.State == record.CommAborted || p.state[w] == rankGone {
				gave++
			}
			if !h.p2p {
				finished = max(finished, m.FinishedAt)
			} else if m.Peer >= 0 && int(m.Peer) < len(members) {
				if peer := p.world(members[m.Peer].World); peer >= 0 {
					if x := overdue(peer); x != nil {
						x.alive = max(x.alive, m.FinishedAt)
					}
				}
			}
		}
		if len(here) == 0 && h.finished > 0 {
			newest = max(newest, h.since)
		}
		for _, x := range here {
			x.alive = max(x.alive, finished)
			if gave > x.gave {
				x.comm, x.gave = int32(ci), gave
			}
		}
	}
	for n := range nodes {
		nodes[n].without = newest > p.ev.Nodes[n].LastSeen+int64(e.cfg.SuspectAfter)
	}
	return nodes
}

// stoppedWith reports whether the job may have stopped because a node went down
// when it fell silent: that was before the first death, and its ranks have not
// taken part in anything since. Who works with them need not name them, but no job
// goes on for long without some of its ranks.
func (e *Engine) stoppedWith(n *Node, x *late, firstDeath int64) bool {
	return x.ranks && !x.without && n.LastSeen > 0 && n.LastSeen < firstDeath &&
		x.alive <= n.LastSeen+int64(e.cfg.SuspectAfter) && e.pass.lastFinish <= n.LastSeen+int64(e.cfg.Grace)
}

// followsLoss reports whether a death may follow from the loss of a node that was
// silent by then and still is.
func (e *Engine) followsLoss(death int64) bool {
	p := &e.pass
	var nodes []late
	for n := range p.ev.Nodes {
		if p.asOf[n] >= p.now {
			continue
		}
		if nodes == nil {
			nodes = e.lateNodes()
		}
		if e.stoppedWith(&p.ev.Nodes[n], &nodes[n], death) {
			return true
		}
	}
	return false
}

// lostNodes blames nodes that went down: others have died or given up since, and
// before they did nothing was wrong. A lost agent alone is none of this: what
// takes its ranks goes on.
func (e *Engine) lostNodes(found []finding) []finding {
	p := &e.pass
	first := int64(never)
	for r := range p.state {
		if p.state[r] == rankGone {
			first = min(first, p.ev.Ranks[r].ProcAt)
		}
	}
	nodes := e.lateNodes()
	f := finding{hang: true}
	f.Class, f.Level, f.Since = NoncommunicationHang, Suspected, never
	for n := range nodes {
		node, x := &p.ev.Nodes[n], &nodes[n]
		age := p.now - max(node.LastSeen, p.lastFinish, e.resumed)
		if !node.Lost || x.comm < 0 || age < int64(e.cfg.LostAfter)/2 || !e.stoppedWith(node, x, first) {
			continue
		}
		c := &p.ev.Comms[x.comm]
		if node.LastSeen < f.Since {
			f.Since = node.LastSeen
			f.setComm(c)
		}
		f.Victims, f.still = max(f.Victims, x.gave), max(f.still, age)
		if age >= int64(e.cfg.LostAfter) {
			f.Level = Confirmed
		}
		f.blame(Culprit{Kind: CulpritNode, Rank: -1, Peer: -1, Node: node.Name, Reason: reasonNodeLost})
		f.why("node %s: its agent is lost, last report at %s; its ranks have taken part in nothing since, and %s given up %s",
			node.Name, clock(node.LastSeen), plural(x.gave, "member has", "members have"), c.Name)
	}
	if len(f.Culprits) == 0 || e.consequence(f.Since) {
		return found
	}
	if p.gone {
		f.why("the ranks that were seen to die did so after it: not to blame")
	}
	return append(found, f)
}
