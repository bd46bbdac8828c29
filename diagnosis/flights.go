package diagnosis

// This file samples where receivers wait for bytes that are on their way.

// watchFlights samples what the network is to blame for: bytes on their way to
// a receiver that waits for them. A completion that is late because the
// receiver does other things leaves no trace here.
func (d *slowLinks) watchFlights() {
	conns := d.ev.Conns
	d.conns = resized(d.conns, len(conns))
	d.inside = resized(d.inside, len(d.comms))
	if d.sampled != d.start {
		d.sampled = d.start
		if d.seeWaiting { // else there are none
			for i := range d.conns {
				d.conns[i].flights = 0
			}
		}
	}
	for ci := range d.comms {
		for _, k := range d.comms[ci].waiting {
			d.seeWaiting = true
			if d.inFlight(&conns[k]) {
				d.conns[k].flights++
			}
		}
	}
}

// inFlight reports whether a waiting receiver's last report is from after the
// bytes that it waits for were posted. Both ends report at moments of their
// own, so it takes more than bytes at one and a wait at the other: the bytes
// were posted during the wait, or the wait began with the receiver's operation
// and the bytes after its last one, or the sender has seen them outstanding
// since the wait began.
func (d *slowLinks) inFlight(c *Conn) bool {
	if c.Comm < 0 || int(c.Comm) >= len(d.ev.Comms) {
		return false
	}
	src, dst := d.end(c, c.Src), d.end(c, c.Dst)
	if src < 0 || dst < 0 || c.LastPost >= d.heard(dst) {
		return false
	}
	m := &d.ev.Comms[c.Comm].Members[c.Dst]
	return c.LastPost >= c.RxWaitingSince ||
		(c.LastPost > m.FinishedAt && m.Open() && c.RxWaitingSince-m.StartedAt < waitBegins) ||
		(c.Outstanding > 0 && d.heard(src) >= c.RxWaitingSince)
}

// waitBegins is how long after it has entered an operation a receiver may tell
// that it waits for its first bytes: short waits are not told.
const waitBegins = 2_000_000

// watchLooks takes over in which share of a window's passes bytes were on a connection
// while its receiver waited.
func (d *slowLinks) watchLooks(h *connHistory, ci int32, flight float32) {
	const keep, keepLong, learn = 0.9, 0.96, 1.0 / 16
	if !d.seeWaiting {
		return
	}
	h.looks, h.seen = h.looks*keep, h.seen*keepLong
	if d.feltIn(ci) {
		h.looks += flight - h.usualLooks
		h.seen += (flight - h.usualLooks) * float32(d.passes)
	} else {
		h.usualLooks += (flight - h.usualLooks) * learn
	}
}

// elsewhere reports whether the members of a slow connection's communicator wait for bytes
// that are on others, and hardly for those on it: what its receiver takes late because it
// waits for another one is not its own.
func (d *slowLinks) elsewhere(conn, comm int32) bool {
	const several = 1 // windows full of looks
	most := float32(0)
	for _, k := range d.connsOf(comm) {
		most = max(most, d.conns[k].looks)
	}
	return most >= several && d.conns[conn].looks < most/4
}
