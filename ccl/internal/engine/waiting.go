package engine

import (
	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
)

// Gated reports whether a track waits at a gate. Then a wait on the links is not enough, since none
// shows when a gate opens.
func (e *Engine) Gated() bool {
	for i := range e.lanes {
		l := &e.lanes[i]
		if int(l.at) >= len(l.steps) || l.steps[l.at].Act != algo.Gate {
			continue
		}
		if need := l.steps[l.at].Need; need == 0 || e.lanes[1-i].at >= need {
			return true
		}
	}
	return false
}

// Late says that nothing could move, so this rank waits for what its current steps receive next.
func (e *Engine) Late() {
	for i := range e.lanes {
		e.lanes[i].late = true
	}
}

// Idle tells the links of blocked receives that this rank waits for their bytes since now, in ns of
// CLOCK_MONOTONIC. The caller calls it only in waits that are long enough to report.
func (e *Engine) Idle(now int64) {
	for i := range e.lanes {
		l := &e.lanes[i]
		if int(l.at) >= len(l.steps) {
			continue
		}
		st := &l.steps[l.at]
		if st.Peer >= 0 && st.Act != algo.Send && !l.wants && e.links[st.Peer] != nil && (st.Need == 0 || e.lanes[1-i].at >= st.Need) {
			l.wants, l.since = true, now
			e.links[st.Peer].WantRecv(now)
		}
	}
}

// Waiting appends to dst the peers that the operation waits for: those that it receives from, or
// if there are none those that it sends to.
func (e *Engine) Waiting(dst []int32) []int32 {
	for pass := 0; pass < 2 && len(dst) == 0; pass++ {
		for i := range e.lanes {
			l := &e.lanes[i]
			if int(l.at) < len(l.steps) {
				if st := &l.steps[l.at]; st.Peer >= 0 && (st.Act == algo.Send) == (pass == 1) {
					dst = append(dst, st.Peer)
				}
			}
		}
	}
	return dst
}

// Flush publishes the counters of all links. now is in ns of CLOCK_MONOTONIC.
func (e *Engine) Flush(now int64) {
	for _, l := range e.links {
		if l != nil {
			l.Flush(now)
		}
	}
}
