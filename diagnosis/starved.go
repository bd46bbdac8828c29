package diagnosis

// reasonCPU is a rank that is short of CPU, by the word of its node's agent.
const reasonCPU = "cpu_starved"

// hunger is the share of time in which a rank wanted to run and did not: because others had the CPU, or
// because its cgroup's quota was used up.
type hunger struct{ starved, throttled float64 }

// medianHunger is the job's usual hunger, of at most some thousands of its ranks.
func (d *slowLinks) medianHunger() hunger {
	if len(d.ev.Ranks) == 0 {
		return hunger{}
	}
	return hunger{
		d.medianRank(&d.scratch, func(r *Rank) float32 { return r.Starved }),
		d.medianRank(&d.scratch, func(r *Rank) float32 { return r.Throttled }),
	}
}

// medianRank is the median of a share of the ranks, in scratch.
func (v *view) medianRank(scratch *[]float64, share func(r *Rank) float32) float64 {
	const most = 4096
	all := (*scratch)[:0]
	for i := 0; i < len(v.ev.Ranks); i += 1 + len(v.ev.Ranks)/most {
		all = append(all, float64(share(&v.ev.Ranks[i])))
	}
	*scratch = all
	return median(all)
}

// starved reports whether a rank gets so much less CPU than the others that its connections
// are late by that: it neither sends nor takes in time, and looks as if it waited for what is
// on the way. Where all ranks are short of CPU it tells nothing of one of them, unless that
// one alone is held back by its quota.
func (d *slowLinks) starved(rank int32) bool {
	r := &d.ev.Ranks[rank]
	return float64(r.Starved) >= d.usualHunger.starved+starvedShare || float64(r.Throttled) >= d.usualHunger.throttled+starvedShare
}
