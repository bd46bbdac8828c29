package diagnosis

import (
	"slices"

	"github.com/lockstep-ccl/lockstep/record"
)

// connHistory is what is normal for a connection, and what the window that
// ends with this pass added.
type connHistory struct {
	comm          uint64
	src, dst      int32
	known         bool
	fresh         bool    // windows closed in the window
	windows, slow uint64  // totals seen
	delay         float64 // now
	share         float32 // of the new windows, those outside the normal
	// Of the last windows the share that its monitor lays to the network, and of those before.
	lately, usually float32
	outside         float32 // of the last windows the share outside the normal, whoever is blamed
	blamed          float32 // of the last windows those of which a part was laid to the network
	held            float32 // share of the window that it spent in delays beyond the usual
	base            baseline

	resent            uint64  // bytes sent again, total seen
	again, usualAgain float32 // share of its windows in which some were: of the last ones, and as a rule

	flights     int32 // passes of the window that saw bytes on it while its receiver waited
	flight      float32
	usualFlight float32 // as shares
	// looks are its flights beyond the usual ones in windows that its communicator felt, the
	// older ones counting less; known without a word of its monitor, too.
	looks, usualLooks float32
	seen              float32 // looks in number, where looks is in windows full of them
}

// slowConn is a connection whose delay has grown, with the window that says so.
type slowConn struct {
	streak
	conn   int32
	comm   int32
	cell   cell
	delay  float64
	base   float64 // its history's, or its peers' while there is none
	alone  bool    // judged without a history
	share  float32
	flight float32 // of the last windows
	peers  int     // connections of its kind that it was compared with
	cost   float64 // of its communicator
	sure   int     // slow windows in which its delays were the network's doing
	// moved is the share of the last windows that its destination was inside operations after all
	// had come, beyond what is usual; it is since what its member's sums were at took.
	moved float64
	took  insideSums
	tookA int64
	// rtt is the round-trip time, ns, where that has grown; else 0.
	rtt, usualRTT float64
}

// plain is plainly of a slow connection.
func (s *slowConn) plain() bool { return plainly(s.share, s.delay, s.base) }

// worse reports whether a connection has become slower than another one.
func (s *slowConn) worse(than *slowConn) bool {
	times := func(x *slowConn) float64 {
		if x.rtt > 0 {
			return x.rtt / x.usualRTT
		}
		return x.delay / x.base
	}
	return times(s) > times(than)
}

// overwhelms reports whether a connection has made its job stand still for most of a window: one of
// these counts for two.
func (s *slowConn) overwhelms(h *connHistory) bool {
	return !s.alone && s.plain() && s.delay >= 8*s.base && s.cost >= 0.5 && h.held >= 0.5
}

// leastSure is how many windows have to show that a slow connection's delays are the network's doing.
const leastSure = 2

// slowLinks finds connections that take longer to deliver than they did, or
// than those of their kind.
type slowLinks struct {
	*window
	stragglers *stragglers
	drags      *drags
	arrivals   *arrivals
	transfers  *transfers

	conns  []connHistory // by index into Evidence.Conns
	inside []insideHistory
	slow   []slowConn
	// between are, by transport, the two nodes that all of its connections are between and
	// slow, when that is so: which of the two, or what is between them, cannot be told.
	between map[record.Transport][2]int32
	twos    map[record.Transport][2]int32 // what twoNodes has found in this window
	// seeWaiting: the transports tell when a receiver waits.
	seeWaiting bool
	sampled    int64 // start of the window that flights are of
	ratios     byTransport[[]float64]
	scratch    []float64
	rtts       rtts
	// usualHunger is the median of the ranks' hunger.
	usualHunger hunger
}

func (d *slowLinks) forget() {
	d.conns, d.inside, d.slow = d.conns[:0], d.inside[:0], d.slow[:0]
	d.rtts = rtts{ago: rttsKept + 1}
	clear(d.between)
}

func (d *slowLinks) find(found []finding) []finding {
	d.watchFlights()
	if d.closed {
		d.judge()
	}
	return d.findings(found)
}

// judge judges the window that ends with this pass. A connection is
// slow when its delay is far above its own history (before there is one: above
// that of the connections of the same kind), not only where all are; when bytes
// were on it while its receiver waited, more often than usual; and when these
// delays cost a good share of the window, which its communicator felt.
func (d *slowLinks) judge() {
	d.watchInside()
	if !d.observe() {
		d.learnInside()
		return
	}
	d.judgeRTTs()
	suspects, slow := d.suspects()
	var active byTransport[int]
	if len(suspects) > 0 {
		active = d.active()
	}
	clear(d.between)
	suspects = slices.DeleteFunc(suspects, func(s slowConn) bool {
		t := d.ev.Conns[s.conn].Transport
		if 5*slow[t] < 4*active[t] || active[t] < 2 {
			return false
		}
		if two, ok := d.twoNodes(t); ok {
			if d.between == nil {
				d.between = map[record.Transport][2]int32{}
			}
			d.between[t] = two
			return false
		}
		return active[t] >= 4 // everyone is slower
	})
	suspects = d.rttSuspects(suspects)
	for i := range suspects {
		s := &suspects[i]
		at := slices.IndexFunc(d.slow, func(x slowConn) bool { return x.conn == s.conn })
		if at < 0 {
			if len(d.slow) == maxSlow {
				continue
			}
			d.slow = append(d.slow, slowConn{})
			at = len(d.slow) - 1
		}
		x := &d.slow[at]
		s.streak = x.streak
		if s.slow > 0 { // one window holds few looks
			s.flight = x.flight + (s.flight-x.flight)/3
		}
		d.watchMoved(s, x)
		if s.sure = x.sure; d.onTheWay(s) && !d.lateSoon(s.cell.src) && !d.lateSoon(s.cell.dst) {
			s.sure++
		}
		if s.sure > x.sure && s.overwhelms(&d.conns[s.conn]) && x.slow > 0 {
			s.slow++
		}
		// One window that bears it out may be a hiccup of its own.
		of := 4
		if s.rtt > 0 {
			of = 2 // no look has to see it
		}
		s.again(d.window, s.alone, s.sure > x.sure && s.sure >= leastSure && of*s.sure > s.slow)
		*x = *s
	}
	for i := 0; i < len(d.slow); i++ {
		s := &d.slow[i]
		if !d.conns[s.conn].fresh && !d.knowsRTT(s.conn) || s.rtt > 0 && d.rtts.conns[s.conn].grown || slices.ContainsFunc(suspects, func(x slowConn) bool { return x.conn == s.conn }) || d.feltIn(s.comm) && d.loses(s.conn, s.comm, s.cell) || slowStill(&d.ev.Conns[s.conn]) {
			continue // what is lost now and then delays some windows and not others
		}
		if s.normal(d.window) {
			d.slow = slices.Delete(d.slow, i, i+1)
			i--
		}
	}
	d.learnDelays()
	d.learnRTTs()
	d.learnInside()
}

// suspects returns the connections that were slow in the window, and how many of each
// transport.
func (d *slowLinks) suspects() (suspects []slowConn, slow byTransport[int]) {
	if !slices.ContainsFunc(d.inside, func(h insideHistory) bool { return h.look }) {
		return nil, slow
	}
	d.usualHunger = d.medianHunger()
	clear(d.twos)
	norm := d.normalRatios()
	for ci := range d.ev.Comms {
		if !d.inside[ci].look {
			continue
		}
		of := d.connsOf(int32(ci))
		for t := nextTransport(d.ev.Conns, of, -1); t >= 0; t = nextTransport(d.ev.Conns, of, t) {
			if record.Transport(t).InMemory() {
				continue // no network is in between: what takes long there waits for one of its ends
			}
			before := len(suspects)
			suspects = d.slowIn(suspects, int32(ci), of, record.Transport(t), norm[t])
			slow[t] += len(suspects) - before
		}
	}
	return suspects, slow
}

// active returns how many connections of each transport had news.
func (d *slowLinks) active() (n byTransport[int]) {
	for i := range d.conns {
		if d.conns[i].fresh {
			n[d.ev.Conns[i].Transport]++
		}
	}
	return n
}

// often reports whether a connection's monitor finds that the network was slow most of the time.
func (h *connHistory) often(c *Conn) bool { return c.Cause == record.CauseNetwork && h.share >= 0.5 }

// plainly reports whether so many of a monitor's windows were outside the normal that its word
// counts: half of them, or, of a connection that takes many times as long, a third. What waits for work in
// between, as pipelines do, has windows that tell nothing.
func plainly(share float32, delay, base float64) bool {
	return share >= 0.5 || share >= 0.3 && delay >= 8*base
}

// twoNodes returns the two nodes that all connections of a transport are between; false when
// they are between others as well, or none.
func (d *slowLinks) twoNodes(t record.Transport) (two [2]int32, ok bool) {
	if known, ok := d.twos[t]; ok {
		return known, known[0] >= 0
	}
	two = [2]int32{-1, -1}
	defer func() {
		if d.twos == nil {
			d.twos = map[record.Transport][2]int32{}
		}
		if !ok {
			two = [2]int32{-1, -1}
		}
		d.twos[t] = two
	}()
	for i := range d.ev.Conns {
		c := &d.ev.Conns[i]
		if c.Transport != t || c.Comm < 0 || int(c.Comm) >= len(d.ev.Comms) {
			continue
		}
		a, b := nodeOf(d.ev, d.end(c, c.Src)), nodeOf(d.ev, d.end(c, c.Dst))
		x := [2]int32{min(a, b), max(a, b)}
		if x[0] < 0 || x[0] == x[1] || two[0] >= 0 && x != two {
			return two, false
		}
		two = x
	}
	return two, two[0] >= 0
}

// watchShare takes down what a monitor lays to the network.
func (h *connHistory) watchShare(cause record.Cause) {
	h.outside += (min(h.share, 1) - h.outside) / 3
	now := float32(0)
	if cause == record.CauseNetwork {
		now = min(h.share, 1)
	}
	is := float32(0)
	if now >= leastOutside {
		is = 1
	}
	h.blamed += (is - h.blamed) / 3
	h.lately += (now - h.lately) / 3
	switch more := h.lately - h.usually; { // what is not usual does not become so
	case more < leastOutside/2:
		h.usually += (now - h.usually) / 16
	case more < movedShare/2:
		h.usually += (now - h.usually) / 64
	}
}

// mostShare is which of the connections, by how slow they are, tells what most share.
const mostShare = 0.3

// normalRatios returns, by transport, how much slower than their history most
// connections are: a slowdown that most share is nobody's. Of three nodes the links
// of one are two thirds of all, so it is not the middle one that tells.
func (d *slowLinks) normalRatios() (norm byTransport[float64]) {
	ratios := &d.ratios
	for t := range ratios {
		ratios[t] = ratios[t][:0]
	}
	for i := range d.conns {
		h, c := &d.conns[i], &d.ev.Conns[i]
		if h.fresh && d.settled(&h.base) && (c.Cause == record.CauseNone || c.Cause == record.CauseNetwork) {
			t := c.Transport
			ratios[t] = append(ratios[t], h.delay/h.base.mean)
		}
	}
	for t := range ratios {
		norm[t] = max(1, quantile(ratios[t], mostShare))
		if len(ratios[t]) == 1 {
			norm[t] = 1
		}
	}
	return norm
}

// nextTransport returns the lowest transport above t among some connections, -1
// when there is none.
func nextTransport(conns []Conn, of []int32, t int) int {
	next := -1
	for _, k := range of {
		if x := int(conns[k].Transport); x > t && (next < 0 || x < next) {
			next = x
		}
	}
	return next
}

// slowIn appends the slow connections of one communicator and transport.
func (d *slowLinks) slowIn(suspects []slowConn, ci int32, of []int32, t record.Transport, norm float64) []slowConn {
	cfg := &d.cfg
	n, learning := 0, false
	for _, k := range of {
		if h := &d.conns[k]; h.fresh && d.ev.Conns[k].Transport == t {
			n++
			learning = learning || !d.settled(&h.base)
		}
	}
	middle, spread := 0.0, 0.0
	if learning && n >= 4 {
		v := d.scratch[:0]
		for _, k := range of {
			if d.conns[k].fresh && d.ev.Conns[k].Transport == t {
				v = append(v, d.conns[k].delay)
			}
		}
		middle = median(v)
		spread = deviation(v, middle)
		d.scratch = v
	}
	cost, felt := d.inside[ci].cost, d.feltIn(ci)
	for _, k := range of {
		c, h := &d.ev.Conns[k], &d.conns[k]
		if !h.fresh || c.Transport != t {
			continue
		}
		if c.Cause != record.CauseNone && c.Cause != record.CauseNetwork {
			continue // its monitor blames one of its ends
		}
		often := h.often(c)
		s := slowConn{conn: k, comm: ci, cell: cell{d.end(c, c.Src), d.end(c, c.Dst)}, delay: h.delay, share: h.share, flight: h.flight, peers: n - 1, cost: cost}
		slow := false
		switch {
		case d.settled(&h.base):
			s.base = h.base.mean
			than := norm
			if _, two := d.twoNodes(t); plainly(h.share, h.delay, h.base.mean) && (two || d.borneOut(&s.cell, ci, c)) {
				than = 1 // whatever others do: all had come, and it took longer; or the others are of the same two nodes
			}
			slow = felt && float64(h.held) >= cfg.SlowShare/2 && h.delay >= cfg.DelayRatio*h.base.mean*than
		case n >= 4:
			s.alone, s.base = true, middle
			slow = (felt || often) && h.delay >= cfg.DelayPeerRatio*middle && h.delay-middle >= 6*spread
		default:
			s.alone, s.peers = true, 0
			slow = often
		}
		if !slow {
			continue
		}
		if s.cell.src >= 0 && s.cell.dst >= 0 {
			suspects = append(suspects, s)
		}
	}
	return suspects
}

// onTheWay reports whether a slow connection's delays are the network's doing:
// often when somebody looked, bytes were on it and its receiver waited for them.
// Without that they wait for an end that does other things; its monitor, which
// sees only the sender's side, may blame the network all the same. It has the
// only word where the transport does not tell who waits, or where waiting for
// bytes on the way is what the job does most of the time.
func (d *slowLinks) onTheWay(s *slowConn) bool {
	if d.rttCosts(s) {
		return true
	}
	same := d.sameRTT(s.conn)
	if !same && d.transferGrown(s) {
		return true
	}
	if d.loses(s.conn, s.comm, s.cell) && !d.elsewhere(s.conn, s.comm) {
		return true
	}
	if !same && (d.carried(s) || d.onlyBetween(s) || d.bothWays(s)) {
		return true
	}
	if d.starved(s.cell.src) || d.starved(s.cell.dst) {
		return false
	}
	h := &d.conns[s.conn]
	if !d.seeWaiting || h.usualFlight >= 0.5 || slowStill(&d.ev.Conns[s.conn]) {
		return d.ev.Conns[s.conn].Cause == record.CauseNetwork && max(h.outside, s.share) >= leastOutside
	}
	return h.outside >= leastOutside && s.flight >= max(0.2, h.usualFlight+0.15)
}

// slowStill reports whether the network of a queue pair is slow by the word of its monitor, which goes by many
// windows. A NIC acknowledges what it takes, whatever the program does that waits for it, so that word is enough. (What
// NCCL's plugin tells of all that goes to a peer has no queue pair's number, and waits for the peer's receive.)
func slowStill(c *Conn) bool {
	return c.Transport.QueuePair() && c.QueuePair != 0 && c.Cause == record.CauseNetwork
}

// leastOutside is which share of its windows the monitor of a slow connection finds slow at least,
// whatever looks see: a delay is of a moment, and bytes are on their way to whoever waits for a rank that is late.
const leastOutside = 0.15

// learnDelays lets the connections that nothing is wrong with teach what is
// normal: neither the network's windows nor those that wait for an end do, nor
// any while the communicator takes longer than usual.
func (d *slowLinks) learnDelays() {
	inParts(len(d.conns), len(d.conns), func(lo, hi int) {
		for i := lo; i < hi; i++ {
			h, c := &d.conns[i], &d.ev.Conns[i]
			if !h.fresh || c.Cause != record.CauseNone || d.feltIn(c.Comm) {
				continue
			}
			if len(d.slow) > 0 && slices.ContainsFunc(d.slow, func(s slowConn) bool { return s.conn == int32(i) }) {
				continue
			}
			h.base.learn(h.delay)
			h.learnAgain()
			h.usualFlight += (h.flight - h.usualFlight) / float32(h.base.n) // a mean as long as base
		}
	})
}
