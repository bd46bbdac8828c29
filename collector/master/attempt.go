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
	s.survey()
	t := &s.report
	return !t.running && (!t.some || w.CreatedUnixNs-t.youngest > skew)
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
	s.survey()
	return s.report.alive && s.report.youngestAlive > w.CreatedUnixNs
}

// Limits of what one report can bring about.
const (
	maxRestarts = 8    // changes of the job's attempt
	maxLeap     = 1000 // of the attempt, but for a rank whose former process has ended
)

// leaps reports whether an attempt is further from the one that is known than
// restarts go. To believe it would be to believe nobody else from then on.
func (s *state) leaps(n int32, w *wire.Rank) bool {
	if s.seen == 0 || w.Attempt <= s.attempt || w.Attempt-s.attempt <= maxLeap {
		return false
	}
	r := int(w.WorldRank)
	return r >= len(s.ranks) || s.ranks[r].node != n || !ended(s.ev.Ranks[r].Proc)
}

// oneReport is what is worked out once for all of a report's entries.
type oneReport struct {
	forgotten map[int32]struct{} // world ranks whose processes it superseded
	restarts  int

	surveyed      bool
	some          bool  // a process is known
	youngest      int64 // when the last of all known processes was created
	running       bool  // one runs
	alive         bool  // one has not ended, as far as is known
	youngestAlive int64 // when the last of these was created
}

func (t *oneReport) forget(rank int32) {
	if t.forgotten == nil {
		t.forgotten = map[int32]struct{}{}
	}
	t.forgotten[rank] = struct{}{}
}

// survey looks at all processes, once a report; what the report says is added as it comes.
func (s *state) survey() {
	if s.report.surveyed {
		return
	}
	s.report.surveyed = true
	for i := range s.ranks {
		if p := &s.ranks[i]; p.node >= 0 {
			s.report.saw(p.created, s.ev.Ranks[i].Proc)
		}
	}
}

func (t *oneReport) saw(created int64, p diagnosis.ProcState) {
	if !t.surveyed {
		return
	}
	t.youngest, t.some = max(t.youngest, created), true
	if ended(p) {
		return
	}
	t.youngestAlive, t.alive = max(t.youngestAlive, created), true
	t.running = t.running || p != diagnosis.ProcUnknown
}

// restart makes what was known of the job's last attempt history.
func (s *state) restart(attempt uint32) {
	s.attempt = attempt
	s.report = oneReport{restarts: s.report.restarts + 1}
	s.clearComms()
	s.ranks, s.ev.Ranks, s.seen, s.calls = s.ranks[:0], s.ev.Ranks[:0], 0, 0
}
