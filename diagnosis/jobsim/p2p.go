package jobsim

import (
	"slices"

	"github.com/lockstep-ccl/lockstep/record"
)

// channel is one direction between pipeline neighbours. A send meets its receive:
// neither ends before both have begun.
type channel struct {
	sent, wanted int64 // when the side that came first began, 0 when it has not
}

// pairEnd is a member whose sends and receives have all met and end later.
type pairEnd struct {
	comm   *comm
	member int32
}

// chan index: direction × members + source.
func (c *comm) channel(backward bool, src int) *channel {
	n := len(c.members)
	if backward {
		return &c.chans[n+src]
	}
	return &c.chans[src]
}

// pipe puts a rank into its sends and receives.
func (j *Job) pipe(r *rank, in *instr) {
	k := r.comms[slotPipe]
	c := k.comm
	n := len(c.members)
	me := int(k.member)
	m := &c.members[me]
	next, prev := (me+1)%n, (me+n-1)%n
	parts := int8(0)
	coll, peer := record.Group, int32(-1)
	for b, as := range [...]struct {
		coll record.CollKind
		peer int
	}{{record.Send, next}, {record.Recv, prev}, {record.Send, prev}, {record.Recv, next}} {
		if in.dirs>>b&1 != 0 {
			parts++
			coll, peer = as.coll, int32(as.peer)
		}
	}
	if parts > 1 || j.cfg.Tuned {
		coll, peer = record.Group, -1
	}
	j.called(r, k, coll, peer, in.bytes)
	if j.failed(r, k) {
		return
	}
	m.Enqueued++
	m.Started++
	m.EnqueuedAt, m.StartedAt = r.t, r.t
	m.Coll, m.Peer, m.Bytes = coll, peer, in.bytes
	m.own = max(0, r.t-r.idleFrom)
	m.parts, m.partEnd, m.late = parts, 0, 0
	r.blocked, r.waits = true, c
	j.touch(c, m)
	at := max(r.t, 1)
	if in.dirs&sendNext != 0 {
		j.meet(c, false, me, next, true, at)
	}
	if in.dirs&sendPrev != 0 {
		j.meet(c, true, me, prev, true, at)
	}
	if in.dirs&recvPrev != 0 {
		j.meet(c, false, prev, me, false, at)
	}
	if in.dirs&recvNext != 0 {
		j.meet(c, true, next, me, false, at)
	}
}

// meet posts one side of a transfer.
func (j *Job) meet(c *comm, backward bool, src, dst int, send bool, at int64) {
	ch := c.channel(backward, src)
	mine, other := &ch.sent, &ch.wanted
	if !send {
		mine, other = other, mine
	}
	if *other == 0 {
		*mine = at
		return
	}
	first := *other
	*other = 0
	d, stalled := j.transferPair(c, src, dst, max(at, first))
	if stalled {
		d = never / 2
	}
	sent, wanted := at, first
	if !send {
		sent, wanted = first, at
	}
	j.part(c, src, max(at, first)+d, wanted)
	j.part(c, dst, max(at, first)+d, sent)
}

// part ends one part of a member's group; late is when its peer began.
func (j *Job) part(c *comm, i int, end, late int64) {
	m := &c.members[i]
	m.parts--
	m.partEnd, m.late = max(m.partEnd, end), max(m.late, late)
	c.touched = j.tick
	if m.parts > 0 {
		return
	}
	if m.partEnd < j.until {
		j.finishPair(c, m)
		return
	}
	j.pairs = append(j.pairs, pairEnd{c, int32(i)})
}

func (j *Job) finishPair(c *comm, m *member) {
	r := &j.ranks[m.World]
	c.touched = j.tick
	j.finished(r, m, min(m.late, m.partEnd), m.partEnd)
	if r.blocked && r.waits == c {
		j.release(r, m.partEnd)
	}
}

// endPairs ends the sends and receives that end in this tick. None ends while the
// process at either end does not run.
func (j *Job) endPairs() {
	all := j.pairs
	j.pairs = nil
	kept := all[:0]
	for _, p := range all {
		m := &p.comm.members[p.member]
		if p.comm.frozen > 0 && j.frozenAround(p.comm, int(p.member)) {
			m.partEnd = max(m.partEnd, j.until+int64(Tick))
		}
		if m.partEnd < j.until {
			j.finishPair(p.comm, m)
		} else {
			kept = append(kept, p)
		}
	}
	j.pairs = append(kept, j.pairs...)
}

func (j *Job) frozenAround(c *comm, i int) bool {
	n := len(c.members)
	return slices.ContainsFunc([]int{i, (i + 1) % n, (i + n - 1) % n}, func(k int) bool { return j.ranks[c.members[k].World].frozen })
}
