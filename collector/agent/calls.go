package agent

import (
	"cmp"
	"github.com/lockstep-ccl/lockstep/collector"
	"slices"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// heldAfter is how long nothing of a rank moves until it counts as held up, ns.
const heldAfter = int64(500e6)

// calls is the ring of a rank's last calls on any communicator.
type calls struct {
	last [diagnosis.MaxCalls]diagnosis.Call
	n    int
}

// called notes an operation that was called. An enqueue record and a whole record tell of the
// same one.
func (r *rank) called(c *comm, call diagnosis.Call) {
	if call.Seq < c.peerSeq {
		return
	}
	again := call.Seq == c.peerSeq
	c.peer, c.peerSeq = call.Peer, call.Seq
	if again || c.aside {
		return
	}
	call.Comm = c.id
	r.calls.last[r.calls.n%diagnosis.MaxCalls] = call
	r.calls.n++
}

// lastCalls is what the rank has called last, oldest first. Of an operation that it is in,
// and has no record of yet, the live words tell.
func (r *rank) lastCalls() []*wire.Call {
	all := slices.Clone(r.calls.last[:min(r.calls.n, diagnosis.MaxCalls)])
	for i := range r.p.Comms {
		s := &r.p.Comms[i]
		if c := r.comm(s.Index); c != nil && s.Enqueued > c.peerSeq {
			all = append(all, diagnosis.Call{Comm: s.ID, Seq: s.Enqueued, Coll: s.Coll, Peer: -1, Bytes: s.Bytes, At: s.EnqueuedAt})
		}
	}
	slices.SortStableFunc(all, func(a, b diagnosis.Call) int { return cmp.Compare(a.At, b.At) })
	all = all[max(0, len(all)-diagnosis.MaxCalls):]
	out := make([]*wire.Call, len(all))
	for i, c := range all {
		out[i] = &wire.Call{CommId: c.Comm, Seq: c.Seq, Coll: uint32(c.Coll), Peer: c.Peer, Bytes: c.Bytes, MonoAtNs: c.At}
	}
	return out
}

// stall reports whether a rank is held up. For heldAfter nothing of it has moved, and it is
// inside an operation, or another rank waits for it, or it has never been away for so long.
type stall struct {
	moved uint64 // sum of what moves
	since int64  // when that last changed
	n     uint32 // stalls so far
	held  bool
}

// current numbers the stall that is, 0 for none.
func (s *stall) current() uint32 {
	if s.held {
		return s.n
	}
	return 0
}

// look takes in the rank's live words. still says that nothing has moved for heldAfter, inside
// that an operation is open.
func (r *rank) look(now int64) (still, inside bool) {
	moved := uint64(len(r.p.Comms))
	for i := range r.p.Comms {
		s := &r.p.Comms[i]
		moved += s.Enqueued + s.Started + s.Finished + uint64(s.State)
		inside = inside || s.State == record.CommJoined && s.Enqueued > s.Finished
	}
	if st := &r.stall; moved != st.moved || st.since == 0 {
		st.moved, st.since, st.held = moved, now, false
	}
	return now-r.stall.since >= heldAfter, inside
}

// waiting is the last operation that members on this node wait in, by communicator.
type waiting map[uint64]uint64

// stalls finds the ranks of a job that are held up. A dead one stays what it was.
func (j *job) stalls(now int64) {
	var idle []*rank
	for _, r := range j.ranks {
		if r.p.Dead() || !r.reportable() {
			continue
		}
		switch still, inside := r.look(now); {
		case !still || r.stall.held:
		case inside:
			r.stall.begin()
		default:
			idle = append(idle, r)
		}
	}
	if len(idle) == 0 {
		return
	}
	wanted := waiting{}
	for _, r := range j.ranks {
		if r.stall.held && !r.p.Dead() {
			for i := range r.p.Comms {
				if s := &r.p.Comms[i]; s.State == record.CommJoined && s.Open() && s.Coll.Collective() {
					wanted[s.ID] = max(wanted[s.ID], s.Started)
				}
			}
		}
	}
	for _, r := range idle {
		if r.missed(wanted) || r.away(now) {
			r.stall.begin()
		}
	}
}

func (s *stall) begin() { s.n, s.held = s.n+1, true }

// missed reports whether others wait in an operation that this rank has not called.
func (r *rank) missed(wanted waiting) bool {
	return slices.ContainsFunc(r.p.Comms, func(s record.CommStatus) bool {
		return s.State == record.CommJoined && wanted[s.ID] > s.Enqueued
	})
}

// away reports whether the rank has been outside of operations for longer than ever before:
// ranks on other nodes may wait for it.
func (r *rank) away(now int64) bool {
	longest, called := uint64(0), false
	for i := range r.p.Comms {
		s := &r.p.Comms[i]
		longest, called = max(longest, s.MaxOwnNs), called || s.Enqueued > 0 && s.State == record.CommJoined
	}
	return called && uint64(now-r.stall.since) > longest
}

// outages is how often the connection was down and came back.
func (r *rank) outages(s *record.ConnStatus) uint64 {
	if int(s.Index) < len(r.conns) && r.conns[s.Index].gen == s.Gen {
		return r.conns[s.Index].outages
	}
	return 0
}

// link takes in one change of a connection's state.
func (r *rank) link(c *comm, rec *record.Record) {
	if int(rec.Conn) >= r.p.ConnSlots {
		return
	}
	k, state := r.conn(rec.Conn), record.LinkState(rec.Code)
	if k.seen || state != record.LinkUp { // that a connection comes up for the first time is no news
		c.links.add(collector.LinkEvent{Peer: rec.Peer, State: state, At: rec.Mono, Conn: k.who})
	}
	k.seen = true
	switch state {
	case record.LinkDown:
		k.down = true
	case record.LinkUp, record.LinkSwitched:
		if k.down {
			k.down = false
			k.outages++
		}
	}
}
