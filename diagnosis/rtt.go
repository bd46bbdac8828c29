package diagnosis

import (
	"math"
	"slices"
)

// TCP measures the round-trip time between two hosts. That is the network's, nearly alone: a receiver
// that takes late what has come, or waits for somebody else, is hardly in it, unlike in the time from
// post to completion. So where it has grown on some connections and not on others, these are the slow
// ones, whatever monitors say of both.

// rtt is what is normal for a connection's round-trip time.
type rtt struct {
	now   float64 // ns; 0 where nothing is known of the window
	usual baseline
	vary  float64 // the mean square of its distance from usual, as a share of that
	over  float64 // excess over usual, ns, smoothed over two windows or so
	long  float64 // the same over some more
	grown bool    // in the window
	post  float64 // excess of the time from post to completion over its usual one, ns, smoothed as over is
	acks  bool    // by delayed acknowledgements, as far as is known
}

// rtts is what slowLinks knows of round-trip times.
type rtts struct {
	conns   []rtt     // by index into Evidence.Conns; nil where no transport tells
	ago     int       // windows since one has grown that its communicator felt
	shared  float64   // how many times the usual one it is on most connections
	excess  float64   // the largest of those that were felt, ns
	excessN []float64 // the same by communicator
}

const (
	// rttRatio is how many times the usual one a slow connection's RTT is, beyond what most connections
	// share, and how many times that of most connections.
	rttRatio = 2
	// rttAlso is the first of a connection that has nearly as large an excess as one of those: the same
	// excess is a smaller ratio where more is usual.
	rttAlso = 1.3
	// rttVaries is its excess in standard deviations.
	rttVaries = 2.5
	// rttOthers is its excess by the largest in its communicator, and rttFar by the largest of all: what
	// waits for a slow connection has a somewhat larger RTT, too, and acknowledgements may be delayed.
	rttOthers, rttFar = 0.5, 0.2
	// rttsInPost is how many round trips a post takes to complete at most where it holds back no others.
	rttsInPost = 8
	// leastRTT is its excess, ns.
	leastRTT = 200e3
	// delayedRTT has more than one delayed acknowledgement in ten, of 40 ms, in it, ns.
	delayedRTT = 4e6
	// delayedAck is how long a kernel delays an acknowledgement as a rule, ns: what carries something now and then has
	// an RTT of up to that where its receiver has nothing to send, and no network is slow.
	delayedAck = 40e6
	// rttInPost is which part of an RTT's excess is in the time from post to completion at least: whatever waits in a
	// network.
	rttInPost = 0.5
	// ordinaryShare is the share of its windows that a monitor finds outside the normal where nothing is wrong.
	ordinaryShare = 0.1
	// rttsKept is for how many windows after that no other connection is slow.
	rttsKept = 4
)

// watchRTT takes over a connection's RTT; anew where it is another connection than before. It reports
// whether the RTT is known. Where no transport tells any it costs nothing.
func (d *slowLinks) watchRTT(i int, anew bool) bool {
	if d.rtts.conns == nil {
		return false
	}
	c, x := &d.ev.Conns[i], &d.rtts.conns[i]
	if anew {
		*x = rtt{}
	}
	x.now, x.grown = 0, false
	if c.RTTNs > 0 && max(c.LastPost, c.LastCompletion) > d.start {
		x.now = c.RTTNs
	}
	return x.now > 0
}

// forgetRTT drops what is known of a connection that belongs to no communicator.
func (d *slowLinks) forgetRTT(i int) {
	if i < len(d.rtts.conns) {
		d.rtts.conns[i] = rtt{}
	}
}

// judgeRTTs finds the connections whose RTT has grown.
func (d *slowLinks) judgeRTTs() {
	all := &d.rtts
	all.ago++
	if len(all.conns) == 0 {
		return
	}
	common := d.commonRTT()
	if all.ago > rttsKept {
		all.excess = 0
	}
	all.excessN = zeroed(all.excessN, len(d.ev.Comms))
	most := 0.0
	for i := range all.conns {
		x := &all.conns[i]
		if x.now == 0 || !d.settled(&x.usual) {
			continue
		}
		usual := all.shared * x.usual.mean
		x.over += (x.now - usual - x.over) / 2
		x.long += (x.now - usual - x.long) / 4
		x.acks = d.delayedAcks(int32(i), usual)
		x.grown = !x.acks && x.over >= usual*max(rttRatio-1, rttVaries*math.Sqrt(x.vary)) && x.over >= leastRTT && x.now >= rttAlso*usual && usual+x.over >= rttRatio*common
		if ci := d.ev.Conns[i].Comm; x.grown && d.feelsRTT(ci) {
			all.ago = 0
			most = max(most, x.long)
			all.excessN[ci] = max(all.excessN[ci], x.long)
		}
	}
	if all.ago == 0 {
		all.excess = most
	}
}

// delayedAcks reports whether an RTT may have grown by delayed acknowledgements alone: what is posted completes as soon
// as ever, as its monitor finds. One that tells nothing, as of small messages, does not say so.
func (d *slowLinks) delayedAcks(conn int32, usual float64) bool {
	x, h := &d.rtts.conns[conn], &d.conns[conn]
	if !h.fresh || !d.settled(&h.base) {
		return false
	}
	x.post += (h.delay - h.base.mean - x.post) / 2
	now := usual + x.over
	return x.over >= leastRTT && now >= delayedRTT && now < delayedAck && h.outside < ordinaryShare && x.post < rttInPost*x.over
}

// commonRTT returns the RTT of most connections, 0 where there are no others, and takes down by what
// factor it has grown.
func (d *slowLinks) commonRTT() (common float64) {
	all := &d.rtts
	all.shared = 1
	of := func(value func(x *rtt) float64) []float64 {
		v := d.scratch[:0]
		for i := range all.conns {
			if x := &all.conns[i]; x.now > 0 && d.settled(&x.usual) {
				v = append(v, value(x))
			}
		}
		d.scratch = v
		return v
	}
	if v := of(func(x *rtt) float64 { return x.now / x.usual.mean }); len(v) > 2 { // both ways of one pair tell nothing of others
		all.shared = max(1, quantile(v, mostShare))
		common = quantile(of(func(x *rtt) float64 { return x.now }), mostShare)
	}
	return common
}

// rttSuspects adds connections whose RTT has grown, and takes out those that are late for another
// reason: a monitor lays to the network what a receiver takes late.
func (d *slowLinks) rttSuspects(suspects []slowConn) []slowConn {
	if d.rtts.ago > rttsKept {
		return suspects
	}
	suspects = slices.DeleteFunc(suspects, func(s slowConn) bool { return d.notByRTT(s.conn) })
	d.slow = slices.DeleteFunc(d.slow, func(s slowConn) bool { return d.notByRTT(s.conn) })
	for i := range d.rtts.conns {
		x, h, c := &d.rtts.conns[i], &d.conns[i], &d.ev.Conns[i]
		if !d.slowByRTT(int32(i)) {
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
		s.alone, s.rtt, s.usualRTT = false, x.now, x.usual.mean
	}
	return suspects
}

// rttCosts reports whether the job takes longer than any rank's own time explains, while a connection's
// RTT has grown.
func (d *slowLinks) rttCosts(s *slowConn) bool {
	if s.rtt == 0 || d.drags.unexplained < d.cfg.SlowShare/4 {
		return false
	}
	// A kernel acknowledges a single segment when its process takes it, or after 40 ms: a rank that does not
	// run is in the RTT after all.
	return !d.starvedIn(s.comm) && (s.rtt >= 2*rttRatio*d.rtts.shared*s.usualRTT || !d.crowded(s.cell.src) && !d.crowded(s.cell.dst))
}

// feelsRTT reports whether the members of a communicator are inside operations for longer.
func (d *slowLinks) feelsRTT(ci int32) bool {
	return d.feltIn(ci) && d.inside[ci].cost >= d.cfg.SlowShare/4
}

// leastExcess is the excess of a slow connection's RTT in a communicator, ns.
func (d *slowLinks) leastExcess(ci int32) float64 {
	return max(rttOthers*d.rtts.excessN[ci], rttFar*d.rtts.excess)
}

// knowsRTT reports whether the RTT of a connection is known in the window, and what is usual.
func (d *slowLinks) knowsRTT(conn int32) bool {
	return int(conn) < len(d.rtts.conns) && d.rtts.conns[conn].now > 0 && d.settled(&d.rtts.conns[conn].usual)
}

// slowByRTT reports whether a connection's RTT has grown, nearly as much as the most in its communicator,
// which feels that.
func (d *slowLinks) slowByRTT(conn int32) bool {
	if d.rtts.ago > rttsKept || !d.knowsRTT(conn) {
		return false
	}
	x, ci := &d.rtts.conns[conn], d.ev.Conns[conn].Comm
	return !x.acks && d.rtts.excessN[ci] > 0 && x.now >= rttAlso*d.rtts.shared*x.usual.mean && x.long >= d.leastExcess(ci) && d.feelsRTT(ci)
}

// besideByRTT reports whether a connection's RTT has grown, too, whether anybody waits for it or not.
func (d *slowLinks) besideByRTT(conn int32) bool {
	return d.rtts.ago <= rttsKept && d.knowsRTT(conn) && d.rtts.conns[conn].grown && d.rtts.conns[conn].long >= rttOthers*d.rtts.excess
}

// notByRTT reports whether it is known that a connection's RTT has not grown, while others' have.
func (d *slowLinks) notByRTT(conn int32) bool {
	if d.rtts.ago > rttsKept || !d.knowsRTT(conn) {
		return false
	}
	c := &d.ev.Conns[conn]
	if d.rtts.conns[conn].long >= d.leastExcess(c.Comm) {
		return false
	}
	a, b := d.end(c, c.Src), d.end(c, c.Dst)
	return !slices.ContainsFunc(d.slow, func(s slowConn) bool {
		return s.rtt > 0 && (s.cell == cell{a, b} || s.cell == cell{b, a})
	})
}

// sameRTT reports whether it is known that a connection's RTT has hardly grown, and by much less than its
// delay, and that hardly anything was lost: then the ends may be late, until looks see bytes on their way.
// (A sender's own queue is in no RTT.) An RTT of acknowledgements that are delayed tells nothing of that.
func (d *slowLinks) sameRTT(conn int32) bool {
	if !d.knowsRTT(conn) {
		return false
	}
	x, h := &d.rtts.conns[conn], &d.conns[conn]
	return x.usual.mean < delayedRTT && x.over < (rttRatio-1)*x.usual.mean && rttsInPost*x.over < h.delay-h.base.mean && h.again < h.usualAgain+moreAgain/2
}

// learnRTTs lets the connections of communicators that feel nothing teach what is normal.
func (d *slowLinks) learnRTTs() {
	for i := range d.rtts.conns {
		if x := &d.rtts.conns[i]; x.now > 0 && !d.feltIn(d.ev.Conns[i].Comm) {
			x.learn()
		}
	}
}

// learn takes what is now for usual.
func (x *rtt) learn() {
	x.usual.learn(x.now)
	far := min(x.now/x.usual.mean-1, 2)
	x.vary += (far*far - x.vary) / float64(x.usual.n)
}

// whyRTT writes what the RTT of a connection is that is slow by it.
func (d *slowLinks) whyRTT(f *finding, s *slowConn) {
	f.why("the round-trip time between the hosts of rank %d and rank %d (%s, %s) is %s, %.1f times its usual %s, as TCP measures it; on most connections %.1f times",
		s.cell.src, s.cell.dst, &d.ev.Conns[s.conn], d.ev.Comms[s.comm].Name, millis(s.rtt), s.rtt/s.usualRTT, millis(s.usualRTT), d.rtts.shared)
}
