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
	held          float32 // share of the window that it spent in delays beyond the usual
	base          baseline

	flights     int32 // passes of the window that saw bytes on it while its receiver waited
	flight      float32
	usualFlight float32 // as shares
	// looks are its flights beyond the usual ones in windows that its communicator felt, the
	// older ones counting less; known without a word of its monitor, too.
	looks, usualLooks float32
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
}

// slowLinks finds connections that take longer to deliver than they did, or
// than those of their kind.
type slowLinks struct {
	*window
	stragglers *stragglers
	drags      *drags

	conns  []connHistory // by index into Evidence.Conns
	inside []insideHistory
	slow   []slowConn
	// between are, by transport, the two nodes that all of its connections are between and
	// slow, when that is so: which of the two, or what is between them, cannot be told.
	between map[record.Transport][2]int32
	// seeWaiting: the transports tell when a receiver waits.
	seeWaiting bool
	sampled    int64          // start of the window that flights are of
	ratios     [256][]float64 // by transport
	scratch    []float64
	// usualHunger is the median of the ranks' hunger.
	usualHunger hunger
}

// insideHistory is what is normal for a communicator, by index into Evidence.Comms.
type insideHistory struct {
	base baseline // time inside an operation, ns
	cost float64  // share of the window that a member was inside for longer than usual
	// look: its members felt something in the window, or a connection's monitor has seen the
	// network be slow. Without either none of its connections is.
	look bool
}

func (d *slowLinks) forget() {
	d.conns, d.inside, d.slow = d.conns[:0], d.inside[:0], d.slow[:0]
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
	elapsed := float64(d.now - d.start)
	for ci := range d.comms {
		h := &d.inside[ci]
		h.cost = 0
		if perOp, ops, ok := d.insideOf(int32(ci)); ok && d.settled(&h.base) {
			h.cost = (perOp - h.base.mean) * ops / float64(len(d.ev.Comms[ci].Members)) / elapsed
		}
		h.look = d.feltIn(int32(ci))
	}
	if !d.observe() {
		d.learnInside()
		return
	}
	suspects, slow := d.suspects()
	var active [256]int // by transport
	if len(suspects) > 0 {
		active = d.active()
	}
	clear(d.between)
	suspects = slices.DeleteFunc(suspects, func(s slowConn) bool {
		t := d.ev.Conns[s.conn].Transport
		if 5*slow[t] < 4*active[t] || active[t] < 2 {
			return false
		}
		return !d.betweenTwo(t) && active[t] >= 4 // everyone is slower
	})
	if len(suspects) > 0 {
		d.usualHunger = d.medianHunger()
	}
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
		s.again(d.window, s.alone, d.onTheWay(s))
		*x = *s
	}
	for i := 0; i < len(d.slow); i++ {
		s := &d.slow[i]
		if d.conns[s.conn].fresh && !slices.ContainsFunc(suspects, func(x slowConn) bool { return x.conn == s.conn }) && s.normal(d.window) {
			d.slow = slices.Delete(d.slow, i, i+1)
			i--
		}
	}
	d.learnDelays()
	d.learnInside()
}

// suspects returns the connections that were slow in the window, and how many of each
// transport.
func (d *slowLinks) suspects() (suspects []slowConn, slow [256]int) {
	if !slices.ContainsFunc(d.inside, func(h insideHistory) bool { return h.look }) {
		return nil, slow
	}
	norm := d.normalRatios()
	for ci := range d.ev.Comms {
		if !d.inside[ci].look {
			continue
		}
		of := d.connsOf(int32(ci))
		for t := nextTransport(d.ev.Conns, of, -1); t >= 0; t = nextTransport(d.ev.Conns, of, t) {
			before := len(suspects)
			suspects = d.slowIn(suspects, int32(ci), of, record.Transport(t), norm[t])
			slow[t] += len(suspects) - before
		}
	}
	return suspects, slow
}

// active returns how many connections of each transport had news.
func (d *slowLinks) active() (n [256]int) {
	for i := range d.conns {
		if d.conns[i].fresh {
			n[d.ev.Conns[i].Transport]++
		}
	}
	return n
}

// feltIn reports whether the members of a communicator were inside for longer than usual.
func (d *slowLinks) feltIn(ci int32) bool { return d.inside[ci].cost >= d.cfg.SlowShare/2 }

// often reports whether a connection's monitor finds that the network was slow most of the time.
func (h *connHistory) often(c *Conn) bool { return c.Cause == record.CauseNetwork && h.share >= 0.5 }

// betweenTwo reports whether all connections of a transport are between two nodes.
func (d *slowLinks) betweenTwo(t record.Transport) bool {
	if _, ok := d.between[t]; ok {
		return true
	}
	two := [2]int32{-1, -1}
	for i := range d.ev.Conns {
		c := &d.ev.Conns[i]
		if c.Transport != t || c.Comm < 0 || int(c.Comm) >= len(d.ev.Comms) {
			continue
		}
		a, b := nodeOf(d.ev, d.end(c, c.Src)), nodeOf(d.ev, d.end(c, c.Dst))
		x := [2]int32{min(a, b), max(a, b)}
		if x[0] < 0 || x[0] == x[1] || two[0] >= 0 && x != two {
			return false
		}
		two = x
	}
	if two[0] < 0 {
		return false
	}
	if d.between == nil {
		d.between = map[record.Transport][2]int32{}
	}
	d.between[t] = two
	return true
}

// observe takes over what the connections' monitors have added since the last
// window; false when there is nothing new.
func (d *slowLinks) observe() bool {
	elapsed := float64(d.now - d.start)
	any := false
	for i := range d.ev.Conns {
		c, h := &d.ev.Conns[i], &d.conns[i]
		h.fresh = false
		if c.Comm < 0 || int(c.Comm) >= len(d.comms) {
			continue
		}
		flights := h.flights
		h.flights = 0
		id := d.comms[c.Comm].id
		if !h.known || h.comm != id || h.src != c.Src || h.dst != c.Dst || c.Windows < h.windows || c.SlowWindows < h.slow {
			*h = connHistory{known: true, comm: id, src: c.Src, dst: c.Dst, windows: c.Windows, slow: c.SlowWindows}
			continue
		}
		d.watchLooks(h, c.Comm, float32(flights)/float32(d.passes))
		n := c.Windows - h.windows
		h.delay = delay(c)
		if n == 0 || h.delay == 0 {
			continue
		}
		h.fresh, any = true, true
		h.share = float32(c.SlowWindows-h.slow) / float32(n)
		h.windows, h.slow = c.Windows, c.SlowWindows
		if h.often(c) {
			d.inside[c.Comm].look = true
		}
		h.flight = float32(flights) / float32(d.passes)
		h.held = 0
		if d.settled(&h.base) {
			h.held = float32((h.delay - h.base.mean) * float64(n) / elapsed)
		}
	}
	return any
}

// normalRatios returns, by transport, how much slower than their history the
// middle connection is: a slowdown that most share is nobody's.
func (d *slowLinks) normalRatios() (norm [256]float64) {
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
		norm[t] = max(1, median(ratios[t]))
		if len(ratios[t]) == 1 {
			norm[t] = 1
		}
	}
	return norm
}

// nextTransport returns the lowest transport above t among some connections, -1
// when there is none.
func nextTransport(conns []Conn, of []int32, t int) int {
	next := 256
	for _, k := range of {
		if x := int(conns[k].Transport); x > t && x < next {
			next = x
		}
	}
	if next == 256 {
		return -1
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
			if h.share >= 0.5 && d.borneOut(&s.cell, ci, c) {
				than = 1 // whatever others do: all had come, and it took longer
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
	if d.transferGrown(s) {
		return true
	}
	if d.starved(s.cell.src) || d.starved(s.cell.dst) {
		return false
	}
	usual := d.conns[s.conn].usualFlight
	if !d.seeWaiting || usual >= 0.5 {
		return d.ev.Conns[s.conn].Cause == record.CauseNetwork && s.share > 0
	}
	return s.flight >= max(0.2, usual+0.15)
}

// elevated reports whether a connection is slower than usual by the word of its monitor,
// and by what it has told in the last window: not enough to be told, but to show
// what those that are have in common.
func (d *slowLinks) elevated(conn int32) bool {
	h, c := &d.conns[conn], &d.ev.Conns[conn]
	return h.known && d.settled(&h.base) && c.Cause == record.CauseNetwork && h.delay >= 0.75*d.cfg.DelayRatio*h.base.mean
}

// transferGrown reports whether what a slow connection's monitor says is borne out
// by the operations: all members had come, the last one too was inside for longer than
// usual, and neither end is short of CPU.
func (d *slowLinks) transferGrown(s *slowConn) bool {
	return !s.alone && s.share >= 0.5 && !d.elsewhere(s) && d.borneOut(&s.cell, s.comm, &d.ev.Conns[s.conn])
}

// borneOut is transferGrown of a connection between two ranks, but for how often its
// monitor says so.
func (d *slowLinks) borneOut(at *cell, ci int32, c *Conn) bool {
	if c.Cause != record.CauseNetwork || int(ci) >= len(d.drags.grown) || float64(d.drags.grown[ci]) < d.cfg.SlowShare/4 {
		return false
	}
	return at.src >= 0 && at.dst >= 0 && !d.crowded(at.src) && !d.crowded(at.dst)
}

// crowded reports whether a rank waits for a CPU, or its whole node does: then what it
// sends or takes is late, whatever the network does.
func (v *view) crowded(rank int32) bool {
	r := &v.ev.Ranks[rank]
	if max(r.Starved, r.Throttled) > 0.1 {
		return true
	}
	n := nodeOf(v.ev, rank)
	return n >= 0 && v.ev.Nodes[n].CPUPressure > 0.4
}

// learnDelays lets the connections that nothing is wrong with teach what is
// normal: neither the network's windows nor those that wait for an end do, nor
// any while the communicator takes longer than usual.
func (d *slowLinks) learnDelays() {
	for i := range d.conns {
		h, c := &d.conns[i], &d.ev.Conns[i]
		if !h.fresh || c.Cause != record.CauseNone || d.feltIn(c.Comm) {
			continue
		}
		if len(d.slow) > 0 && slices.ContainsFunc(d.slow, func(s slowConn) bool { return s.conn == int32(i) }) {
			continue
		}
		h.base.learn(h.delay)
		h.usualFlight += (h.flight - h.usualFlight) / float32(h.base.n) // a mean as long as base
	}
}

// learnInside lets communicators without a slow connection teach how long
// their operations take.
func (d *slowLinks) learnInside() {
	for ci := range d.comms {
		h := &d.inside[ci]
		if perOp, _, ok := d.insideOf(int32(ci)); ok && !slices.ContainsFunc(d.slow, func(s slowConn) bool { return s.comm == int32(ci) }) {
			h.base.learn(perOp)
		}
	}
}
