package service

import (
	"context"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/pathplan"
	"github.com/lockstep-ccl/lockstep/pathplan/probe"
)

// follower is a connection from host 0 to host 2 of job a, whose lanes have the source ports that its
// client gives it.
type follower struct {
	t     *testing.T
	s     *Server
	c     *Client
	path  ccl.Path
	moved chan struct{}
	lanes []ccl.LaneState
}

// follow opens one; hops is what its client's traces find.
func follow(t *testing.T, s *Server, o ClientOptions, conn ccl.PathConn, lanes int, hops func(context.Context, probe.TraceOptions) ([]probe.Hops, error)) *follower {
	t.Helper()
	creds, err := Credentials(nil, false)
	if err != nil {
		t.Fatal(err)
	}
	o.Planner, o.Credentials, o.Node, o.Job, o.Log = s.Addr().String(), creds, "host0", "a", quiet
	c, err := NewClient(o)
	if err != nil {
		t.Fatal(err)
	}
	f := &follower{t: t, s: s, c: c, moved: make(chan struct{}, 100), lanes: make([]ccl.LaneState, lanes)}
	c.hops = hops
	f.path = c.Open(conn, func() {
		select {
		case f.moved <- struct{}{}:
		default:
		}
	})
	t.Cleanup(func() {
		f.path.Close()
		_ = c.Close()
	})
	return f
}

// settles awaits that each lane has a port which is right for its planned path, and no two the same.
func (f *follower) settles(what string, right func(port uint16, p pathplan.Path) bool) {
	f.t.Helper()
	for end := time.Now().Add(patience); ; {
		for i := range f.lanes {
			f.lanes[i].Acked += bulk
		}
		f.path.Seen(f.lanes)
		select {
		case <-f.moved:
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
			for i, port := range f.path.Ports(ctx, len(f.lanes)) { // it may have taken those of an earlier call
				f.lanes[i].Port = port
			}
			cancel()
		case <-time.After(time.Millisecond):
		}
		plan, taken := f.s.Assignments("a"), map[uint16]bool{}
		good := len(plan) == len(f.lanes)
		for _, a := range plan {
			port := f.lanes[a.Lane].Port
			good = good && port != 0 && !taken[port] && right(port, a.Path)
			taken[port] = true
		}
		if good {
			return
		}
		if time.Now().After(end) {
			f.t.Fatalf("%s: lanes %v, the plan is %+v", what, f.lanes, plan)
		}
	}
}
