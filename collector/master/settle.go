package master

import (
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// callsOnly is what was told of a communicator of some of whose members no more than calls is
// seen (uprobes on NCCL). That one has called an operation says that it is in it, and that its call
// has returned does not say that it is out: a GPU may be waiting. But while a member has not
// called an operation nobody is out of it, and those who have called it wait for that member; and
// once all have called it there is nobody to wait for. So where such a member is follows from what
// all members have called, which only the master knows.
type callsOnly struct {
	members []calledMember
	changed bool
}

// calledMember is one member's own words.
type calledMember struct {
	only                  bool // it is seen by its calls
	returned              uint64
	startedAt, returnedAt int64
}

// callsOnly notes whether a member is one of those.
func (s *state) callsOnly(c int32, rank int, only bool) {
	x := s.comms[c].calls
	if x == nil {
		if !only {
			return
		}
		x = &callsOnly{members: make([]calledMember, len(s.ev.Comms[c].Members))}
		s.comms[c].calls = x
	}
	x.members[rank].only = only
}

// set keeps a member's own words: what is made of them stands in the evidence.
func (x *callsOnly) set(rank int, m diagnosis.Member) {
	if x == nil {
		return
	}
	k := &x.members[rank]
	k.returned, k.startedAt, k.returnedAt = m.Finished, m.StartedAt, m.FinishedAt
	x.changed = true
}

// settle says of members that are seen by their calls which operation they are in.
func (s *state) settle() {
	for c := range s.comms {
		if x := s.comms[c].calls; x != nil && x.changed {
			x.changed = false
			x.settle(s.ev.Comms[c].Members)
			s.ev.Comms[c].Rev = s.revision()
		}
	}
}

func (x *callsOnly) settle(members []diagnosis.Member) {
	// The last operation that all have called, and when the last one did. While somebody is not
	// known nobody can be said to wait.
	all, at, known := ^uint64(0), int64(0), true
	for i := range members {
		m := &members[i]
		switch {
		case m.World < 0:
			known = false
		case m.Enqueued < all:
			all, at = m.Enqueued, m.EnqueuedAt
		case m.Enqueued == all:
			at = max(at, m.EnqueuedAt)
		}
	}
	for i := range members {
		m, k := &members[i], &x.members[i]
		if !k.only || m.World < 0 {
			continue
		}
		m.Finished, m.FinishedAt, m.StartedAt = k.returned, k.returnedAt, k.startedAt
		if known && all < k.returned {
			// It is in the one after that since that one was called by it, or since the one before
			// was called by all: the program may run far ahead of the GPU.
			m.Finished, m.FinishedAt = all, at
			m.StartedAt = max(k.startedAt, at)
		}
	}
}
