package diagnosis

import (
	"math"
	"slices"
)

// arrivals finds ranks that come late to collectives more often than before, by when every
// member entered each sampled one. Sums over windows see what a rank costs its job on average;
// a rank that is late in some steps and not in others they take for one that has always been
// away once in a while. Here the past is counted in collectives instead: how often did any
// member come so late, and how often did this one.
type arrivals struct {
	*window
	drags *drags
	of    []arrivalsOf // by index into Evidence.Comms
	known []int32      // communicators of which some are known
	kept  int          // parts of all communicators
	at    int64        // last look
	late  []lateRank
	moved []movedComm

	scratch []float64
	tooks   []float64 // scratch, too
}

// arrivalsOf is what is known of a communicator's sampled collectives, oldest first.
type arrivalsOf struct {
	seq   uint64 // the last one that was looked at
	end   []int64
	parts []arrivalPart
	// Collectives follow each other in rounds of period, a step's as a rule, of which the first is
	// phase modulo that; 0: not known, a round is as many as come in roundTime.
	period, phase uint64
	bySteps       bool // the times between them do not repeat: period is by how many come in a step
	fresh         int  // parts since period was found
	appended      int  // parts that there have been
	dropped       int  // how often old parts have been dropped
	rounds, short grouped
	moved         movedBefore

	step0, seq0 uint64 // a step of the job, and the last collective then
}

// arrivalPart is of one collective, of those of arrivalPartTime where there are many, or of a round.
type arrivalPart struct {
	from, until int64 // last entry before it, and of its last collective
	seq         uint64
	seqs, n     uint32 // collectives since the part before; sampled ones
	rank        int32  // world rank that was last by most, -1: nobody by more than clocks may be wrong
	late        float32
	took        float32 // from when the last one had entered to when the first one left, or the last where they do not wait
	// Of the sampled ones the number of those before which another one was sampled, and how late rank was to these.
	knownN    uint32
	knownLate float32
}

const (
	arrivalsEvery   = int64(300e6) // between two looks, ns
	arrivalPartTime = int64(250e6)
	roundTime       = int64(1e9)
	shortRound      = roundTime / 2
	mostPeriod      = 64  // collectives in a round
	periodSure      = 3.5 // standard errors that the correlation which shows it is above nothing
	leastSteps      = 8   // of a job, to know how many collectives come in one
	// arrivalWait is how long members' reports of a collective may take.
	arrivalWait = int64(3e9)
	// mostParts are kept of a communicator, allParts of all.
	mostParts = 512
	allParts  = 1 << 17
)

func (d *arrivals) forget() {
	clear(d.of)
	d.of, d.late, d.moved, d.known, d.kept = d.of[:0], d.late[:0], d.moved[:0], d.known[:0], 0
}

func (d *arrivals) find(found []finding) []finding {
	if d.now-d.at >= arrivalsEvery || d.now < d.at {
		d.at = d.now
		d.of = resized(d.of, len(d.ev.Comms))
		d.take()
		d.judge()
	}
	return d.findings(found)
}

// take takes in collectives of which all is known by now.
func (d *arrivals) take() {
	waits := map[int32]bool{} // communicators with an earlier collective that is not known yet
	for i := range d.ev.Arrivals {
		a := &d.ev.Arrivals[i]
		if a.Comm < 0 || int(a.Comm) >= len(d.of) || a.Seq <= d.of[a.Comm].seq || waits[a.Comm] || a.Coll.PointToPoint() || d.comms[a.Comm].p2p || d.comms[a.Comm].former {
			continue
		}
		// A few members' words decide neither that a collective is over nor that it was.
		known, told, off := true, 0, 0 // off: told of a time long ago, or to come
		for m, s := range a.Start {
			known = known && s > 0 && a.End[m] > 0
			if s > 0 {
				told++
			}
			if s > 0 && (s < d.now-arrivalWait || s > d.now+arrivalWait) {
				off++
			}
		}
		x := &d.of[a.Comm]
		switch {
		case known && len(a.Start) == len(d.ev.Comms[a.Comm].Members) && len(a.Start) > 1:
			d.takeOne(x, a)
			if x.seq = a.Seq; x.step0 == 0 {
				x.step0, x.seq0 = d.view.step, a.Seq
			}
		case 2*off > told: // it will not be
			if 2*told > len(a.Start) {
				x.seq, x.end = a.Seq, x.end[:0]
			}
		default:
			waits[a.Comm] = true
		}
	}
	if d.kept > allParts {
		for i := range d.of {
			d.of[i].drop(len(d.of[i].parts) / 2)
		}
		d.kept = 0
		d.known = d.known[:0]
		for i := range d.of {
			if n := len(d.of[i].parts); n > 0 {
				d.kept, d.known = d.kept+n, append(d.known, int32(i))
			}
		}
	}
}

// takeOne takes in a collective.
func (d *arrivals) takeOne(x *arrivalsOf, a *Arrival) {
	members := d.ev.Comms[a.Comm].Members
	last, second := -1, -1
	for m, s := range a.Start {
		switch {
		case last < 0 || s > a.Start[last]:
			last, second = m, last
		case second < 0 || s > a.Start[second]:
			second = m
		}
	}
	late := a.Start[last] - a.Start[second]
	if p, q := nodeOf(d.ev, members[last].World), nodeOf(d.ev, members[second].World); p != q && p >= 0 && q >= 0 {
		late -= d.ev.Nodes[p].MapError + d.ev.Nodes[q].MapError
	}
	// Who left the one before later than others is as late in this one, and for no fault of its own.
	known := len(x.end) == len(a.End) && a.Seq == x.seq+1
	if known {
		v := make([]float64, len(x.end))
		for m := range x.end {
			v[m] = float64(x.end[m])
		}
		late -= max(0, x.end[last]-int64(median(v)))
	}
	rank := members[last].World
	if late <= 0 || d.world(rank) < 0 || x.seq == 0 { // to the first one ranks come when they have started
		rank, late = -1, 0
	}
	seqs := uint32(0)
	if x.seq > 0 {
		seqs = uint32(min(a.Seq-x.seq, math.MaxUint32))
	}
	x.end = append(x.end[:0], a.End...)
	at := a.Start[last]
	left := slices.Max(a.End)
	if a.Coll.Synchronizes() {
		left = slices.Min(a.End)
	}
	if seqs > 1 || x.dense() { // those from now on are several, and no rounds like those before
		x.period, x.bySteps = 0, false
	}
	part := arrivalPart{from: at, until: at, seq: a.Seq, seqs: seqs, n: 1, rank: rank, late: float32(late), took: float32(max(0, left-at))}
	if known {
		part.knownN, part.knownLate = 1, part.late
	}
	if n := len(x.parts); n > 0 {
		p := &x.parts[n-1]
		if x.dense() && at-p.from < arrivalPartTime && at >= p.from {
			p.join(&part)
			return
		}
		part.from = p.until
	} else {
		d.known = append(d.known, a.Comm)
	}
	x.parts = append(x.parts, part)
	x.fresh++
	x.appended++
	d.kept++
	if len(x.parts) > mostParts {
		d.kept -= len(x.parts)
		x.drop(mostParts / 8)
		d.kept += len(x.parts)
	}
}

// drop drops the oldest parts.
func (x *arrivalsOf) drop(n int) {
	x.parts = slices.Delete(x.parts, 0, n)
	x.dropped++
}

// join adds a later part. Its late one is who has been late by most.
func (p *arrivalPart) join(q *arrivalPart) {
	switch {
	case q.rank == p.rank:
		p.late, p.knownLate = p.late+q.late, p.knownLate+q.knownLate
	case q.late > p.late:
		p.rank, p.late, p.knownLate = q.rank, q.late, q.knownLate
	}
	p.took, p.knownN = p.took+q.took, p.knownN+q.knownN
	p.until, p.seq, p.seqs, p.n = q.until, q.seq, p.seqs+q.seqs, p.n+q.n
}

// dense reports whether there are more collectives than are kept one by one.
func (x *arrivalsOf) dense() bool {
	const few = 32
	n := len(x.parts)
	if n < few {
		return false
	}
	p := x.parts[n-few:]
	return p[few-1].until-p[0].until < few*int64(30e6) || p[few-1].seq-p[0].seq > 3*few/2
}
