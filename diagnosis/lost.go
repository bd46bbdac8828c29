package diagnosis

import (
	"fmt"

	"github.com/lockstep-ccl/lockstep/record"
)

// A node that goes down takes its agent with it: nobody sees its ranks die. What
// is seen is that others give up the communicators they share with them, and end.

// losses finds nodes that went down.
type losses struct {
	*view
	aborts *aborts
}

func (d *losses) forget() {}

// late is what is known of a node whose report is overdue.
type late struct {
	ranks bool  // of this attempt, not seen to have ended
	alive int64 // last time that others finished what takes its ranks, too
	comm  int32 // shared with it, and given up by most members, -1 when none is
	gave  int   // members of it that have aborted or died
	named int   // times that ranks of other nodes said that they lost one of its ranks
	// without: others have formed a communicator since and work there.
	without bool

	counted int32 // 1 + the communicator being looked at
}

// lateNodes looks at every communicator with members on nodes whose report is
// overdue; the result is by node.
func (d *losses) lateNodes() []late {
	nodes := make([]late, len(d.ev.Nodes))
	for n := range nodes {
		nodes[n].comm = -1
	}
	overdue := func(world int32) *late {
		n := nodeOf(d.ev, world)
		if n < 0 || d.asOf[n] >= d.now || d.state[world] == rankGone || d.state[world] == rankExited {
			return nil
		}
		return &nodes[n]
	}
	var here []*late
	newest := int64(0)
	for ci := range d.ev.Comms {
		if d.comms[ci].former {
			continue
		}
		members, h := d.ev.Comms[ci].Members, &d.comms[ci]
		here = here[:0]
		gave, finished := 0, int64(0)
		for i := range members {
			m := &members[i]
			w := d.world(m.World)
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
			if m.State == record.CommAborted || d.state[w] == rankGone {
				gave++
			}
			if !h.p2p {
				finished = h.lastFinish
			} else if !m.failedLast() && m.Peer >= 0 && int(m.Peer) < len(members) {
				if peer := d.world(members[m.Peer].World); peer >= 0 {
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
	for _, x := range d.namings() {
		if n, from := nodeOf(d.ev, x.to), nodeOf(d.ev, x.from); n >= 0 && from != n && x.why == record.ResultPeerLost {
			nodes[n].named++
		}
	}
	for n := range nodes {
		nodes[n].without = newest > d.ev.Nodes[n].LastSeen+int64(d.cfg.SuspectAfter)
	}
	return nodes
}

// stoppedWith reports whether the job may have stopped because a node went down
// when it fell silent: that was before the first death, and its ranks have not
// taken part in anything since. Who works with them need not name them, but no job
// goes on for long without some of its ranks.
func (d *losses) stoppedWith(n *Node, x *late, firstDeath int64) bool {
	if x.named > 0 && firstDeath != never {
		firstDeath += int64(d.cfg.SuspectAfter) // its last report may have been under way
	}
	return x.ranks && !x.without && n.LastSeen > 0 && n.LastSeen < firstDeath &&
		x.alive <= n.LastSeen+int64(d.cfg.SuspectAfter) && d.lastFinish <= n.LastSeen+int64(d.cfg.Grace)
}

// followsLoss reports whether a death may follow from the loss of a node that was
// silent by then and still is.
func (d *losses) followsLoss(death int64) bool {
	var nodes []late
	for n := range d.ev.Nodes {
		if d.asOf[n] >= d.now {
			continue
		}
		if nodes == nil {
			nodes = d.lateNodes()
		}
		if d.stoppedWith(&d.ev.Nodes[n], &nodes[n], death) {
			return true
		}
	}
	return false
}

// find blames nodes that went down: others have died or given up since, and
// before they did nothing was wrong. A lost agent alone is none of this: what
// takes its ranks goes on.
func (d *losses) find(found []finding) []finding {
	if !d.lost || len(found) > 0 {
		return found
	}
	first := int64(never)
	for r := range d.state {
		if d.state[r] == rankGone {
			first = min(first, d.ev.Ranks[r].ProcAt)
		}
	}
	nodes := d.lateNodes()
	f := finding{hang: true}
	f.Class, f.Level, f.Since = NoncommunicationHang, Suspected, never
	for n := range nodes {
		node, x := &d.ev.Nodes[n], &nodes[n]
		age := d.now - max(node.LastSeen, d.lastFinish, d.resumed)
		suspect, confirm := int64(d.cfg.LostAfter)/2, int64(d.cfg.LostAfter)
		if x.named > 0 {
			suspect, confirm = 0, suspect // its peers and the master have lost it, each by itself
		}
		if !node.Lost || x.comm < 0 || age < suspect || !d.stoppedWith(node, x, first) {
			continue
		}
		c := &d.ev.Comms[x.comm]
		if node.LastSeen < f.Since {
			f.Since = node.LastSeen
			f.setComm(c)
		}
		f.Victims, f.still = max(f.Victims, x.gave), max(f.still, age)
		if age >= confirm {
			f.Level = Confirmed
		}
		f.blame(Culprit{Kind: CulpritNode, Rank: -1, Peer: -1, Node: node.Name, Reason: reasonNodeLost})
		f.why("node %s: its agent is lost, last report at %s; its ranks have taken part in nothing since, and %s given up %s",
			node.Name, clock(node.LastSeen), plural(x.gave, "member has", "members have"), c.Name)
	}
	if len(f.Culprits) == 0 || d.open.consequence(f.Since) {
		return found
	}
	f.Counter = fmt.Sprintf("the agent of node %s reporting again, with its ranks at work", f.Culprits[0].Node)
	if d.gone {
		f.why("the ranks that were seen to die did so after it: not to blame")
	}
	return append(found, f)
}
