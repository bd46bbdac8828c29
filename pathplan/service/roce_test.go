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
)

// TestQueuePairPorts: a connection over RoCE v2 gets source ports that devices can make, found by UDP
// probes to its port, which take the planned paths; others when switches hash otherwise than they
// did, or when a queue pair has lost its port; and none of them rests.
func TestQueuePairPorts(t *testing.T) {
	s := serve(t, Options{})
	n := newRoutes(t, s, 2)
	var mu sync.Mutex
	foreign := 0
	f := follow(t, s, ClientOptions{Verify: time.Millisecond}, ccl.PathConn{Comm: 1, Peer: 1, RoCE: true, Local: addrOf(0), Remote: netip.AddrPortFrom(addrOf(2), 4791)}, 4,
		func(ctx context.Context, o probe.TraceOptions) ([]probe.Hops, error) {
			mu.Lock()
			defer mu.Unlock()
			if o.Proto != probe.UDP || o.Dst.Port() != 4791 || slices.Min(o.Ports) < 49152 {
				foreign++
			}
			return n.trace(ctx, o)
		})
	f.path.Seen(f.lanes)
	if ports := f.path.Ports(context.Background(), len(f.lanes)); ports != nil {
		t.Errorf("ports %v before anything was sent", ports)
	}
	right := func(port uint16, p pathplan.Path) bool {
		mu.Lock()
		defer mu.Unlock()
		up, down := n.route(addrOf(0), addrOf(2), port)
		return p == pathplan.Path{Up: up, Down: down} && port >= 49152
	}
	f.settles("at first", right)
	mu.Lock()
	n.seed++
	mu.Unlock()
	f.settles("when switches hash otherwise", right)
	f.lanes[1].Port = 0
	f.settles("when a queue pair broke", right)
	mu.Lock()
	defer mu.Unlock()
	if foreign > 0 {
		t.Errorf("%d traces are not like the queue pairs' packets", foreign)
	}
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	if len(f.c.used) > 0 {
		t.Errorf("ports %v are kept from other connections", f.c.used)
	}
}

// TestNoPortsWithinALeaf: where no spine is on the way, nothing is traced.
func TestNoPortsWithinALeaf(t *testing.T) {
	c := &Client{ctx: context.Background(), hops: func(context.Context, probe.TraceOptions) ([]probe.Hops, error) {
		t.Error("traced")
		return nil, nil
	}}
	p := &path{c: c, want: []hops{{leaf: addrOf(1)}, {leaf: addrOf(1)}}, move: func() { t.Error("moved") }}
	p.settle()
}
