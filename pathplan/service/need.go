package service

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/lockstep-ccl/lockstep/pathplan"
	"github.com/lockstep-ccl/lockstep/pathplan/service/planpb"
)

func (st *stream) id(conn string) pathplan.ConnID {
	return pathplan.ConnID{Tenant: st.tenant, Job: st.job, Conn: conn}
}

// take does what a process asks for.
func (s *Server) take(st *stream, m *planpb.Need) error {
	if len(m.GetRequests())+len(m.GetRelease())+len(m.GetSignals())+len(m.GetLoads()) > 2*maxConns {
		s.Refused.Add(1)
		return status.Errorf(codes.ResourceExhausted, "more than %d entries in a message", 2*maxConns)
	}
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range m.GetRelease() {
		if st.conns[c] && s.owners[st.id(c)] == st {
			delete(st.conns, c)
			delete(st.loads, c)
			delete(s.owners, st.id(c))
			_ = s.planner.Release(st.id(c)) // it may have expired
		}
	}
	var reqs []pathplan.Request
	out := &planpb.Paths{}
	for _, r := range m.GetRequests() {
		q, err := s.request(st, r)
		if err == nil && len(st.conns) >= maxConns && !st.conns[r.GetConn()] {
			err = fmt.Errorf("more than %d connections of one process", maxConns)
		}
		if err == nil {
			if old := s.owners[q.Conn]; old != nil && old != st && old.node != st.node {
				err = errors.New("another node's connection")
			}
		}
		if err != nil {
			s.Refused.Add(1)
			out.Assigned = append(out.Assigned, &planpb.Assigned{Conn: r.GetConn(), Error: err.Error()})
			continue
		}
		reqs = append(reqs, q)
	}
	if len(reqs) > 0 {
		as, err := s.planner.Allocate(now, reqs)
		s.version++
		for _, q := range reqs {
			n := slices.IndexFunc(as, func(a pathplan.Assignment) bool { return a.Conn == q.Conn })
			if n < 0 {
				out.Assigned = append(out.Assigned, s.assigned(q.Conn, nil, cmp.Or(err, errors.New("no path"))))
				continue
			}
			st.conns[q.Conn.Conn], s.owners[q.Conn] = true, st
			delete(s.orphans, q.Conn)
			end := n
			for end < len(as) && as[end].Conn == q.Conn {
				end++
			}
			out.Assigned = append(out.Assigned, s.assigned(q.Conn, as[n:end], nil))
		}
	}
	if len(out.Assigned) > 0 {
		st.send(out)
	}
	st.carries(now, m.GetLoads())
	s.lose(now, st, m.GetLoads())
	signals := s.compared(now, st, m.GetLoads())
	for _, g := range m.GetSignals() {
		if !st.conns[g.GetConn()] || g.GetLane() >= pathplan.MaxLanes {
			continue
		}
		if lanes := st.loads[g.GetConn()]; int(g.GetLane()) < len(lanes) {
			lanes[g.GetLane()].bad = now
		}
		signals = append(signals, pathplan.LaneSignal{
			Conn: st.id(g.GetConn()), Lane: int(g.GetLane()), Congested: g.GetCongested() || g.GetNowhere(),
			Nowhere: g.GetNowhere() && s.on(st.id(g.GetConn()), g),
		})
	}
	if len(signals) > 0 {
		s.planner.Observe(now, nil, signals)
	}
	return nil
}

// on reports whether a lane is still on the path that its sender speaks of.
func (s *Server) on(id pathplan.ConnID, g *planpb.Signal) bool {
	for _, a := range s.planner.Assignments(id) {
		if a.Lane == int(g.GetLane()) && a.Path != (pathplan.Path{}) {
			spine, leaf := s.o.Fabric.hops(a.Path)
			return spine == g.GetSpine() && leaf == g.GetLeaf()
		}
	}
	return false
}

// request checks what a process says of a connection.
func (s *Server) request(st *stream, r *planpb.Request) (q pathplan.Request, err error) {
	src, err1 := netip.ParseAddr(r.GetSrc())
	dst, err2 := netip.ParseAddr(r.GetDst())
	from, ok1 := s.o.Fabric.nics[src]
	to, ok2 := s.o.Fabric.nics[dst]
	switch {
	case err1 != nil || err2 != nil || !ok1 || !ok2:
		return q, fmt.Errorf("no NIC has address %.64q, or %.64q", r.GetSrc(), r.GetDst())
	case s.o.TLS != nil && from.Host != st.node:
		s.Denied.Add(1)
		return q, fmt.Errorf("%s is not of node %s", src, st.node)
	case r.GetConn() == "" || len(r.GetConn()) > pathplan.MaxName || r.GetLanes() < 1 || r.GetLanes() > pathplan.MaxLanes:
		return q, fmt.Errorf("connection %.80q of %d lanes: want a name, and 1 to %d lanes", r.GetConn(), r.GetLanes(), pathplan.MaxLanes)
	}
	return pathplan.Request{Conn: st.id(r.GetConn()), Src: from, Dst: to, Lanes: int(r.GetLanes())}, nil
}
