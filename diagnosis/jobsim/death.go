package jobsim

import (
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// Dying is how the job's program and its launcher deal with an end that they did
// not expect.
type Dying struct {
	Reaction Reaction
	// Silent is how long it takes until a host that does not answer is given up: 5 s.
	// A process that ends on a host that lives is known within 50 ms.
	Silent time.Duration
	// Bound is how long a connection is tried again before it fails: 30 s.
	Bound time.Duration
	// React is how long a program takes from the error to its end, at most: 500 ms.
	React time.Duration
	// Launcher ends the rest of the job this long after the first process has
	// ended by itself; 0: it does not.
	Launcher time.Duration
}

// Reaction is what a program does with an error of a communicator.
type Reaction uint8

const (
	// LogFatal exits with 1 at once and closes nothing.
	LogFatal Reaction = iota
	// AbortOne aborts the communicator that failed and exits with 1, closing nothing else.
	AbortOne
	// AbortAll aborts all its communicators, then exits with 1.
	AbortAll
	// CloseAll closes everything in good order, its recorder, too, and exits with 1.
	CloseAll
	// Panics ends with 2.
	Panics
	// AbortSleep aborts all and sleeps on: something outside is to end it.
	AbortSleep
	// Linger never hears of it, as NCCL does not without its watchdog.
	Linger
	numReactions
)

var reactionNames = [numReactions]string{"log_fatal", "abort_one", "abort_all", "close_all", "panics", "abort_sleep", "linger"}

func (r Reaction) String() string { return reactionNames[min(r, numReactions-1)] }

func (d *Dying) setDefaults() {
	if d.Silent == 0 {
		d.Silent = 5 * time.Second
	}
	if d.Bound == 0 {
		d.Bound = 30 * time.Second
	}
	if d.React == 0 {
		d.React = 500 * time.Millisecond
	}
}

// ending is how a process ends.
type ending struct {
	code, signal int
	closed       bool // its recorder, in good order
	asked        bool // by its supervisor
}

// freeze takes a rank's process off its CPUs. What it takes part in does not end.
func (j *Job) freeze(r *rank, why stuckKind) {
	if r.frozen || r.done {
		return
	}
	r.frozen, r.stuck, r.stuckAt = true, why, j.now
	switch why {
	case stuckStop:
		r.proc = diagnosis.ProcStopped
	case stuckDisk:
		r.proc = diagnosis.ProcDisk
	}
	for s := range r.comms {
		if k := r.comms[s]; k.comm != nil {
			k.comm.frozen++
			j.stall(k.comm)
		}
	}
}

// freezeGPU stops what a rank's GPU does; its process spins, or sleeps, for it.
func (j *Job) freezeGPU(r *rank) {
	j.freeze(r, stuckIdle)
	if j.cfg.Cluster.Spin {
		r.stuck = stuckBusy
	}
}

// stall makes a collective under way stand still.
func (j *Job) stall(c *comm) {
	c.touched = j.tick
	if c.ends != 0 {
		c.ends, c.stalled, c.stalledAt = 0, true, j.now
	}
}

// thaw lets a stopped process go on.
func (j *Job) thaw(r *rank) {
	if !r.frozen || r.done {
		return
	}
	away := j.now - r.stuckAt
	r.frozen, r.stuck, r.proc = false, notStuck, diagnosis.ProcRunning
	if !r.blocked {
		r.t = max(r.t+away, j.now)
		if r.t < j.until {
			j.ready = append(j.ready, r.id)
		}
	}
	for s := range r.comms {
		if k := r.comms[s]; k.comm != nil {
			k.comm.frozen--
			j.resume(k.comm)
		}
	}
}

// resume lets a collective that stood still go on, unless something else holds it.
func (j *Job) resume(c *comm) {
	c.touched = j.tick
	if !c.stalled || c.frozen > 0 || c.odd {
		return
	}
	c.stalled, c.resumed = false, j.now
	d, stalled := j.transfer(c)
	if stalled {
		c.stalled = true
		return
	}
	c.ends = max(c.last, j.now) + d
	j.ending = append(j.ending, c)
}

// end ends a rank's process, and lets those who count on it hear.
func (j *Job) end(r *rank, how ending) {
	if r.done {
		return
	}
	j.freeze(r, stuckIdle)
	r.done, r.stuck = true, notStuck
	r.ended = diagnosis.ProcGone
	if how.closed {
		r.ended = diagnosis.ProcExited
		for s := range r.comms {
			if k := r.comms[s]; k.comm != nil {
				m := &k.comm.members[k.member]
				if m.State == record.CommJoined || m.State == record.CommJoining {
					m.State, m.StateAt = record.CommLeft, j.now
					j.touch(k.comm, m)
				}
			}
		}
	}
	if j.cfg.Agents.Exits != NobodyTells {
		r.exit = diagnosis.Exit{By: diagnosis.ExitSupervisor, Code: int32(how.code), Signal: int32(how.signal), At: j.now, Asked: how.asked}
		if j.cfg.Agents.Exits == KernelTells {
			r.exit.By, r.exit.Asked = diagnosis.ExitKernel, false
		}
	}
	if how.asked || how.code == 0 && how.signal == 0 && how.closed && j.leftAll(r) {
		return
	}
	if j.cfg.Dying.Launcher > 0 && !j.launched {
		j.launched = true
		j.at(j.now+int64(j.cfg.Dying.Launcher), j.endRest)
	}
	j.bereave(r, int64(50*time.Millisecond))
}

// leftAll reports whether a rank has left all its communicators: nobody counts on it.
func (j *Job) leftAll(r *rank) bool {
	for s := range r.comms {
		if r.comms[s].comm != nil {
			return false
		}
	}
	return true
}

// endRest is the launcher ending what is left of the job, node by node.
func (j *Job) endRest() {
	for i := range j.nodes {
		n := &j.nodes[i]
		if n.silent {
			continue // it does not get there
		}
		for k := n.first; k < n.first+n.ranks; k++ {
			r := &j.ranks[k]
			j.at(j.now+n.rng.int63n(int64(300*time.Millisecond)), func() {
				j.end(r, ending{signal: 15, asked: true})
			})
		}
	}
}

// soonest is how long word of a failure takes from one member to another, at least, ns.
const soonest = 1_000_000

// bereave tells the members of a rank's communicators of its end, within some time.
func (j *Job) bereave(dead *rank, within int64) {
	if j.cfg.Dying.Reaction == Linger {
		return
	}
	for s := range dead.comms {
		k := dead.comms[s]
		c := k.comm
		if c == nil || c.bereft > 0 && c.bereft <= j.now+soonest {
			continue
		}
		c.bereft = soonest
		for i := range c.members {
			x := &j.ranks[c.members[i].World]
			if x == dead || x.done || j.nodes[x.node].down {
				continue
			}
			m := int32(i)
			at := j.hear(x, &c.members[i], within, func() { j.lose(x, ref{c, m}, k.member) })
			c.bereft = max(c.bereft, at)
		}
	}
}

// hear has a member hear of a failure within some time, unless it hears of one before that.
// It returns when it has heard.
func (j *Job) hear(r *rank, m *member, within int64, do func()) int64 {
	if m.State == record.CommAborted || m.State == record.CommLeft {
		return 0
	}
	at := j.now + soonest + r.rng.int63n(within)
	if m.hears > 0 && m.hears <= at {
		return m.hears
	}
	m.hears = at
	j.at(at, do)
	return at
}

// lose fails a communicator at one member because of another. The program learns
// of it when it is inside an operation there, or calls the next one.
func (j *Job) lose(r *rank, k ref, peer int32) {
	m := &k.comm.members[k.member]
	if r.frozen && r.stuck == stuckStop { // it hears of the next one
		m.hears, k.comm.bereft, k.comm.aborted = 0, 0, 0
		return
	}
	if r.done || m.State == record.CommAborted || m.State == record.CommLeft {
		return
	}
	m.State, m.StateAt, m.Fault, m.FaultPeer = record.CommAborted, j.now, record.ResultPeerLost, peer
	j.touch(k.comm, m)
	if r.blocked && r.waits == k.comm {
		j.fail(r)
	}
}

// fail is a program that has got an error.
func (j *Job) fail(r *rank) {
	if r.failing || r.done {
		return
	}
	r.failing = true
	d := &j.cfg.Dying
	j.freeze(r, stuckIdle)
	if d.Reaction == AbortAll || d.Reaction == AbortSleep || d.Reaction == CloseAll {
		j.at(j.now+r.rng.int63n(int64(d.React)/4+1), func() {
			if r.done {
				return
			}
			for s := range r.comms {
				if k := r.comms[s]; k.comm != nil {
					if m := &k.comm.members[k.member]; m.State != record.CommAborted {
						m.State, m.StateAt, m.Fault = record.CommAborted, j.now, record.ResultOK
						j.touch(k.comm, m)
						j.abortTold(r, k)
					}
				}
			}
		})
	}
	how := ending{code: 1}
	switch d.Reaction {
	case AbortSleep:
		return
	case CloseAll:
		how.closed = true
	case Panics:
		how.code = 2
	}
	j.at(j.now+int64(d.React)/4+r.rng.int63n(int64(d.React)*3/4), func() { j.end(r, how) })
}

// abortTold lets the other members of a communicator know that one has aborted it.
func (j *Job) abortTold(by *rank, k ref) {
	c := k.comm
	if c.aborted > 0 && c.aborted <= j.now+soonest {
		return
	}
	reached := int64(soonest)
	for i := range c.members {
		x := &j.ranks[c.members[i].World]
		switch {
		case x == by || x.done:
			continue
		case j.nodes[x.node].cut != j.nodes[by.node].cut:
			reached = never // somebody of its side may tell it
			continue
		}
		m := &c.members[i]
		member := int32(i)
		reached = max(reached, j.hear(x, m, 20_000_000, func() {
			if x.done || m.State == record.CommAborted || m.State == record.CommLeft {
				return
			}
			m.State, m.StateAt, m.Fault, m.FaultPeer = record.CommAborted, j.now, record.ResultAborted, k.member
			j.touch(c, m)
			if k := (ref{c, member}); x.blocked && x.waits == k.comm {
				j.fail(x)
			}
		}))
	}
	c.aborted = reached
}

// stallHit stops the collectives under way over connections that a fault cuts.
func (j *Job) stallHit(f *fault) {
	felt := func() {
		if f.onset == 0 {
			f.onset = j.now
		}
	}
	for _, c := range f.comms {
		if c.ends != 0 {
			felt()
		}
		j.stall(c)
		if c.slot != slotPipe {
			continue
		}
		for _, h := range c.hits {
			if h.fault != f {
				continue
			}
			e := &c.edges[h.edge]
			for _, i := range [...]int32{e.src, e.dst} {
				if m := &c.members[i]; m.Open() && m.parts == 0 && m.partEnd > j.now {
					m.partEnd = never / 2
					felt()
				}
			}
		}
	}
}

// resumeHit lets them go on.
func (j *Job) resumeHit(f *fault) {
	for _, c := range f.comms {
		j.resume(c)
		for i := range c.members {
			if m := &c.members[i]; m.partEnd > never/4 {
				m.partEnd = j.now + c.base
				c.touched = j.tick
			}
		}
	}
}

// gpu is what the agent tells of a rank's GPU.
func (j *Job) gpu(n *node, r *rank) diagnosis.GPU {
	if !j.cfg.Cluster.GPU {
		return diagnosis.GPU{}
	}
	g := r.gpu
	g.Seen, g.Index = true, uint16(r.id-n.first)
	g.XidAt, g.LostAt, g.ThrottledAt = n.real(g.XidAt, j.now), n.real(min(g.LostAt, j.now), j.now), n.real(g.ThrottledAt, j.now)
	if r.gpu.LostAt > j.now {
		g.LostAt = 0
	}
	return g
}
