package diagnosis

import (
	"cmp"
	"slices"

	"github.com/lockstep-ccl/lockstep/record"
)

// reasonLinkDown is a connection that has no path left.
const reasonLinkDown = "link_down"

// deadLink is a pair of ranks that no path connects any more, by the word of both.
type deadLink struct {
	comm, src, dst int32 // src < dst, in the communicator
	at             int64 // when the last path broke, by the end that saw it first
	seeks          bool  // both ends are in it still and look for another path
}

// seekingFor is how long RDMA's connections look for a path when they have none
// (GiveUpAfter): a port that flaps costs no operation. Others end with their one path.
const seekingFor = 10e9

// deadLinks finds pairs of living ranks whose every path is broken. Both ends
// must say so: a process that dies takes its ends down without a word, and one
// that gives up closes them in good order. Its ranks fail soon after, so this is
// known before the rest of the job can look like the culprit. While they look for
// another path it is suspected.
func (e *Engine) deadLinks(found []finding) []finding {
	p := &e.pass
	dead := slices.DeleteFunc(p.dead, e.wentOn)
	if len(dead) == 0 {
		return found
	}
	f := finding{hang: true}
	f.Class, f.Level = CommunicationHang, Suspected
	f.Since = dead[0].at
	c := &p.ev.Comms[dead[0].comm]
	f.setComm(c)
	for i := range c.Members {
		m := &c.Members[i]
		if m.Open() || m.State == record.CommAborted {
			f.Victims++
		}
		if f.Seq == 0 && m.Open() {
			f.Seq, f.Coll = m.Finished+1, m.Coll
		}
	}
	for _, d := range dead {
		members := p.ev.Comms[d.comm].Members
		src, dst := members[d.src].World, members[d.dst].World
		f.blame(Culprit{Kind: CulpritConnection, Rank: src, Peer: dst, Node: p.nodeName(src), Reason: reasonLinkDown})
		age := min(p.known(src), p.known(dst)) - max(d.at, e.resumed)
		f.still = max(f.still, age)
		patience := int64(e.cfg.GoneAfter)
		if d.seeks {
			patience = seekingFor
		}
		if age >= patience {
			f.Level = Confirmed
		}
	}
	for _, d := range dead {
		for i := range p.ev.Conns {
			if k := &p.ev.Conns[i]; k.Comm == d.comm && k.Src == d.src && k.Dst == d.dst && k.Link == record.LinkDown {
				m := p.ev.Comms[d.comm].Members
				f.why("rank %d and rank %d have no path left: %s %s broke at %s", m[d.src].World, m[d.dst].World, k.Transport, k.Name, clock(k.LinkAt))
			}
		}
	}
	return append(found, f)
}

// wentOn reports whether one of the ends has finished operations since, in a
// communicator that has not failed: the job has come to terms with the loss, by leaving
// the other end out for instance.
func (e *Engine) wentOn(d deadLink) bool {
	p := &e.pass
	if p.lastFinish <= d.at+int64(e.cfg.SuspectAfter) {
		return false
	}
	of := p.ev.Comms[d.comm].Members
	for i := range p.ev.Comms {
		for _, m := range p.ev.Comms[i].Members {
			if m.State != record.CommAborted && (m.World == of[d.src].World || m.World == of[d.dst].World) && m.FinishedAt > d.at+int64(e.cfg.SuspectAfter) {
				return true
			}
		}
	}
	return false
}

// scanLinks fills in the pass's dead links, the first to break first.
func (e *Engine) scanLinks() {
	p := &e.pass
	if !slices.ContainsFunc(p.ev.Conns, func(c Conn) bool { return c.Link == record.LinkDown }) {
		return
	}
	type ends struct{ comm, src, dst int32 }
	type paths struct {
		down, up int
		at       int64
		seeks    bool
	}
	all := make(map[ends]*paths)
	for i := range p.ev.Conns {
		c := &p.ev.Conns[i]
		if c.Link == record.LinkNone || c.Comm < 0 || int(c.Comm) >= len(e.comms) || e.comms[c.Comm].former {
			continue
		}
		at := ends{c.Comm, c.Src, c.Dst}
		if all[at] == nil {
			all[at] = new(paths)
		}
		x := all[at]
		x.seeks = x.seeks || c.Transport == record.TransportRDMA
		if c.Link == record.LinkDown {
			x.down++
			x.at = max(x.at, c.LinkAt)
		} else {
			x.up++
		}
	}
	for at, x := range all {
		back := all[ends{at.comm, at.dst, at.src}]
		if at.src > at.dst || x.down == 0 || x.up > 0 || back == nil || back.down == 0 || back.up > 0 {
			continue
		}
		members := p.ev.Comms[at.comm].Members
		src, dst := p.world(members[at.src].World), p.world(members[at.dst].World)
		if src < 0 || dst < 0 || p.state[src] == rankGone || p.state[dst] == rankGone {
			continue
		}
		ended := func(m *Member) bool { return !inComm(m) || p.state[m.World] == rankExited }
		p.dead = append(p.dead, deadLink{
			comm: at.comm, src: at.src, dst: at.dst, at: min(x.at, back.at),
			seeks: (x.seeks || back.seeks) && !ended(&members[at.src]) && !ended(&members[at.dst]),
		})
	}
	slices.SortFunc(p.dead, func(a, b deadLink) int {
		return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.comm, b.comm), cmp.Compare(a.src, b.src), cmp.Compare(a.dst, b.dst))
	})
}
