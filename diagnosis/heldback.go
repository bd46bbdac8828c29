package diagnosis

import (
	"maps"
	"slices"
)

// heldBack finds ranks that their cgroup's quota, or whoever has their core, holds back, and that
// others wait for most of the time. A rank with a twelfth of a core may take ten seconds for a step: in windows of
// steps that is few windows, and it looks as if it hung, again and again, and its own
// operations take as long as the others' waiting. But what is held back runs.
type heldBack struct {
	*view
	drags *drags
	ranks map[int32]*heldRank

	scratch []float64
}

// heldRank is what is remembered of a rank that is held back.
type heldRank struct {
	since, last  int64    // when it was held back first, and last
	passes, late float64  // looks, and those in which others waited for it, the older ones counting less
	at           []ofComm // its memberships
	comm         int32    // where others last waited for it, -1 when they never have
	victims      int      // of them
	level        Level
}

// ofComm is a member of a communicator, both by index.
type ofComm struct{ comm, member int32 }

const (
	// heldStarved is the share of the time, beyond the usual and what is usual for the job's other
	// ranks, in which a rank finds no core at least: that it does is common where ranks share
	// cores, so that it counts in a job that has become slower only. It is also what remains to be
	// seen of a quota where the agent is not shown the cgroups.
	heldStarved = 0.4
	heldShare   = 0.2   // of the time, beyond the usual, that the quota holds a rank back at least
	heldGap     = 3e9   // without that, and it is over
	heldSuspect = 2.5e9 // from when on it is told
	heldConfirm = 5e9
	// starvedConfirm is that of a rank that finds no core: whoever has it may soon be done.
	starvedConfirm = 12e9
	heldMemory     = 0.98 // of a look, 100 ms ago
	heldLate       = 0.5  // of the looks in which others wait for it
	stoppedLate    = 0.15 // the same of one that is stopped again and again
	heldMost       = 0.5  // of the time: inside of operations it is late as well
	maxHeld        = 64
)

func (d *heldBack) forget() { clear(d.ranks) }

func (d *heldBack) find(found []finding) []finding {
	d.follow()
	for _, r := range slices.Sorted(maps.Keys(d.ranks)) {
		h := d.ranks[r]
		if h.watch(d, r); h.level == 0 || d.crowd(r) {
			continue
		}
		blamed := func(f finding) bool {
			return slices.ContainsFunc(f.Culprits, func(k Culprit) bool {
				return k.Rank == r || k.Kind == CulpritNode && k.Node == d.nodeName(r)
			})
		}
		// It runs: that it hangs is not so, unless it has for as long as anything may take.
		found = slices.DeleteFunc(found, func(f finding) bool {
			return f.hang && f.Level < Confirmed && len(f.Culprits) == 1 && f.Culprits[0].Reason == reasonCPU && blamed(f)
		})
		if slices.ContainsFunc(found, blamed) {
			continue
		}
		f := finding{}
		f.Class, f.Level, f.Since, f.Victims = NoncommunicationSlow, h.level, h.since, h.victims
		f.blame(d.rankCulprit(r, reasonStraggler))
		c := &d.ev.Comms[h.comm]
		f.setComm(c)
		f.lastOf(c)
		if x := &d.ev.Ranks[r]; d.crowds.stopped(r) > 0 {
			f.why("rank %d is stopped (state T) in %.0f %% of the looks, and goes on again: something stops it, a debugger, a signal or a freezer", r, 100*d.crowds.stopped(r))
		} else if x.Throttled >= heldShare {
			f.why("rank %d is held back by its cgroup's quota for %.0f %% of the time, usually for %.0f %%", r, 100*x.Throttled, 100*d.crowds.usuallyHeld(r))
		} else {
			usual, _ := d.crowds.usually(r, -1)
			f.why("rank %d wants to run and finds no core for %.0f %% of the time, usually for %.0f %%", r, 100*x.Starved, 100*usual)
		}
		f.why("others wait for it in %s, or the job takes longer, in %.0f %% of the looks", c.Name, 100*h.late/h.passes)
		f.why("so since %s", clock(h.since))
		found = append(found, f)
	}
	return found
}

// follow keeps the histories of the ranks that are held back.
func (d *heldBack) follow() {
	for i := range d.ev.Ranks {
		r := int32(i)
		if !d.heldNow(r) {
			continue
		}
		h := d.ranks[r]
		if h == nil {
			if len(d.ranks) >= maxHeld {
				continue
			}
			if d.ranks == nil {
				d.ranks = map[int32]*heldRank{}
			}
			h = &heldRank{since: d.now, comm: -1, at: d.memberships(r)}
			d.ranks[r] = h
		}
		h.last = d.now
	}
	for r, h := range d.ranks {
		switch {
		case int(r) >= len(d.state) || d.state[r] != rankAlive && d.state[r] != rankStopped || d.now-h.last > heldGap:
			delete(d.ranks, r)
		case d.changed:
			h.at, h.comm, h.level = d.memberships(r), -1, 0
		}
	}
}

// heldNow reports whether a rank is held back more than it usually is.
func (d *heldBack) heldNow(r int32) bool {
	x := &d.ev.Ranks[r]
	if d.crowds.stopped(r) > 0 {
		return true
	}
	held := d.crowds.usuallyHeld(r) + heldShare
	if d.ranks[r] != nil { // what holds it back comes and goes within seconds
		held -= heldShare / 2
	}
	if x.Throttled >= held {
		return true
	}
	// A master that is started in the middle takes for usual what it finds; the other ranks tell.
	if x.Throttled >= heldMost && x.Throttled >= heldMost+float32(d.medianRank(&d.scratch, func(r *Rank) float32 { return r.Throttled })) {
		return true
	}
	if d.crowds.windows < crowdFirst {
		return false // what is usual is not known: programs that start find their cores taken by each other
	}
	usual, _ := d.crowds.usually(r, -1)
	share, slower := float32(heldStarved), heldShare
	if d.ranks[r] != nil {
		share, slower = share/2, slower/2
	}
	return x.Starved >= usual+share && d.drags.slower(1) >= slower &&
		x.Starved >= share+float32(d.medianRank(&d.scratch, func(r *Rank) float32 { return r.Starved }))
}

// crowd reports whether so many ranks are held back that none of them is the one.
func (d *heldBack) crowd(r int32) bool { return len(d.ranks) > 1 && 2*len(d.ranks) > d.alive }

func (d *heldBack) memberships(r int32) (at []ofComm) {
	for ci := range d.ev.Comms {
		if d.comms[ci].former {
			continue
		}
		if m := slices.IndexFunc(d.ev.Comms[ci].Members, func(m Member) bool { return m.World == r }); m >= 0 {
			at = append(at, ofComm{int32(ci), int32(m)})
		}
	}
	return at
}

// watch takes a look at who waits for a rank.
func (h *heldRank) watch(d *heldBack, r int32) {
	h.passes, h.late = h.passes*heldMemory+1, h.late*heldMemory
	if !paused(d.ev.Ranks[r].Mark) {
		// A rank that has little of a core takes as long for its part of an operation.
		inside := d.ev.Ranks[r].hunger() >= heldMost && d.drags.slower(1) >= heldShare || d.crowds.stopped(r) > 0
		if n, ci := d.waitFor(h, inside); n > 0 {
			h.late++
			h.comm, h.victims = ci, n
		} else if (d.crowds.stopped(r) > 0 && d.onlyP2P(h) || len(h.at) > 0 && d.throttledAlone(r)) && d.drags.slower(horizons[0]) >= 2*leastCost {
			h.late++ // it is not seen who waits for it, or seldom, but the job takes longer
			h.comm, h.victims = h.at[0].comm, len(d.ev.Comms[h.at[0].comm].Members)-1
		}
	}
	least := heldLate
	if d.crowds.stopped(r) > 0 {
		least = stoppedLate
	}
	if h.comm < 0 || h.late < least*h.passes {
		return
	}
	lasted := d.now - h.since
	if lasted >= heldSuspect {
		h.level = max(h.level, Suspected)
	}
	confirm := int64(heldConfirm)
	if d.ev.Ranks[r].Throttled < heldShare && d.crowds.stopped(r) == 0 {
		confirm = starvedConfirm
	}
	if lasted >= confirm && d.lastFinish > h.since {
		h.level = Confirmed
	}
}

// throttledAlone reports whether a rank's quota holds it back more than usual, and at least twice as long as any
// other rank's does.
func (d *heldBack) throttledAlone(r int32) bool {
	held := d.ev.Ranks[r].Throttled
	if held < d.crowds.usuallyHeld(r)+heldShare/2 {
		return false
	}
	for i := range d.ev.Ranks {
		if int32(i) != r && d.ev.Ranks[i].Throttled > held/2 {
			return false
		}
	}
	return true
}

// onlyP2P reports whether all that a rank does are sends and receives.
func (d *heldBack) onlyP2P(h *heldRank) bool {
	return len(h.at) > 0 && !slices.ContainsFunc(h.at, func(at ofComm) bool { return int(at.comm) >= len(d.comms) || !d.comms[at.comm].p2p })
}

// waitFor returns how many members of a communicator are inside an operation that a rank has not
// entered, or is inside of as well.
func (d *heldBack) waitFor(h *heldRank, inside bool) (n int, comm int32) {
	for _, at := range h.at {
		if int(at.comm) >= len(d.ev.Comms) || int(at.member) >= len(d.ev.Comms[at.comm].Members) || d.comms[at.comm].p2p {
			continue // where sequences are each rank's own, nobody knows who waits for whom
		}
		members := d.ev.Comms[at.comm].Members
		me := &members[at.member]
		if !inComm(me) || me.Open() && !inside {
			continue
		}
		waiting := 0
		for i := range members {
			if m := &members[i]; int32(i) != at.member && inComm(m) && m.Open() && (m.Started > me.Started || me.Open() && m.Started == me.Started) {
				waiting++
			}
		}
		if waiting > n {
			n, comm = waiting, at.comm
		}
	}
	return n, comm
}
