package master

import (
	"cmp"
	"slices"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

const (
	viewEvery = 500 * time.Millisecond // a view is made no more often, whoever asks
	waitsFrom = int64(200e6)           // ns in an operation from which on whom it waits for is of interest
	maxStages = 16                     // operations of one communicator whose missing members are looked for
)

// View returns where each rank is now, at most half a second old. It is made when it is asked
// for, so that a job that nobody looks at pays nothing for it. It is not to be changed.
func (m *Master) View() *collector.JobView {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.now()
	if v := m.view; v != nil && now-v.At.UnixNano() < int64(viewEvery) {
		return v
	}
	m.view = m.state.view(now)
	return m.view
}

func (s *state) view(now int64) *collector.JobView {
	ev := &s.ev
	v := &collector.JobView{At: time.Unix(0, now), Ranks: make([]collector.RankView, len(ev.Ranks))}
	for i := range ev.Ranks {
		r, out := &ev.Ranks[i], &v.Ranks[i]
		out.PID, out.Proc, out.ProcAt, out.Step = r.PID, r.Proc, moment(r.ProcAt), r.Step
		out.Mark, out.MarkAt, out.Xid = r.Mark, moment(r.MarkAt), r.Xid
		if n := s.ranks[i].node; n >= 0 {
			out.Node = ev.Nodes[n].Name
		}
		out.Seen = s.sees(i)
	}
	w := waits{state: s, now: now, conns: map[int32][]int32{}}
	for c := range ev.Comms {
		w.comm(int32(c), v)
	}
	slices.SortStableFunc(v.Comms, func(a, b collector.CommView) int {
		if a.Oldest.IsZero() != b.Oldest.IsZero() {
			if a.Oldest.IsZero() {
				return 1
			}
			return -1
		}
		return cmp.Or(a.Oldest.Compare(b.Oldest), cmp.Compare(a.Name, b.Name))
	})
	if len(v.Comms) > collector.MaxViewComms {
		v.More = len(v.Comms) - collector.MaxViewComms
		v.Comms = v.Comms[:collector.MaxViewComms]
	}
	return v
}

// sees reports whether an agent that is heard tells of a rank, or it has ended.
func (s *state) sees(rank int) bool {
	n := s.ranks[rank].node
	return n >= 0 && s.trusted(n) && (ended(s.ev.Ranks[rank].Proc) || s.nodes[n].stream != nil && !s.ev.Nodes[n].Lost)
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
	*state
	now     int64
	conns   map[int32][]int32 // by communicator, once one is asked for
	indexed bool
}

func (w *waits) comm(c int32, v *collector.JobView) {
	comm := &w.ev.Comms[c]
	out := collector.CommView{ID: comm.ID, Name: comm.Name, World: make([]int32, len(comm.Members))}
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
		if m.World < 0 || int(m.World) >= len(v.Ranks) || left(m.State) {
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
		r.In = &collector.Stay{
			Comm: comm.Name, CommRank: i, Coll: m.Coll, Seq: m.Finished + 1, Bytes: m.Bytes, Since: moment(m.StartedAt),
		}
		if w.now-m.StartedAt >= waitsFrom {
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
	if a.count++; len(a.world) < collector.MaxWaitsFor {
		a.world = append(a.world, world)
	}
}

// whom says for whom a member waits that is in an operation.
func (w *waits) whom(c int32, member int, p2p bool, missing map[uint64]*absentees, stay *collector.Stay) {
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
func (w *waits) atConns(c, member int32, stay *collector.Stay) {
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
