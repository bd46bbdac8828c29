package diagnosis

import "cmp"

// pairs follows how long sends and receives take a rank once the other side has begun, too. Of
// those no collective is sampled, for their sequence numbers are each rank's own; each member's
// sums tell it all the same, stretch by stretch. A rank that is late shows in what its peers wait,
// and not in this. What a slow connection carries takes its receiver longer, over some transports
// its sender, too: moves asks the monitors which connection it is.
type pairs struct {
	*window
	drags *drags

	judged int32   // the drags' stretches
	length float64 // of those that have not been taken in, ns
	of     []pairComm
	moved  []movedComm

	before, last []float64 // scratch
	starts       []int64
}

// pairComm is what is known of a communicator that carries sends and receives.
type pairComm struct {
	id      uint64
	members []pairMember
	rounds  int // stretches of which something is kept
	until   [pairRounds]int64
	length  [pairRounds]float32 // ns
}

// pairMember is what is known of a member, by stretch modulo pairRounds.
type pairMember struct {
	ops, transfer uint64 // sums at the last stretch's end
	usual         baseline
	took          [pairRounds]float32 // ns an operation; 0 where there was none
	n             [pairRounds]float32 // operations
}

const (
	pairRounds = 48
	// pairGrew is how many times as long as usual a member's operations take at least.
	pairGrew = 1.3
	// leastPairs is the share of the time that they take it longer, at least. In a pipeline a part of it is made
	// up for where ranks would have waited anyway: of the job's time a third will do.
	leastPairs = 0.04
)

// pairHorizons are the numbers of stretches that are looked at.
var pairHorizons = [...]int{6, 8, 12, 16, 24}

func (d *pairs) forget() { d.judged, d.length, d.of, d.moved = 0, 0, d.of[:0], d.moved[:0] }

func (d *pairs) find(found []finding) []finding {
	if d.drags.windows < d.judged {
		d.forget()
	}
	if d.drags.windows > d.judged {
		d.judged = d.drags.windows
		// Where the program marks no steps a stretch may be a part of one: of these several are one.
		if d.length += float64(d.drags.last); d.view.step > 0 || d.length >= float64(roundTime) {
			d.take()
			d.judge()
			d.length = 0
		}
	}
	return found // moves tells
}

// take takes in the stretch that has ended.
func (d *pairs) take() {
	d.of = resized(d.of, len(d.ev.Comms))
	for ci := range d.ev.Comms {
		x, members := &d.of[ci], d.ev.Comms[ci].Members
		if !d.comms[ci].p2p || d.comms[ci].former {
			continue
		}
		if x.id != d.ev.Comms[ci].ID || len(x.members) != len(members) {
			*x = pairComm{id: d.ev.Comms[ci].ID, members: make([]pairMember, len(members))}
		}
		at := x.rounds % pairRounds
		x.rounds++
		x.until[at], x.length[at] = d.now, float32(d.length)
		for i := range members {
			m, p := &members[i], &x.members[i]
			p.took[at], p.n[at] = 0, 0
			if n := m.Ops - p.ops; m.Ops > p.ops && p.ops > 0 && m.TransferNs >= p.transfer {
				p.n[at], p.took[at] = float32(n), float32(m.TransferNs-p.transfer)/float32(n)
				p.usual.learn(float64(p.took[at]))
			}
			p.ops, p.transfer = m.Ops, m.TransferNs
		}
	}
}

// judge finds the members whose operations take longer than before.
func (d *pairs) judge() {
	d.moved = d.moved[:0]
	if d.lost {
		return
	}
	for ci := range d.of {
		x := &d.of[ci]
		if len(x.members) == 0 || x.rounds < pairHorizons[0] || len(d.moved) == maxSlow || d.comms[ci].former {
			continue
		}
		of := movedComm{comm: int32(ci)}
		for i := range x.members {
			if !x.high(i) {
				continue
			}
			best := movedComm{}
			for _, h := range pairHorizons {
				if s, ok := d.over(x, i, h); ok && cmp.Or(cmp.Compare(s.level, best.level), cmp.Compare(s.likely, best.likely), cmp.Compare(s.cost, best.cost)) > 0 {
					best = s
				}
			}
			if best.likely == 0 {
				continue
			}
			best.comm, best.members = of.comm, append(of.members, int32(i))
			if cmp.Or(cmp.Compare(best.level, of.level), cmp.Compare(best.likely, of.likely), cmp.Compare(best.cost, of.cost)) > 0 {
				of = best
			}
			of.members = best.members
		}
		if len(of.members) > 0 {
			d.moved = append(d.moved, of)
		}
	}
}

// high reports whether a member's operations have taken longer than usual in two of the last three stretches:
// of the others no more has to be known.
func (x *pairComm) high(i int) bool {
	p, n := &x.members[i], 0
	for k := range min(3, x.rounds) {
		if took := p.took[(x.rounds-1-k)%pairRounds]; float64(took) > pairGrew*p.usual.mean {
			n++
		}
	}
	return n >= 2
}

// over judges a member by the last h stretches.
func (d *pairs) over(x *pairComm, i, h int) (s movedComm, ok bool) {
	p, all := &x.members[i], min(x.rounds, pairRounds)
	before, last, starts := d.before[:0], d.last[:0], d.starts[:0]
	sum, ops, length := 0.0, 0.0, 0.0
	for k := range all {
		at := (x.rounds - all + k) % pairRounds
		took := float64(p.took[at])
		switch {
		case p.n[at] == 0:
		case all-k > h:
			before = append(before, took)
		default:
			last, starts = append(last, took), append(starts, x.until[at]-int64(x.length[at]))
			sum, ops = sum+took*float64(p.n[at]), ops+float64(p.n[at])
		}
		if all-k <= h {
			length += float64(x.length[at])
		}
	}
	d.before, d.last, d.starts = before, last, starts
	if len(last) < pairHorizons[0] || len(before) < len(last) {
		return s, false
	}
	s.then, s.now = median(before), sum/ops
	excess, slower := (sum-s.then*ops)/max(length, 1), d.drags.slower(int32(h))
	if s.cost = min(excess, slower); excess < leastPairs || slower < leastPairs/3 {
		return s, false
	}
	chance, times, first := exceeds(before, last, s.then)
	if first < 0 {
		return s, false
	}
	s.times, s.of, s.since = times, len(last), starts[first]
	s.level = d.levelBy(chance, s.since, lateSuspected, lateConfirmed)
	s.likely = d.levelBy(chance, s.since, likelySuspected, likelyConfirmed)
	return s, s.likely > 0
}
