package diagnosistest

import (
	"slices"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// Reaction of survivors to a peer's death.
type Reaction uint8

// Pause is a part of the program outside of collectives.
type Pause struct {
	Every  int             // steps; 0: once, before the first step
	Length time.Duration   // mean; ranks differ by a tenth, or by Spread
	Spread time.Duration   // the slowest takes that much longer than the fastest
	Mark   record.MarkCode // MarkNone: the program says nothing
	IO     bool            // reads or writes storage; else it computes
	Sleep  bool            // neither: it waits for something
	Rank   int             // the one rank that does it, or AllRanks
}

// AllRanks in Pause.Rank means that everyone pauses.
const AllRanks = -1

// FaultKind is what goes wrong.
type FaultKind uint8

// Fault is one injected fault.
type Fault struct {
	Kind   FaultKind
	At     time.Duration // since the start
	Until  time.Duration // 0: for ever
	Rank   int
	Peer   int
	Factor float64
	Extra  time.Duration // of each computation
}

func (f *Fault) during(t int64) bool {
	return t >= int64(f.At) && (f.Until == 0 || t < int64(f.Until))
}

func (j *Job) connFault(x *conn) (factor float64, stalled bool) {
	factor = 1
	for i := range j.cfg.Faults {
		f := &j.cfg.Faults[i]
		if x.comm.ranks[x.src] != f.Rank || x.comm.ranks[x.dst] != f.Peer || !f.during(j.now) {
			continue
		}
		switch f.Kind {
		case StallConn:
			return 1, true
		case SlowConn:
			factor = f.Factor
		}
	}
	return factor, false
}

// slows reports whether a fault makes a connection between two ranks slow.
func (c *Config) slows(a, b int) bool {
	return slices.ContainsFunc(c.Faults, func(f Fault) bool {
		return f.Kind == SlowConn && (f.Rank == a && f.Peer == b || f.Rank == b && f.Peer == a)
	})
}

func (j *Job) memberOf(r *rank, c *comm) int {
	for i, w := range c.ranks {
		if w == r.id {
			return i
		}
	}
	return -1
}

func (r *rank) mine() []*comm {
	var cs []*comm
	for _, c := range []*comm{r.tpComm, r.dpComm, r.ppComm, r.worldComm} {
		if c != nil {
			cs = append(cs, c)
		}
	}
	return cs
}

// join waits in the rendezvous of a rank's communicators.
func (j *Job) join(r *rank) {
	for _, c := range r.mine() {
		r.member[c].State = record.CommJoining
		c.joined++
	}
	r.op = nil
	for _, x := range j.ranks {
		ready := !x.done && !x.frozen
		for _, c := range x.mine() {
			ready = ready && c.joined == len(c.ranks) && x.member[c].State == record.CommJoining
		}
		if !ready || len(x.mine()) == 0 {
			continue
		}
		for _, c := range x.mine() {
			x.member[c].State = record.CommJoined
		}
		x.idleFrom = j.now
		j.at(j.now+j.rng.Int64N(1e6), x, func() { j.run(x) })
	}
}

// leave ends a rank's communicators for a resize.
func (j *Job) leave(r *rank) {
	for _, c := range r.mine() {
		r.member[c].State = record.CommLeft
	}
	r.commGen++
	if r.dp == j.cfg.DP-1 {
		r.done, r.proc = true, diagnosis.ProcExited
		r.tpComm, r.dpComm, r.ppComm, r.worldComm = nil, nil, nil, nil
	}
	for _, x := range j.ranks {
		if x.commGen == 0 {
			// The others keep their old communicators until they get here.
			if r.commGen == 1 {
				j.reform(r)
			}
			return
		}
	}
	j.reform(r)
}

// reform gives a rank its communicators of the second generation, made when
// the first rank asks.
func (j *Job) reform(r *rank) {
	if r.done {
		return
	}
	made := false
	for _, c := range j.comms {
		made = made || c.gen == 1
	}
	if !made {
		old := make([][4]*comm, len(j.ranks))
		for i, x := range j.ranks {
			old[i] = [4]*comm{x.tpComm, x.dpComm, x.ppComm, x.worldComm}
		}
		j.form(1, j.cfg.DP-1)
		for i, x := range j.ranks {
			if x != r {
				x.tpComm, x.dpComm, x.ppComm, x.worldComm = old[i][0], old[i][1], old[i][2], old[i][3]
			}
		}
		return
	}
	r.tpComm, r.dpComm, r.ppComm, r.worldComm = nil, nil, nil, nil
	for _, c := range j.comms {
		if c.gen != 1 || j.memberOf(r, c) < 0 {
			continue
		}
		switch c.name[:2] {
		case "tp":
			r.tpComm = c
		case "dp":
			r.dpComm = c
		case "pp":
			r.ppComm = c
		case "wo":
			r.worldComm = c
		}
	}
}

// inject schedules a fault that does not act through connections or computing.
func (j *Job) inject(f *Fault) {
	switch f.Kind {
	case Kill, Stop:
		r := j.ranks[f.Rank]
		j.at(int64(f.At), nil, func() { j.freeze(r, f.Kind) })
		if f.Kind == Stop && f.Until > 0 {
			j.at(int64(f.Until), nil, func() { j.thaw(r) })
		}
	case LostNode:
		j.at(int64(f.At), nil, func() {
			n := j.nodes[j.ranks[f.Rank].node]
			n.lost = true
			for _, r := range j.ranks {
				if r.node == n.id {
					j.freeze(r, Stop)
				}
			}
			if j.cfg.Survivors == Linger {
				return
			}
			for _, r := range j.ranks {
				if r.node == n.id {
					j.bereave(r)
				}
			}
		})
	case LostAgent:
		j.at(int64(f.At), nil, func() { j.nodes[j.ranks[f.Rank].node].lost = true })
		if f.Until > 0 {
			j.at(int64(f.Until), nil, func() { j.nodes[j.ranks[f.Rank].node].lost = false })
		}
	case StallConn:
		if f.Until > 0 {
			j.at(int64(f.Until), nil, func() {
				for _, c := range j.comms {
					for _, o := range c.sorted() {
						if o.stalled != nil {
							o.stalled = nil
							j.finishWhenAll(o)
						}
					}
				}
			})
		}
	}
}

func (c *comm) sorted() []*op {
	var ops []*op
	for _, o := range c.ops {
		ops = append(ops, o)
	}
	for i := range ops {
		for k := i; k > 0 && ops[k].seq < ops[k-1].seq; k-- {
			ops[k], ops[k-1] = ops[k-1], ops[k]
		}
	}
	return ops
}

// freeze takes a rank's process off its CPUs, for ever or until thaw. An
// operation under way does not end for anyone.
func (j *Job) freeze(r *rank, why FaultKind) {
	if r.done || r.frozen {
		return
	}
	r.frozen, r.stuck, r.stuckAt = true, why, j.now
	r.gen++
	r.proc = diagnosis.ProcStopped
	if o := r.op; o != nil && o.ends > 0 {
		for i, w := range o.comm.ranks {
			if x := j.ranks[w]; o.start[i] != 0 && o.out[i] == 0 && x != r && x.op == o {
				x.gen++
			}
		}
		o.ends = 0
	}
	if why == Kill {
		r.proc = diagnosis.ProcGone
		if j.cfg.Survivors != Linger {
			j.bereave(r)
		}
	}
}

func (j *Job) thaw(r *rank) {
	r.frozen, r.stuck, r.proc = false, 0, diagnosis.ProcRunning
	switch {
	case r.op != nil:
		j.finishWhenAll(r.op)
	case r.computing:
		j.at(max(j.now, r.until), r, func() { j.computed(r) })
	default:
		j.at(j.now, r, func() { j.run(r) })
	}
}

// bereave lets those who share a communicator with the dead abort and react,
// and those who share one with them in turn.
func (j *Job) bereave(dead *rank) {
	for _, c := range dead.mine() {
		for _, w := range c.ranks {
			x := j.ranks[w]
			if x == dead || x.erred || x.done || x.frozen {
				continue
			}
			x.erred = true
			j.at(j.now+200e6+j.rng.Int64N(1500e6), nil, func() { j.fail(x) })
		}
	}
}

func (j *Job) fail(r *rank) {
	if r.frozen || r.done {
		return
	}
	for _, c := range r.mine() {
		r.member[c].State = record.CommAborted
	}
	r.gen++
	r.op = nil
	r.frozen, r.stuck, r.stuckAt = true, Hang, j.now
	r.proc = diagnosis.ProcRunning
	if j.cfg.Survivors != Idle {
		j.at(j.now+50e6+j.rng.Int64N(500e6), nil, func() {
			r.done = true
			r.proc = diagnosis.ProcExited
			if j.cfg.Survivors == Crash {
				r.proc = diagnosis.ProcGone
			}
		})
	}
	j.bereave(r)
}

const (
	Linger Reaction = iota // they notice nothing and hang
	Exit                   // abort within two seconds and exit, closing their recorders
	Crash                  // abort within two seconds and die without closing them
	Idle                   // abort within two seconds and sleep
)

const (
	Kill      FaultKind = iota + 1 // SIGKILL
	Stop                           // SIGSTOP
	Hang                           // the program sleeps for ever in its own code
	Spin                           // the program computes for ever
	StallConn                      // Rank → Peer delivers no more, on all communicators
	SlowConn                       // Rank → Peer takes Factor times as long; it is one over a network, wherever both are
	SlowRank                       // Rank's own time is Factor times as long, plus Extra
	LostAgent                      // Rank's node reports no more; the job goes on
	LostNode                       // Rank's node is gone with all its ranks
	SlowAll                        // everybody's own time is Factor times as long
)
