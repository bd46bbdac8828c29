package diagnosis

import "github.com/lockstep-ccl/lockstep/record"

// commHistory is what is remembered of a communicator.
type commHistory struct {
	id       uint64
	since    int64  // first seen
	former   bool   // left behind by a former attempt: ignored
	p2p      bool   // has carried sends or receives, whose sequence numbers are each rank's own
	joining  bool   // some member is in rendezvous
	aborted  bool   // some member has given it up
	enqueued uint64 // sum over members; it falls only when an id is used again
	finished uint64 // highest sequence finished
	kinds    uint32 // by record.CollKind: calls seen to end well, as far as passes see them

	// slowest follows the longest durations of its operations, ns: quickly up, slowly
	// down. usual does so, too, but for those that are far longer than most: in these
	// somebody was waited for, and how long that one is away is learnt of it alone.
	slowest, usual float64

	ops, inside uint64 // sums over members: operations, ns in them

	// What the last scan saw, good for as long as the revisions are the same.
	rev, connRev uint64
	oldest       int64 // start of the operation that is open for longest, never when none is
	lastFinish   int64 // of an operation that did not fail
	maxOwn       int64
	linkDown     bool    // some path is down
	waiting      []int32 // connections whose receiver waits
}

// rankHistory is what is remembered of a rank.
type rankHistory struct {
	mark markHistory
	io   int64 // last pass that saw it read or write storage
	seen bool  // an agent could tell of its process
	// blind is since when none can any more, 0 while one can.
	blind int64

	cpu   float32 // share of a core that it uses as a rule, of so many looks
	looks int16
	away  bool // others wait for it: what it uses now is not the rule
}

const (
	cpuMemory = 256 // looks that the usual share of a core is a mean of
	cpuKnown  = 64  // looks that make it known
	leastCPU  = 0.02
)

// worksAsUsual reports whether a process uses as much CPU as it does as a rule, however
// little that is: where a GPU does the work, next to none. One in which nothing runs
// uses less.
func (h *rankHistory) worksAsUsual(cpu float32) bool {
	return h.looks >= cpuKnown && cpu >= leastCPU && cpu >= h.cpu/2
}

// follow notices an agent that comes or goes.
func (h *rankHistory) follow(r *Rank, now int64) {
	switch {
	case r.Proc != ProcUnknown:
		h.seen, h.blind = true, 0
		if !h.away && r.Proc == ProcRunning {
			h.looks = min(h.looks+1, cpuMemory)
			h.cpu += (r.CPU - h.cpu) / float32(h.looks)
		}
	case h.seen && h.blind == 0:
		h.blind = now
	}
}

// rankSums are a rank's monotone sums over all its communicators.
type rankSums struct{ own, inside, ops uint64 }

// scanRanks classifies every rank and follows marks.
func (v *view) scanRanks() {
	v.crowds.look(v.ev)
	for i := range v.ev.Ranks {
		r := &v.ev.Ranks[i]
		if r.IO {
			v.ranks[i].io = v.now
		}
		v.ranks[i].follow(r, v.now)
		s := rankAlive
		switch {
		case r.Attempt < v.attempt || (r.Node < 0 && r.Proc == ProcUnknown):
			s = rankAbsent
		case r.Proc == ProcGone:
			s = rankGone
		case r.Proc == ProcExited:
			s = rankExited
		case v.silent(r.Node):
			s = rankLost
		case r.Proc == ProcStopped, r.Proc == ProcDisk && !v.awaitsStorage(r, &v.ranks[i]):
			s = rankStopped
		}
		v.state = append(v.state, s)
		switch s {
		case rankAlive:
			v.alive++
		case rankLost:
			v.alive++
			v.lost = true
		case rankStopped:
			v.alive++
			v.sick = true
		case rankGone:
			v.ended++
			v.sick, v.gone = true, true
		case rankExited:
			v.ended++
		}
		v.step = max(v.step, r.Step)
		v.marked = v.marked || paused(r.Mark)
		v.fatalXid = v.fatalXid || r.Xid != 0
		v.pauses.follow(&v.ranks[i].mark, r, v.now)
	}
}

// alignComms makes v.comms parallel to the evidence's communicators. The
// master keeps their order, so this is a comparison of ids as a rule.
func (v *view) alignComms() {
	comms := v.ev.Comms
	v.changed = len(v.comms) != len(comms)
	for i := 0; i < len(comms) && !v.changed; i++ {
		v.changed = v.comms[i].id != comms[i].ID
	}
	if !v.changed {
		return
	}
	known := make(map[uint64]int, len(v.comms))
	for i := range v.comms {
		known[v.comms[i].id] = i
	}
	aligned := make([]commHistory, len(comms))
	for i := range comms {
		if at, ok := known[comms[i].ID]; ok {
			aligned[i] = v.comms[at]
		} else {
			aligned[i] = commHistory{id: comms[i].ID, since: v.now}
		}
	}
	v.comms = aligned
}

// scan looks at what has changed of the communicators and notes which of them
// hold an operation that has been open for too long.
func (v *view) scan() {
	inParts(len(v.ev.Comms), len(v.ev.Conns), func(lo, hi int) {
		for ci := lo; ci < hi; ci++ {
			c, h := &v.ev.Comms[ci], &v.comms[ci]
			if c.Rev == 0 || c.Rev != h.rev {
				h.rev = c.Rev
				v.scanMembers(c, h)
			}
			if c.ConnRev == 0 || c.ConnRev != h.connRev {
				h.connRev = c.ConnRev
				v.scanConns(int32(ci), h)
			}
		}
	})
	floor := int64(v.cfg.SuspectAfter)
	for ci := range v.ev.Comms {
		c, h := &v.ev.Comms[ci], &v.comms[ci]
		v.lastFinish, v.maxOwn = max(v.lastFinish, h.lastFinish), max(v.maxOwn, h.maxOwn)
		v.aborted = v.aborted || h.aborted
		if h.oldest == never || h.former {
			continue
		}
		patience := floor
		if !v.sick {
			patience = v.suspectAfter(h)
		}
		if v.now-max(h.oldest, v.resumed) >= patience && v.holds(c, patience) {
			v.held = append(v.held, int32(ci))
		}
	}
	v.pauses.longestOwn(v.maxOwn, v.now)
}

// scanMembers sums up a communicator's members and learns how long its operations take.
func (v *view) scanMembers(c *Comm, h *commHistory) {
	var enqueued, ops, inside, finished uint64
	var longest int64
	h.joining, h.aborted, h.oldest, h.maxOwn = false, false, never, 0
	before := h.lastFinish
	for i := range c.Members {
		m := &c.Members[i]
		enqueued += m.Enqueued
		failed := false
		if m.State != record.CommJoined {
			h.joining = h.joining || m.State == record.CommJoining
			h.aborted = h.aborted || m.State == record.CommAborted
			failed = m.failedLast()
		} else if m.Enqueued == m.Finished {
			h.kinds |= 1 << (m.Coll & 31)
		}
		if uint32(m.World) >= uint32(len(v.ev.Ranks)) {
			continue
		}
		if m.Coll.PointToPoint() {
			h.p2p = true
		}
		if m.Started > m.Finished {
			h.oldest = min(h.oldest, m.StartedAt)
		} else if m.FinishedAt > before {
			longest = max(longest, m.FinishedAt-m.StartedAt)
		}
		finished = max(finished, m.Finished)
		if !failed {
			h.lastFinish = max(h.lastFinish, m.FinishedAt)
		}
		h.maxOwn = max(h.maxOwn, int64(min(m.MaxOwnNs, never)))
		ops += m.Ops
		inside += m.WaitNs + m.TransferNs
	}
	if h.former && enqueued < h.enqueued {
		h.former, h.since, h.lastFinish = false, v.now, 0 // the id is in use again
	}
	h.enqueued = enqueued
	if h.former {
		return
	}
	if finished > h.finished {
		h.learnDuration(float64(longest), finished < v.cfg.StartupOps)
	}
	h.finished = finished
	h.ops, h.inside = ops, inside
}

// scanConns notes which of a communicator's connections need a look in every pass.
func (v *view) scanConns(ci int32, h *commHistory) {
	h.linkDown, h.waiting = false, h.waiting[:0]
	for _, k := range v.connsOf(ci) {
		c := &v.ev.Conns[k]
		h.linkDown = h.linkDown || c.Link == record.LinkDown
		if c.RxWaitingSince > 0 {
			h.waiting = append(h.waiting, k)
		}
	}
}

// sumRanks sums up what every rank has done over all its communicators. It looks at
// every member, so it is called where a window begins or ends and not in every pass.
func (v *view) sumRanks() {
	if v.summed {
		return
	}
	v.summed = true
	v.shares = shares(v.shares, v.ev)
	v.partSums = resized(v.partSums, len(v.shares))
	inShares(v.shares, func(k, lo, hi int) {
		v.partSums[k] = zeroed(v.partSums[k], len(v.ev.Ranks))
		sums := v.partSums[k]
		for ci := lo; ci < hi; ci++ {
			members := v.ev.Comms[ci].Members
			for i := range members {
				m := &members[i]
				if uint32(m.World) >= uint32(len(sums)) {
					continue
				}
				s := &sums[m.World]
				s.ops += m.Ops
				s.own += m.OwnNs
				s.inside += m.WaitNs + m.TransferNs
			}
		}
	})
	v.sums = v.partSums[0]
	for _, part := range v.partSums[1:] {
		for r := range part {
			s, x := &v.sums[r], &part[r]
			s.ops, s.own, s.inside = s.ops+x.ops, s.own+x.own, s.inside+x.inside
		}
	}
}

// holds reports whether an operation of c is known to have been open for so
// long: by the reports of the ranks inside, not by the master's clock.
func (v *view) holds(c *Comm, patience int64) bool {
	for i := range c.Members {
		m := &c.Members[i]
		if v.openFor(m) >= patience {
			return true
		}
	}
	return false
}

// openFor returns for how long a member is known to be inside an operation,
// -1 when it is not.
func (v *view) openFor(m *Member) int64 {
	w := v.world(m.World)
	if w < 0 || !m.Open() || !inComm(m) || v.state[w] != rankAlive {
		return -1
	}
	return max(0, v.known(w)-max(m.StartedAt, v.resumed))
}

func (h *commHistory) learnDuration(longest float64, young bool) {
	switch {
	case longest <= h.usual:
		h.usual -= (h.usual - longest) / 64
	case young || longest <= 2*h.usual:
		h.usual += (longest - h.usual) / 4
	default:
		h.usual += h.usual / 4
	}
	if longest > h.slowest {
		h.slowest += (longest - h.slowest) / 4
	} else {
		h.slowest -= (h.slowest - longest) / 64
	}
}

// suspectAfter is the communicator's own threshold for an open operation.
func (v *view) suspectAfter(h *commHistory) int64 { return v.patience(h.usual) }

// stalledAfter is the same for one that all have entered.
func (v *view) stalledAfter(h *commHistory) int64 { return v.patience(h.slowest) }

func (v *view) patience(duration float64) int64 {
	scaled := min(v.cfg.DurationFactor*duration, float64(v.cfg.MaxSuspectAfter))
	return max(int64(v.cfg.SuspectAfter), int64(scaled))
}

// young reports whether a communicator is still starting up.
func (v *view) young(ci int32) bool { return v.comms[ci].finished < v.cfg.StartupOps }
