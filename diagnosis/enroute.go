package diagnosis

import "slices"

// A slow connection over TCP shows in no throughput where the kernel's buffer takes a whole
// message: it is sent at once, as far as its sender sees, and is on its way for as long as
// the path takes. In a ring all wait for that one connection, and what goes over the others
// is taken as soon as it is sent. So of a communicator that is slow for all of its members,
// the one connection whose bytes are on their way for several times as long as usual, and as
// over any other of its connections, is the one that holds up the rest.

// lateComm is a communicator that one of its connections slows down.
type lateComm struct {
	streak
	comm, conn         int32
	grown              float64 // share of the time of the last stretch
	way, usual, others float64 // on the way over conn, usually, and over the slowest of the others; ns
}

const (
	wayEvery   = int64(300e6) // between two looks at communicators of more than two, ns
	leastLooks = 3            // at a connection in some stretches, to judge it
	leastTold  = 8            // stretches, to know what is usual
	shortWay   = 1e6          // ns that are nothing unusual
	// One connection that stands out says much: so less of the time will do than without.
	lateGrown  = 1.0 / 3
	lateSlower = 1.0 / 4

	mostCompared = 64 // members of communicators that are asked whether they share a rank
)

// judgeLate judges the drags' last stretch of a communicator.
func (d *throughputs) judgeLate(ci int32) {
	at := slices.IndexFunc(d.late, func(s lateComm) bool { return s.comm == ci })
	s, is := lateComm{comm: ci, grown: float64(d.drags.grown[ci])}, false
	if s.grown >= lateGrown && d.drags.slower(1) >= lateSlower && d.well(ci) {
		is = d.longest(&s)
	}
	switch {
	case is && at >= 0 && d.late[at].conn != s.conn:
		d.late[at] = s // it was not that one
	case !is && at >= 0 && s.grown >= lateGrown && d.stays(&d.late[at]):
		s, is = d.late[at], true // few looks are not enough to take it back
		s.grown = float64(d.drags.grown[ci])
	}
	var x *lateComm
	d.late, x = kept(d.late, at, s, is, func(x *lateComm) bool { return d.drags.ops0[ci].active && x.lessen(d.window) })
	if x != nil {
		x.grown, x.way, x.usual, x.others = s.grown, s.way, s.usual, s.others
		x.add(d.window, d.now-d.drags.last, 2, true)
	}
}

// longest finds the connection whose bytes are on their way for longest, and reports whether
// that is far from usual and from what the communicator's others take.
func (d *throughputs) longest(s *lateComm) bool {
	s.conn = -1
	var x *throughput
	for _, k := range d.ofComm(s.comm) {
		if y := &d.conns[k]; y.lately().n >= leastLooks && (x == nil || y.lately().mean() > x.lately().mean()) {
			s.conn, x = k, y
		}
	}
	if x == nil || !x.known() {
		return false
	}
	compared := false
	for _, k := range d.ofComm(s.comm) {
		if y := &d.conns[k]; y.lately().n > 0 && (y.src != x.src || y.dst != x.dst) {
			compared, s.others = true, max(s.others, y.lately().mean())
		}
	}
	s.way, s.usual = x.lately().mean(), x.usually.mean
	return compared && s.way > d.wrong(s.comm, x) && s.way >= oneWay*max(s.others, s.usual, shortWay) && !d.elsewhere(s.comm)
}

// stays reports whether what has been found of a connection is still so by all looks that are kept,
// if by less.
func (d *throughputs) stays(s *lateComm) bool {
	if int(s.conn) >= len(d.conns) || !slices.Contains(d.ofComm(s.comm), s.conn) {
		return false
	}
	x, others := &d.conns[s.conn], 0.0
	for _, k := range d.ofComm(s.comm) {
		if y := &d.conns[k]; y.src != x.src || y.dst != x.dst {
			others = max(others, y.over(len(y.before)).mean())
		}
	}
	return x.over(len(x.before)).mean() >= oneWay/2*max(others, x.usually.mean, shortWay) && d.well(s.comm) && !d.elsewhere(s.comm)
}

// elsewhere reports whether bytes are on their way for longer than usual among other ranks as
// well: then it is no one connection's fault. Few communicators are asked about in a stretch.
func (d *throughputs) elsewhere(ci int32) bool {
	if d.asked++; d.asked > maxSlow {
		return true
	}
	if len(d.ev.Comms[ci].Members) > mostCompared {
		return false // hardly a communicator has none of its ranks
	}
	var others []float64
	for o := range d.ev.Comms {
		if int32(o) == ci || len(d.ev.Comms[o].Members) > mostCompared || shareRank(&d.ev.Comms[o], &d.ev.Comms[ci]) {
			continue
		}
		worst := 0.0
		for _, k := range d.ofComm(int32(o)) {
			if x := &d.conns[k]; x.lately().n > 0 && x.known() {
				worst = max(worst, x.lately().mean()/max(x.usually.mean, shortWay))
			}
		}
		if worst > 0 {
			others = append(others, worst)
		}
	}
	return len(others) > 0 && median(others) >= oneWay/2
}

// wrong is what clocks of two ends may differ by; ns.
func (d *throughputs) wrong(ci int32, x *throughput) float64 {
	m := d.ev.Comms[ci].Members
	if int(max(x.src, x.dst)) >= len(m) || min(x.src, x.dst) < 0 {
		return 0
	}
	a, b := nodeOf(d.ev, m[x.src].World), nodeOf(d.ev, m[x.dst].World)
	if a == b || a < 0 || b < 0 {
		return 0
	}
	return 2 * float64(d.ev.Nodes[a].MapError+d.ev.Nodes[b].MapError)
}

// lateFindings reports connections that are slow by that, unless something else explains it.
func (d *throughputs) lateFindings(found []finding) []finding {
	for i := range d.late {
		s := &d.late[i]
		if s.level == 0 || int(s.conn) >= len(d.ev.Conns) || d.explained(s.comm, found) {
			continue
		}
		c, k := &d.ev.Comms[s.comm], &d.ev.Conns[s.conn]
		from, to := d.end(k, k.Src), d.end(k, k.Dst)
		f := finding{}
		f.Class, f.Level, f.Since, f.Victims = CommunicationSlow, s.level, s.since, len(c.Members)
		f.blame(Culprit{Kind: CulpritConnection, Rank: from, Peer: to, Node: d.nodeName(from), Reason: reasonNetwork})
		f.setComm(c)
		f.lastOf(c)
		f.why("all members of %s are inside its operations for several times as long as usual, the last one to come as well: the transfer takes longer, for %.0f %% of the time", c.Name, 100*min(s.grown, 1))
		f.why("what rank %d sends is on its way to rank %d for %s (%s), usually %s; over no other connection of the communicator does it take longer than %s", from, to, millis(s.way), k.String(), millis(s.usual), millis(s.others))
		f.why("so for %s, since %s", plural(s.slow, "window", "windows"), clock(s.since))
		found = append(found, f)
	}
	return found
}
