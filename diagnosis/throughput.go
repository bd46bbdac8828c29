package diagnosis

import (
	"fmt"
	"slices"
)

// throughputs finds connections that have become slow without their delays saying so:
// where a buffer of the kernel takes what is sent, a post completes at once, however slowly
// its bytes leave. What tells is that less gets through at best than ever before, while both
// members of a communicator of two are inside its operations for several times as long as
// usual. Of more members, and where throughput says nothing, see lateComm.
type throughputs struct {
	*window
	drags  *drags
	judged int32 // stretches
	looked int64 // when communicators of more than two last were
	conns  []throughput
	slow   []slowPair
	late   []lateComm
	asked  int // communicators of which it was asked whether others are slow as well, in this stretch
}

// throughput is what is normal for a connection, and what the stretch has shown so far.
type throughput struct {
	comm     uint64
	src, dst int32
	windows  uint64 // of its monitor, seen
	best     float64
	usual    baseline // of the best of a stretch, bytes/s
	// The last look at its ends, and for how long bytes were on their way in those since the
	// stretch began, ns: from the sender's last post to the receiver's next wait, which begins
	// when it has taken what came.
	post, waiting int64
	onTheWay      lookSum
	before        [5]lookSum // of the stretches before, the last one first
	usually       baseline   // of a stretch's mean
	unseen        int        // stretches of no slowness in which something was sent, and no look saw it on its way
}

// known reports whether it is known for how long bytes usually are on their way. Short waits of
// receivers are not told, so where looks have seen none, they are on their way for a moment only:
// such a stretch says more than one of which a look or two are known.
func (x *throughput) known() bool { return int(x.usually.n)+2*x.unseen >= leastTold }

// lately is for how long bytes were on their way in this stretch and the two before, or more of
// them while it has not been looked at often enough: a look is a sample, and a short stretch has
// one at most.
func (x *throughput) lately() lookSum { return x.over(2) }

// over is for how long bytes were on their way in this stretch and at least so many before.
func (x *throughput) over(stretches int) lookSum {
	s := x.onTheWay
	for i, b := range x.before {
		if i >= stretches && s.n >= leastLooks {
			break
		}
		s.sum, s.n = s.sum+b.sum, s.n+b.n
	}
	return s
}

// lookSum is a sum over looks.
type lookSum struct{ sum, n float64 }

func (s lookSum) mean() float64 { return s.sum / max(s.n, 1) }

// slowPair is a communicator of two whose transfers have become slow.
type slowPair struct {
	streak
	comm  int32
	grown float64 // share of the time of the last stretch
	// falls are, by the member that sends, the connections whose best has fallen by most.
	falls [2]fall
	// way is, by the members' order, for how long bytes from the one to the other have been on
	// their way since it is slow, and usually were.
	way   [2]lookSum
	older [2]float64
}

// fall is how much gets through a connection at best, and usually does; bytes/s.
type fall struct {
	conn        int32
	best, usual float64 // 0: none
}

const (
	pairGrown    = 2.0 / 3 // of the time: then operations take three times as long at least
	throughFalls = 1.0 / 3 // what is left of the usual throughput
	pairSlower   = 0.5     // of the time that the job takes for its work
	oneWay       = 4       // times as long as the other way, and as usual
)

func (d *throughputs) forget() {
	d.judged, d.looked, d.conns, d.slow, d.late = 0, 0, d.conns[:0], d.slow[:0], d.late[:0]
}

func (d *throughputs) find(found []finding) []finding {
	if d.drags.windows < d.judged {
		d.forget()
	}
	all := d.now-d.looked >= wayEvery
	if all {
		d.looked = d.now
	}
	looks := func(ci int) bool {
		return (all || len(d.ev.Comms[ci].Members) == 2) && len(d.ofComm(int32(ci))) > 0
	}
	for ci := range d.ev.Comms {
		if looks(ci) {
			d.conns = resized(d.conns, len(d.ev.Conns)) // else nothing is kept
			inParts(len(d.ev.Comms), len(d.ev.Conns), func(lo, hi int) {
				for ci := lo; ci < hi; ci++ {
					if looks(ci) {
						for _, k := range d.ofComm(int32(ci)) {
							d.conns[k].look(&d.ev.Conns[k], d.ev.Comms[ci].ID)
						}
					}
				}
			})
			break
		}
	}
	if d.drags.windows > d.judged && len(d.drags.grown) == len(d.ev.Comms) {
		d.judged, d.asked = d.drags.windows, 0
		if len(d.conns) > 0 {
			d.conns = resized(d.conns, len(d.ev.Conns)) // some may be new since the last look
		}
		for ci := range d.ev.Comms {
			if len(d.ofComm(int32(ci))) == 0 || len(d.conns) == 0 {
				continue
			}
			if len(d.ev.Comms[ci].Members) == 2 {
				d.judge(int32(ci))
			}
			d.judgeLate(int32(ci))
		}
		inParts(len(d.ev.Comms), len(d.conns), func(lo, hi int) { // only now: each is compared with others
			for ci := lo; ci < hi; ci++ {
				if len(d.ofComm(int32(ci))) > 0 && len(d.conns) > 0 {
					d.learn(int32(ci))
				}
			}
		})
	}
	return d.lateFindings(d.findings(found))
}

// ofComm is the connections of a communicator, none where it goes over RDMA: a NIC says when what was
// posted has arrived, so delays say all. One end of the list tells: what is not RDMA then is in memory.
func (d *throughputs) ofComm(ci int32) []int32 {
	of := d.connsOf(ci)
	if n := len(of); n > 0 && (d.ev.Conns[of[0]].Transport.QueuePair() || d.ev.Conns[of[n-1]].Transport.QueuePair()) {
		return nil
	}
	return of
}

// look takes over what is told of a connection.
func (x *throughput) look(c *Conn, comm uint64) {
	if x.comm != comm || x.src != c.Src || x.dst != c.Dst || c.Windows < x.windows {
		*x = throughput{comm: comm, src: c.Src, dst: c.Dst, windows: c.Windows}
	}
	if c.Windows > x.windows {
		x.windows, x.best = c.Windows, max(x.best, c.BytesPerSec)
	}
	if c.LastPost > 0 && c.RxWaitingSince > 0 && (c.LastPost != x.post || c.RxWaitingSince != x.waiting) {
		x.post, x.waiting = c.LastPost, c.RxWaitingSince
		x.onTheWay.sum += float64(max(0, x.waiting-x.post))
		x.onTheWay.n++
	}
}

// judge judges the drags' last stretch of a communicator of two.
func (d *throughputs) judge(ci int32) {
	grown := float64(d.drags.grown[ci])
	at := slices.IndexFunc(d.slow, func(s slowPair) bool { return s.comm == ci })
	s, fallen := slowPair{comm: ci, grown: grown}, false
	if grown >= pairGrown && d.drags.slower(1) >= pairSlower && d.well(ci) {
		fallen = d.fallen(&s)
	}
	var x *slowPair
	d.slow, x = kept(d.slow, at, s, fallen, func(x *slowPair) bool { return d.drags.ops0[ci].active && x.lessen(d.window) })
	if x != nil {
		x.grown, x.falls = s.grown, s.falls
		d.ways(x)
		x.add(d.window, d.now-d.drags.last, 2, true)
	}
}

// kept is a list of what is slow after a stretch: with s where that is slow and not in it (at is
// negative), without what is over. now is the entry that the stretch counts for, nil for none.
func kept[T any](list []T, at int, s T, slow bool, over func(*T) bool) (_ []T, now *T) {
	switch {
	case slow && at < 0 && len(list) < maxSlow:
		list, at = append(list, s), len(list)
	case !slow && at >= 0 && over(&list[at]):
		return slices.Delete(list, at, at+1), nil
	}
	if !slow || at < 0 {
		return list, nil
	}
	return list, &list[at]
}

// learn lets a stretch that is not slow teach what is normal, and begins the next one.
func (d *throughputs) learn(ci int32) {
	usual := d.drags.grown[ci] < leastGrown && !slices.ContainsFunc(d.slow, func(s slowPair) bool { return s.comm == ci }) &&
		!slices.ContainsFunc(d.late, func(s lateComm) bool { return s.comm == ci })
	for _, k := range d.ofComm(ci) {
		x := &d.conns[k]
		if usual && x.best > 0 {
			x.usual.learn(x.best)
		}
		switch {
		case usual && x.onTheWay.n > 0:
			x.usually.learn(x.onTheWay.mean())
		case usual && x.best > 0:
			x.unseen = min(x.unseen+1, leastTold)
		}
		copy(x.before[1:], x.before[:])
		x.before[0] = x.onTheWay
		x.best, x.onTheWay = 0, lookSum{}
	}
}

// well reports whether all members of a communicator live, are in nothing else and are not
// short of CPU: then what they send is not late for that.
func (d *throughputs) well(ci int32) bool {
	if h := &d.comms[ci]; d.lost || h.former || h.p2p {
		return false
	}
	for i := range d.ev.Comms[ci].Members {
		r := d.world(d.ev.Comms[ci].Members[i].World)
		if r < 0 || d.state[r] != rankAlive || d.ranks[r].mark.seen >= d.now-d.drags.last || d.crowded(r) {
			return false
		}
	}
	return true
}

// fallen reports whether less gets through all connections of a communicator that had
// traffic than usual, unless that is so of those of other ranks as well.
func (d *throughputs) fallen(s *slowPair) bool {
	any := false
	for _, k := range d.ofComm(s.comm) {
		x := &d.conns[k]
		if x.best == 0 {
			continue
		}
		if !d.settled(&x.usual) || x.best > throughFalls*x.usual.mean {
			return false
		}
		any = true
		if f := &s.falls[x.src&1]; f.usual == 0 || x.best*f.usual < f.best*x.usual.mean {
			*f = fall{k, x.best, x.usual.mean}
		}
	}
	if !any {
		return false
	}
	var others []float64
	for ci := range d.ev.Comms {
		if len(d.ev.Comms[ci].Members) == 2 && !shareRank(&d.ev.Comms[ci], &d.ev.Comms[s.comm]) {
			for _, k := range d.ofComm(int32(ci)) {
				if x := &d.conns[k]; x.best > 0 && d.settled(&x.usual) {
					others = append(others, x.best/x.usual.mean)
				}
			}
		}
	}
	return len(others) == 0 || median(others) > 2*throughFalls
}

// shareRank reports whether a rank is a member of both.
func shareRank(a, b *Comm) bool {
	return slices.ContainsFunc(a.Members, func(m Member) bool {
		return slices.ContainsFunc(b.Members, func(x Member) bool { return x.World == m.World })
	})
}

// ways adds up for how long bytes were on their way in the stretch.
func (d *throughputs) ways(s *slowPair) {
	s.older = [2]float64{}
	for _, k := range d.ofComm(s.comm) {
		x := &d.conns[k]
		w := &s.way[x.src&1]
		w.sum, w.n = w.sum+x.onTheWay.sum, w.n+x.onTheWay.n
		s.older[x.src&1] = max(s.older[x.src&1], x.usually.mean)
	}
}

// slowWay is the member from whom bytes take longer than to it, -1 when that cannot be told:
// the two wait for each other, so both ways carry less. What an end's clock may be wrong by
// is no such time.
func (d *throughputs) slowWay(s *slowPair) int {
	wrong := d.wrong(s.comm, &throughput{src: 0, dst: 1})
	for i := range s.way {
		if t := s.way[i].mean(); t > wrong && t >= oneWay*s.way[1-i].mean() && t >= oneWay*s.older[i] {
			return i
		}
	}
	return -1
}

// findings reports slow pairs, the worst communicator of each, unless something else
// explains them.
func (d *throughputs) findings(found []finding) []finding {
	for i := range d.slow {
		s := &d.slow[i]
		c := &d.ev.Comms[s.comm]
		if s.level == 0 || d.explained(s.comm, found) {
			continue
		}
		f := finding{}
		f.Class, f.Level, f.Since, f.Victims = CommunicationSlow, s.level, s.since, 2
		way := d.slowWay(s)
		for i, m := range c.Members {
			if peer := c.Members[1-i].World; way < 0 || way == i {
				f.blame(Culprit{Kind: CulpritConnection, Rank: m.World, Peer: peer, Node: d.nodeName(m.World), Reason: reasonNetwork})
			}
		}
		f.setComm(c)
		f.lastOf(c)
		f.why("both members of %s are inside its operations for several times as long as usual, the last one to come as well: the transfer takes longer, for %.0f %% of the time", c.Name, 100*min(s.grown, 1))
		for i, x := range s.falls {
			if x.usual > 0 && (way < 0 || way == i) {
				k := &d.ev.Conns[x.conn]
				f.why("no more than %s comes through from rank %d to rank %d (%s), usually up to %s", perSecond(x.best), d.end(k, k.Src), d.end(k, k.Dst), k.String(), perSecond(x.usual))
			}
		}
		if way >= 0 {
			f.why("what rank %d sends is on its way to rank %d for %s, usually %s; the other way it takes %s: less comes through that one only because the two wait for each other",
				c.Members[way].World, c.Members[1-way].World, millis(s.way[way].mean()), millis(s.older[way]), millis(s.way[1-way].mean()))
		} else {
			f.Undetermined = fmt.Sprintf("which way it is slow between rank %d and rank %d: they wait for each other", c.Members[0].World, c.Members[1].World)
		}
		f.why("so for %s, since %s", plural(s.slow, "window", "windows"), clock(s.since))
		found = append(found, f)
	}
	return found
}

// explained reports whether something hangs, or what is found already is about a member of the communicator.
func (d *throughputs) explained(ci int32, found []finding) bool {
	c := &d.ev.Comms[ci]
	of := func(k *Culprit) bool {
		return slices.ContainsFunc(c.Members, func(m Member) bool {
			return k.Rank == m.World || k.Peer == m.World || k.Rank < 0 && k.Node == d.nodeName(m.World)
		})
	}
	return slices.ContainsFunc(found, func(f finding) bool {
		return f.hang || slices.ContainsFunc(f.Culprits, func(k Culprit) bool { return of(&k) })
	})
}

func perSecond(bytes float64) string {
	if bytes >= 1e9 {
		return fmt.Sprintf("%.1f GB/s", bytes/1e9)
	}
	return fmt.Sprintf("%.3g MB/s", bytes/1e6)
}
