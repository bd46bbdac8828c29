package master

import (
	"math"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// skew is how far apart the real-time clocks of two nodes may be, ns.
const skew = int64(10e9)

// Bounds of what a rank's process may say of its job.
const (
	maxAttempt = 1 << 20
	maxLeap    = 1000 // of the attempt, unless most say so, or one whose ranks of the last one have ended
)

// epoch is one life of a job: which restart, and of how many ranks, as its processes report. A
// job is in one epoch, and no agent decides alone which.
//
// Each connected agent has one vote: the epoch of its youngest living process. The majority
// wins. On a tie the job stays in its epoch, unless those against it had ranks in it (a job
// whose ranks have left an attempt is not in it any more) or joined the job before those for
// it. Where no process of the job's epoch is known to live, the next epoch needs no majority.
type epoch struct {
	attempt uint32
	world   int32
}

// claim is an agent's vote for another epoch than the job's.
type claim struct {
	epoch
	created int64 // of the youngest process that it is about, unix ns; 0: there is no claim
}

// possible reports whether a rank's entry can be true at all.
func (s *state) possible(w *wire.Rank, now int64) bool {
	return w != nil && w.WorldRank >= 0 && w.WorldRank < w.WorldSize && w.CreatedUnixNs > 0 && w.CreatedUnixNs <= now+s.ahead+skew && w.Attempt <= maxAttempt
}

// refuse counts an entry that cannot be true, and notes a node whose clock is ahead: nothing of its new processes is taken in.
func (s *state) refuse(n int32, w *wire.Rank, now int64) {
	s.refused++
	if nd := &s.nodes[n]; w != nil && nd.fast == 0 {
		nd.fast = max(0, w.CreatedUnixNs-now-s.ahead-skew)
	}
}

// hear takes in what a report says of the job's epoch, before any of its entries is merged, and
// changes the epoch when the votes have decided so.
func (s *state) hear(n int32, ranks []*wire.Rank, now int64) {
	nd := &s.nodes[n]
	var alive, over claim
	for _, w := range ranks {
		if !s.possible(w, now) || int(w.WorldSize) > s.limits.Ranks {
			continue
		}
		c := claim{epoch{w.Attempt, w.WorldSize}, w.CreatedUnixNs}
		switch {
		case !ended(diagnosis.ProcState(w.Proc)):
			if c.created > alive.created || c.created == alive.created && c.attempt > alive.attempt {
				alive = c
			}
		case c.attempt > over.attempt || over.created == 0:
			over = c
		}
		if ended(diagnosis.ProcState(w.Proc)) && c.epoch == nd.claim.epoch && nd.claim.created != 0 {
			s.setClaim(n, claim{})
			nd.stale = true // whether others of it live is asked
		}
	}
	switch {
	case s.epochs == 0 && alive.created != 0:
		s.begin(alive)
	case s.epochs == 0:
		if over.created != 0 {
			s.begin(over)
		}
	case alive.created != 0 && alive.epoch == s.epoch:
		if alive.created >= nd.claim.created {
			s.setClaim(n, claim{})
		}
	case alive.created > max(nd.youngest, nd.claim.created), alive.created == max(nd.youngest, nd.claim.created) && alive.attempt > s.attempt,
		nd.owned > 0 && alive.attempt > max(s.attempt, nd.claim.attempt): // its clock was set back; the agent has compared the processes
		s.setClaim(n, alive)
	case over.created >= max(s.began, 1) && over.attempt > s.attempt && over.attempt-s.attempt <= maxLeap && s.speakers() == 0:
		s.begin(over)
	}
	s.decide()
}

func (s *state) setClaim(n int32, c claim) {
	nd := &s.nodes[n]
	if nd.claim.created != 0 {
		s.claims--
	}
	if nd.claim = c; c.created != 0 {
		s.claims++
	}
}

// heard reports whether a node's agent speaks.
func (s *state) heard(n int32) bool { return !s.ev.Nodes[n].Lost && s.ev.Nodes[n].LastSeen != 0 }

// speakers is how many agents tell of living processes of the job's epoch.
func (s *state) speakers() (votes int) {
	for i := range s.nodes {
		if s.heard(int32(i)) && s.agrees(&s.nodes[i]) {
			votes++
		}
	}
	return votes
}

// agrees reports whether a node votes for the job's epoch: it has a living process of it, or
// voted for it before the change and has yet to report everything again.
func (s *state) agrees(nd *node) bool {
	return nd.claim.created == 0 && (nd.running > 0 || nd.owned == 0 && nd.chose == s.epochs && s.epochs != 0)
}

// side is the nodes that vote for one epoch.
type side struct {
	votes   int
	since   int64 // since when the longest of them is of the job; math.MaxInt64: none is
	created int64 // of the youngest process
	owners  bool  // one had ranks in the job's epoch
	left    bool  // and all of them have ended
	over    int   // for the job's epoch: agents whose ranks of it have all ended
}

func (v *side) add(nd *node) {
	v.votes++
	if nd.since != 0 {
		v.since = min(v.since, nd.since)
	}
	v.created = max(v.created, nd.claim.created)
	v.owners = v.owners || nd.owned > 0
	v.left = v.left || nd.owned > 0 && nd.running == 0
}

// decide changes the job's epoch when the votes of connected agents demand it.
func (s *state) decide() {
	if s.claims == 0 {
		return
	}
	own, sides := side{since: math.MaxInt64}, map[epoch]*side{}
	for i := range s.nodes {
		nd := &s.nodes[i]
		switch {
		case !s.heard(int32(i)):
		case nd.claim.created != 0:
			v := sides[nd.claim.epoch]
			if v == nil {
				v = &side{since: math.MaxInt64}
				sides[nd.claim.epoch] = v
			}
			v.add(nd)
		case s.agrees(nd):
			own.add(nd)
		case nd.owned > 0:
			own.over++
		}
	}
	var best epoch
	var most *side
	for e, v := range sides {
		if most == nil || v.before(e, most, best) {
			best, most = e, v
		}
	}
	if most != nil && s.prevails(best, most, &own) {
		s.begin(claim{best, most.created})
	}
}

// before orders the epochs that may come next: most votes first, then the one whose nodes have
// been in the job for longest, then the later attempt.
func (v *side) before(e epoch, o *side, f epoch) bool {
	switch {
	case v.votes != o.votes:
		return v.votes > o.votes
	case v.since != o.since:
		return v.since < o.since
	case e.attempt != f.attempt:
		return e.attempt > f.attempt
	}
	return e.world > f.world
}

func (s *state) prevails(e epoch, v, own *side) bool {
	later := e.attempt > s.attempt
	near := !later || e.attempt-s.attempt <= maxLeap || v.left
	switch {
	case own.votes > 0 && v.votes > own.votes, own.votes == 0 && v.votes > max(own.over, 1):
		return true
	case own.votes > 0: // a tie, or less
		return v.votes == own.votes && (later && near && v.owners || own.since-skew > v.since)
	case later:
		return near
	case v.owners: // its agent has compared the processes
		return true
	}
	// A late word of a former life is older than what is known.
	return v.created-s.youngestKnown() > skew
}

// youngestKnown is when the last of all known processes was created.
func (s *state) youngestKnown() (t int64) {
	for i := range s.ranks {
		if p := &s.ranks[i]; p.node >= 0 {
			t = max(t, p.created)
		}
	}
	return t
}

// begin makes what was known of the job's last epoch history.
func (s *state) begin(c claim) {
	first := s.epochs == 0
	if !first && c.attempt <= s.attempt {
		s.began = c.created
		s.anew++
	}
	s.epoch, s.shared = c.epoch, false
	s.epochs++
	s.report.forgotten = nil
	s.clearComms()
	s.ranks, s.ev.Ranks, s.seen, s.calls = s.ranks[:0], s.ev.Ranks[:0], 0, 0
	for range c.world {
		s.ranks = append(s.ranks, process{node: -1})
		s.ev.Ranks = append(s.ev.Ranks, diagnosis.Rank{Node: -1})
	}
	for i := range s.nodes {
		nd := &s.nodes[i]
		nd.owned, nd.running, nd.vouched, nd.youngest = 0, 0, 0, 0
		nd.stale = nd.stale || !first // what it said of this epoch was refused until now; of another one it is asked again
		if nd.claim.created != 0 && nd.claim.epoch == c.epoch {
			s.setClaim(int32(i), claim{})
			nd.chose = s.epochs
		}
	}
}

// oneReport is computed once for all entries of a report.
type oneReport struct {
	forgotten map[int32]struct{} // world ranks whose processes it superseded
}

func (t *oneReport) forget(rank int32) {
	if t.forgotten == nil {
		t.forgotten = map[int32]struct{}{}
	}
	t.forgotten[rank] = struct{}{}
}
