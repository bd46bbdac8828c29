package diagnosis

import "math"

// This file tells a rank that has become slow from one of a job that varies: among a
// thousand windows of noisy ranks some that are late follow each other. How often a rank's
// windows are late is counted, and a streak has to be longer than chance makes them.

// lateWindows counts windows, and those of them in which a rank was late; older ones count less.
type lateWindows struct{ late, n float32 }

const (
	chanceMemory = 512  // windows of a rank
	othersWeigh  = 4    // windows of its own that the share of all ranks counts for
	byChanceOnce = 1e-8 // streaks of that chance or less are none: a job of days has a million windows
)

func (l *lateWindows) add(late, n float32, memory float32) {
	if keep := memory / (memory + n); l.n >= memory {
		l.late, l.n = l.late*keep, l.n*keep
	}
	l.late, l.n = l.late+late, l.n+n
}

// countLate counts a window: for ranks that are in a streak only once it is over without a
// word, for a slow rank's windows tell nothing of chance.
func (d *stragglers) countLate(late []slowRank) {
	n := float32(0)
	for r := range d.history {
		h := &d.history[r]
		if _, _, ops := d.delta(int32(r)); ops == 0 || !d.settled(&h.own) {
			continue
		}
		if i := d.streakOf(int32(r)); i >= 0 {
			was := float32(0)
			if hasRank(late, int32(r)) {
				was = 1
			}
			d.slow[i].windows.add(was, 1, chanceMemory)
			continue
		}
		h.windows.add(0, 1, chanceMemory)
		n++
	}
	d.all.add(0, n, chanceMemory*float32(max(1, len(d.history))))
}

func (d *stragglers) streakOf(rank int32) int {
	for i := range d.slow {
		if d.slow[i].rank == rank {
			return i
		}
	}
	return -1
}

// byChance counts the windows of a streak that is over and that nothing was told of.
func (d *stragglers) byChance(s *slowRank) {
	if s.level > 0 || s.alone {
		return
	}
	d.history[s.rank].windows.add(s.windows.late, s.windows.n, chanceMemory)
	d.all.add(s.windows.late, s.windows.n, chanceMemory*float32(max(1, len(d.history))))
}

// isNoChance reports whether a rank's late windows, this one among them, are more than
// follow each other by chance, given how often it was late before and how often all are.
func (d *stragglers) isNoChance(s *slowRank) bool {
	if s.alone {
		return true // nothing is known of it: isRule asks for more
	}
	own := d.history[s.rank].windows
	all := float64(d.all.late+1) / float64(d.all.n+20)
	p := (float64(own.late) + othersWeigh*all) / (float64(own.n) + othersWeigh)
	return p < 0.5 && float64(s.slow+1)*math.Log(p) <= math.Log(byChanceOnce)
}
