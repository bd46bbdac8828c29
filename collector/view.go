package collector

import (
	"cmp"
	"slices"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

const (
	waitsFrom = int64(200e6) // ns in an operation from which on whom it waits for is of interest
	maxStages = 16           // operations of one communicator whose missing members are looked for
)

// View says where each rank is by the evidence. sees reports whether somebody who is heard
// tells of a rank now.
func View(ev *diagnosis.Evidence, sees func(rank int) bool) *JobView {
	v := &JobView{At: time.Unix(0, ev.Now), Ranks: make([]RankView, len(ev.Ranks))}
	for i := range ev.Ranks {
		r, out := &ev.Ranks[i], &v.Ranks[i]
		out.PID, out.Proc, out.ProcAt, out.Step = r.PID, r.Proc, moment(r.ProcAt), r.Step
		out.Mark, out.MarkAt, out.Xid = r.Mark, moment(r.MarkAt), r.Xid
		out.Starting, out.WaitsIn = r.Starting, r.WaitsIn
		if n := r.Node; n >= 0 && int(n) < len(ev.Nodes) {
			out.Node = ev.Nodes[n].Name
		}
		out.Seen = sees(i)
	}
	w := waits{ev: ev, conns: map[int32][]int32{}}
	for c := range ev.Comms {
		w.comm(int32(c), v)
	}
	slices.SortStableFunc(v.Comms, func(a, b CommView) int {
		if a.Oldest.IsZero() != b.Oldest.IsZero() {
			if a.Oldest.IsZero() {
				return 1
			}
			return -1
		}
		return cmp.Or(a.Oldest.Compare(b.Oldest), cmp.Compare(a.Name, b.Name))
	})
	if len(v.Comms) > MaxViewComms {
		v.More = len(v.Comms) - MaxViewComms
		v.Comms = v.Comms[:MaxViewComms]
	}
	return v
}

func moment(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return time.Unix(0, ns)
}

// waits finds for whom members wait. It tells what can be seen of each by itself; who is to
// blame in the end is diagnosis' work.
type waits struct {
	ev      *diagnosis.Evidence
	conns   map[int32][]int32 // by communicator, once one is asked for
	indexed bool
}

func (w *waits) comm(c int32, v *JobView) {
	comm := &w.ev.Comms[c]
	out := CommView{ID: comm.ID, Name: comm.Name, World: make([]int32, len(comm.Members))}
	first := true
	oldest := int64(0)
	for i := range comm.Members {
		m := &comm.Members[i]
		out.World[i] = m.World
		switch {
		case m.World < 0:
			continue
		case m.State == record.CommLeft:
			out.Left++
			continue
		case m.State == record.CommAborted:
			out.Aborted++
			continue
		}
		out.P2P = out.P2P || m.Coll.PointToPoint()
		if first || m.Finished < out.Least {
			out.Least = m.Finished
		}
		first = false
		out.Most = max(out.Most, m.Finished)
		if m.Open() {
			out.Open++
			if oldest == 0 || m.StartedAt < oldest {
				oldest = m.StartedAt
			}
		}
	}
	out.Oldest = moment(oldest)
	missing := map[uint64]*absentees{}
	for i := range comm.Members {
		m := &comm.Members[i]
		if m.World < 0 || int(m.World) >= len(v.Ranks) || (m.State == record.CommLeft || m.State == record.CommAborted) {
			continue
		}
		r := &v.Ranks[m.World]
		if !m.Open() {
			if at := moment(m.FinishedAt); at.After(r.Last) {
				r.Last = at
			}
			continue
		}
		if r.In != nil && !moment(m.StartedAt).Before(r.In.Since) {
			continue
		}
		r.In = &Stay{
			Comm: comm.Name, CommRank: i, Coll: m.Coll, Seq: m.Finished + 1, Bytes: m.Bytes, Since: moment(m.StartedAt),
		}
		if w.ev.Now-m.StartedAt >= waitsFrom {
			w.whom(c, i, out.P2P, missing, r.In)
		}
	}
	v.Comms = append(v.Comms, out)
}

// absentees are the members that have not entered an operation.
type absentees struct {
	world []int32
	count int
}

func (a *absentees) add(world int32) {
	if a.count++; len(a.world) < MaxWaitsFor {
		a.world = append(a.world, world)
	}
}

// whom says for whom a member waits that is in an operation.
func (w *waits) whom(c int32, member int, p2p bool, missing map[uint64]*absentees, stay *Stay) {
	members := w.ev.Comms[c].Members
	m := &members[member]
	if m.Coll.PointToPoint() {
		if m.Coll != record.Group && m.Enqueued <= m.Finished+1 && m.Peer >= 0 && int(m.Peer) < len(members) {
			peer := &members[m.Peer]
			stay.WaitsFor, stay.Waited = []int32{peer.World}, 1
			stay.Entered = peer.Open() && int(peer.Peer) == member
			return
		}
		w.atConns(c, int32(member), stay)
		return
	}
	a := missing[stay.Seq]
	if a == nil {
		a = &absentees{}
		if missing[stay.Seq] = a; len(missing) <= maxStages {
			for i := range members {
				if o := &members[i]; notEntered(o, m, stay.Seq, p2p) {
					a.add(o.World)
				}
			}
		}
	}
	if a.count == 0 {
		w.atConns(c, int32(member), stay)
		return
	}
	stay.WaitsFor, stay.Waited = a.world, a.count
}

// notEntered reports whether o has not entered the collective seq that m is in. Where sends
// and receives are counted along, only kinds and times compare.
func notEntered(o, m *diagnosis.Member, seq uint64, p2p bool) bool {
	if p2p {
		return o != m && !(o.Coll == m.Coll && (o.Open() || o.FinishedAt >= m.StartedAt))
	}
	return o.Started < seq
}

// atConns says whom a member's connections wait for: all have entered.
func (w *waits) atConns(c, member int32, stay *Stay) {
	if !w.indexed {
		w.indexed = true
		for i := range w.ev.Conns {
			w.conns[w.ev.Conns[i].Comm] = append(w.conns[w.ev.Conns[i].Comm], int32(i))
		}
	}
	members := w.ev.Comms[c].Members
	var a absentees
	for _, k := range w.conns[c] {
		conn := &w.ev.Conns[k]
		var peer int32
		switch {
		case conn.Dst == member && conn.RxWaitingSince > 0:
			peer = members[conn.Src].World
		case conn.Src == member && conn.TxBlockedSince > 0:
			peer = members[conn.Dst].World
		default:
			continue
		}
		if !slices.Contains(a.world, peer) {
			a.add(peer)
		}
	}
	stay.WaitsFor, stay.Waited, stay.Entered = a.world, a.count, a.count > 0
}
