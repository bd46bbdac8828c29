package jobsim

import (
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// held is what a connection holds when its receiver does not take it: its credit.
const held = 64 << 10

// reportEdge merges what the source's agent, the destination's, or both tell of a
// connection now.
func (j *Job) reportEdge(n *node, c *comm, k int32, src, dst bool) {
	e := &c.edges[k]
	outstanding, lastPost, blocked, waiting := j.flow(c, e)
	if over(&c.members[e.src]) { // who gives up closes, and tells nothing more
		outstanding, blocked = 0, 0
	}
	if over(&c.members[e.dst]) {
		waiting = 0
	}
	if e.at < 0 {
		if lastPost == 0 && waiting == 0 {
			return // idle: nothing is told
		}
		e.at = int32(len(j.ev.Conns))
		j.ev.Conns = append(j.ev.Conns, diagnosis.Conn{Comm: c.at, Src: e.src, Dst: e.dst, Transport: e.transport, Name: j.edgeName(c, e)})
		if e.transport.QueuePair() {
			j.ev.Conns[len(j.ev.Conns)-1].QueuePair = uint32(len(j.ev.Conns))
		}
		j.connOf = append(j.connOf, connRef{c, k})
	}
	x := &j.ev.Conns[e.at]
	j.ev.Comms[c.at].ConnRev = j.revision()
	if src {
		x.Outstanding, x.LastPost, x.TxBlockedSince = outstanding, n.real(lastPost, j.now), n.real(blocked, j.now)
		x.Link, x.LinkAt = record.LinkUp, 0
		if e.down {
			x.Link, x.LinkAt = record.LinkDown, n.real(e.downAt, j.now)
		} else if e.switched {
			x.Link, x.LinkAt = record.LinkSwitched, n.real(e.downAt, j.now)
		}
		if e.transport == record.TransportSHM {
			x.Link, x.LinkAt = record.LinkNone, 0
		}
		x.Switches, x.Outages, x.Resent = e.switches, e.outages, e.resent
		j.monitor(n, c, e, x)
	}
	if dst {
		x.RxWaitingSince = n.real(waiting, j.now)
	}
}

func over(m *member) bool {
	return m.State == record.CommAborted || m.State == record.CommLeft
}

// inert reports whether a member's process had stopped in the midst of what it was in;
// one that gives up has not.
func (j *Job) inert(m *member) bool {
	r := &j.ranks[m.World]
	return r.frozen && !r.failing
}

// monitor fills in what the source's window monitor says of the last operations.
func (j *Job) monitor(n *node, c *comm, e *edge, x *diagnosis.Conn) {
	m := &c.members[e.src]
	ops := m.Finished
	if ops == 0 {
		return
	}
	w := j.windows(c)
	windows := ops * w
	x.LastCompletion = n.real(m.FinishedAt, j.now)
	if e.transport == record.TransportTCP && j.cfg.Cluster.RTT >= 0 {
		x.RTTNs = j.rtt(c, e, ops)
	}
	if j.cfg.Cluster.Small && !e.transport.QueuePair() {
		return
	}
	x.LastWindowAt = x.LastCompletion
	if windows == x.Windows {
		return
	}
	draw := hash(c.id^uint64(e.src)<<20^uint64(e.dst), ops, uint64(e.path))
	d := float64(c.base) / float64(w)
	if net := &j.cfg.Cluster; net.DelayNoise == 0 {
		d *= 0.7 + 0.3*unit(draw)
	} else {
		if e.usual == 0 {
			e.usual = spread(hash(c.id, uint64(e.src)<<20^uint64(e.dst), uint64(e.path)), net.DelaySpread)
		}
		d *= j.delays[draw>>54] * e.usual
	}
	if e.transport == record.TransportTCP && unit(mix(draw+1)) < j.cfg.Cluster.SentAgain {
		e.resent += 1448
	}
	x.SlowWindows += e.slow
	e.slow = 0
	x.Windows, x.LatencyNs, x.Cause = windows, d*e.factor, record.CauseNone
	x.BytesPerSec = 1e9 * 8e6 / x.LatencyNs
	src, dst := &c.members[e.src], &c.members[e.dst]
	late := dst.StartedAt - src.StartedAt
	busy := j.ranks[dst.World].starved > 0.3 || j.ranks[src.World].starved > 0.3
	switch draw >>= 20; {
	case busy && e.factor < 1.5:
		x.Cause = record.CauseCPUStarved
		if draw%3 == 0 {
			x.Cause = record.CauseReceiverNotReady
		}
		x.LatencyNs *= 3
		x.SlowWindows += w
	case e.factor >= 1.5 || e.rare.is:
		x.Cause = record.CauseNetwork
	case e.transport != record.TransportTCP && late < 0 && draw%4 == 0:
		x.Cause = record.CauseSenderStarved
		x.SlowWindows++
	case e.transport != record.TransportTCP && late > c.base/4 && draw%3 == 0:
		x.Cause = record.CauseReceiverNotReady
		x.LatencyNs += float64(late) / float64(w)
		x.SlowWindows++
	case unit(mix(draw)) < j.cfg.Cluster.MonitorErrs:
		x.Cause = record.CauseNetwork
		x.LatencyNs *= 1.5 + 2*unit(draw<<44)
		x.SlowWindows++
	}
}

// rtt is a connection's round-trip time: what segments wait for in the network is in it, and nothing else.
func (j *Job) rtt(c *comm, e *edge, ops uint64) float64 {
	at := uint64(e.src)<<20 ^ uint64(e.dst)
	usual := j.cfg.Cluster.RTT
	if usual == 0 {
		usual = 150 * time.Microsecond
	}
	return float64(usual)*spread(hash(c.id, at, 11), j.cfg.Cluster.DelaySpread)*spread(hash(c.id^at, ops, 12), j.cfg.Cluster.RTTNoise) + e.queue
}

// flow is what is on a connection now: bytes that the receiver has not taken, when
// the source posted last, since when it has no credit, since when the receiver waits.
func (j *Job) flow(c *comm, e *edge) (outstanding uint64, lastPost, blocked, waiting int64) {
	src, dst := &c.members[e.src], &c.members[e.dst]
	lastPost = src.FinishedAt - c.base/8
	if src.Finished == 0 {
		lastPost = 0
	}
	if c.slot == slotPipe {
		return j.flowPair(c, e, src, dst, lastPost)
	}
	in, there := src.Open(), dst.Open()
	if in && there && src.Started != dst.Started {
		in, there = src.Started < dst.Started, dst.Started < src.Started
	}
	switch {
	case in && there && int(c.entered) == len(c.members):
		lastPost = max(src.StartedAt, c.last)
		stop, at := j.stopped(c, e)
		switch {
		case stop: // on this connection
			outstanding, blocked, waiting = held, at+1_000_000, max(at, dst.StartedAt)
			lastPost = at
		case c.ends == 0 && c.hierarchical && j.frozenDomain(c, int(e.dst)):
			// The receiver waits for a GPU of its own domain, of which nobody tells.
		case c.ends == 0: // elsewhere: what could flow has flowed
			waiting = max(at+2_000_000, dst.StartedAt)
			lastPost = at + 1_000_000
		default:
			j.flowing(c, e, &outstanding, &lastPost, &waiting)
		}
	case in && there: // some are missing: what could flow has flowed
		lastPost, waiting = src.StartedAt, max(dst.StartedAt, src.StartedAt)
	case in:
		outstanding, lastPost = held, src.StartedAt
		if e.transport != record.TransportTCP || c.base >= int64(5*time.Millisecond) { // else the kernel's buffers take it
			blocked = src.StartedAt + 1000
		}
	case there:
		waiting = dst.StartedAt
	}
	return outstanding, lastPost, blocked, waiting
}

// flowing is the moment of a transfer under way. A sound connection of a ring with
// a slow one is empty most of the time, since nothing comes that could be sent on.
func (j *Job) flowing(c *comm, e *edge, outstanding *uint64, lastPost, waiting *int64) {
	worst := 1.0
	for _, h := range c.hits {
		worst = max(worst, c.edges[h.edge].factor)
	}
	draw := hash(c.id^uint64(e.src), uint64(j.now), uint64(e.dst))
	chunk := c.base / 64
	gap := float64(chunk) * worst // between two arrivals in the whole ring
	if e.factor >= 1.5 {
		gap = float64(chunk) * e.factor
	}
	for _, h := range c.hits {
		gap = max(gap, float64(c.edges[h.edge].lag))
	}
	*lastPost = max(*lastPost, j.now-int64(draw%uint64(chunk+1)))
	switch {
	case e.factor >= 1.5:
		*outstanding = held
		*lastPost = max(c.last, j.now-int64(gap))
		*waiting = max(c.last, j.now-int64(gap*unit(draw)))
	case worst >= 1.5:
		*waiting = max(c.last, j.now-int64(gap*unit(draw)))
		*lastPost = max(c.last, j.now-int64(gap))
		if unit(hash(draw, 1, 1)) < 1/worst {
			*outstanding = held
		}
	default:
		*outstanding = held
		if draw>>60 < 3 {
			*waiting = max(c.last, j.now-chunk)
		}
	}
}

// stopped tells whether an operation that all have entered stands still for the
// sake of this connection, and since when it does.
func (j *Job) stopped(c *comm, e *edge) (bool, int64) {
	if c.ends != 0 {
		return false, 0
	}
	at := max(c.last, c.stalledAt)
	if c.frozen > 0 {
		a, b := j.inert(&c.members[e.src]), j.inert(&c.members[e.dst])
		return b && !a, at
	}
	for _, h := range c.hits {
		if &c.edges[h.edge] == e && h.fault.stalls(at) {
			return true, at
		}
	}
	return false, at
}

// frozenDomain reports whether a process of a member's NVLink domain does not run.
func (j *Job) frozenDomain(c *comm, member int) bool {
	if c.frozen == 0 {
		return false
	}
	d := j.domain(c, member)
	for i := member; i >= 0 && j.domain(c, i) == d; i-- {
		if j.inert(&c.members[i]) {
			return true
		}
	}
	for i := member + 1; i < len(c.members) && j.domain(c, i) == d; i++ {
		if j.inert(&c.members[i]) {
			return true
		}
	}
	return false
}

// flowPair is flow of a send to a pipeline neighbour.
func (j *Job) flowPair(c *comm, e *edge, src, dst *member, lastPost int64) (uint64, int64, int64, int64) {
	n := int32(len(c.members))
	for b := range 2 {
		backward := b == 1
		if to := e.src + 1; !backward && to%n != e.dst || backward && (e.src+n-1)%n != e.dst {
			continue
		}
		ch := c.channel(backward, int(e.src))
		switch {
		case ch.sent > 0 && src.Open():
			return held, ch.sent, ch.sent + 1000, 0
		case ch.wanted > 0 && dst.Open():
			return 0, lastPost, 0, ch.wanted
		}
	}
	if src.Open() && dst.Open() && (src.parts == 0 || dst.parts == 0) && dst.partEnd > j.now && src.partEnd > j.now {
		// The transfer is under way, or stands still.
		at := max(src.StartedAt, dst.StartedAt)
		if dst.partEnd > never/4 || e.factor >= 1.5 || j.frozenAround(c, int(e.src)) {
			return held, at, at + 1_000_000, at
		}
		return held, at, 0, 0
	}
	return 0, lastPost, 0, 0
}
