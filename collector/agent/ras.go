package agent

import (
	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/wire"
)

const (
	// maxRAS is how many communicators of RAS's answer a report has at most.
	maxRAS = 32
	// rasRoom is how many entries of a report that takes.
	rasRoom = maxRAS * (1 + 2*collector.MaxRASRanks)
)

// reportRAS is what NCCL's RAS knows of the job's communicators, once for each answer:
// first of those with something wrong.
func (j *job) reportRAS(a *collector.RAS) (out []*wire.RAS) {
	if a == nil || a.At == j.rasAt {
		return nil
	}
	j.rasAt = a.At
	ours := map[uint64]bool{}
	for _, r := range j.ranks {
		for i := range r.p.Comms {
			ours[r.p.Comms[i].ID] = true
		}
	}
	for _, wrong := range []bool{true, false} {
		for i := range a.Comms {
			c := &a.Comms[i]
			if !ours[c.ID] || wrong != (len(c.Missing)+len(c.Behind) > 0) || len(out) == maxRAS {
				continue
			}
			w := &wire.RAS{CommId: c.ID, MonoAtNs: a.At, More: c.More}
			for _, m := range c.Missing {
				w.Missing = append(w.Missing, &wire.RASRank{Rank: m.Rank, Dead: m.Dead})
			}
			for _, b := range c.Behind {
				w.Behind = append(w.Behind, &wire.RASBehind{Rank: b.Rank, Coll: b.Coll, Launched: b.Launched, Most: b.Most})
			}
			out = append(out, w)
		}
	}
	return out
}
