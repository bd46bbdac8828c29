package diagnosis

import (
	"math"
	"slices"
)

// A kernel knows how long a segment and its acknowledgement take between two hosts. That is the
// network's, nearly alone: a receiver that takes late what has come, or waits for somebody else, is hardly
// in it, unlike in the time from post to completion. So where it has grown on some
// connections and not on others, these are the slow ones, whatever monitors say of both.

// trip is what is normal for how long a segment and its acknowledgement take on a connection.
type trip struct {
	now   float64 // ns; 0 where nothing has come of it in the window
	usual baseline
	vary  float64 // the mean square of how far from usual it is, by its length
	over  float64 // how much longer than usual, ns, over two windows or so
	long  float64 // and over some more
	grown bool    // in the window
}

const (
	// tripRatio is how many times as long as usual it takes on a slow connection, beyond what most
	// connections share.
	tripRatio = 2
	// tripAlso is the same of one that takes nearly as much longer than usual as one of those: what adds to all
	// alike is less, by ratio, where more is usual.
	tripAlso = 1.3
	// tripVaries is by how many standard deviations it is longer.
	tripVaries = 2.5
	// tripOthers is how much longer than usual it takes on a slow connection at least, by how much longer on
	// the slowest one of its communicator, and tripFar by that of all: what waits for that is a little later,
	// too, and acknowledgements may be delayed.
	tripOthers, tripFar = 0.5, 0.2
	// tripsIn is how many of them a post takes at most to complete, of those that hold back none.
	tripsIn = 8
	// leastTrip is how much longer, ns, it takes at least.
	leastTrip = 200e3
	// tripsFor is for how many windows no other connection is slow after some have been by that.
	tripsFor = 4
)

// watchTrip takes over how long a segment takes on a connection, which may be another one than before;
// false when that is not known, or not new. Where no transport tells it costs nothing.
func (d *slowLinks) watchTrip(i int, other bool) bool {
	c := &d.ev.Conns[i]
	if d.trips == nil && c.RoundTripNs == 0 {
		return false
	}
	if len(d.trips) < len(d.ev.Conns) {
		d.trips = append(d.trips, make([]trip, len(d.ev.Conns)-len(d.trips))...)
	}
	x := &d.trips[i]
	if other {
		*x = trip{}
	}
	x.now, x.grown = 0, false
	if c.RoundTripNs > 0 && max(c.LastPost, c.LastCompletion) > d.start {
		x.now = c.RoundTripNs
	}
	return x.now > 0
}

// watchTrips finds the connections on which a segment takes longer than usual, and than most
// others' share of that.
func (d *slowLinks) watchTrips() {
	d.noTrips++
	if len(d.trips) == 0 {
		return
	}
	others := d.tripsOfMost()
	if d.noTrips > tripsFor {
		d.mostOver = 0
	}
	d.mostIn = resized(d.mostIn, len(d.ev.Comms))
	most := 0.0
	clear(d.mostIn)
	for i := range d.trips {
		x := &d.trips[i]
		if x.now == 0 || !d.settled(&x.usual) {
			continue
		}
		usual := d.usualTrips * x.usual.mean
		x.over += (x.now - usual - x.over) / 2
		x.long += (x.now - usual - x.long) / 4
		x.grown = x.over >= usual*max(tripRatio-1, tripVaries*math.Sqrt(x.vary)) && x.over >= leastTrip && x.now >= tripAlso*usual && usual+x.over >= tripRatio*others
		if ci := d.ev.Conns[i].Comm; x.grown && d.tripFelt(ci) {
			d.noTrips = 0
			most = max(most, x.long)
			d.mostIn[ci] = max(d.mostIn[ci], x.long)
		}
	}
	if d.noTrips == 0 {
		d.mostOver = most
	}
}

// tripsOfMost finds how many times as long as usual segments take on most connections, and returns how long
// that is; 0 where there are no others.
func (d *slowLinks) tripsOfMost() (long float64) {
	d.usualTrips = 1
	of := func(value func(x *trip) float64) []float64 {
		v := d.scratch[:0]
		for i := range d.trips {
			if x := &d.trips[i]; x.now > 0 && d.settled(&x.usual) {
				v = append(v, value(x))
			}
		}
		d.scratch = v
		return v
	}
	if v := of(func(x *trip) float64 { return x.now / x.usual.mean }); len(v) > 2 { // both ways of one pair tell nothing of others
		d.usualTrips = max(1, quantile(v, mostShare))
		long = quantile(of(func(x *trip) float64 { return x.now }), mostShare)
	}
	return long
}

// tripSuspects adds connections on which segments take longer, and takes out what is slow for
// another reason: a monitor lays to the network what a receiver takes late.
func (d *slowLinks) tripSuspects(suspects []slowConn) []slowConn {
	if d.noTrips > tripsFor {
		return suspects
	}
	suspects = slices.DeleteFunc(suspects, func(s slowConn) bool { return d.tripsElsewhere(s.conn) })
	d.slow = slices.DeleteFunc(d.slow, func(s slowConn) bool { return d.tripsElsewhere(s.conn) })
	for i := range d.trips {
		x, h, c := &d.trips[i], &d.conns[i], &d.ev.Conns[i]
		if !d.tripLonger(int32(i)) || !d.tripFelt(c.Comm) {
			continue
		}
		at := slices.IndexFunc(suspects, func(s slowConn) bool { return s.conn == int32(i) })
		if at < 0 {
			s := slowConn{conn: int32(i), comm: c.Comm, cell: cell{d.end(c, c.Src), d.end(c, c.Dst)}, delay: h.delay, base: h.base.mean, share: h.share, flight: h.flight, cost: d.inside[c.Comm].cost}
			if s.cell.src < 0 || s.cell.dst < 0 || len(suspects) >= 4*maxSlow {
				continue
			}
			at, suspects = len(suspects), append(suspects, s)
		}
		s := &suspects[at]
		s.alone, s.trip, s.usualTrip = false, x.now, x.usual.mean
	}
	return suspects
}

// tripCosts reports whether the job takes longer than any rank's own time explains, while a connection's
// segments do.
func (d *slowLinks) tripCosts(s *slowConn) bool {
	if s.trip == 0 || d.drags.unexplained < d.cfg.SlowShare/4 {
		return false
	}
	// A kernel acknowledges a single segment when its process takes it, or after 40 ms, so who does not run is in it after all.
	return !d.starvedIn(s.comm) && (s.trip >= 2*tripRatio*d.usualTrips*s.usualTrip || !d.crowded(s.cell.src) && !d.crowded(s.cell.dst))
}

// tripFelt reports whether the members of a communicator feel that it takes longer.
func (d *slowLinks) tripFelt(ci int32) bool {
	return d.feltIn(ci) && d.inside[ci].cost >= d.cfg.SlowShare/4
}

// leastOver is how much longer than usual segments have to take on a connection of a communicator.
func (d *slowLinks) leastOver(ci int32) float64 {
	return max(tripOthers*d.mostIn[ci], tripFar*d.mostOver)
}

// tripLonger reports whether segments take longer on a connection, in a communicator that feels that, and nearly
// by as much as on the slowest one of it.
func (d *slowLinks) tripLonger(conn int32) bool {
	if d.noTrips > tripsFor || !d.tripKnown(conn) {
		return false
	}
	x, ci := &d.trips[conn], d.ev.Conns[conn].Comm
	return d.settled(&x.usual) && d.mostIn[ci] > 0 && x.now >= tripAlso*d.usualTrips*x.usual.mean && x.long >= d.leastOver(ci)
}

// tripsBeside reports whether segments take longer on a connection, too, though not enough for it to be told,
// or nobody waits for it.
func (d *slowLinks) tripsBeside(conn int32) bool {
	return d.noTrips <= tripsFor && d.tripKnown(conn) && d.trips[conn].grown && d.trips[conn].long >= tripOthers*d.mostOver
}

// tripsElsewhere reports whether it is known that segments take no longer on a connection, while they
// do between other ranks.
func (d *slowLinks) tripsElsewhere(conn int32) bool {
	if d.noTrips > tripsFor || int(conn) >= len(d.trips) {
		return false
	}
	c, x := &d.ev.Conns[conn], &d.trips[conn]
	if x.now == 0 || !d.settled(&x.usual) || x.long >= d.leastOver(c.Comm) {
		return false
	}
	a, b := d.end(c, c.Src), d.end(c, c.Dst)
	return !slices.ContainsFunc(d.slow, func(s slowConn) bool {
		return s.trip > 0 && (s.cell == cell{a, b} || s.cell == cell{b, a})
	})
}

// tripSame reports whether it is known that segments take hardly longer on a connection than usual, and much less so
// than its posts to complete, and hardly any is sent again: what is late then may be for its ends, until looks see bytes on their way. (A sender's own queue
// is in no segment's time.)
func (d *slowLinks) tripSame(conn int32) bool {
	if !d.tripKnown(conn) {
		return false
	}
	x, h := &d.trips[conn], &d.conns[conn]
	return d.settled(&x.usual) && x.over < (tripRatio-1)*x.usual.mean && tripsIn*x.over < h.delay-h.base.mean && h.again < h.usualAgain+moreAgain/2
}

// tripKnown reports whether the window has told how long a segment takes on a connection.
func (d *slowLinks) tripKnown(conn int32) bool {
	return int(conn) < len(d.trips) && d.trips[conn].now > 0
}

// learnTrips lets the connections that nothing is wrong with teach what is normal.
func (d *slowLinks) learnTrips() {
	for i := range d.trips {
		if x := &d.trips[i]; x.now > 0 && !d.feltIn(d.ev.Conns[i].Comm) {
			x.learn()
		}
	}
}

// learn takes what is now for usual.
func (x *trip) learn() {
	x.usual.learn(x.now)
	far := min(x.now/x.usual.mean-1, 2)
	x.vary += (far*far - x.vary) / float64(x.usual.n)
}

// whyTrip says what segments take on a connection that is slow by that.
func (d *slowLinks) whyTrip(f *finding, s *slowConn) {
	f.why("between the hosts of rank %d and rank %d (%s, %s) a segment and its acknowledgement take %s, %.1f times the usual %s, as their kernel measures it; on most connections %.1f times",
		s.cell.src, s.cell.dst, &d.ev.Conns[s.conn], d.ev.Comms[s.comm].Name, millis(s.trip), s.trip/s.usualTrip, millis(s.usualTrip), d.usualTrips)
}
