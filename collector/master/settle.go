package master

import (
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// callsOnly is a communicator with members of which only calls are seen (uprobes on NCCL), or of
// whose last operation no more is (NCCL's plugin did not have it timed). A member that has called
// an operation is in it; that its call has returned does not say that it is out, since a GPU may
// still be waiting. But while one member has not called an operation nobody is out of it, and
// those that have called it wait for that member. Once all have called it nobody is waited for.
// So where such a member is follows from what all members have called, which only the master
// knows.
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

// set keeps what a member reported itself; what settle derives from it stands in the evidence.
func (x *callsOnly) set(rank int, m diagnosis.Member) {
	if x == nil {
		return
	}
	k := &x.members[rank]
	k.returned, k.startedAt, k.returnedAt = m.Finished, m.StartedAt, m.FinishedAt
	x.changed = true
}

// settle finds which operation members are in that are seen only by their calls.
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
	// all is the last operation that every member has called, at when the last of them did.
	// With a member that is not known nobody can be said to wait.
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
			// The member is in the operation after all. It has been since it called that, or
			// since every member had called all: a program may run far ahead of its GPU.
			m.Finished, m.FinishedAt = all, at
			m.StartedAt = max(k.startedAt, at)
		}
	}
}
