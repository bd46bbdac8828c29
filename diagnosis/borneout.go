package diagnosis

import (
	"slices"

	"github.com/lockstep-ccl/lockstep/record"
)

// watchAgain takes down whether bytes were sent again in the window. Of a queue pair nobody tells: there it is whether
// its monitor finds the network slow, if only now and then.
func (h *connHistory) watchAgain(c *Conn) {
	now := float32(0)
	if c.Resent > h.resent || slowStill(c) {
		now = 1
	}
	h.resent = c.Resent
	h.again += (now - h.again) / 4
}

// learnAgain lets a window teach how often bytes are sent again as a rule. What it takes for a connection to be
// told teaches slowly: a fault would become usual in the windows in which its job feels it less.
func (h *connHistory) learnAgain() {
	const slowly = 8
	n := float32(max(h.base.n, 8))
	if h.again >= leastAgain {
		n *= slowly
	}
	h.usualAgain += (h.again - h.usualAgain) / n
}

// Shares of its windows in which a connection that loses what it carries sends bytes again, and
// by how much that has to be more than usual.
const (
	leastAgain = 0.6
	moreAgain  = 0.35
)

// loses reports whether a connection sends bytes again in most of its windows, unlike before and
// unlike the others, and neither end is short of CPU. Whoever comes late, or takes late what comes, has
// nobody send again.
func (d *slowLinks) loses(conn, comm int32, at cell) bool {
	h, t := &d.conns[conn], d.ev.Conns[conn].Transport
	if h.again < leastAgain || h.again < h.usualAgain+moreAgain || d.crowded(at.src) || d.crowded(at.dst) || d.starvedIn(comm) {
		return false
	}
	v := d.scratch[:0]
	for i := range d.conns {
		if d.conns[i].fresh && d.ev.Conns[i].Transport == t {
			v = append(v, float64(d.conns[i].again))
		}
	}
	d.scratch = v
	return len(v) <= 2 || median(v) <= leastAgain/2
}

// watchMoved takes down how long a slow connection's destination is inside operations after all
// have come. x is what was known of it at the window before.
func (d *slowLinks) watchMoved(s, x *slowConn) {
	m := &d.ev.Comms[s.comm].Members[d.ev.Conns[s.conn].Dst]
	s.moved, s.took, s.tookA = x.moved, insideSums{m.Ops, m.WaitNs, m.TransferNs}, d.now
	if x.tookA == 0 || m.Ops <= x.took.ops || m.TransferNs < x.took.transfer || int(s.comm) >= len(d.transfers.usual) {
		return
	}
	usual := &d.transfers.usual[s.comm]
	if usual.n == 0 {
		return
	}
	took, ops := float64(m.TransferNs-x.took.transfer), float64(m.Ops-x.took.ops)
	excess := 0.0
	if took >= 2*usual.mean*ops {
		excess = (took - usual.mean*ops) / float64(d.now-x.tookA)
	}
	s.moved += (excess - s.moved) / 3
}

// carried reports whether the destination of a slow connection is inside operations for longer
// after all have come, by more than both ends have waited for a CPU. Unlike looks at what is on
// the way, this misses nothing in between. But a member takes for come whom it has heard of, maybe
// by others: where one rank is late, the job takes no longer than that explains.
func (d *slowLinks) carried(s *slowConn) bool {
	hungry := float64(d.ev.Ranks[s.cell.src].hunger() + d.ev.Ranks[s.cell.dst].hunger())
	if !s.plain() || s.moved < max(leastGrown, hungry) || d.drags.unexplained < d.cfg.SlowShare/4 || d.elsewhere(s.conn, s.comm) {
		return false
	}
	// Of those that end there, it is the one on which bytes are seen, when any is.
	if slices.ContainsFunc(d.slow, func(x slowConn) bool {
		return x.comm == s.comm && x.cell.dst == s.cell.dst && x.flight >= 0.1 && x.flight > 2*s.flight
	}) {
		return false
	}
	return !d.starvedIn(s.comm)
}

// onlyBetween reports whether a slow connection is one of those between two nodes, all of which
// are slow, and the job takes longer than any rank's own time explains. Of two ranks that run
// after each other one is late in one collective and the other in the next, so that nobody is inside
// for longer in all of them.
func (d *slowLinks) onlyBetween(s *slowConn) bool {
	c := &d.ev.Conns[s.conn]
	if _, ok := d.between[c.Transport]; !ok || c.Cause != record.CauseNetwork || !s.plain() {
		return false
	}
	return d.drags.unexplained >= d.cfg.SlowShare/2 && !d.elsewhere(s.conn, s.comm) && !d.crowded(s.cell.src) && !d.crowded(s.cell.dst) && !d.starvedIn(s.comm)
}

// bothWays reports whether a slow connection's way back is slow as well, and the job takes longer
// than any rank's own time explains: what is late one way is acknowledged late the other. A rank
// that is late, or waits for another one, takes late what comes to it, and what it sends is taken at once.
func (d *slowLinks) bothWays(s *slowConn) bool {
	if !s.plain() || d.ev.Conns[s.conn].Cause != record.CauseNetwork || d.drags.unexplained < d.cfg.SlowShare/2 {
		return false
	}
	back := slices.ContainsFunc(d.slow, func(x slowConn) bool {
		return x.comm == s.comm && x.cell.src == s.cell.dst && x.cell.dst == s.cell.src && x.clean == 0 && x.plain() && x.delay >= s.delay/2 && x.delay <= 2*s.delay
	})
	return back && !d.elsewhere(s.conn, s.comm) && !d.crowded(s.cell.src) && !d.crowded(s.cell.dst) && !d.starvedIn(s.comm)
}

// lateSoon reports whether a rank has cost the job as much lately as a slow connection has to: it may
// be told to be late itself in a moment.
func (d *slowLinks) lateSoon(r int32) bool {
	return int(r) < len(d.drags.ranks) && float64(d.drags.ranks[r].sums[0])/float64(horizons[0]) >= d.cfg.SlowShare/2
}

// blamedAgain reports whether the monitor of a connection has laid a part of its windows to the network again
// and again, unlike before: not enough to be told, but to show what those that are have in common.
func (d *slowLinks) blamedAgain(conn int32) bool {
	h, c := &d.conns[conn], &d.ev.Conns[conn]
	return h.known && h.blamed >= 0.5 && h.lately >= h.usually+leastOutside && !c.Transport.InMemory()
}

// blamedLong reports whether it has for longer, and its communicator does not wait for other connections:
// what a receiver takes late because it waits for another one is laid to the network as well. That may be
// one of another communicator: then this one's operations take no longer once all have come.
func (d *slowLinks) blamedLong(conn int32) bool {
	if ci := int(d.ev.Conns[conn].Comm); ci < len(d.transfers.denied) && d.transfers.denied[ci] && !d.comms[ci].p2p {
		return false
	}
	return d.conns[conn].blamed >= 0.6 && d.blamedAgain(conn) && !d.notByRTT(conn) && !d.elsewhere(conn, d.ev.Conns[conn].Comm)
}

// transferGrown reports whether what a slow connection's monitor says is borne out
// by the operations: all members had come, the last one too was inside for longer than
// usual, and neither end is short of CPU.
func (d *slowLinks) transferGrown(s *slowConn) bool {
	return !s.alone && s.plain() && !d.elsewhere(s.conn, s.comm) && d.borneOut(&s.cell, s.comm, &d.ev.Conns[s.conn])
}

// borneOut is transferGrown of a connection between two ranks, but for how often its
// monitor says so. A member that is short of CPU has all the others' transfers take longer.
func (d *slowLinks) borneOut(at *cell, ci int32, c *Conn) bool {
	if c.Cause != record.CauseNetwork || int(ci) >= len(d.drags.grown) || float64(d.drags.grown[ci]) < d.cfg.SlowShare/4 {
		return false
	}
	if int(ci) < len(d.transfers.denied) && d.transfers.denied[ci] {
		return false
	}
	return at.src >= 0 && at.dst >= 0 && !d.crowded(at.src) && !d.crowded(at.dst) && !d.starvedIn(ci)
}

// starvedIn reports whether a member of a communicator is starved.
func (d *slowLinks) starvedIn(ci int32) bool {
	h := &d.inside[ci]
	if h.looked != d.start {
		h.looked = d.start
		h.starving = slices.ContainsFunc(d.ev.Comms[ci].Members, func(m Member) bool {
			r := d.world(m.World)
			return r >= 0 && d.starved(r)
		})
	}
	return h.starving
}
