package diagnosis

import (
	"cmp"
	"math"
	"slices"

	"github.com/lockstep-ccl/lockstep/record"
)

// moves finds slow connections by how long sampled collectives take once all members have entered:
// no rank that is late shows in that. The communicator whose collectives take longer than they ever
// did is one fact; which of its connections the monitors lay to the network, and no others, is the
// other one. Neither needs looks at bytes on their way, which miss what is short.
type moves struct {
	*window
	links     *slowLinks
	late      *arrivals
	pairs     *pairs
	transfers *transfers
	slow      []movedConn
	said      []movedSaid
}

// movedSaid is what has been said of a communicator: where the same connections are told again soon it stays as sure,
// for rounds that are a little faster now and then take nothing back.
type movedSaid struct {
	comm        uint64
	cells       []cell
	level       Level
	since, last int64
}

// saidFor is for how long what is not said again is kept, ns.
const saidFor = 3e9

// movedComm is a communicator whose collectives take longer.
type movedComm struct {
	comm      int32
	members   []int32 // of sends and receives: those whose own take longer; else nil
	level     Level
	likely    Level   // where one of its connections has begun to lose what it carries
	chance    float64 // logarithm of it
	since     int64
	times, of int
	cost      float64 // of the time since
	now, then float64 // what a collective takes, ns
}

// movedConn is a connection that is told.
type movedConn struct {
	conn, comm int32
	cell       cell
	share      float32 // of its windows, by its monitor; 0 where looks tell it
	times      float32 // as many looks as at any other two ranks, else 0
}

const (
	// leastMoved is the share of the time that a communicator's transfers have to cost more.
	leastMoved = 0.06
	// movedShare is the share of its windows that the monitor of a slow connection lays to the
	// network, beyond what it did before.
	movedShare = 0.4
	// movedOthers is that of the communicator's other connections, by that of the slow one.
	movedOthers = 0.5
	// leastSeen is how many looks have to see bytes between two ranks.
	leastSeen = 6
	// The chances that will do where a connection has begun to send bytes again, and no other has: what is lost
	// now and then delays few operations, and by much.
	likelySuspected, likelyConfirmed = 1e-3, 1e-4
	// mostUsualAgain is in which share of its windows such a connection sent bytes again before, at most.
	mostUsualAgain = 0.1
)

func (d *moves) forget() { d.slow, d.said = d.slow[:0], nil }

func (d *moves) find(found []finding) []finding {
	d.said = slices.DeleteFunc(d.said, func(x movedSaid) bool { return d.now-x.last > saidFor })
	for i := range d.late.moved {
		found = d.told(found, &d.late.moved[i])
	}
	for i := range d.pairs.moved {
		found = d.told(found, &d.pairs.moved[i])
	}
	return found
}

// told adds what is told of a communicator.
func (d *moves) told(found []finding, s *movedComm) []finding {
	if int(s.comm) >= min(len(d.ev.Comms), len(d.links.inside)) || len(d.links.conns) != len(d.ev.Conns) || d.links.starvedIn(s.comm) {
		return found
	}
	if len(d.connsOf(s.comm)) == 0 {
		if s.level > 0 && s.members == nil {
			found = d.toldNode(found, s)
		}
		return found
	}
	level, lost := s.level, d.losing(s)
	if lost {
		level = s.likely
	} else if d.connections(s); len(d.slow) == 0 {
		d.seen(s)
	}
	if len(d.slow) == 0 {
		return found
	}
	if level == 0 && d.before(s) == nil {
		return found
	}
	if f := d.suspected(found, level); f != nil {
		level = d.say(s, level)
		f.Level, f.Since = level, min(f.Since, s.since)
		f.whyMoved(d.ev, s)
		return found
	}
	var cells []cell
	transports := map[record.Transport]bool{}
	for i := range d.slow {
		x := &d.slow[i]
		if d.links.lateEnd(x.cell) || d.crowded(x.cell.src) || d.crowded(x.cell.dst) || x.times == 0 && d.links.elsewhere(x.conn, x.comm) || d.explained(found, x) || lost && d.slowWithin(found, s.comm) {
			return found
		}
		cells = append(cells, x.cell)
		transports[d.ev.Conns[x.conn].Transport] = true
	}
	level = d.say(s, level)
	c := &d.ev.Comms[s.comm]
	around := d.links.around(cells, transports)
	if lost {
		around.beside, around.lasting = nil, nil // slow for another reason
	}
	for _, p := range patternsBeside(cells, around, func(r int32) int32 { return nodeOf(d.ev, r) }) {
		f := d.ofPattern(&p)
		f.Level, f.Since, f.Victims = level, s.since, len(c.Members)
		f.setComm(c)
		f.lastOf(c)
		f.whyMoved(d.ev, s)
		for i := range d.slow {
			x := &d.slow[i]
			if !slices.Contains(p.cells, x.cell) {
				continue
			}
			if c := &d.ev.Conns[x.conn]; lost && slowStill(c) {
				f.why("the network of %d → %d (%s) is slow now and then by the word of its monitor, unlike before and unlike others", x.cell.src, x.cell.dst, c)
				continue
			}
			if lost {
				f.why("%d → %d (%s) sends bytes again in most windows, unlike before and unlike others", x.cell.src, x.cell.dst, &d.ev.Conns[x.conn])
				continue
			}
			if x.times > 0 {
				f.why("looks see bytes on their way over %d → %d (%s) or back to a receiver that waits, %.1f times as often as between any other two ranks; its monitor tells nothing of messages under 4 KiB", x.cell.src, x.cell.dst, &d.ev.Conns[x.conn], x.times)
				continue
			}
			f.why("the monitor of %d → %d (%s) lays %.0f %% of its windows to the network, of no other connection of %s half as many", x.cell.src, x.cell.dst, &d.ev.Conns[x.conn], 100*x.share, c.Name)
		}
		f.why("the job loses %.0f %% of its time to it, since %s", 100*s.cost, clock(s.since))
		found = append(found, f)
	}
	return found
}

// before is what was said before of the same connections of a communicator; nil for nothing.
func (d *moves) before(s *movedComm) *movedSaid {
	for i := range d.said {
		x := &d.said[i]
		if x.comm == d.ev.Comms[s.comm].ID && len(x.cells) == len(d.slow) && !slices.ContainsFunc(d.slow, func(m movedConn) bool { return !slices.Contains(x.cells, m.cell) }) {
			return x
		}
	}
	return nil
}

// say takes down what is said of a communicator's connections, and returns how sure that is.
func (d *moves) say(s *movedComm, level Level) Level {
	x := d.before(s)
	if x == nil {
		d.said = append(d.said, movedSaid{comm: d.ev.Comms[s.comm].ID, since: d.now})
		x = &d.said[len(d.said)-1]
		for i := range d.slow {
			x.cells = append(x.cells, d.slow[i].cell)
		}
	}
	x.level, x.last = max(x.level, level), d.now
	if d.slow[0].times > 0 && d.now-x.since < int64(d.cfg.SlowSuspectAfter) {
		return min(x.level, Suspected) // by chance looks are apart for a moment
	}
	return x.level
}

// whyMoved says what of a communicator takes longer.
func (f *finding) whyMoved(ev *Evidence, s *movedComm) {
	c := &ev.Comms[s.comm]
	if s.members == nil {
		f.why("once all members of %s have entered, its collectives take %s each, before %s; so in %d of the last %d rounds", c.Name, millis(s.now), millis(s.then), s.times, s.of)
		return
	}
	f.why("once its peers have begun as well, sends and receives of rank %d on %s take %s each, before %s; so in %d of the last %d stretches of the job", c.Members[s.members[0]].World, c.Name, millis(s.now), millis(s.then), s.times, s.of)
}

// ends reports whether a connection ends at a member whose operations take longer, where that is known.
func (s *movedComm) ends(c *Conn) bool { return s.members == nil || slices.Contains(s.members, c.Dst) }

// losing finds the connections of a communicator that have begun to lose what they carry, when no other of
// it sends bytes again half as often, and reports whether there are any.
func (d *moves) losing(s *movedComm) bool {
	d.slow = d.slow[:0]
	ci := s.comm
	of, others := d.connsOf(ci), float32(0)
	for _, k := range of {
		h, c := &d.links.conns[k], &d.ev.Conns[k]
		x := movedConn{conn: k, comm: ci, cell: cell{d.end(c, c.Src), d.end(c, c.Dst)}}
		if h.known && s.ends(c) && h.usualAgain <= mostUsualAgain && x.cell.src >= 0 && x.cell.dst >= 0 && d.links.loses(k, ci, x.cell) {
			d.slow = append(d.slow, x)
		} else {
			others = max(others, h.again)
		}
	}
	if 2*len(d.slow) > len(of) && !d.onePair() || others >= movedOthers*leastAgain {
		d.slow = d.slow[:0]
	}
	return len(d.slow) > 0
}

// onePair reports whether all slow connections are between the same two ranks. Of a pipeline these may be all
// that leave a node.
func (d *moves) onePair() bool {
	return !slices.ContainsFunc(d.slow, func(x movedConn) bool {
		a := d.slow[0].cell
		return x.cell != a && x.cell != cell{a.dst, a.src}
	})
}

// connections finds the connections of a communicator that their monitors tell from the others: all
// that are as slow as the slowest one, and no other half as slow. Of those that end at a member whose own
// operations take longer, the way back does not count: it is late with what it acknowledges.
func (d *moves) connections(s *movedComm) {
	d.slow = d.slow[:0]
	ci, most := s.comm, float32(0)
	shares := func(yield func(k int32, c *Conn, share float32)) {
		for _, k := range d.connsOf(ci) {
			if h, c := &d.links.conns[k], &d.ev.Conns[k]; h.known && c.Windows > 0 {
				share := h.lately - h.usually
				if c.Cause != record.CauseNone && c.Cause != record.CauseNetwork || c.Transport.InMemory() || d.links.notByRTT(k) {
					share = 0 // its monitor blames one of its ends, or may as well: what is in memory is late because of who takes it
				}
				yield(k, c, share)
			}
		}
	}
	n, other := 0, float32(0)
	shares(func(_ int32, c *Conn, share float32) {
		n++
		if s.ends(c) {
			most = max(most, share)
		}
	})
	least := float32(movedShare)
	if s.members != nil {
		least = leastOutside // it is known already at whom it ends
	}
	if most < least || n < 2 {
		return
	}
	shares(func(k int32, c *Conn, share float32) {
		switch {
		case share < movedOthers*most:
		case s.ends(c):
			d.slow = append(d.slow, movedConn{conn: k, comm: ci, cell: cell{d.end(c, c.Src), d.end(c, c.Dst)}, share: share})
		case !slices.Contains(s.members, c.Src):
			other = max(other, share)
		}
	})
	if 2*len(d.slow) > n || other > 0 || slices.ContainsFunc(d.slow, func(x movedConn) bool { return x.cell.src < 0 || x.cell.dst < 0 }) {
		d.slow = d.slow[:0] // what most of them have in common is none's
	}
}

// seen finds the two ranks between which looks see bytes on their way to a receiver that waits, many times as
// often as between any other two, where their monitors have told nothing since collectives take longer: of small
// messages they take no times. Both ways count together, for what is late one way is acknowledged late the other,
// and the next message waits for that.
func (d *moves) seen(s *movedComm) {
	d.slow = d.slow[:0]
	if s.members != nil {
		return
	}
	of, looks, heard := d.connsOf(s.comm), map[cell]float32{}, map[cell]bool{}
	for _, k := range of {
		h, c := &d.links.conns[k], &d.ev.Conns[k]
		at := d.between(c)
		heard[at] = heard[at] || c.Transport.InMemory() || c.LastWindowAt >= s.since
		if h.known && h.seen > 0 {
			looks[at] += h.seen
		}
	}
	best, next := cell{-1, -1}, float32(0)
	for at, n := range looks {
		switch {
		case n > looks[best]:
			best, next = at, max(next, looks[best])
		case at != best:
			next = max(next, n)
		}
	}
	least, n := float32(leastSeen), looks[best]
	if slices.ContainsFunc(d.said, func(x movedSaid) bool {
		return x.comm == d.ev.Comms[s.comm].ID && (slices.Contains(x.cells, best) || slices.Contains(x.cells, cell{best.dst, best.src}))
	}) {
		least /= 2 // looks are few
	}
	// As many as that are seen by chance now and then, where others are, too.
	far := n-next >= least/3*float32(math.Sqrt(float64(n+next)))
	if n < least || n < clearlyMore*next || !far || heard[best] || best.src < 0 {
		return
	}
	for _, k := range of {
		h, c := &d.links.conns[k], &d.ev.Conns[k]
		if d.between(c) == best && h.known {
			d.slow = append(d.slow, movedConn{conn: k, comm: s.comm, cell: cell{d.end(c, c.Src), d.end(c, c.Dst)}, times: n / max(next, 1)})
		}
	}
	slices.SortStableFunc(d.slow, func(a, b movedConn) int { return cmp.Compare(d.links.conns[b.conn].seen, d.links.conns[a.conn].seen) })
}

// between is the two ranks that a connection is between, the lower one first.
func (d *moves) between(c *Conn) cell {
	a, b := d.end(c, c.Src), d.end(c, c.Dst)
	return cell{min(a, b), max(a, b)}
}

// suspected returns what has been found of the one connection that is slow, and for less sure; nil when there is
// none.
func (d *moves) suspected(found []finding, level Level) *finding {
	i := slices.IndexFunc(found, func(f finding) bool {
		return f.Class == CommunicationSlow && f.Level < level && len(f.Culprits) == 1 && f.Culprits[0].Kind == CulpritConnection
	})
	if i < 0 || len(d.slow) != 1 {
		return nil
	}
	if x, k := d.slow[0].cell, &found[i].Culprits[0]; k.Rank != x.src || k.Peer != x.dst {
		return nil
	}
	return &found[i]
}

// explained reports whether a connection is in what has been found.
func (d *moves) explained(found []finding, x *movedConn) bool {
	return slices.ContainsFunc(found, func(f finding) bool {
		return f.hang || f.Class == CommunicationSlow && (f.Comm == d.ev.Comms[x.comm].ID || slices.ContainsFunc(f.Culprits, func(k Culprit) bool {
			return k.Rank == x.cell.src || k.Rank == x.cell.dst || k.Peer == x.cell.src || k.Peer == x.cell.dst ||
				k.Kind == CulpritNode && (k.Node == d.nodeName(x.cell.src) || k.Node == d.nodeName(x.cell.dst))
		}))
	})
}

// slowWithin reports whether something slow has been found already between members of a communicator: its collectives
// take longer for that, and what is sent again now and then over another connection has nothing to do with it.
func (d *moves) slowWithin(found []finding, ci int32) bool {
	has := func(of func(rank int32) bool) bool {
		return slices.ContainsFunc(d.ev.Comms[ci].Members, func(m Member) bool { return of(m.World) })
	}
	return slices.ContainsFunc(found, func(f finding) bool {
		return f.Class == CommunicationSlow && slices.ContainsFunc(f.Culprits, func(k Culprit) bool {
			switch k.Kind {
			case CulpritNode:
				return has(func(r int32) bool { return d.world(r) >= 0 && d.nodeName(r) == k.Node })
			case CulpritConnection:
				return has(func(r int32) bool { return r == k.Rank }) && has(func(r int32) bool { return r == k.Peer })
			}
			return has(func(r int32) bool { return r == k.Rank })
		})
	})
}
