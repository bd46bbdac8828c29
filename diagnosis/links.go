package diagnosis

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/lockstep-ccl/lockstep/record"
)

// reasonLinkDown is a connection that has no path left.
const reasonLinkDown = "link_down"

// deadLink is a pair of ranks that no path connects any more, by the word of both.
type deadLink struct {
	comm, src, dst int32 // src < dst, in the communicator
	at             int64 // when the last path broke, by the end that saw it first
	seeks          int64 // for how long both ends, which are in it still, look for a path, ns
	one            bool  // only one end says so; the other is there
}

// links finds connections that are dead on every path.
type links struct {
	*view
	aborts *aborts
	dead   []deadLink // of this pass
	// Scratch: connections of communicators that have a path which is down, and members with
	// such a path, whatever their communicator.
	conns []int32
	near  []bool
}

func (l *links) forget() {}

// find finds pairs of ranks whose every path is broken. Both ends must say so, or one
// while the other is there and does its part: a process that dies takes its ends
// down without a word, and one that gives up closes them in good order. Its ranks
// fail soon after, so this is known before the rest of the job can look like the
// culprit. While they look for a path it is suspected.
func (l *links) find(found []finding) []finding {
	l.dead = slices.DeleteFunc(l.dead, l.wentOn)
	if len(l.dead) == 0 {
		return l.lostEachOther(found)
	}
	f := finding{hang: true, deadLink: true}
	f.Class, f.Level = CommunicationHang, Suspected
	f.Since = l.dead[0].at
	c := &l.ev.Comms[l.dead[0].comm]
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
	var pairs []cell
	for _, d := range l.dead {
		members := l.ev.Comms[d.comm].Members
		src, dst := members[d.src].World, members[d.dst].World
		pairs = append(pairs, cell{src, dst})
		age := min(l.known(src), l.known(dst)) - max(d.at, l.resumed)
		f.still = max(f.still, age)
		if age >= max(int64(l.cfg.GoneAfter), d.seeks) {
			f.Level = Confirmed
		}
	}
	l.blamePairs(&f, pairs)
	for _, d := range l.dead {
		for i := range l.ev.Conns {
			if k := &l.ev.Conns[i]; k.Comm == d.comm && k.Src == d.src && k.Dst == d.dst && k.Link == record.LinkDown {
				m := l.ev.Comms[d.comm].Members
				f.why("rank %d and rank %d have no path left: %s broke at %s", m[d.src].World, m[d.dst].World, k, clock(k.LinkAt))
			}
		}
	}
	return append(found, f)
}

// lostEachOther finds pairs of ranks that gave each other up while both were there, where
// transports tell of no broken path.
func (l *links) lostEachOther(found []finding) []finding {
	cuts := l.aborts.cuts
	if len(cuts) == 0 || slices.ContainsFunc(l.aborts.ends, func(r int32) bool {
		return l.overdue(r) || l.state[r] == rankStopped || l.state[r] == rankGone && l.endedAt(r) <= cuts[0].at+dyingFor
	}) || l.open.consequence(cuts[0].at) || slices.ContainsFunc(l.namings(), func(n naming) bool { return n.why == record.ResultMismatch }) {
		return found // these explain more
	}
	if f, ok := l.open.linkBefore(cuts[0].at); ok && f.blames(cuts) {
		if l.now-cuts[0].at >= int64(l.cfg.GoneAfter) {
			f.Level = Confirmed
		}
		f.deadLink, f.still = true, l.now-f.Since
		f.sayOnce(fmt.Sprintf("rank %d gave up %s at %s because it lost rank %d", cuts[0].a, l.ev.Comms[cuts[0].comm].Name, clock(cuts[0].at), cuts[0].b))
		return append(found, f)
	}
	f := finding{hang: true, deadLink: true}
	f.Class, f.Level, f.Since = CommunicationHang, Suspected, cuts[0].at
	f.still = l.now - max(cuts[0].at, l.resumed)
	if f.still >= int64(l.cfg.GoneAfter) {
		f.Level = Confirmed
	}
	c := &l.ev.Comms[cuts[0].comm]
	f.setComm(c)
	for i := range c.Members {
		if m := &c.Members[i]; m.Open() || m.State == record.CommAborted {
			f.Victims++
			f.Seq, f.Coll = max(f.Seq, m.Started), m.Coll
		}
	}
	var pairs []cell
	for _, x := range cuts {
		pairs = append(pairs, cell{min(x.a, x.b), max(x.a, x.b)})
		said := "which was there"
		if x.mutual {
			said = "and the other way round"
		}
		f.why("rank %d gave up %s at %s because it lost rank %d, %s", x.a, l.ev.Comms[x.comm].Name, clock(x.at), x.b, said)
	}
	l.blamePairs(&f, pairs)
	return append(found, f)
}

// blames reports whether a finding blames an end of one of the pairs.
func (f *finding) blames(cuts []cut) bool {
	return slices.ContainsFunc(cuts, func(c cut) bool {
		return slices.ContainsFunc(f.Culprits, func(k Culprit) bool {
			return k.Rank >= 0 && (k.Rank == c.a || k.Rank == c.b || k.Peer == c.a || k.Peer == c.b)
		})
	})
}

// sayOnce adds a sentence that a finding which goes on may have already.
func (f *finding) sayOnce(s string) {
	if !slices.Contains(f.Why, s) {
		f.why("%s", s)
	}
}

// blamePairs blames what pairs of ranks that cannot reach each other have in common: one
// rank of all, or one node that has lost several others; else each of them.
func (l *links) blamePairs(f *finding, pairs []cell) {
	f.Counter = fmt.Sprintf("a path between rank %d and rank %d that works again, or one of them being gone before the other lost it", pairs[0].src, pairs[0].dst)
	slices.SortFunc(pairs, func(a, b cell) int { return cmp.Or(cmp.Compare(a.src, b.src), cmp.Compare(a.dst, b.dst)) })
	pairs = slices.Compact(pairs)
	if len(pairs) > 1 {
		for _, r := range [...]int32{pairs[0].src, pairs[0].dst} {
			if !slices.ContainsFunc(pairs, func(p cell) bool { return p.src != r && p.dst != r }) {
				f.blame(l.rankCulprit(r, reasonLinkDown))
				return
			}
		}
		for _, r := range [...]int32{pairs[0].src, pairs[0].dst} {
			if n := nodeOf(l.ev, r); n >= 0 && l.lostSeveral(n, pairs) {
				f.blame(Culprit{Kind: CulpritNode, Rank: -1, Peer: -1, Node: l.ev.Nodes[n].Name, Reason: reasonLinkDown})
				return
			}
		}
	}
	for _, p := range pairs {
		f.blame(Culprit{Kind: CulpritConnection, Rank: p.src, Peer: p.dst, Node: l.nodeName(p.src), Reason: reasonLinkDown})
	}
}

// lostSeveral reports whether all pairs have one end on a node, and the others on
// more than one.
func (l *links) lostSeveral(node int32, pairs []cell) bool {
	other := int32(-1)
	several := false
	for _, p := range pairs {
		a, b := nodeOf(l.ev, p.src), nodeOf(l.ev, p.dst)
		if b == node {
			a, b = b, a
		}
		if a != node || b == node {
			return false
		}
		several = several || other >= 0 && b != other
		other = b
	}
	return several
}

// wentOn reports whether one of the ends has finished operations since, in a
// communicator that has not failed: the job has come to terms with the loss, by leaving
// the other end out for instance.
func (l *links) wentOn(d deadLink) bool {
	if l.lastFinish <= d.at+int64(l.cfg.SuspectAfter) {
		return false
	}
	of := l.ev.Comms[d.comm].Members
	for i := range l.ev.Comms {
		for _, m := range l.ev.Comms[i].Members {
			if m.State != record.CommAborted && (m.World == of[d.src].World || m.World == of[d.dst].World) && m.FinishedAt > d.at+int64(l.cfg.SuspectAfter) {
				return true
			}
		}
	}
	return false
}

// scan fills in the pass's dead links, the first to break first.
func (l *links) scan() {
	l.dead = l.dead[:0]
	if !slices.ContainsFunc(l.comms, func(h commHistory) bool { return h.linkDown }) {
		return
	}
	type ends struct{ comm, src, dst int32 }
	type paths struct {
		down, up int
		at       int64
		seeks    int64
	}
	all := make(map[ends]*paths)
	// Few of a large job's connections have a path that is down: the others are not looked up.
	l.near = append(l.near[:0], make([]bool, len(l.ev.Ranks))...)
	told := l.conns[:0]
	for ci := range l.comms {
		if !l.comms[ci].linkDown || l.comms[ci].former {
			continue
		}
		n := min(len(l.ev.Comms[ci].Members), len(l.near))
		for _, k := range l.connsOf(int32(ci)) {
			if c := &l.ev.Conns[k]; c.Link != record.LinkNone && uint32(c.Src) < uint32(n) && uint32(c.Dst) < uint32(n) {
				told = append(told, k)
			}
		}
	}
	l.conns = told
	for _, k := range told {
		c := &l.ev.Conns[k]
		if c.Link != record.LinkDown {
			continue
		}
		for _, at := range [...]ends{{c.Comm, c.Src, c.Dst}, {c.Comm, c.Dst, c.Src}} {
			if all[at] == nil {
				all[at] = new(paths)
			}
		}
		l.near[c.Src], l.near[c.Dst] = true, true
	}
	for _, k := range told {
		c := &l.ev.Conns[k]
		if !l.near[c.Src] {
			continue
		}
		x := all[ends{c.Comm, c.Src, c.Dst}]
		if x == nil {
			continue
		}
		x.seeks = max(x.seeks, int64(c.Transport.Seeks()))
		if c.Link == record.LinkDown {
			x.down++
			x.at = max(x.at, c.LinkAt)
		} else {
			x.up++
		}
	}
	for at, x := range all {
		if x.down == 0 || x.up > 0 {
			continue
		}
		d := deadLink{comm: at.comm, src: at.src, dst: at.dst, at: x.at, seeks: x.seeks, one: true}
		if back := all[ends{at.comm, at.dst, at.src}]; back != nil && back.down > 0 && back.up == 0 {
			if at.src > at.dst {
				continue // told from the other end
			}
			d.at, d.seeks, d.one = min(x.at, back.at), max(x.seeks, back.seeks), false
		}
		if l.dies(&d) {
			l.dead = append(l.dead, d)
		}
	}
	slices.SortFunc(l.dead, func(a, b deadLink) int {
		return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.comm, b.comm), cmp.Compare(a.src, b.src), cmp.Compare(a.dst, b.dst))
	})
}

// whileLinksSeek gives a stall as much time as a link that looks for a path has: what is
// not delivered waits for that, as a rule, and goes on with it.
func (d *hangs) whileLinksSeek(c *cause) {
	if c.class != CommunicationHang || !slices.ContainsFunc(d.comms, func(h commHistory) bool { return h.linkDown && !h.former }) {
		return
	}
	for i := range d.ev.Conns {
		k := &d.ev.Conns[i]
		if bound := int64(k.Transport.Seeks()); k.Link == record.LinkDown && d.now < k.LinkAt+bound {
			c.confirm = max(c.confirm, bound)
			for i := range c.nodes {
				c.nodes[i].confirm = max(c.nodes[i].confirm, bound)
			}
		}
	}
}

// dies reports whether a link is dead by itself rather than by the end of one of its
// ranks, and notes whether these still look for a path.
func (l *links) dies(d *deadLink) bool {
	members := l.ev.Comms[d.comm].Members
	if uint32(d.src) >= uint32(len(members)) || uint32(d.dst) >= uint32(len(members)) {
		return false
	}
	for _, end := range [...]*Member{&members[d.src], &members[d.dst]} {
		r := l.world(end.World)
		if r < 0 {
			return false
		}
		switch {
		case l.state[r] == rankGone && end.State != record.CommAborted && (l.ev.Ranks[r].Exit.byItself() || l.endedAt(r) <= d.at+int64(l.cfg.SuspectAfter)):
			return false // it took the link down
		case l.state[r] == rankLost:
			return false // with its node, perhaps
		case end.State == record.CommAborted && end.StateAt > 0 && d.at >= end.StateAt-abortSlack:
			return false // it gave up for another reason, and closed its ends
		case d.one && end == &members[d.dst] && (l.state[r] != rankAlive || !inComm(end) || l.heard(r) <= d.at+dyingFor/2):
			return false // it may have, and not be seen to have
		case !inComm(end) || l.state[r] == rankExited || l.state[r] == rankGone:
			d.seeks = 0
		}
	}
	if d.src > d.dst {
		d.src, d.dst = d.dst, d.src
	}
	return true
}
