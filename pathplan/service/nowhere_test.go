package service

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/pathplan"
	"github.com/lockstep-ccl/lockstep/pathplan/probe"
	"github.com/lockstep-ccl/lockstep/pathplan/service/planpb"
)

// TestNowhere: routes leave a link and no prober is there to find that. The connection whose
// lane was on it gets another path, by its own word, with ports that take it.
func TestNowhere(t *testing.T) {
	const spines, lanes = 4, 4
	s := serve(t, Options{Fabric: newFabric(2, spines, 2)})
	n := newRoutes(t, s, spines)
	var mu sync.Mutex
	var gone pathplan.Link
	// takes is the path of a port: what went over the link that is gone goes over the next spine.
	takes := func(port uint16) pathplan.Path {
		up, down := n.route(addrOf(0), addrOf(2), port)
		if up == gone {
			i := slices.Index(s.o.Fabric.Spines, up.To)
			up.To = s.o.Fabric.Spines[(i+1)%spines]
			down.From = up.To
		}
		return pathplan.Path{Up: up, Down: down}
	}
	f := follow(t, s, ClientOptions{Verify: 10 * time.Millisecond, Ports: 32}, ccl.PathConn{Comm: 1, Peer: 1, Local: addrOf(0), Remote: netip.AddrPortFrom(addrOf(2), 5000)}, lanes,
		func(_ context.Context, o probe.TraceOptions) ([]probe.Hops, error) {
			mu.Lock()
			defer mu.Unlock()
			out := make([]probe.Hops, len(o.Ports))
			for i, port := range o.Ports {
				p := takes(port)
				out[i] = probe.Hops{s.o.Fabric.addrs[p.Up], s.o.Fabric.addrs[p.Down]}
			}
			return out, nil
		})
	right := func(port uint16, p pathplan.Path) bool {
		mu.Lock()
		defer mu.Unlock()
		return takes(port) == p && p.Up != gone
	}
	f.settles("at first", right)
	mu.Lock()
	gone = s.Assignments("a")[0].Path.Up
	mu.Unlock()
	f.settles("when a link is gone", right)
}

// TestNowhereOnlyOnes: a word of a path that the lane has left, or of another's connection, moves nothing.
func TestNowhereOnlyOnes(t *testing.T) {
	s, err := New(Options{Fabric: newFabric(2, 4, 2), Listen: "127.0.0.1:0", Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	st := &stream{tenant: "a", job: "a", out: make(chan *planpb.Paths, 100), conns: map[string]bool{}, loads: map[string][]carried{}}
	other := &stream{tenant: "b", job: "b", out: make(chan *planpb.Paths, 100), conns: map[string]bool{}, loads: map[string][]carried{}}
	if err := s.take(st, &planpb.Need{Requests: []*planpb.Request{request("0", "10.3.0.1", "10.3.2.1")}}); err != nil {
		t.Fatal(err)
	}
	was := s.Assignments("a")[0].Path
	says := func(st *stream, p pathplan.Path) pathplan.Path {
		t.Helper()
		spine, leaf := s.o.Fabric.hops(p)
		if err := s.take(st, &planpb.Need{Signals: []*planpb.Signal{{Conn: "0", Lane: 0, Nowhere: true, Spine: spine, Leaf: leaf}}}); err != nil {
			t.Fatal(err)
		}
		s.tick(time.Now())
		return s.Assignments("a")[0].Path
	}
	if p := says(other, was); p != was {
		t.Errorf("another tenant's word moved the lane to %s", p)
	}
	elsewhere := was
	for _, spine := range s.o.Fabric.Spines {
		if spine != was.Up.To {
			elsewhere.Up.To, elsewhere.Down.From = spine, spine
		}
	}
	if p := says(st, elsewhere); p != was {
		t.Errorf("a word of %s moved the lane from %s to %s", elsewhere, was, p)
	}
	if p := says(st, was); p == was || p.Up.To == was.Up.To {
		t.Errorf("still on %s", p)
	}
}

// TestPortsRest: a port rests from when its connection ends, however long that has lasted.
func TestPortsRest(t *testing.T) {
	p := &path{c: &Client{used: map[uint16]string{}}, spent: map[uint16]time.Time{}, want: make([]hops, 2), ready: [][]uint16{{1, 2}, {3, 4}}}
	if got := p.Ports(t.Context(), 2); !slices.Equal(got, []uint16{1, 2}) {
		t.Fatalf("ports %v", got)
	}
	for port := range p.spent {
		p.spent[port] = time.Now().Add(-2 * restFor)
	}
	if got := p.Ports(t.Context(), 2); !slices.Equal(got, []uint16{3, 4}) {
		t.Fatalf("ports %v", got)
	}
	busy := p.busy()
	for port := range uint16(4) {
		if !busy[port+1] {
			t.Errorf("port %d may be given again", port+1)
		}
	}
}
