package diagnosis

import "github.com/lockstep-ccl/lockstep/record"

// commHistory is what is remembered of a communicator.
type commHistory struct {
	id       uint64
	since    int64  // first seen
	former   bool   // left behind by a former attempt: ignored
	p2p      bool   // has carried sends or receives, whose sequence numbers are each rank's own
	joining  bool   // some member is in rendezvous
	enqueued uint64 // sum over members; it falls only when an id is used again
	finished uint64 // highest sequence finished

	// usual follows the longest durations of its operations, ns: quickly up,
	// slowly down, so that one long pause does not blunt the threshold for good.
	usual float64

	ops, inside   uint64 // sums over members in this pass: operations, ns in them
	ops0, inside0 uint64 // at the window's start
	active        bool   // had operations in the last window
	insideBase    baseline
	cost          float64 // share of the window that a member was inside for longer than usual
}

// rankHistory is what is remembered of a rank.
type rankHistory struct {
	own  ownHistory
	mark markHistory
	io   int64 // last pass that saw it read or write storage
}

// rankSums are a rank's monotone sums over all its communicators.
type rankSums struct{ own, inside, ops uint64 }

// scanRanks classifies every rank and follows marks.
func (e *Engine) scanRanks() {
	p := &e.pass
	for i := range p.ev.Ranks {
		r := &p.ev.Ranks[i]
		if r.IO {
			e.ranks[i].io = p.now
		}
		s := rankAlive
		switch {
		case r.Attempt < e.attempt || (r.Node < 0 && r.Proc == ProcUnknown):
			s = rankAbsent
		case r.Proc == ProcGone:
			s = rankGone
		case r.Proc == ProcExited:
			s = rankExited
		case p.silent(r.Node):
			s = rankLost
		case r.Proc == ProcStopped, r.Proc == ProcDisk && !e.awaitsStorage(r, &e.ranks[i]):
			s = rankStopped
		}
		p.state = append(p.state, s)
		switch s {
		case rankAlive:
			p.alive++
		case rankLost:
			p.alive++
			p.lost = true
		case rankStopped:
			p.alive++
			p.sick = true
		case rankGone:
			p.ended++
			p.sick, p.gone = true, true
		case rankExited:
			p.ended++
		}
		p.step = max(p.step, r.Step)
		p.marked = p.marked || paused(r.Mark)
		e.pauses.follow(&e.ranks[i].mark, r, p.now)
	}
}

// alignComms makes e.comms parallel to the evidence's communicators. The
// master keeps their order, so this is a comparison of ids as a rule.
func (e *Engine) alignComms() {
	comms := e.pass.ev.Comms
	e.changed = len(e.comms) != len(comms)
	for i := 0; i < len(comms) && !e.changed; i++ {
		e.changed = e.comms[i].id != comms[i].ID
	}
	if !e.changed {
		return
	}
	known := make(map[uint64]int, len(e.comms))
	for i := range e.comms {
		known[e.comms[i].id] = i
	}
	aligned := make([]commHistory, len(comms))
	for i := range comms {
		if at, ok := known[comms[i].ID]; ok {
			aligned[i] = e.comms[at]
		} else {
			aligned[i] = commHistory{id: comms[i].ID, since: e.pass.now}
		}
	}
	e.comms = aligned
}

// scanMembers is the one pass over all members of all communicators: it sums
// what the slow detectors need, learns durations and notes which communicators
// hold an operation that has been open for too long.
func (e *Engine) scanMembers() {
	p := &e.pass
	floor := int64(e.cfg.SuspectAfter)
	for ci := range p.ev.Comms {
		c, h := &p.ev.Comms[ci], &e.comms[ci]
		var enqueued, ops, inside, finished uint64
		var longest int64
		joining := false
		oldest := int64(never)
		for i := range c.Members {
			m := &c.Members[i]
			enqueued += m.Enqueued
			if m.State == record.CommJoining {
				joining = true
			}
			if uint32(m.World) >= uint32(len(e.sums)) {
				continue
			}
			if pointToPoint(m.Coll) {
				h.p2p = true
			}
			if m.Started > m.Finished {
				oldest = min(oldest, m.StartedAt)
			} else {
				longest = max(longest, m.FinishedAt-m.StartedAt)
			}
			finished = max(finished, m.Finished)
			p.lastFinish = max(p.lastFinish, m.FinishedAt)
			p.maxOwn = max(p.maxOwn, int64(min(m.MaxOwnNs, never)))
			ops += m.Ops
			inside += m.WaitNs + m.TransferNs
			s := &e.sums[m.World]
			s.ops += m.Ops
			s.own += m.OwnNs
			s.inside += m.WaitNs + m.TransferNs
		}
		h.joining = joining
		if h.former && enqueued < h.enqueued {
			h.former, h.since = false, p.now // the id is in use again
		}
		h.enqueued = enqueued
		if h.former {
			continue
		}
		if finished > h.finished {
			h.learnDuration(float64(longest))
		}
		h.finished = finished
		h.ops, h.inside = ops, inside
		if oldest == never {
			continue
		}
		patience := floor
		if !p.sick {
			patience = e.suspectAfter(h)
		}
		if p.now-max(oldest, e.resumed) >= patience && e.holds(c, patience) {
			p.held = append(p.held, int32(ci))
		}
	}
	e.pauses.longestOwn(p.maxOwn, p.now)
}

// holds reports whether an operation of c is known to have been open for so
// long: by the reports of the ranks inside, not by the master's clock.
func (e *Engine) holds(c *Comm, patience int64) bool {
	for i := range c.Members {
		m := &c.Members[i]
		if e.openFor(m) >= patience {
			return true
		}
	}
	return false
}

// openFor returns for how long a member is known to be inside an operation,
// -1 when it is not.
func (e *Engine) openFor(m *Member) int64 {
	p := &e.pass
	w := p.world(m.World)
	if w < 0 || !m.Open() || !inComm(m) || p.state[w] != rankAlive {
		return -1
	}
	return max(0, p.known(w)-max(m.StartedAt, e.resumed))
}

func (h *commHistory) learnDuration(longest float64) {
	if longest > h.usual {
		h.usual += (longest - h.usual) / 4
	} else {
		h.usual -= (h.usual - longest) / 64
	}
}

// suspectAfter is the communicator's own threshold for an open operation.
func (e *Engine) suspectAfter(h *commHistory) int64 {
	scaled := min(e.cfg.DurationFactor*h.usual, float64(e.cfg.MaxSuspectAfter))
	return max(int64(e.cfg.SuspectAfter), int64(scaled))
}

// young reports whether a communicator is still starting up.
func (e *Engine) young(ci int32) bool { return e.comms[ci].finished < e.cfg.StartupOps }
