package diagnosis

import (
	"cmp"
	"slices"
)

// This file learns how long ranks are away while others wait for them, whatever the
// reason: a checkpoint, an evaluation, the first batch of an epoch. What a rank has
// come back from before it may do again without a word.

const (
	// keptPauses is how many pauses of a rank are remembered, pausingRanks of how many ranks.
	keptPauses   = 8
	pausingRanks = 4096
	// rarePause is for how long a pause counts that came only once; one that comes
	// again counts for rareTimes as long as it is apart from the one before.
	rarePause = 3600e9
	rareTimes = 10
)

// pauseLog is what ranks came back from.
type pauseLog map[int32]*rankPauses

// rankPauses holds the longest of a rank's pauses, the oldest first.
type rankPauses struct {
	lengths, at []int64
}

func (l pauseLog) add(rank int32, length, now int64) {
	p := l[rank]
	if p == nil {
		if len(l) >= pausingRanks {
			return // so many that they are everybody's
		}
		p = &rankPauses{}
		l[rank] = p
	}
	if len(p.at) == keptPauses {
		i := slices.Index(p.lengths, slices.Min(p.lengths))
		p.lengths, p.at = slices.Delete(p.lengths, i, i+1), slices.Delete(p.at, i, i+1)
	}
	p.lengths, p.at = append(p.lengths, length), append(p.at, now)
}

// longest is the longest of a rank's pauses that count still.
func (p *rankPauses) longest(now int64) int64 {
	counts := int64(rarePause)
	if n := len(p.at); n > 1 {
		counts = max(counts, rareTimes*(p.at[n-1]-p.at[n-2]))
	}
	longest := int64(0)
	for i, at := range p.at {
		if now-at <= counts {
			longest = max(longest, p.lengths[i])
		}
	}
	return longest
}

// usual is how long a pause of a rank may be and not be unusual: the longest of its own,
// or one that two others have had as well, for then it is anybody's.
func (l pauseLog) usual(rank int32, now int64) int64 {
	own, first, second := int64(0), int64(0), int64(0)
	for r, p := range l {
		n := p.longest(now)
		switch {
		case r == rank:
			own = n
		case n > first:
			first, second = n, first
		default:
			second = max(second, n)
		}
	}
	return max(own, second)
}

// absence is a rank that others wait for.
type absence struct {
	rank  int32
	since int64
}

// note remembers the ranks that are waited for in this pass.
func (d *hangs) note(rank int32, since int64) {
	d.ranks[rank].away = true
	if since > 0 && !slices.ContainsFunc(d.absent, func(a absence) bool { return a.rank == rank }) {
		d.absent = append(d.absent, absence{rank, since})
	}
}

// welcome learns how long ranks were away that have come back since the pass before.
func (d *hangs) welcome() {
	if len(d.absent) == 0 {
		return
	}
	slices.SortFunc(d.absent, func(a, b absence) int { return cmp.Compare(a.rank, b.rank) })
	back := make([]int64, len(d.absent))
	for ci := range d.ev.Comms {
		if d.comms[ci].former {
			continue
		}
		members := d.ev.Comms[ci].Members
		for i := range members {
			m := &members[i]
			if len(d.absent) == 1 && m.World != d.absent[0].rank {
				continue // the common case, and members are many
			}
			k, ok := slices.BinarySearchFunc(d.absent, m.World, func(a absence, r int32) int { return cmp.Compare(a.rank, r) })
			if at := m.StartedAt; ok && at > d.absent[k].since && (back[k] == 0 || at < back[k]) {
				back[k] = at
			}
		}
	}
	kept := d.absent[:0]
	for k, a := range d.absent {
		if int(a.rank) < len(d.ranks) {
			d.ranks[a.rank].away = false // until it is noted again
		}
		switch {
		case int(a.rank) >= len(d.state) || d.state[a.rank] != rankAlive:
		case back[k] > 0 && back[k]-a.since < int64(d.cfg.SuspectAfter)/2: // nobody minds
		case back[k] > 0:
			d.pauses.log.add(a.rank, back[k]-a.since, d.now)
		default:
			kept = append(kept, a)
		}
	}
	d.absent = kept
}
