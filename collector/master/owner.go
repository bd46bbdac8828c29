package master

import (
	"time"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// This file says which agent owns a rank: the first to report it, as long as that agent is
// connected and says that the process lives. A later one is refused, whatever the times say.
//
// Two things correct a first agent that lied. The job changes its epoch by majority
// (attempt.go). And a rank that is in no communicator with another node's ranks goes to an
// agent whose rank is in one, since only the job's processes know such a communicator's id.

// count and uncount keep what is known of a rank's node.
func (s *state) count(rank int32, now int64) {
	p := &s.ranks[rank]
	nd := &s.nodes[p.node]
	nd.owned++
	if p.vouched {
		nd.vouched++
	}
	if nd.since == 0 {
		nd.since = now
	}
	if !ended(s.ev.Ranks[rank].Proc) {
		nd.running++
		nd.youngest = max(nd.youngest, p.created)
	}
}

func (s *state) uncount(rank int32) {
	p := &s.ranks[rank]
	if p.node < 0 {
		return
	}
	nd := &s.nodes[p.node]
	nd.owned--
	if p.vouched {
		nd.vouched--
	}
	if !ended(s.ev.Ranks[rank].Proc) {
		nd.running--
	}
}

// strangerAfter is how long an agent must have been silent before another process than its
// own takes its rank's place in the same attempt, ns. The same process under another node's
// name (a pod that replaced another) need not wait, and a new attempt neither.
const strangerAfter = int64(30 * time.Second)

// mayTake reports whether a node's process may take a rank's place.
func (s *state) mayTake(n int32, w *wire.Rank, now int64) bool {
	p := &s.ranks[w.WorldRank]
	nd := &s.nodes[n]
	switch {
	case p.node == n:
		// An older process of this rank is of no interest; but one that lives is younger than one that has ended, whatever the
		// node's clock said when it began.
		return w.CreatedUnixNs > p.created || ended(s.ev.Ranks[w.WorldRank].Proc) && !ended(diagnosis.ProcState(w.Proc))
	case nd.owned >= s.limits.PerNode:
		s.overflow++
		return false
	case p.node < 0:
		if p.kept && p.keeper != n && s.heard(p.keeper) {
			s.foreign++
			return false
		}
		return true
	case ended(diagnosis.ProcState(w.Proc)):
		return false // what has ended takes nobody's place
	case !ended(s.ev.Ranks[w.WorldRank].Proc) && (s.heard(p.node) || w.CreatedUnixNs != p.created && now-s.ev.Nodes[p.node].LastSeen < strangerAfter):
		s.foreign++
		nd.denied = true // it may be believed when the other one is gone
		return false
	}
	return w.CreatedUnixNs >= p.created-skew
}

// vouch notes that a rank, and those with it, are in a communicator with ranks of other nodes.
func (s *state) vouch(n, c, world int32, now int64) {
	k := &s.comms[c]
	if k.by != n && k.by != several {
		own := &s.nodes[k.by].apart
		own.comms--
		own.members -= len(s.ev.Comms[c].Members)
		k.by = several
		s.reopened = true
		for _, m := range s.ev.Comms[c].Members {
			if m.World >= 0 && int(m.World) < len(s.ranks) {
				s.vouched(m.World)
			}
		}
		s.vouched(world)
		s.share(now)
	}
	if k.by == several {
		s.vouched(world)
	}
}

func (s *state) vouched(rank int32) {
	p := &s.ranks[rank]
	if p.vouched || p.node < 0 {
		return
	}
	p.vouched = true
	nd := &s.nodes[p.node]
	if nd.vouched++; nd.vouched == 1 && s.shared {
		nd.stale = true // what it said of its processes is believed from now on
	}
}

// trusted reports whether what a node reports may lead to a verdict. Once a job is known to
// communicate between nodes, a node none of whose ranks does may be reporting processes of
// something else: any agent of the job can claim ranks that nobody reports.
func (s *state) trusted(n int32) bool { return !s.shared || s.nodes[n].vouched > 0 }

// share begins to tell the job's nodes from others.
func (s *state) share(now int64) {
	if s.shared {
		return
	}
	s.shared = true
	for i := range s.ranks {
		p := &s.ranks[i]
		if p.node < 0 || s.trusted(p.node) {
			continue
		}
		s.uncount(int32(i))
		s.doubt(&s.ev.Ranks[i])
		s.count(int32(i), now)
		s.report.forget(int32(i))
	}
}

// doubt removes what would be believed of a process.
func (s *state) doubt(r *diagnosis.Rank) {
	s.calls -= len(r.Calls)
	*r = diagnosis.Rank{Node: r.Node, PID: r.PID, Attempt: r.Attempt}
}

// contest takes a rank from an agent that nobody vouches for, when another agent knows a
// communicator in which its process has the rank's place and a third agent knows that
// communicator, too.
func (s *state) contest(n int32, w *wire.Member) {
	if w.Attempt != s.attempt || w.WorldRank < 0 || int(w.WorldRank) >= len(s.ranks) || left(record.CommState(w.State)) {
		return
	}
	p := &s.ranks[w.WorldRank]
	if p.node < 0 || p.node == n || p.vouched {
		return
	}
	by := s.learnComm(n, w.CommId)
	if c, ok := s.commOf[w.CommId]; ok {
		was := &s.ev.Comms[c].Members[min(int(w.Rank), len(s.ev.Comms[c].Members)-1)]
		if int(w.Size) != len(s.ev.Comms[c].Members) || present(was) && was.World != w.WorldRank {
			return
		}
		if by != several && by != s.comms[c].by {
			by = s.comms[c].by
		}
	}
	if by == p.node || by == n {
		return
	}
	s.release(w.WorldRank, n)
	s.nodes[n].stale = true
}

// maxKnownComms bounds the communicators that agents know while another agent owns their ranks.
const maxKnownComms = 64

// learnComm notes that an agent knows a communicator, and returns who does.
func (s *state) learnComm(n int32, id uint64) (by int32) {
	by, known := s.knownBy[id]
	switch {
	case known && by != n:
		by = several
	case !known && s.nodes[n].knows >= maxKnownComms:
		return n
	case !known:
		s.nodes[n].knows++
		by = n
	}
	s.knownBy[id] = by
	return by
}

// release takes a rank from its node, and keeps it for another one.
func (s *state) release(rank, keeper int32) {
	s.uncount(rank)
	s.calls -= len(s.ev.Ranks[rank].Calls)
	s.seen--
	s.ranks[rank] = process{node: -1, kept: true, keeper: keeper}
	s.ev.Ranks[rank] = diagnosis.Rank{Node: -1}
	s.report.forget(rank)
}

// node returns the index of the named node, a new one when needed, or -1 when there is no room.
func (s *state) node(name string) int32 {
	if i, ok := s.nodeOf[name]; ok {
		return i
	}
	if len(s.free) == 0 && len(s.nodes) >= s.limits.Nodes {
		s.evict(func(i int) bool { return s.nodes[i].stream == nil })
	}
	fresh := diagnosis.Node{Name: name, MapError: unknownError}
	if k := len(s.free); k > 0 {
		i := s.free[k-1]
		s.free = s.free[:k-1]
		s.nodes[i], s.ev.Nodes[i] = node{}, fresh
		s.nodeOf[name] = i
		return i
	}
	if len(s.nodes) >= s.limits.Nodes {
		s.overflow++
		return -1
	}
	i := int32(len(s.nodes))
	s.nodes = append(s.nodes, node{})
	s.ev.Nodes = append(s.ev.Nodes, fresh)
	s.nodeOf[name] = i
	return i
}

// evictIdle forgets the nodes that have had nothing to say for long.
func (s *state) evictIdle(now int64) {
	s.evict(func(i int) bool { return s.nodes[i].stream == nil && now-s.ev.Nodes[i].LastSeen > rememberFor })
}

// evict forgets nodes without ranks.
func (s *state) evict(idle func(i int) bool) {
	for i := range s.nodes {
		name := s.ev.Nodes[i].Name
		if name == "" || s.nodes[i].owned > 0 || s.nodes[i].apart != (apart{}) || !idle(i) {
			continue
		}
		s.setClaim(int32(i), claim{})
		delete(s.nodeOf, name)
		s.dropNICs(int32(i))
		s.nodes[i], s.ev.Nodes[i] = node{}, diagnosis.Node{Lost: true, MapError: unknownError}
		s.free = append(s.free, int32(i))
	}
}
