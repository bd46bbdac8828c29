package service

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/collector/wire/wiretest"
	"github.com/lockstep-ccl/lockstep/pathplan"
	"github.com/lockstep-ccl/lockstep/pathplan/service/planpb"
)

// testFabric is two pods of two hosts, two spines.
func testFabric() Fabric { return newFabric(2, 2, 2) }

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

// serve runs a planner on loopback.
func serve(t *testing.T, o Options) *Server {
	t.Helper()
	o.Fabric, o.Listen, o.Log = testFabric(), "127.0.0.1:0", quiet
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return s
}

const patience = 30 * time.Second

// dial connects with a certificate.
func dial(t *testing.T, s *Server, tls *wire.TLS) (planpb.PlannerClient, context.Context) {
	t.Helper()
	creds, err := Credentials(tls, false)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := grpc.NewClient(s.Addr().String(), grpc.WithTransportCredentials(creds))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(func() {
		cancel()
		conn.Close()
	})
	return planpb.NewPlannerClient(conn), ctx
}

// ask opens a stream as a job on a node and asks for connections.
func ask(t *testing.T, c planpb.PlannerClient, ctx context.Context, node, job string, need *planpb.Need) (planpb.Planner_PlanClient, *planpb.Paths, error) {
	t.Helper()
	g, err := c.Plan(ctx)
	if err != nil {
		return nil, nil, err
	}
	need.Hello = &planpb.Hello{Version: version, Node: node, Job: job}
	if err := g.Send(need); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	m, err := g.Recv()
	return g, m, err
}

func request(conn, src, dst string) *planpb.Request {
	return &planpb.Request{Conn: conn, Src: src, Dst: dst, Lanes: 2}
}

// TestWhoEnds: the paths of a process that ends are free at once; those of one that is not heard
// any more a little later, though others of its job go on; and who comes back in time keeps them.
func TestWhoEnds(t *testing.T) {
	s := serve(t, Options{})
	open := func(conn, src, dst string) (planpb.Planner_PlanClient, func()) {
		c, ctx := dial(t, s, nil)
		ctx, cut := context.WithCancel(ctx)
		g, got, err := ask(t, c, ctx, "host0", "a", &planpb.Need{Requests: []*planpb.Request{request(conn, src, dst)}})
		if err != nil || len(got.GetAssigned()) != 1 || len(got.GetAssigned()[0].GetLanes()) != 2 {
			t.Fatalf("%v, %v", got, err)
		}
		return g, cut
	}
	planned := func() (out []string) {
		for _, a := range s.Assignments("a") {
			if a.Lane == 0 {
				out = append(out, a.Conn.Conn)
			}
		}
		slices.Sort(out)
		return out
	}
	await := func(what string, ok func() bool) {
		t.Helper()
		for end := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%s: %v are planned", what, planned())
			}
		}
	}
	orphans := func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.orphans)
	}
	open("stays", "10.3.0.1", "10.3.2.1")
	ends, _ := open("ends", "10.3.1.1", "10.3.3.1")
	_, cut := open("cut", "10.3.2.1", "10.3.0.1")
	_, cutToo := open("returns", "10.3.3.1", "10.3.1.1")
	if err := ends.CloseSend(); err != nil {
		t.Fatal(err)
	}
	await("one has ended", func() bool { return slices.Equal(planned(), []string{"cut", "returns", "stays"}) })
	cut()
	cutToo()
	await("two are cut off", func() bool { return orphans() == 2 })
	s.tick(time.Now().Add(orphanFor / 2))
	if got := planned(); len(got) != 3 {
		t.Errorf("a moment after two were cut off %v are planned", got)
	}
	open("returns", "10.3.3.1", "10.3.1.1")
	s.tick(time.Now().Add(orphanFor + time.Second))
	if got := planned(); !slices.Equal(got, []string{"returns", "stays"}) || orphans() != 0 {
		t.Errorf("long after two were cut off, of which one came back, %v are planned", got)
	}
}

// TestClientLeaves: a client that is closed has the planner know; without a planner, and when it is
// closed already, it ends all the same.
func TestClientLeaves(t *testing.T) {
	s := serve(t, Options{})
	creds, err := Credentials(nil, false)
	if err != nil {
		t.Fatal(err)
	}
	for _, addr := range []string{s.Addr().String(), "127.0.0.1:1"} {
		c, err := NewClient(ClientOptions{Planner: addr, Credentials: creds, Node: "host0", Job: "a", Log: quiet})
		if err != nil {
			t.Fatal(err)
		}
		p, _ := c.Open(ccl.PathConn{Comm: 1, Peer: 1, Local: netip.MustParseAddr("10.3.0.1"), Remote: netip.MustParseAddrPort("10.3.2.1:9")}, func() {}).(*path)
		p.ask(2)
		if addr == s.Addr().String() {
			for end := time.Now().Add(patience); len(s.Assignments("a")) == 0; time.Sleep(time.Millisecond) {
				if time.Now().After(end) {
					t.Fatal("nothing is planned")
				}
			}
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if got := s.Assignments("a"); len(got) > 0 {
			t.Errorf("the client is closed, and %v is planned", got)
		}
		_ = c.Close() // gRPC says that it was
	}
}

// TestTenants: by its certificate a job plans its own connections, from its own node, and
// neither sees, moves nor ends another's, whatever it says.
func TestTenants(t *testing.T) {
	ca := wiretest.NewAuthority(t)
	planner := ca.Planner()
	s := serve(t, Options{TLS: &planner})
	a, b := ca.Agent("host0", "a"), ca.Agent("host1", "b")
	ca0, ctxA := dial(t, s, &a)
	cb, ctxB := dial(t, s, &b)
	_, got, err := ask(t, ca0, ctxA, "host0", "a", &planpb.Need{Requests: []*planpb.Request{request("x", "10.3.0.1", "10.3.2.1")}})
	if err != nil || len(got.GetAssigned()) != 1 || len(got.GetAssigned()[0].GetLanes()) != 2 {
		t.Fatalf("%v, %v", got, err)
	}
	before := fmt.Sprint(s.Assignments("a"))

	for what, try := range map[string]func() error{
		"its job":  func() error { _, _, err := ask(t, cb, ctxB, "host1", "a", &planpb.Need{}); return err },
		"its node": func() error { _, _, err := ask(t, cb, ctxB, "host0", "b", &planpb.Need{}); return err },
		"its hosts": func() error {
			g, err := cb.Probe(ctxB)
			if err == nil {
				_ = g.Send(&planpb.ProbeUp{Hello: &planpb.Hello{Version: version, Node: "host1"}})
				_, err = g.Recv()
			}
			return err
		},
	} {
		if err := try(); status.Code(err) != codes.PermissionDenied {
			t.Errorf("b speaks for %s: %v", what, err)
		}
	}
	// The same name is another connection; what is a's cannot be released or signalled.
	g, got, err := ask(t, cb, ctxB, "host1", "b", &planpb.Need{
		Release:  []string{"x"},
		Signals:  []*planpb.Signal{{Conn: "x", Congested: true}, {Conn: "x", Lane: 1 << 30}},
		Requests: []*planpb.Request{request("x", "10.3.1.1", "10.3.3.1"), request("y", "10.3.0.1", "10.3.2.1"), request("", "10.3.1.1", "10.3.3.1"), request("z", "10.3.1.1", "nobody"), {Conn: "many", Src: "10.3.1.1", Dst: "10.3.3.1", Lanes: 1 << 20}},
	})
	if err != nil {
		t.Fatal(err)
	}
	planned := 0
	for _, x := range got.GetAssigned() {
		if len(x.GetLanes()) > 0 {
			planned++
			if x.GetConn() != "x" {
				t.Errorf("%v", x)
			}
		} else if x.GetError() == "" {
			t.Errorf("no path and no reason: %v", x)
		}
	}
	if planned != 1 || len(got.GetAssigned()) != 5 {
		t.Errorf("%v", got)
	}
	for range 20 { // signals about x are b's x
		if err := g.Send(&planpb.Need{Signals: []*planpb.Signal{{Conn: "x", Congested: true}, {Conn: "x", Lane: 1, Congested: true}}}); err != nil {
			t.Fatal(err)
		}
	}
	if after := fmt.Sprint(s.Assignments("a")); after != before {
		t.Errorf("a's paths were %s, and are %s", before, after)
	}
	if len(s.Assignments("b")) != 2 {
		t.Errorf("b has %v", s.Assignments("b"))
	}

	// Who is none of these: another authority, a master, and who is nobody.
	other := wiretest.NewAuthority(t).Agent("host0", "a")
	other.CAFile = a.CAFile
	master := ca.Master("a")
	for _, c := range []wire.TLS{other, master} {
		c, ctx := dial(t, s, &c)
		if _, _, err := ask(t, c, ctx, "host0", "a", &planpb.Need{}); err == nil {
			t.Error("a stranger is let in")
		}
	}
	// A client believes a planner only.
	if c, ctx := dial(t, serve(t, Options{TLS: &master}), &a); c != nil {
		if _, _, err := ask(t, c, ctx, "host0", "a", &planpb.Need{}); err == nil || !strings.Contains(err.Error(), "not a planner") {
			t.Errorf("a master passes for a planner: %v", err)
		}
	}
}

// TestClosedByDefault: beyond loopback a planner without certificates does not start.
func TestClosedByDefault(t *testing.T) {
	if _, err := New(Options{Fabric: testFabric(), Listen: "0.0.0.0:0", Log: quiet}); err == nil || !strings.Contains(err.Error(), "certificates") {
		t.Errorf("%v", err)
	}
}

// TestMessagesAreBounded: what is too much ends the stream, and nothing else.
func TestMessagesAreBounded(t *testing.T) {
	s := serve(t, Options{Insecure: true, Streams: 2})
	c, ctx := dial(t, s, nil)
	many := &planpb.Need{}
	for i := range 2*maxConns + 1 {
		many.Release = append(many.Release, fmt.Sprint(i))
	}
	if _, _, err := ask(t, c, ctx, "host0", "a", many); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("%v", err)
	}
	for _, h := range []*planpb.Hello{nil, {Version: 99, Node: "n", Job: "j"}, {Version: version, Node: "../x", Job: "j"}, {Version: version, Node: "n", Job: "UPPER"}} {
		g, err := c.Plan(ctx)
		if err != nil {
			t.Fatal(err)
		}
		_ = g.Send(&planpb.Need{Hello: h})
		if _, err := g.Recv(); err == nil || status.Code(err) == codes.DeadlineExceeded {
			t.Errorf("hello %v: %v", h, err)
		}
	}
	if _, _, err := ask(t, c, ctx, "host0", "a", &planpb.Need{Requests: []*planpb.Request{request("x", "10.3.0.1", "10.3.2.1")}}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := ask(t, c, ctx, "host0", "a", &planpb.Need{}); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("one job has more than half of the streams: %v", err)
	}
}

// TestFabricFile: what is wrong with a fabric is said.
func TestFabricFile(t *testing.T) {
	for what, spoil := range map[string]func(f *Fabric){
		"address":   func(f *Fabric) { f.Ports[0].Addr = "x" },
		"interface": func(f *Fabric) { f.Interfaces[0].From = "nowhere" },
		"its own":   func(f *Fabric) { f.Interfaces[1].Addr = f.Interfaces[0].Addr },
		"each":      func(f *Fabric) { f.Interfaces = f.Interfaces[1:] },
	} {
		f := testFabric()
		if err := f.check(); err != nil {
			t.Fatal(err)
		}
		spoil(&f)
		if err := f.check(); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestJudge: links are found bad by what probers tell, named, and well again.
func TestJudge(t *testing.T) {
	s := serve(t, Options{Insecure: true})
	s.mu.Lock()
	defer s.mu.Unlock()
	p, now := s.probing, time.Now().Add(time.Hour)
	bad := pathplan.Link{From: "leaf0", To: "spine1"}
	tell := func(dead bool) {
		for _, src := range []int{0, 1} {
			for _, dst := range []int{2, 3} {
				for _, flip := range []bool{false, true} {
					a, b := src, dst
					if flip {
						a, b = b, a
					}
					h := &probing{asked: map[uint64]pair{1: {s.o.Fabric.nics[addrOf(a)], s.o.Fabric.nics[addrOf(b)], now, 20, false}}}
					r := &planpb.Result{Id: 1, Traced: 256}
					for _, up := range p.leavesOf(h.asked[1].src) {
						for _, spine := range s.o.Fabric.Spines {
							for _, down := range p.leavesOf(h.asked[1].dst) {
								w := pathplan.Path{Up: pathplan.Link{From: up, To: spine}, Down: pathplan.Link{From: spine, To: down}}
								x, y := s.o.Fabric.hops(w)
								sample := &planpb.PathSample{Spine: x, Leaf: y, Ports: 8, Sent: 20}
								if dead && w.Up == bad {
									sample.Lost = 20
								}
								r.Samples = append(r.Samples, sample)
							}
						}
					}
					p.take(h, r, now)
				}
			}
		}
	}
	state := func() (down []string) {
		for _, l := range s.planner.Links() {
			if l.State != (pathplan.LinkState{}) {
				down = append(down, l.Link.String())
			}
		}
		return down
	}
	tell(false)
	p.judge(now)
	if d := state(); d != nil {
		t.Errorf("%v are blamed, and all are well", d)
	}
	for range 5 {
		now = now.Add(2 * time.Second)
		tell(true)
		p.judge(now)
	}
	if d := state(); len(d) != 1 || d[0] != bad.String() {
		t.Errorf("%v are blamed, want %v", d, bad)
	}
	for range 8 {
		now = now.Add(2 * time.Second)
		tell(false)
		p.judge(now)
	}
	if d := state(); d != nil {
		t.Errorf("%v are blamed, and all are well again", d)
	}
	p.take(&probing{asked: map[uint64]pair{}}, &planpb.Result{Id: 9, Samples: []*planpb.PathSample{{Spine: "x"}}}, now) // nobody has asked
}

func addrOf(h int) netip.Addr { return netip.AddrFrom4([4]byte{10, 3, byte(h), 1}) }

// TestConnectionsAreBounded: who connects and says nothing holds a bounded number of connections.
func TestConnectionsAreBounded(t *testing.T) {
	s, err := New(Options{Fabric: testFabric(), Listen: "127.0.0.1:0", Log: quiet, Streams: 4})
	if err != nil {
		t.Fatal(err)
	}
	most := 4 + 4 + spareConns // streams, and the fabric's hosts
	var accepted atomic.Int64
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			c, err := s.ln.Accept()
			if err != nil {
				return
			}
			defer c.Close()
			accepted.Add(1)
		}
	}()
	for i := range most + 1 {
		c, err := net.Dial("tcp", s.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_, _ = c.Write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")) // who says nothing is not let in
		if i < most {
			for end := time.Now().Add(patience); accepted.Load() <= int64(i) && time.Now().Before(end); {
				time.Sleep(time.Millisecond)
			}
			continue
		}
		_ = c.SetDeadline(time.Now().Add(patience))
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("connection %d is not hung up on: %v", i+1, err)
		}
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	<-ended
	if n := int(accepted.Load()); n != most {
		t.Errorf("%d connections are accepted, want %d", n, most)
	}
}

// TestRefusedByThePlanner: who is no one's host or job is counted, by what it lacks.
func TestRefusedByThePlanner(t *testing.T) {
	ca, theirs := wiretest.NewAuthority(t), wiretest.NewAuthority(t)
	planner, other, agent := ca.Planner(), theirs.Agent("host0", "a"), ca.Agent("host0", "a")
	s := serve(t, Options{TLS: &planner})
	other.CAFile = agent.CAFile // it knows whom to expect
	c, ctx := dial(t, s, &other)
	if _, _, err := ask(t, c, ctx, "host0", "a", &planpb.Need{}); err == nil {
		t.Error("a host with another authority's certificate is let in")
	}
	for end := time.Now().Add(patience); s.Snapshot(time.Now()).Handshakes == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) { // with TLS 1.3 the client is done before the server
			t.Fatal("its handshake is not counted")
		}
	}
	c, ctx = dial(t, s, &agent)
	if _, _, err := ask(t, c, ctx, "host1", "a", &planpb.Need{}); status.Code(err) != codes.PermissionDenied {
		t.Errorf("a host speaks for another: %v", err)
	}
	g, err := c.Plan(ctx)
	if err != nil {
		t.Fatal(err)
	}
	_ = g.Send(&planpb.Need{Hello: &planpb.Hello{Version: 99, Node: "host0", Job: "a"}})
	if _, err := g.Recv(); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("another version: %v", err)
	}
	if n := s.Snapshot(time.Now()); n.Denied != 1 || n.Refused != 1 {
		t.Errorf("%d denied and %d refused, want 1 and 1", n.Denied, n.Refused)
	}
}
