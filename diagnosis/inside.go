package diagnosis

import "slices"

// This file is about how long communicators' members are inside operations: a slow connection
// that none of them felt is nobody's trouble.

// insideHistory is what is normal for a communicator, by index into Evidence.Comms.
type insideHistory struct {
	base baseline // time inside an operation, ns
	cost float64  // share of the window that a member was inside for longer than usual
	// look: its members felt something in the window, or a connection's monitor has seen the
	// network be slow. Without either none of its connections is.
	look bool
	// starving, when of this window (its start): whether a member is starved.
	starving bool
	looked   int64
}

// watchInside takes down what the window that ends with this pass cost each communicator.
func (d *slowLinks) watchInside() {
	elapsed := float64(d.now - d.start)
	for ci := range d.comms {
		h := &d.inside[ci]
		h.cost = 0
		if perOp, ops, ok := d.insideOf(int32(ci)); ok && d.settled(&h.base) {
			h.cost = (perOp - h.base.mean) * ops / float64(len(d.ev.Comms[ci].Members)) / elapsed
		}
		h.look = d.feltIn(int32(ci))
	}
}

// feltIn reports whether the members of a communicator were inside for longer than usual: much
// longer, or some, and the job as a whole takes longer. What slows several of them
// down a little each is felt by their sum.
func (d *slowLinks) feltIn(ci int32) bool {
	cost, most := d.inside[ci].cost, d.cfg.SlowShare/2
	return cost >= most || cost >= most/4 && d.drags.windows > horizons[0] && d.drags.slower(horizons[0]) >= most
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
