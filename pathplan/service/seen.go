package service

import (
	"time"

	"github.com/lockstep-ccl/lockstep/pathplan"
	"github.com/lockstep-ccl/lockstep/pathplan/service/planpb"
)

// What a planner shows of itself: links, counts, and what it has decided.

// Decision is something that the planner did: it moved lanes, or took a link for bad, or
// for well again.
type Decision struct {
	At    time.Time
	Took  time.Duration   // to decide on moves
	Moves []pathplan.Move // of one look, in their order

	Link  pathplan.Link // where there are no moves
	State pathplan.LinkState
	Since time.Time // of a link that is well again: when it was taken for bad
}

// Snapshot is what a planner knows at a moment.
type Snapshot struct {
	Links                  []SeenLink
	Moves                  map[pathplan.Reason]uint64 // lanes ever moved
	Denied, Refused        uint64                     // by certificates; malformed, or over a bound
	Jobs, Streams, Probers int
}

// SeenLink is a link, and what probes and senders say of it.
type SeenLink struct {
	pathplan.LinkView
	Up         bool   // leaf to spine
	Sent, Lost uint64 // probes whose path crossed it
	Measured   int64  // bit/s, by those who send over it; in place of LinkView's
}

// carried is what a lane's sender says that arrives.
type carried struct {
	rate uint64 // bytes a second
	at   time.Time
}

// loadFor is for how long a sender's word on its lanes counts.
const loadFor = 5 * time.Second

// carries notes what a process says that its lanes carry.
func (st *stream) carries(now time.Time, loads []*planpb.Load) {
	for _, l := range loads {
		if !st.conns[l.GetConn()] || l.GetLane() >= pathplan.MaxLanes {
			continue
		}
		lanes := st.loads[l.GetConn()]
		for len(lanes) <= int(l.GetLane()) {
			lanes = append(lanes, carried{})
		}
		lanes[l.GetLane()] = carried{min(l.GetRate(), pathplan.MaxRate/8), now}
		st.loads[l.GetConn()] = lanes
	}
}

// Snapshot returns what the planner knows now.
func (s *Server) Snapshot(now time.Time) Snapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := Snapshot{Moves: map[pathplan.Reason]uint64{}, Denied: s.Denied.Load(), Refused: s.Refused.Load(), Jobs: s.planner.Jobs(), Streams: s.streams, Probers: len(s.probing.hosts)}
	for r, n := range s.moved {
		out.Moves[r] = n
	}
	measured := s.measured(now)
	leaf := map[string]bool{}
	for _, l := range s.o.Fabric.Leaves {
		leaf[l] = true
	}
	for _, l := range s.planner.Links() {
		out.Links = append(out.Links, SeenLink{
			LinkView: l, Up: leaf[l.Link.From], Sent: s.probing.sent[l.Link], Lost: s.probing.lost[l.Link], Measured: measured[l.Link],
		})
	}
	return out
}

// measured is what senders say, by link. The lock is held.
func (s *Server) measured(now time.Time) map[pathplan.Link]int64 {
	sum := map[pathplan.Link]int64{}
	for id, st := range s.owners {
		loads := st.loads[id.Conn]
		if len(loads) == 0 {
			continue
		}
		for _, a := range s.planner.Assignments(id) {
			if a.Lane < len(loads) && now.Sub(loads[a.Lane].at) < loadFor && a.Path != (pathplan.Path{}) {
				sum[a.Path.Up] += 8 * int64(loads[a.Lane].rate)
				sum[a.Path.Down] += 8 * int64(loads[a.Lane].rate)
			}
		}
	}
	return sum
}

func (s *Server) decided(d Decision) {
	if s.o.Decided != nil {
		s.o.Decided(d)
	}
}
