package diagnosis

import (
	"cmp"
	"fmt"
	"slices"
	"sync"

	"github.com/lockstep-ccl/lockstep/record"
)

const (
	// deathTie is how far apart two deaths may be seen and yet have happened in
	// either order: agents look at processes a few times a second, each at its own
	// moments; one agent sees what is gone in one sweep, and parents reap late.
	deathTie     = 250e6
	deathTieNode = 20e6
	// killPatience is how long the death of most of a job in one moment is taken
	// for its end from outside (a cancelled job, a restart).
	killPatience = 10e9
)

// dead is a rank that ended while others counted on it.
type dead struct {
	rank   int32
	at     int64
	comm   int32 // a communicator that it was in, -1 when none
	peers  int   // live members of its communicators that have not given up on it
	gave   int   // members that have aborted since
	named  int   // times that others named it when they gave up
	gone   bool  // it did not close its recorder
	left   bool  // it had left a communicator in good order
	gaveUp bool  // it had aborted one itself: it followed another's fault, or its program's own
}

func earlier(a, b dead) int { return cmp.Compare(a.at, b.at) }

// deaths finds the process whose end broke step. The survivors get errors,
// abort and often exit soon after, so deaths form a graph: who named another when it
// gave up follows that one. Of those that nobody explains the first is to blame.
type deaths struct {
	*view
	aborts *aborts
	losses *losses
}

func (x *deaths) forget() {}

func (x *deaths) find(found []finding) []finding {
	told := x.namings()
	if len(found) > 0 || !x.gone && (x.ended == 0 || len(told) == 0) {
		return found
	}
	if slices.ContainsFunc(x.aborts.ends, x.overdue) {
		return found // told by losses, when it is certain
	}
	all := x.first(x.roots(told))
	if len(all) == 0 {
		return x.stoppedFirst(found)
	}
	first := slices.MinFunc(all, earlier)
	if x.losses.followsLoss(first.at) {
		return found // likewise
	}
	if f, ok := x.open.linkBefore(first.at); ok && !slices.ContainsFunc(all, x.certain) {
		return append(found, x.ofLink(f, first))
	}
	age := x.known(first.rank) - max(first.at, x.resumed)
	if x.open.consequence(first.at) || age < int64(x.cfg.GoneAfter)/2 || x.killed(all) && age < killPatience {
		return found
	}
	f := finding{hang: true, still: age}
	f.Class, f.Level, f.Since = NoncommunicationHang, Suspected, first.at
	if age >= int64(x.cfg.GoneAfter) {
		f.Level = Confirmed
	}
	ranks := make([]int32, len(all))
	for i := range all {
		ranks[i] = all[i].rank
	}
	if node, ok := x.wholeNode(ranks); ok {
		f.blame(Culprit{Kind: CulpritNode, Rank: -1, Peer: -1, Node: node, Reason: reasonGone})
	}
	for i := range all {
		reason := reasonGone
		if !all[i].gone {
			reason = reasonExited
		}
		f.blame(x.rankCulprit(all[i].rank, reason))
		f.Victims = max(f.Victims, all[i].peers+all[i].gave)
	}
	first = all[0]
	if first.comm >= 0 {
		c := &x.ev.Comms[first.comm]
		f.setComm(c)
		for i := range c.Members {
			if m := &c.Members[i]; m.Open() && inComm(m) && (f.Seq == 0 || x.world(m.World) >= 0 && x.state[m.World] == rankAlive) {
				f.Seq, f.Coll = m.Finished+1, m.Coll
			}
		}
	}
	x.whyGone(&f, all, told)
	f.Counter = fmt.Sprintf("the others going on without rank %d, or the word of who reaped another that it ended first", first.rank)
	if len(all) > 1 && !slices.ContainsFunc(all, func(d dead) bool { return x.certain(d) != x.certain(all[0]) }) && !x.certain(first) {
		f.Undetermined = "which of these ended first: nobody named one of them, and their ends are closer than clocks tell"
	}
	return append(found, f)
}

// roots returns the ended ranks that no other explains.
func (x *deaths) roots(told []naming) []dead {
	var all []dead
	names := map[int32]int{} // ended ranks that named another
	named, lost := map[int32]int{}, map[int32]int64{}
	for i := range told {
		n := &told[i]
		if n.from != n.to {
			names[n.from]++
			if n.why == record.ResultPeerLost || n.why == record.ResultAborted {
				named[n.to]++
				if at, ok := lost[n.to]; n.at > 0 && (!ok || n.at < at) {
					lost[n.to] = n.at
				}
			}
		}
	}
	for r := range x.state {
		at, s := int32(r), x.state[r]
		if s == rankGone || s == rankExited && (named[at] > 0 || x.missed(at)) {
			d := dead{rank: at, at: x.endedAt(at), comm: -1, gone: s == rankGone, named: named[at]}
			if t, ok := lost[at]; ok {
				d.at = min(d.at, t) // agents see it later than its peers
			}
			all = append(all, d)
		}
	}
	joining := x.countOn(all)
	cutOff := func(r int32) bool {
		return slices.ContainsFunc(x.aborts.cuts, func(c cut) bool { return c.a == r || c.b == r })
	}
	asked := slices.ContainsFunc(x.ev.Ranks, func(r Rank) bool { return r.Exit.Asked })
	progressing := func(d *dead) bool {
		return x.lastFinish > d.at+int64(x.cfg.SuspectAfter) && x.now-x.lastFinish < int64(x.cfg.SuspectAfter)
	}
	all = slices.DeleteFunc(all, func(d dead) bool {
		exit := &x.ev.Ranks[d.rank].Exit
		switch {
		case names[d.rank] > 0, exit.Asked, cutOff(d.rank):
			return true // it followed
		case d.named > 0:
			return progressing(&d)
		case !d.gone && x.missed(d.rank):
			return false // it left while others were in an operation without it
		case d.comm < 0: // in no communicator: it matters while one forms
			return d.left || !joining
		case exit.ok() && !x.missed(d.rank): // done
			return true
		case x.alive == 0: // all have ended: only their states tell a fault from the job's end
			return d.gaveUp || d.gave == 0 && !exit.byItself() && (exit.By == ExitUnknown || !asked) && !x.longBefore(d)
		}
		return d.peers == 0 && (d.gave == 0 || progressing(&d))
	})
	if slices.ContainsFunc(all, func(d dead) bool { return !d.gaveUp || d.named > 0 }) {
		all = slices.DeleteFunc(all, func(d dead) bool { return d.gaveUp && d.named == 0 })
	}
	return all
}

// first returns of several deaths that nothing else orders those that came first, as
// far as clocks and the agents' looks tell, the surest first: whom others named, who
// did not end of itself as a program does that got an error, who was in no operation.
func (x *deaths) first(all []dead) []dead {
	if len(all) < 2 {
		return all
	}
	first := slices.MinFunc(all, earlier)
	all = slices.DeleteFunc(all, func(d dead) bool { return d.at-first.at > x.tie(first.rank, d.rank) })
	// Who ended as programs do on an error follows who did not.
	if slices.ContainsFunc(all, x.certain) {
		all = slices.DeleteFunc(all, func(d dead) bool { return !x.certain(d) && x.onError(d) })
	}
	slices.SortStableFunc(all, func(a, b dead) int {
		return cmp.Or(
			boolCompare(b.named > 0, a.named > 0), boolCompare(x.certain(b), x.certain(a)), boolCompare(x.onError(a), x.onError(b)),
			boolCompare(x.inside(a.rank), x.inside(b.rank)), earlier(a, b))
	})
	return all
}

// tie is how far apart the ends of two ranks may be told in the wrong order.
func (x *deaths) tie(a, b int32) int64 {
	ra, rb := &x.ev.Ranks[a], &x.ev.Ranks[b]
	if ra.Node == rb.Node {
		return deathTieNode
	}
	if ra.Exit.At > 0 && rb.Exit.At > 0 {
		return deathTieNode + x.mapError(a) + x.mapError(b)
	}
	return deathTie
}

// mapError bounds the error of the clock that a rank's times are told by.
func (v *view) mapError(rank int32) int64 {
	if n := nodeOf(v.ev, rank); n >= 0 {
		return min(max(0, v.ev.Nodes[n].MapError), deathTie)
	}
	return 0
}

// inside reports whether a rank ended inside an operation.
func (x *deaths) inside(rank int32) bool {
	for ci := range x.ev.Comms {
		for i := range x.ev.Comms[ci].Members {
			if m := &x.ev.Comms[ci].Members[i]; m.World == rank && m.Open() {
				return true
			}
		}
	}
	return false
}

// certain reports whether a rank's end was its own, and nobody's error that it met.
func (x *deaths) certain(d dead) bool {
	return d.named > 0 && !d.gaveUp || x.ev.Ranks[d.rank].Exit.byItself()
}

// onError reports whether a rank ended as a program does that got an error from an operation.
func (x *deaths) onError(d dead) bool {
	e := &x.ev.Ranks[d.rank].Exit
	return d.gaveUp || e.By != ExitUnknown && !e.byItself()
}

// ok reports whether a process ended as one that is done.
func (e *Exit) ok() bool { return e.By != ExitUnknown && e.Code == 0 && e.Signal == 0 }

// Signals and exit statuses that say who ended a process.
const (
	sigAbrt    = 6 // what runtimes and watchdogs end a process by on an error
	sigTerm    = 15
	sigInt     = 2
	sigHup     = 1
	exitError  = 1 // log.Fatal, an exception
	exitPanic  = 2 // a Go program that panics
	exitSignal = 128
)

// byItself reports whether a process ended in a way that one does not which got an error from a
// peer: killed or crashed, or with a status of its own choice.
func (e *Exit) byItself() bool {
	switch {
	case e.By == ExitUnknown || e.Asked:
		return false
	case e.Signal != 0:
		return e.Signal != sigAbrt && e.Signal != sigTerm && e.Signal != sigInt && e.Signal != sigHup
	}
	return e.Code != 0 && e.Code != exitError && e.Code != exitPanic && e.Code != exitSignal+sigAbrt && e.Code != exitSignal+sigTerm
}

// killed reports whether deaths look like the end of the job from outside: most of it
// ended at once, or those that ended after the first did so by the same signal.
func (x *deaths) killed(all []dead) bool {
	if 2*len(all) > len(x.state) {
		return true
	}
	first := &x.ev.Ranks[all[0].rank].Exit
	if first.By == ExitUnknown || first.Signal == 0 {
		return false
	}
	same := 0
	for r := range x.state {
		e := &x.ev.Ranks[r].Exit
		if (x.state[r] == rankGone || x.state[r] == rankExited) && e.Signal == first.Signal && !e.Asked && x.endedAt(int32(r)) < all[0].at+int64(x.cfg.SuspectAfter) {
			same++
		}
	}
	return 2*same > len(x.state)
}

// longBefore reports whether a rank ended well before all others, which were in operations
// without it by then.
func (x *deaths) longBefore(d dead) bool {
	for r := range x.state {
		if int32(r) != d.rank && (x.state[r] == rankGone || x.state[r] == rankExited) && x.endedAt(int32(r)) < d.at+int64(x.cfg.GoneAfter)/2 {
			return false
		}
	}
	return x.missed(d.rank)
}

// missed reports whether somebody went into an operation that a rank which ended never
// entered or came out of, or gave up a communicator that it had not left.
func (x *deaths) missed(rank int32) bool {
	for ci := range x.ev.Comms {
		c := &x.ev.Comms[ci]
		for i := range c.Members {
			own := &c.Members[i]
			if own.World != rank || x.comms[ci].former {
				continue
			}
			for k := range c.Members {
				m := &c.Members[k]
				if m.State == record.CommAborted && own.State != record.CommLeft || m.Open() && !x.comms[ci].p2p && (m.Started > own.Started || own.Open() && m.World != rank) {
					return true
				}
			}
		}
	}
	return false
}

// stoppedFirst blames the process that others gave up on and that is stopped, when they
// died of it before it was told otherwise.
func (x *deaths) stoppedFirst(found []finding) []finding {
	for _, r := range x.aborts.ends {
		at := x.ev.Ranks[r].ProcAt
		if x.state[r] != rankStopped || x.open.consequence(at) {
			continue
		}
		still := x.known(r) - max(at, x.resumed)
		f := finding{hang: true, still: still}
		f.Class, f.Level, f.Since = NoncommunicationHang, Suspected, at
		if still >= int64(x.cfg.ConfirmAfter) {
			f.Level = Confirmed
		}
		reason := reasonStopped
		if x.ev.Ranks[r].Proc == ProcDisk {
			reason = reasonDisk
		}
		f.blame(x.rankCulprit(r, reason))
		f.why("%s", x.excuseSentence(blamed{node: r, since: at}, reason))
		told := x.namings()
		for i := range told {
			if n := &told[i]; n.to == r {
				f.Victims++
				f.setComm(&x.ev.Comms[n.comm])
			}
		}
		x.whyFollowed(&f, told)
		return append(found, f)
	}
	return found
}

// ofLink goes on with what was found of a link before its ranks ended.
func (x *deaths) ofLink(f finding, first dead) finding {
	if x.known(first.rank)-max(first.at, x.resumed) >= int64(x.cfg.GoneAfter) {
		f.Level = Confirmed
	}
	f.still = x.now - f.Since
	f.sayOnce(fmt.Sprintf("rank %d ended at %s: after that, and not to blame", first.rank, clock(first.at)))
	return f
}

// overdue reports whether nobody has heard of a rank since its report was due.
func (v *view) overdue(r int32) bool {
	return v.state[r] == rankLost || v.state[r] == rankAlive && v.known(r) < v.now
}

// countOn fills in who counts on the dead, and reports whether some
// communicator is still forming.
func (x *deaths) countOn(all []dead) (joining bool) {
	at := make(map[int32]int, len(all))
	for i := range all {
		at[all[i].rank] = i
	}
	for ci := range x.ev.Comms {
		if x.comms[ci].former {
			continue
		}
		joining = joining || x.comms[ci].joining
		c := &x.ev.Comms[ci]
		live, gave, here := 0, 0, false
		for i := range c.Members {
			w := x.world(c.Members[i].World)
			if w < 0 {
				continue
			}
			if _, ended := at[w]; ended {
				here = true
			}
			switch {
			case c.Members[i].State == record.CommAborted:
				gave++
			case x.state[w] != rankGone && x.state[w] != rankExited && inComm(&c.Members[i]):
				live++
			}
		}
		if !here {
			continue
		}
		for i := range c.Members {
			k, ended := at[c.Members[i].World]
			if !ended {
				continue
			}
			d := &all[k]
			if c.Members[i].State == record.CommLeft {
				d.left = true
				continue
			}
			d.gaveUp = d.gaveUp || c.Members[i].State == record.CommAborted
			if d.comm < 0 || live+gave > d.peers+d.gave {
				d.comm, d.peers, d.gave = int32(ci), live, gave
			}
		}
	}
	return joining
}

// wholeNode reports whether ranks are all those of one node of several.
func (v *view) wholeNode(ranks []int32) (string, bool) {
	node := v.ev.Ranks[ranks[0]].Node
	if len(ranks) < 2 || len(v.ev.Nodes) < 2 || node < 0 || int(node) >= len(v.ev.Nodes) {
		return "", false
	}
	on := 0
	for r := range v.ev.Ranks {
		if v.ev.Ranks[r].Node == node && v.state[r] != rankAbsent {
			on++
		}
	}
	if slices.ContainsFunc(ranks, func(r int32) bool { return v.ev.Ranks[r].Node != node }) {
		return "", false
	}
	return v.ev.Nodes[node].Name, on == len(ranks)
}

// abandoned makes ranks that gave up a communicator after a member's death, or
// while its node is silent, and have done nothing since, wait for that member.
func (d *hangs) abandoned() {
	s := &d.hang
	if !d.sick && !d.lost {
		return
	}
	s.without = s.without[:0]
	var mu sync.Mutex
	inParts(len(d.ev.Comms), len(d.ev.Conns), func(lo, hi int) {
		for ci := lo; ci < hi; ci++ {
			if dead, at := d.deadIn(int32(ci)); dead >= 0 {
				mu.Lock()
				s.without = append(s.without, memberGone{int32(ci), dead, at})
				mu.Unlock()
			}
		}
	})
	slices.SortFunc(s.without, func(a, b memberGone) int { return cmp.Compare(a.comm, b.comm) })
	for _, x := range s.without {
		c := &d.ev.Comms[x.comm]
		for i := range c.Members {
			m := &c.Members[i]
			w := d.world(m.World)
			if w >= 0 && m.State == record.CommAborted && s.inside[w] == 0 && s.active[w] < x.at+int64(d.cfg.ConfirmAfter) {
				d.graph.wait(waitEdge{from: w, to: x.rank, comm: x.comm, since: x.at})
			}
		}
	}
}

// memberGone is a member of a communicator that is dead, or whose node is silent, since a moment.
type memberGone struct {
	comm, rank int32
	at         int64
}

// deadIn is a member of a communicator that is dead, or else the last one whose node is silent, and since when; -1 when
// there is none. One is enough: blame need not follow to each.
func (d *hangs) deadIn(ci int32) (dead int32, at int64) {
	dead = -1
	if d.comms[ci].former {
		return dead, at
	}
	c := &d.ev.Comms[ci]
	for i := range c.Members {
		w := d.world(c.Members[i].World)
		if w < 0 || !inComm(&c.Members[i]) {
			continue
		}
		if d.state[w].sick() {
			return w, d.ev.Ranks[w].ProcAt
		}
		if d.state[w] == rankLost {
			dead, at = w, d.heard(w)
		}
	}
	return dead, at
}
