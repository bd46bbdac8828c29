package master

import (
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
)

// viewEvery is how old a view may be: one is made no more often, whoever asks.
const viewEvery = 500 * time.Millisecond

// View returns where each rank is now, at most half a second old. It is made when it is asked
// for, so that a job that nobody looks at pays nothing for it. It is not to be changed.
func (m *Master) View() *collector.JobView {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.now()
	if v := m.view; v != nil && m.viewOf == m.state.epochs && now-v.At.UnixNano() < int64(viewEvery) {
		return v
	}
	m.view, m.viewOf = m.state.view(now), m.state.epochs
	return m.view
}

func (s *state) view(now int64) *collector.JobView {
	ev := s.ev
	ev.Now = now
	return collector.View(&ev, s.sees)
}

// sees reports whether a connected agent reports a rank, or the rank has ended.
func (s *state) sees(rank int) bool {
	n := s.ranks[rank].node
	return n >= 0 && s.trusted(n) && (ended(s.ev.Ranks[rank].Proc) || s.nodes[n].stream != nil && !s.ev.Nodes[n].Lost)
}
