package service

import (
	"context"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/lockstep-ccl/lockstep/collector/wire/wiretest"
	"github.com/lockstep-ccl/lockstep/pathplan/service/planpb"
)

// TestWhere: a job's master, and nobody else, is told over which links its connections go.
func TestWhere(t *testing.T) {
	ca := wiretest.NewAuthority(t)
	planner := ca.Planner()
	s := serve(t, Options{TLS: &planner})
	agent, master, other := ca.Agent("host0", "a"), ca.Master("a"), ca.Master("b")
	c, ctx := dial(t, s, &agent)
	name := connName(7, 1, 0)
	if _, got, err := ask(t, c, ctx, "host0", "a", &planpb.Need{Requests: []*planpb.Request{request(name, "10.3.0.1", "10.3.2.1")}}); err != nil || got.GetAssigned()[0].GetError() != "" {
		t.Fatal(got, err)
	}
	say := func(c planpb.PlannerClient, job string, conns ...string) (*planpb.Paths, error) {
		return c.Where(ctx, &planpb.WhereRequest{Hello: &planpb.Hello{Version: version, Node: "m", Job: job}, Conns: conns})
	}
	if _, err := say(c, "a", name); status.Code(err) != codes.PermissionDenied {
		t.Errorf("an agent is told: %v", err)
	}
	b, _ := dial(t, s, &other)
	if _, err := say(b, "a", name); status.Code(err) != codes.PermissionDenied {
		t.Errorf("another job's master is told: %v", err)
	}
	if got, err := say(b, "b", name); err != nil || len(got.GetAssigned()) > 0 {
		t.Errorf("another job's connection: %v, %v", got, err)
	}
	if _, err := say(b, "b", make([]string, maxWhere+1)...); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("%v", err)
	}

	creds, err := Credentials(&master, false)
	if err != nil {
		t.Fatal(err)
	}
	w, err := NewWhere(WhereOptions{Planner: s.Addr().String(), Credentials: creds, Node: "m", Job: "a", Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	run, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { w.Run(run); close(done) }()
	defer func() { stop(); <-done }()
	var want []string
	for _, a := range s.Assignments("a") {
		want = append(want, a.Path.String())
	}
	for end := time.Now().Add(patience); w.Path(7, 1, 0) != strings.Join(want, " and "); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("the path is %q, want %v", w.Path(7, 1, 0), want)
		}
	}
	if p := w.Path(7, 0, 1); p != "" {
		t.Errorf("a connection that is not planned goes over %q", p)
	}
	for i := range 2 * maxWhere {
		w.Path(9, i, 0)
	}
	if n := len(w.names(time.Now())); n > maxWhere {
		t.Errorf("%d connections are asked for", n)
	}
	if n := len(w.names(time.Now().Add(2 * wantFor))); n > 0 {
		t.Errorf("%d connections are asked for, and nobody wants to know", n)
	}
}
