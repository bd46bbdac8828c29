package service

import (
	"slices"
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
	Handshakes             uint64                     // refused before a word
	Jobs, Streams, Probers int
}

// SeenLink is a link, and what probes and senders say of it.
type SeenLink struct {
	pathplan.LinkView
	Up         bool   // leaf to spine
	Sent, Lost uint64 // probes whose path crossed it
	Measured   int64  // bit/s, by those who send over it; in place of LinkView's

	Segments, SegmentsLost uint64 // by those who send over it
	Suspected              bool   // a tenant's losses speak of it, or of another of its paths' links
}

// carried is what a lane's sender says that arrives.
type carried struct {
	rate  uint64  // bytes a second
	usual float64 // the same, smoothed
	speed float64 // while bytes are under way, smoothed; that of usual where it is not told
	at    time.Time
	slow  bool      // against the connection's fastest lane
	bad   time.Time // when its sender last said that it stalls, or loses
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
		c := &lanes[l.GetLane()]
		weight := smoothing
		if now.Sub(c.at) >= loadFor {
			weight = 1
		}
		c.rate, c.at = min(l.GetRate(), pathplan.MaxRate/8), now
		c.usual += weight * (float64(c.rate) - c.usual)
		speed := float64(c.rate)
		if l.GetSpeed() > 0 {
			speed = float64(min(l.GetSpeed(), pathplan.MaxRate/8))
		}
		c.speed += weight * (speed - c.speed)
		st.loads[l.GetConn()] = lanes
	}
}

const (
	// slowFrom is the part of its connection's fastest lane that a slow lane is slower than, and
	// slowUntil the one that it is faster than when it is slow no more. It carries less, too: senders
	// split by speed, and how fast a lane is that has little to do is hard to tell. A lane of a
	// link that has more lanes than the fastest's may be slower by that.
	slowFrom, slowUntil = 0.55, 0.75
	// busyFrom is the part of a link's rate from which on a connection's fastest lane tells
	// anything of paths.
	busyFrom = 0.02
	// smoothing is the weight of the newest second: of few chunks in it, each lane gets what happens.
	smoothing = 0.3
	// badFor is for how long a sender's word that a lane is bad stands against its rate: less than
	// it takes to be told of rates again, since one stall is no congestion.
	badFor = loadEvery * 9 / 10
)

// compared is which lanes of connections the network slows, by how fast they are: of all that
// are told of, since a link is blamed only where most others are well.
func (s *Server) compared(now time.Time, st *stream, loads []*planpb.Load) (out []pathplan.LaneSignal) {
	done := map[string]bool{}
	for _, l := range loads {
		lanes := st.loads[l.GetConn()]
		if done[l.GetConn()] || len(lanes) < 2 {
			continue
		}
		done[l.GetConn()] = true
		busiest, best, fairest, carries, fair := 0.0, 0.0, 0.0, 0.0, 0.0
		s.fair = s.planner.FairRates(st.id(l.GetConn()), s.fair[:0])
		for i, c := range lanes {
			if now.Sub(c.at) < loadFor {
				busiest, best = max(busiest, c.usual), max(best, c.speed)
				if i < len(s.fair) {
					fairest = max(fairest, s.fair[i])
					carries, fair = carries+c.usual, fair+s.fair[i]
				}
			}
		}
		if 8*busiest < busyFrom*float64(s.slowest) {
			continue
		}
		for i := range lanes {
			c := &lanes[i]
			if now.Sub(c.at) >= loadFor {
				continue
			}
			part, ofFair := max(c.speed/best, c.usual/busiest), 0.0
			if i < len(s.fair) && s.fair[i] > 0 {
				part *= fairest / s.fair[i]
				ofFair = c.usual / s.fair[i] * fair / carries
			}
			c.slow = part < slowFrom || c.slow && part < slowUntil
			out = append(out, pathplan.LaneSignal{Conn: st.id(l.GetConn()), Lane: i, Congested: c.slow || now.Sub(c.bad) < badFor, Part: ofFair})
		}
	}
	return out
}

// Snapshot returns what the planner knows now.
func (s *Server) Snapshot(now time.Time) Snapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := Snapshot{Moves: map[pathplan.Reason]uint64{}, Denied: s.Denied.Load(), Refused: s.Refused.Load(), Handshakes: s.Handshakes.Load() + s.ln.Silent(), Jobs: s.planner.Jobs(), Streams: s.streams, Probers: len(s.probing.hosts)}
	for r, n := range s.moved {
		out.Moves[r] = n
	}
	measured := s.measured(now)
	leaf := map[string]bool{}
	for _, l := range s.o.Fabric.Leaves {
		leaf[l] = true
	}
	suspects := s.planner.Suspects()
	for _, l := range s.planner.Links() {
		of := s.segments[l.Link]
		out.Links = append(out.Links, SeenLink{
			LinkView: l, Up: leaf[l.Link.From], Sent: s.probing.sent[l.Link], Lost: s.probing.lost[l.Link], Measured: measured[l.Link],
			Segments: of[0], SegmentsLost: of[1], Suspected: s.probing.bad[l.Link] == nil && slices.Contains(suspects, l.Link),
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
