package diagnosis

import (
	"fmt"
	"slices"
)

// starts finds who keeps a job from starting: ranks whose processes are there and have made
// no communicator, so that nothing of what they do is recorded. A rank that uses CPU or
// storage is starting, however long that takes. One that is stopped, or has ended,
// keeps the others; one that sleeps is only judged against them, when all of them wait for somebody.
type starts struct {
	*view
	ranks map[int32]*startHistory
}

// startHistory is what is remembered of a starting rank.
type startHistory struct {
	pid    int32
	still  int64 // since when it has used neither CPU nor storage
	moved  int64 // when it last used any worth counting: one that reads slowly is in state D all the time
	own    bool  // it waits for something of its own
	sinceO int64 // since when own is what it is
}

// Levels of patience, times StartPatience.
const (
	startFirm = 2 // to confirm what a process's state shows
	startSoft = 5 // to confirm that a rank sleeps
)

func (d *starts) forget() { clear(d.ranks) }

// startSurvey is what the ranks of a job that starts do.
type startSurvey struct {
	stopped, ended, idle []int32 // each is a culprit, maybe
	waiting              []int32 // for others
	missing              []int32 // that nobody has seen
	busy, unclear        int
	starting             int
}

func (d *starts) find(found []finding) []finding {
	d.follow()
	patience := int64(d.cfg.StartPatience)
	if len(d.ranks) == 0 || len(found) > 0 || d.lastFinish > 0 && d.now-max(d.lastFinish, d.resumed) < patience {
		return found // nobody starts, or nobody waits for those who do
	}
	s := d.survey(patience)
	quiet := s.busy == 0 && s.unclear == 0
	switch {
	case len(s.stopped) > 0:
		if s.busy+s.unclear+len(s.waiting)+len(s.idle) == 0 {
			return found // all are: somebody has suspended the job
		}
		return d.blameStart(found, &s, s.stopped, reasonStopped, startFirm)
	case len(s.ended) > 0:
		if !quiet || len(s.waiting) == 0 {
			return found // ranks that work for themselves end when they are done
		}
		return d.blameStart(found, &s, s.ended, reasonGone, startFirm)
	case len(s.idle) > 0:
		if !quiet || len(s.missing) > 0 || len(s.waiting) < len(s.idle) {
			return found
		}
		return d.blameStart(found, &s, s.idle, reasonIdle, startSoft)
	case !quiet || len(s.waiting) != s.starting:
		return found
	case len(s.missing) > 0:
		return d.blameMissing(found, &s)
	}
	return d.blameNobody(found, &s)
}

// follow keeps the histories of the ranks that start.
func (d *starts) follow() {
	for i := range d.ev.Ranks {
		r, rank := &d.ev.Ranks[i], int32(i)
		if !r.Starting || d.state[i] == rankAbsent {
			delete(d.ranks, rank)
			continue
		}
		h := d.ranks[rank]
		if h == nil || h.pid != r.PID {
			h = &startHistory{pid: r.PID, still: d.now, moved: d.now, own: r.WaitsIn.own(), sinceO: d.now}
			if d.ranks == nil {
				d.ranks = map[int32]*startHistory{}
			}
			d.ranks[rank] = h
		}
		if d.works(r) {
			h.still = d.now
		}
		if r.IO || r.CPU >= leastCPU {
			h.moved = d.now
		}
		if own := r.WaitsIn.own(); own != h.own {
			h.own, h.sinceO = own, d.now
		}
	}
	for rank := range d.ranks {
		if int(rank) >= len(d.ev.Ranks) {
			delete(d.ranks, rank)
		}
	}
}

// works reports whether a process gets on with something.
func (d *starts) works(r *Rank) bool {
	return paused(r.Mark) || r.IO || r.CPU >= idleCPU && (!r.Starting || r.WaitsIn != WaitInPolling)
}

// quietFor is for how long a starting rank has done nothing.
func (d *starts) quietFor(rank int32) int64 {
	r, since := &d.ev.Ranks[rank], int64(0)
	switch s := d.state[rank]; {
	case s == rankGone, s == rankExited:
		since = d.endedAt(rank)
	case r.Proc == ProcDisk:
		since = max(r.ProcAt, d.ranks[rank].moved)
	case s == rankStopped:
		since = r.ProcAt
	default:
		since = d.ranks[rank].still
	}
	return d.known(rank) - max(since, d.lastFinish, d.resumed) // while others work together nobody waits for it
}

// survey sorts the ranks by what they do.
func (d *starts) survey(patience int64) (s startSurvey) {
	for i := range d.ev.Ranks {
		r, rank := &d.ev.Ranks[i], int32(i)
		state := d.state[i]
		if r.Starting && state != rankAbsent {
			s.starting++
		}
		switch {
		case state == rankAbsent:
			s.missing = append(s.missing, rank)
		case state == rankGone || state == rankExited:
			if r.Starting && !r.Exit.Asked {
				s.ended = append(s.ended, rank)
			}
		case state == rankLost, r.Proc == ProcUnknown:
			s.unclear++
		case !r.Starting && d.works(r):
			s.busy++
		case !r.Starting:
			s.waiting = append(s.waiting, rank)
		case state == rankStopped, r.Proc == ProcDisk:
			s.stopped = append(s.stopped, rank)
		case d.quietFor(rank) < patience:
			s.busy++
		case r.WaitsIn.own() && d.now-d.ranks[rank].sinceO >= patience/2:
			s.idle = append(s.idle, rank)
		case r.WaitsIn.forOthers():
			s.waiting = append(s.waiting, rank)
		default:
			s.unclear++
		}
	}
	return s
}

// blameStart blames those of the ranks that have been what they are for long enough.
func (d *starts) blameStart(found []finding, s *startSurvey, ranks []int32, reason string, confirm int64) []finding {
	patience := int64(d.cfg.StartPatience)
	f := finding{hang: true, passing: true}
	f.Class, f.Level, f.Since, f.Victims = NoncommunicationHang, Suspected, never, len(s.waiting)+s.busy+s.unclear
	for _, rank := range ranks {
		r, quiet := &d.ev.Ranks[rank], d.quietFor(rank)
		if quiet < patience {
			continue
		}
		why := reason
		switch {
		case reason == reasonStopped && r.Proc == ProcDisk:
			why = reasonDisk
		case reason == reasonGone && (r.Exit.By == ExitUnknown || r.Exit.ok()):
			why, confirm = reasonExited, startSoft
		}
		if f.still = max(f.still, quiet); quiet >= confirm*patience {
			f.Level = Confirmed
		}
		f.Since = min(f.Since, d.now-quiet)
		f.blame(d.rankCulprit(rank, why))
		f.why("%s", d.startSentence(rank, why))
		f.whyOffCPU(d.ev, rank)
	}
	if len(f.Culprits) == 0 {
		return found
	}
	f.why("no communicator has been made with %s; %s", plural(len(f.Culprits), "this rank", "these ranks"), d.othersSentence(s))
	f.Counter = fmt.Sprintf("rank %d making a communicator, or using CPU or storage", f.Culprits[0].Rank)
	return append(found, f)
}

// blameMissing blames the ranks that nobody has seen, when all others have been waiting for long.
func (d *starts) blameMissing(found []finding, s *startSurvey) []finding {
	f := finding{hang: true, passing: true, still: never}
	f.Class, f.Level, f.Victims = NoncommunicationHang, Suspected, len(s.waiting)
	for _, rank := range s.waiting {
		f.still = min(f.still, d.quietFor(rank))
	}
	if f.still < startFirm*int64(d.cfg.StartPatience) {
		return found
	}
	f.Since = d.now - f.still
	for _, rank := range s.missing {
		f.blame(d.rankCulprit(rank, reasonNotJoined))
	}
	f.why("%s of the job never been seen by an agent", plural(len(s.missing), "rank has", "ranks have"))
	f.why("no communicator has been made; %s", d.othersSentence(s))
	f.Counter = fmt.Sprintf("rank %d being seen, or a communicator being made without it", s.missing[0])
	return append(found, f)
}

// blameNobody tells that all ranks wait, and for each other: some of them in NCCL's bootstrap,
// since only that asks the kernel again and again. Ranks that only wait on the network may be servers.
func (d *starts) blameNobody(found []finding, s *startSurvey) []finding {
	f := finding{hang: true, passing: true, still: never}
	f.Class, f.Level, f.Victims = NoncommunicationHang, Suspected, len(s.waiting)
	var others []int32
	for _, rank := range s.waiting {
		f.still = min(f.still, d.quietFor(rank))
		if d.ev.Ranks[rank].WaitsIn != WaitInPolling {
			others = append(others, rank)
		}
	}
	switch {
	case len(others) == len(s.waiting) || f.still < startSoft*int64(d.cfg.StartPatience):
		return found
	case len(others) == 0:
		others = s.waiting
	case f.still >= 2*startSoft*int64(d.cfg.StartPatience):
		f.Level = Confirmed
	}
	f.Since = d.now - f.still
	for _, rank := range others {
		f.blame(d.rankCulprit(rank, reasonNotJoined))
	}
	f.why("no communicator has been made for %s; %s", seconds(f.still), d.othersSentence(s))
	for _, rank := range others {
		f.why("rank %d (pid %d on %s) waits in %s", rank, d.ev.Ranks[rank].PID, d.nodeName(rank), d.ev.Ranks[rank].WaitsIn)
	}
	f.Undetermined = "for whom these ranks wait: all do, none is stopped, and none sleeps on its own"
	f.Counter = "a communicator being made, or any rank using CPU or storage for something else"
	return append(found, f)
}

// startSentence says what a rank does that keeps a job from starting.
func (d *starts) startSentence(rank int32, reason string) string {
	r := &d.ev.Ranks[rank]
	if reason == reasonStopped || reason == reasonDisk {
		return d.reasonSentence(blamed{node: rank, since: r.ProcAt}, reason) + waitsIn(r)
	}
	name := fmt.Sprintf("rank %d (pid %d on %s)", rank, r.PID, d.nodeName(rank))
	if reason == reasonGone || reason == reasonExited {
		return fmt.Sprintf("%s has ended at %s%s before it made a communicator", name, clock(d.endedAt(rank)), r.Exit.howEnded())
	}
	return fmt.Sprintf("%s waits in %s, uses %.2f cores and does no I/O since %s", name, r.WaitsIn, r.CPU, clock(d.ranks[rank].still))
}

// waitsIn is what a rank's first thread waits in, as a part of a sentence.
func waitsIn(r *Rank) string {
	if r.WaitsIn.Known() == WaitInUnknown {
		return ""
	}
	return ", and waits in " + r.WaitsIn.String()
}

// othersSentence says what the other ranks do.
func (d *starts) othersSentence(s *startSurvey) string {
	text := fmt.Sprintf("of the others %s for somebody", plural(len(s.waiting), "waits", "wait"))
	if s.busy+s.unclear > 0 {
		text += fmt.Sprintf(", %d are at work or not to be seen", s.busy+s.unclear)
	}
	if i := slices.IndexFunc(s.waiting, func(r int32) bool { return d.ev.Ranks[r].Starting }); i >= 0 {
		text += fmt.Sprintf(" (rank %d in %s)", s.waiting[i], d.ev.Ranks[s.waiting[i]].WaitsIn)
	}
	return text
}
