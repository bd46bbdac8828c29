package diagnosis

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/lockstep-ccl/lockstep/record"
)

// reasonMismatch is a rank that called another operation than the others under
// the same sequence number: the program's fault, though all are inside.
const reasonMismatch = "mismatch"

// calling is what a member says its operation is.
type calling struct {
	coll  record.CollKind
	bytes uint64
	root  int32
}

// version is a call with the world ranks that made it.
type version struct {
	calling
	ranks []blamed
}

func (c calling) String() string {
	s := fmt.Sprintf("%s of %d bytes", c.coll, c.bytes)
	if c.root >= 0 {
		s += fmt.Sprintf(" with root %d", c.root)
	}
	return s
}

// called returns the member's operation as far as all members must agree on it.
func called(m *Member) calling {
	c := calling{coll: m.Coll, bytes: m.Bytes, root: -1}
	switch m.Coll {
	case record.Broadcast, record.Reduce:
		c.root = m.Peer
	case record.AlltoAllv, record.Gather, record.Scatter:
		c.bytes = 0
	}
	return c
}

// disagreement finds what members of a communicator that are inside mean by the
// highest sequence that any of them has enqueued, when they do not mean the same,
// the commonest first. Only the last call is told, so those that have enqueued less
// say nothing of it; nil when fewer than two do, or all agree.
func (e *Engine) disagreement(ci int32) (seq uint64, versions []version) {
	if e.comms[ci].p2p {
		return 0, nil // sequences are each rank's own
	}
	members := e.pass.ev.Comms[ci].Members
	for i := range members {
		if m := &members[i]; inComm(m) && m.Open() {
			seq = max(seq, m.Enqueued)
		}
	}
	for i := range members {
		m := &members[i]
		if !inComm(m) || !m.Open() || m.Enqueued != seq || e.pass.world(m.World) < 0 {
			continue
		}
		c := called(m)
		if c.coll == record.CollNone {
			continue
		}
		k := slices.IndexFunc(versions, func(v version) bool { return v.calling == c })
		if k < 0 {
			k = len(versions)
			versions = append(versions, version{calling: c})
		}
		versions[k].ranks = append(versions[k].ranks, blamed{node: m.World})
	}
	if len(versions) < 2 {
		return 0, nil
	}
	slices.SortStableFunc(versions, func(a, b version) int { return cmp.Compare(len(b.ranks), len(a.ranks)) })
	return seq, versions
}

// mismatched turns a hang inside an operation into the program's fault when its
// members do not mean the same operation.
func (e *Engine) mismatched(c *cause) {
	if c.class != CommunicationHang {
		return
	}
	if _, versions := e.disagreement(c.comm); versions != nil {
		c.class, c.reason, c.firm = NoncommunicationHang, reasonMismatch, 2
		c.suspect, c.confirm = int64(e.cfg.SuspectAfter), int64(e.cfg.ConfirmAfter)
	}
}

// blameMismatch blames whoever differs from most, everybody when there is no majority.
func (e *Engine) blameMismatch(f *finding, ci int32) {
	seq, versions := e.disagreement(ci)
	f.Seq, f.Coll = seq, versions[0].coll
	wrong := versions[1:]
	if len(versions[0].ranks) == len(versions[1].ranks) {
		wrong = versions
	}
	for _, v := range wrong {
		for _, r := range v.ranks {
			f.blame(e.rankCulprit(r.node, reasonMismatch))
		}
	}
	for _, v := range versions {
		f.why("#%d on %s is %s for rank %s", seq, f.CommName, v.calling, ranksOf(v.ranks))
	}
	f.why("all members must call the same operations in the same order: the program differs between these ranks")
}
