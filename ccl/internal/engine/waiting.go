package engine

import (
	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
)

// Gated reports whether a track waits at a gate. Then a wait on the links is not enough, since none
// shows when a gate opens.
func (e *Engine) Gated() bool {
	for i := range e.lanes {
		if st := e.ready(i); st != nil && st.Act == algo.Gate {
			return true
		}
	}
	return false
}

// ready returns lane i's current step. It returns nil if the lane is finished, or if the step needs
// steps of the other lane.
func (e *Engine) ready(i int) *algo.Step {
	l := &e.lanes[i]
	if int(l.at) >= len(l.steps) {
		return nil
	}
	st := &l.steps[l.at]
	if st.Need > 0 && e.lanes[1-i].at < st.Need {
		return nil
	}
	return st
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
		l, st := &e.lanes[i], e.ready(i)
		if st != nil && st.Peer >= 0 && st.Act != algo.Send && !l.wants && e.links[st.Peer] != nil {
			l.wants, l.since = true, now
			e.links[st.Peer].WantRecv(now)
		}
	}
}

// Waiting appends to dst the peers that the operation waits for: those that it receives from, or
// if there are none those that it sends to. A step that needs this rank's other steps waits for
// those, not for its peer.
func (e *Engine) Waiting(dst []int32) []int32 {
	for pass := 0; pass < 2 && len(dst) == 0; pass++ {
		for i := range e.lanes {
			if st := e.ready(i); st != nil && st.Peer >= 0 && (st.Act == algo.Send) == (pass == 1) {
				dst = append(dst, st.Peer)
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
