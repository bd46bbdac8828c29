package collector_test

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/agent"
)

// tracing is a tracer that exports what rank 0 does, and of the other ranks nothing.
type tracing struct{ sink }

func (s *tracing) Collective(c *collector.Collective) {
	c.Traced = c.Rank == 0
	s.sink.Collective(c)
}

// A job without a master: an agent that ends sends the roots of all traces whose spans it has sent,
// those included that other ranks may still have a part in.
func TestRootsGoOutBeforeAnAgentEnds(t *testing.T) {
	const steps = 5
	dir := t.TempDir()
	r := newRanks(t, dir, 4, 0)
	s := &tracing{}
	_, running := startAgent(t, agent.Options{Dir: dir, Sinks: []collector.Sink{s}})
	for range steps {
		r.step()
	}
	eventually(t, "all collectives folded", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.got) == 4*steps
	})
	running.kill(t)
	roots := map[uint64]collector.Collective{}
	for _, c := range s.roots {
		roots[c.Seq] = c
	}
	if len(s.roots) != steps || len(roots) != steps {
		t.Fatalf("%d roots of %d of %d traces", len(s.roots), len(roots), steps)
	}
	for i := range s.got {
		if c := &s.got[i]; c.Traced && (roots[c.Seq].Started > c.Started+c.RealOffset || roots[c.Seq].Ended < c.Ended+c.RealOffset) {
			t.Errorf("the root of #%d does not cover its span", c.Seq)
		}
	}
}
