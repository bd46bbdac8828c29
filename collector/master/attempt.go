package master

import (
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// skew is how far apart the real-time clocks of two nodes may be, ns.
const skew = int64(10e9)

// startedAnew reports whether a process with a lower restart count is no late word
// of a former attempt: whatever restarts the job was started again, and counts from
// 0 again. The rank's process of the highest attempt is older then, and ended, as far
// as is known; where there was none, all ranks' are.
func (s *state) startedAnew(n int32, w *wire.Rank) bool {
	if w.Attempt >= s.attempt {
		return false
	}
	over := func(rank int) bool {
		p, proc := &s.ranks[rank], s.ev.Ranks[rank].Proc
		return p.node < 0 || w.CreatedUnixNs-p.created > skew && (ended(proc) || proc == diagnosis.ProcUnknown)
	}
	rank := int(w.WorldRank)
	known := rank < len(s.ranks) && s.ranks[rank].node >= 0
	switch {
	case known && s.ranks[rank].node == n:
		return w.CreatedUnixNs > s.ranks[rank].created // its agent has compared them
	case ended(diagnosis.ProcState(w.Proc)):
		return false
	case known:
		return over(rank)
	}
	for i := range s.ranks {
		if !over(i) {
			return false
		}
	}
	return true
}

// outlived reports whether a process with a higher restart count is of the job's last
// life: it was created before the present one began, or has ended while a
// younger one lives.
func (s *state) outlived(w *wire.Rank) bool {
	if w.CreatedUnixNs < s.began {
		return true
	}
	if !ended(diagnosis.ProcState(w.Proc)) {
		return false
	}
	for i := range s.ranks {
		if p := &s.ranks[i]; p.node >= 0 && p.created > w.CreatedUnixNs && !ended(s.ev.Ranks[i].Proc) {
			return true
		}
	}
	return false
}

// restart makes what was known of the job's last attempt history.
func (s *state) restart(attempt uint32) {
	s.attempt = attempt
	s.clearComms()
	s.ranks, s.ev.Ranks, s.seen = s.ranks[:0], s.ev.Ranks[:0], 0
}
