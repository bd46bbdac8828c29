package service

import (
	"slices"
	"time"

	"github.com/lockstep-ccl/lockstep/pathplan"
	"github.com/lockstep-ccl/lockstep/pathplan/service/planpb"
)

// What senders lose: their words go to the plan, which has their lanes leave what loses; where
// it may be, probers look closely; and both are shown.

// lose notes what a process says that its lanes have sent and lost.
func (s *Server) lose(now time.Time, st *stream, loads []*planpb.Load) {
	var losses []pathplan.LaneLoss
	for _, l := range loads {
		if sent, lost := int(l.GetSegments()), int(min(l.GetLost(), l.GetSegments())); sent > 0 && st.conns[l.GetConn()] {
			losses = append(losses, pathplan.LaneLoss{Conn: st.id(l.GetConn()), Lane: int(l.GetLane()), Sent: sent, Lost: lost})
		}
	}
	for i, of := range s.planner.ObserveLosses(now, losses) {
		if of == (pathplan.Path{}) {
			continue
		}
		for _, l := range []pathplan.Link{of.Up, of.Down} {
			n := s.segments[l]
			s.segments[l] = [2]uint64{n[0] + uint64(losses[i].Sent), n[1] + uint64(losses[i].Lost)}
		}
	}
}

// suspected tells once of links that senders' losses speak of.
func (s *Server) suspected() {
	now := s.planner.Suspects()
	var fresh []string
	for _, l := range now {
		if !slices.Contains(s.suspects, l) && s.probing.bad[l] == nil {
			fresh = append(fresh, l.String())
		}
	}
	if s.suspects = now; len(fresh) > 0 {
		s.o.Log.Warn("a job's senders lose segments on a path, and its lanes leave it: one of these links is bad, and probes look closely", "links", fresh)
	}
}
