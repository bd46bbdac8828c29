package master

import (
	"slices"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// mergeRAS takes in what NCCL's RAS knows of a communicator of the job. It is second
// evidence: words beside a verdict, which it does not change. What is old is dropped.
func (s *state) mergeRAS(w *wire.RAS, at, now int64) {
	ci, ok := s.commOf[w.CommId]
	if !ok || at <= 0 || at > now {
		return
	}
	size := len(s.ev.Comms[ci].Members)
	r := diagnosis.RAS{Comm: w.CommId, At: at, More: w.More}
	for _, m := range w.Missing[:min(len(w.Missing), collector.MaxRASRanks)] {
		if m.Rank >= 0 && int(m.Rank) < size {
			r.Missing = append(r.Missing, diagnosis.RASRank{Rank: m.Rank, Dead: m.Dead})
		}
	}
	for _, b := range w.Behind[:min(len(w.Behind), collector.MaxRASRanks)] {
		if b.Rank >= 0 && int(b.Rank) < size && b.Launched < b.Most {
			r.Behind = append(r.Behind, diagnosis.RASBehind{Rank: b.Rank, Coll: word(b.Coll), Launched: b.Launched, Most: b.Most})
		}
	}
	s.ev.RAS = slices.DeleteFunc(s.ev.RAS, func(o diagnosis.RAS) bool { return now-o.At > diagnosis.RASKeep || o.Comm == r.Comm && o.At <= r.At })
	if len(s.ev.RAS) < collector.MaxRASComms && !slices.ContainsFunc(s.ev.RAS, func(o diagnosis.RAS) bool { return o.Comm == r.Comm }) {
		s.ev.RAS = append(s.ev.RAS, r)
	}
}

// word keeps what NCCL's words for operations are made of.
func word(s string) string {
	b := make([]byte, 0, 32)
	for i := 0; i < len(s) && len(b) < cap(b); i++ {
		if c := s[i] | 0x20; c >= 'a' && c <= 'z' {
			b = append(b, s[i])
		}
	}
	return string(b)
}
