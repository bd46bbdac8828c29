package diagnosis

import (
	"fmt"
	"strings"
)

// This file writes the sentences of Verdict.Why for what is slow.

func (d *stragglers) whyLate(f *finding, s *slowRank) {
	c := &d.ev.Comms[s.comm]
	if s.alone {
		f.why("rank %d spends %s of its own before an operation, %.1f times the %s of those that do the same work; it has no history yet",
			s.rank, millis(s.own), s.own/max(s.base, 1), millis(s.base))
	} else {
		f.why("rank %d spends %s of its own before an operation, %.1f times its usual %s; the middle rank spends %.1f times",
			s.rank, millis(s.own), s.own/max(s.base, 1), millis(s.base), s.common)
	}
	f.why("in the last window this cost %s; its peers on %s were inside collectives %s longer for it, while it was not",
		millis(s.excess), d.ev.Comms[s.felt].Name, millis(s.growth))
	if s.last > 0 {
		f.why("it entered last in %d of %d sampled collectives of %s", s.last, s.of, c.Name)
	}
	f.whyOffCPU(d.ev, s.rank)
	f.why("so for %s, since %s", plural(s.slow, "window", "windows"), clock(s.since))
}

func (d *slowLinks) whyDelayed(f *finding, pat *pattern, worst *slowConn) {
	if k := &f.Culprits[0]; k.Kind != CulpritConnection {
		f.why("%d connections of %s %s are slow", len(pat.cells), k.Kind, strings.TrimPrefix(key(*k), k.Kind.String()+"/"))
	}
	for i := range d.slow {
		s := &d.slow[i]
		told := false
		for _, c := range pat.cells {
			told = told || c == s.cell
		}
		if s.level == 0 || !told {
			continue
		}
		if s.rtt > 0 {
			d.whyRTT(f, s)
			continue
		}
		c := &d.ev.Conns[s.conn]
		usual := "its usual"
		if s.alone {
			usual = fmt.Sprintf("that of the %s beside it, it has no history yet:", plural(s.peers, "connection", "connections"))
		}
		line := fmt.Sprintf("connection %d → %d (%s, %s) takes %s from post to completion", s.cell.src, s.cell.dst, c, d.ev.Comms[s.comm].Name, millis(s.delay))
		if s.base > 0 {
			line += fmt.Sprintf(", %.1f times %s %s", s.delay/s.base, usual, millis(s.base))
		}
		f.why("%s; its receiver waited for bytes on the way in %.0f%% of the looks; its monitor finds %.0f%% of the windows slow, cause %s", line, 100*s.flight, 100*s.share, c.Cause)
	}
	if src := worst.cell.src; worst.cell.src >= 0 && int(src) < len(d.ev.Ranks) && d.ev.Ranks[src].OffCPU.Resent >= resentWorthwhile {
		f.why("TCP connections of rank %d have sent %d segments again in the last ten seconds", src, d.ev.Ranks[src].OffCPU.Resent)
	}
	if worst.cost > 0 {
		f.why("members of %s are inside its operations for %.0f%% of the time more than usual", f.CommName, 100*worst.cost)
	}
	f.why("so for %s, since %s", plural(worst.slow, "window", "windows"), clock(worst.since))
}

func (d *drags) whyDrags(f *finding, s *slowRank) {
	x := &d.did[s.rank]
	f.why("rank %d spends %s of its own in a window of %s in which it usually spends %s, after what all ranks spend more",
		s.rank, millis(float64(x.own)), millis(d.lengths[(d.windows+costWindows-1)%costWindows]), millis(float64(x.pred)))
	f.why("the job loses %.0f%% of its time to it; its peers on %s are inside collectives longer by %.0f%% of that",
		100*s.excess/max(1, d.lengths[(d.windows+costWindows-1)%costWindows]), d.ev.Comms[s.felt].Name, 100*s.growth/max(s.waited, 1))
	f.why("so for %s, since %s", plural(s.slow, "window", "windows"), clock(s.since))
}
