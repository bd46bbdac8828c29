package master

import (
	"fmt"
	"slices"

	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// maxWhy is how many sentences a verdict has at most.
const maxWhy = 8

// along adds to verdicts on connections the links that these take, where a planner knows them.
// Recorded verdicts stay without: they are judged again without a planner.
func (m *Master) along(ev *diagnosis.Evidence, verdicts []diagnosis.Verdict) []diagnosis.Verdict {
	if m.o.Paths == nil {
		return verdicts
	}
	out := slices.Clone(verdicts)
	for i := range out {
		v := &out[i]
		c := slices.IndexFunc(ev.Comms, func(c diagnosis.Comm) bool { return c.ID == v.Comm })
		if c < 0 {
			continue
		}
		member := func(world int32) int {
			return slices.IndexFunc(ev.Comms[c].Members, func(m diagnosis.Member) bool { return m.World == world })
		}
		var said []string
		for _, k := range v.Culprits {
			if k.Kind != diagnosis.CulpritConnection {
				continue
			}
			if from, to := member(k.Rank), member(k.Peer); from >= 0 && to >= 0 {
				if path := m.o.Paths(v.Comm, from, to); path != "" {
					said = append(said, fmt.Sprintf("rank %d sends to rank %d over %s", k.Rank, k.Peer, path))
				}
			}
		}
		said = said[:min(len(said), maxWhy/2)]
		v.Why = slices.Concat(v.Why[:min(len(v.Why), maxWhy-len(said))], said)
	}
	return out
}
