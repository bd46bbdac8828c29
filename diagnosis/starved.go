package diagnosis

// reasonCPU is a rank that is short of CPU, by the word of its node's agent.
const reasonCPU = "cpu_starved"

// starvation is the share of time in which a rank wanted to run and did not.
func (r *Rank) starvation() float64 { return float64(max(r.Starved, r.Throttled)) }

// medianStarved is the job's usual starvation, of at most some thousands of its ranks.
func (d *slowLinks) medianStarved() float64 {
	const most = 4096
	v := d.scratch[:0]
	for i := 0; i < len(d.ev.Ranks); i += 1 + len(d.ev.Ranks)/most {
		v = append(v, d.ev.Ranks[i].starvation())
	}
	d.scratch = v
	if len(v) == 0 {
		return 0
	}
	return median(v)
}

// starved reports whether a rank gets so much less CPU than the others that its connections
// are late by that: it neither sends nor takes in time, and looks as if it waited for what is
// on the way. Where all ranks are short of CPU it tells nothing of one of them.
func (d *slowLinks) starved(rank int32) bool {
	return d.ev.Ranks[rank].starvation() >= d.usuallyStarved+starvedShare
}
