package jobsim

import (
	"math"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// How far apart members notice the end of an operation, at most, ns: where they do so at
// once, and where they are woken.
const (
	jitter  = 20_000
	maxWake = 12_000_000 // below a tick
)

// wake is how far apart members notice the end of a communicator's last operation, ns.
func (j *Job) wake(c *comm) float64 {
	return min(float64(j.cfg.Cluster.Wake)*spread(hash(c.id, c.seq, 3), wakeNoise), maxWake)
}

// wakeNoise is the sigma of its logarithm between operations.
const wakeNoise = 1.2

// run lets a rank go on until it is ahead of the tick, waits, or ends.
func (j *Job) run(r *rank) {
	for !r.blocked && !r.frozen && !r.done && r.t < j.until {
		r.io, r.asleep = false, false
		switch r.phase {
		case phaseStart:
			r.phase, r.next = phaseJoin, 0
		case phaseJoin:
			if int(r.next) == len(r.comms) {
				r.phase, r.next = phaseWarm, -1
				if r.step > 0 {
					r.phase = phaseSteps
				}
				r.idleFrom = r.t
				continue
			}
			r.next++
			if k := r.comms[r.next-1]; k.comm != nil {
				j.join(r, k)
			}
		case phaseWarm:
			j.warm(r)
		case phaseSteps:
			j.exec(r)
		case phasePause:
			j.pause(r)
		case phaseLeave:
			j.leave(r)
		}
	}
}

// warm is what comes before the first step: loading and compiling, then pauses.
func (j *Job) warm(r *rank) {
	if r.next < 0 {
		r.next = 0
		j.takes(r, int64(float64(j.cfg.Warmup)*r.rng.between(0.8, 1.1)))
		return
	}
	if !j.pausing(r, func(p *Pause) bool { return p.Every == 0 }) {
		r.phase = phaseSteps
	}
}

func (j *Job) pause(r *rank) {
	if !j.pausing(r, func(p *Pause) bool { return p.Every > 0 && int(r.step)%p.Every == 0 }) {
		r.phase = phaseSteps
		if j.cfg.ResizeAt > 0 && int(r.step) == j.cfg.ResizeAt {
			r.phase = phaseLeave
		}
	}
}

// pausing runs the rank's next pause that is due, each as two turns: it, and what
// comes after; false when none is left.
func (j *Job) pausing(r *rank, due func(*Pause) bool) bool {
	if r.next&1 == 1 {
		r.next++
		r.mark, r.markAt = record.MarkNone, 0
	}
	for ; int(r.next/2) < len(j.cfg.Pauses); r.next += 2 {
		p := &j.cfg.Pauses[r.next/2]
		if !due(p) || p.Rank != AllRanks && int32(p.Rank) != r.id {
			continue
		}
		d := float64(p.Length) * r.rng.between(0.975, 1.025)
		d += float64(r.rng.int63n(int64(p.Spread)))
		if p.Mark != record.MarkNone {
			r.mark, r.markAt = p.Mark, r.t
		}
		r.next++
		j.takes(r, int64(d))
		r.io, r.asleep = p.IO, p.Sleep || p.IO
		return true
	}
	return false
}

// takes makes a rank busy with its own code.
func (j *Job) takes(r *rank, d int64) {
	r.since = r.t
	if j.slowing {
		d = j.slowed(r, d)
	}
	r.t += d
}

// shows has a rank look as a test's program says.
func (r *rank) shows(in *instr) {
	r.io, r.asleep, r.throttled = in.io, in.sleep || in.io, in.throttled
	if in.mark != r.mark {
		r.mark, r.markAt = in.mark, 0
		if in.mark != 0 {
			r.markAt = r.since
		}
	}
}

// exec runs one instruction of the step's program.
func (j *Job) exec(r *rank) {
	if r.pc == 0 {
		r.prog = nil
		if j.odd {
			r.prog = j.oddProgram(r)
		}
		if j.cfg.program != nil {
			r.prog = j.cfg.program(int(r.id), int(r.step), j.progs[r.stage])
		}
	}
	prog := j.progs[r.stage]
	if r.prog != nil {
		prog = r.prog
	}
	in := &prog[r.pc]
	r.pc++
	if in.fault > 0 {
		j.faults[in.fault-1].onset = max(r.t, 1)
	}
	switch in.op {
	case opCompute, opExpert:
		d := float64(in.dur) * j.noise[r.rng.next()>>54]
		if j.cfg.Lengths > 0 {
			d *= j.length(r, in.micro)
		}
		if in.op == opExpert && j.cfg.Experts > 0 {
			d *= spread(r.rng.next(), j.cfg.Experts)
		}
		if j.cfg.Hiccups > 0 && r.rng.float() < j.cfg.Hiccups {
			d += j.hiccup(r)
		}
		if j.cfg.Collect > 0 && r.t >= r.collects {
			if r.collects > 0 {
				d += float64(j.cfg.Garbage) * r.rng.between(0.5, 1.5)
			}
			r.collects = r.t + int64(float64(j.cfg.Collect)*r.rng.between(0.5, 1.5))
		}
		j.takes(r, int64(d))
		if j.cfg.program != nil {
			r.shows(in)
		}
	case opColl:
		k := r.comms[in.slot]
		k.comm.scale = in.scale
		j.called(r, k, in.coll, -1, in.bytes)
		if j.failed(r, k) {
			return
		}
		j.start(r, k, in.coll, in.bytes, r.t, r.t)
		r.blocked, r.waits = true, k.comm
		j.progress(k.comm)
	case opAsync:
		k := r.comms[in.slot]
		if j.failed(r, k) {
			return
		}
		m := &k.comm.members[k.member]
		j.called(r, k, in.coll, -1, in.bytes)
		if m.Open() || len(m.queue) > 0 {
			m.queue = append(m.queue, call{r.t, in.coll, in.bytes})
			m.Enqueued++
			m.EnqueuedAt, m.Coll, m.Bytes = r.t, in.coll, in.bytes
			j.touch(k.comm, m)
			return
		}
		j.start(r, k, in.coll, in.bytes, r.t, r.t)
		j.progress(k.comm)
	case opWait:
		k := r.comms[in.slot]
		if m := &k.comm.members[k.member]; m.Open() || len(m.queue) > 0 {
			r.blocked, r.waits = true, k.comm
		} else {
			r.t = max(r.t, m.FinishedAt)
		}
	case opPipe:
		j.pipe(r, in)
	case opStep:
		r.step++
	case opPause:
		r.pc = 0
		r.phase, r.next = phasePause, 0
	}
}

// hiccup is for how long something else has a rank's CPU.
func (j *Job) hiccup(r *rank) float64 {
	if j.cfg.Tail == 0 {
		return float64(r.rng.int63n(int64(j.cfg.Hiccup)))
	}
	return min(float64(j.cfg.Hiccup)*math.Pow(max(r.rng.float(), 1e-9), -1/j.cfg.Tail), float64(longestHiccup))
}

const longestHiccup = 1500 * time.Millisecond

// failed reports whether a communicator has failed at this rank: a call is the
// moment at which the program learns of it.
func (j *Job) failed(r *rank, k ref) bool {
	if k.comm.members[k.member].State != record.CommAborted {
		return false
	}
	r.blocked, r.waits = true, k.comm
	j.at(r.t, func() { j.fail(r) })
	return true
}

// length is the factor of a microbatch's length: ranks that work on the same
// sequences share it.
func (j *Job) length(r *rank, micro uint16) float64 {
	return spread(hash(j.cfg.Seed^uint64(r.data)<<32, uint64(r.step), uint64(micro)), j.cfg.Lengths)
}

// called keeps a rank's last calls.
func (j *Job) called(r *rank, k ref, coll record.CollKind, peer int32, bytes uint64) {
	m := &k.comm.members[k.member]
	r.calls[r.ncalls%diagnosis.MaxCalls] = diagnosis.Call{Comm: k.comm.id, Seq: m.Enqueued + 1, Coll: coll, Peer: peer, Bytes: bytes, At: r.t}
	r.ncalls++
}

func (j *Job) touch(c *comm, m *member) {
	m.dirty = true
	c.touched = j.tick
}

// start puts a member into a collective.
func (j *Job) start(r *rank, k ref, coll record.CollKind, bytes uint64, enqueued, at int64) {
	c := k.comm
	m := &c.members[k.member]
	if len(m.queue) == 0 {
		m.Enqueued++
		m.EnqueuedAt, m.Coll, m.Bytes = enqueued, coll, bytes
	}
	m.Started++
	m.StartedAt, m.Peer = at, -1
	m.own = max(0, at-r.idleFrom)
	if c.entered > 0 && (c.coll != coll || c.bytes != bytes) {
		c.odd = true
	}
	c.entered++
	c.coll, c.bytes = coll, bytes
	c.last = max(c.last, at)
	j.touch(c, m)
}

// progress ends a collective that all have entered, or has it end later.
func (j *Job) progress(c *comm) {
	if int(c.entered) < len(c.members) || c.ends != 0 || c.stalled {
		return
	}
	d, stalled := j.transfer(c)
	if stalled || c.frozen > 0 || c.odd {
		c.stalled, c.stalledAt = true, c.last
		return
	}
	c.ends = c.last + d
	if c.ends+j.slack < j.until {
		j.finish(c)
		return
	}
	j.ending = append(j.ending, c)
}

// endPending ends what ends in this tick.
func (j *Job) endPending() {
	kept := j.ending[:0]
	all := j.ending
	j.ending = nil
	for _, c := range all {
		switch {
		case c.ends == 0: // it does not move any more
		case c.ends+j.slack < j.until:
			j.finish(c)
		default:
			kept = append(kept, c)
		}
	}
	j.ending = append(kept, j.ending...)
	j.endPairs()
}

// finish ends the collective of c for all members.
func (j *Job) finish(c *comm) {
	last, ends := c.last, c.ends
	c.seq++
	c.entered, c.last, c.ends, c.touched = 0, 0, 0, j.tick
	s := j.sample(c, len(c.members))
	late := c.seq * 0x9e3779b97f4a7c15
	apart := float64(1 << 14) // below jitter
	if j.cfg.Cluster.Wake > 0 {
		apart = j.wake(c)
	}
	restart := false
	for i := range c.members {
		m := &c.members[i]
		r := &j.ranks[m.World]
		end := ends + int64(apart*unit(late+uint64(i)*0xbf58476d1ce4e5b9))
		if s != nil {
			s.take(j, c, i, m.StartedAt, end)
		}
		j.finished(r, m, last, end)
		if len(m.queue) > 0 {
			restart = true
		} else if r.waits == c && r.blocked {
			j.release(r, end)
		}
	}
	if !restart {
		return
	}
	for i := range c.members {
		m := &c.members[i]
		if len(m.queue) == 0 {
			continue
		}
		q := m.queue[0]
		r := &j.ranks[m.World]
		j.start(r, ref{c, int32(i)}, q.coll, q.bytes, q.at, max(q.at, m.FinishedAt))
		m.queue = m.queue[1:]
	}
	j.progress(c)
}

// finished counts a member's operation.
func (j *Job) finished(r *rank, m *member, last, end int64) {
	m.Finished = m.Started
	m.FinishedAt = end
	m.Ops++
	m.OwnNs += uint64(m.own)
	m.MaxOwnNs = max(m.MaxOwnNs, uint64(m.own))
	m.WaitNs += uint64(max(0, last-m.StartedAt))
	m.TransferNs += uint64(max(0, end-max(last, m.StartedAt)))
	m.dirty = true
	r.idleFrom = max(r.idleFrom, end)
}

// release lets a rank that waited go on.
func (j *Job) release(r *rank, at int64) {
	r.blocked, r.waits = false, nil
	r.t = max(r.t, at)
	if !r.frozen && !r.done && r.t < j.until {
		j.ready = append(j.ready, r.id)
	}
}

// join waits in a communicator's rendezvous.
func (j *Job) join(r *rank, k ref) {
	c := k.comm
	m := &c.members[k.member]
	m.State, m.StateAt = record.CommJoining, r.t
	j.touch(c, m)
	c.joined++
	c.joinLast = max(c.joinLast, r.t)
	r.blocked, r.waits = true, c
	if int(c.joined) < len(c.members) {
		return
	}
	at := c.joinLast + int64(5*time.Millisecond) + int64(len(c.members))*20_000
	for i := range c.members {
		m := &c.members[i]
		m.State, m.StateAt = record.CommJoined, at
		j.touch(c, m)
		j.release(&j.ranks[m.World], at)
	}
}

// leave is an elastic resize: everybody leaves, the last replica for good.
func (j *Job) leave(r *rank) {
	for s := range r.comms {
		k := r.comms[s]
		if k.comm == nil {
			continue
		}
		m := &k.comm.members[k.member]
		m.State, m.StateAt = record.CommLeft, r.t
		j.touch(k.comm, m)
		r.former = append(r.former, k)
		r.comms[s] = ref{}
	}
	if int(r.data) == j.cfg.Data-1 {
		at := r.t
		j.at(at, func() { j.end(r, ending{closed: true}) })
		r.t = never
		return
	}
	for s := range j.resized {
		for _, c := range j.resized[s] {
			for i := range c.members {
				if c.members[i].World == r.id {
					r.comms[s] = ref{c, int32(i)}
				}
			}
		}
	}
	r.phase, r.next = phaseJoin, 0
}
