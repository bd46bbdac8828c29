package service

import (
	"context"
	"math/rand/v2"
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
	creds, err := Credentials(nil, false)
	if err != nil {
		t.Fatal(err)
	}
	n := &network{t: t, r: rand.New(rand.NewPCG(1, 2)), f: s.o.Fabric, pods: 2, spines: 2, loss: map[pathplan.Link]float64{}, seed: 1}
	for h := range 4 {
		n.hosts = append(n.hosts, &simHost{pod: h / 2, addr: addrOf(h)})
	}
	c, err := NewClient(ClientOptions{Planner: s.Addr().String(), Credentials: creds, Node: "host0", Job: "a", Verify: time.Millisecond, Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var mu sync.Mutex
	foreign := 0
	c.hops = func(ctx context.Context, o probe.TraceOptions) ([]probe.Hops, error) {
		mu.Lock()
		defer mu.Unlock()
		if o.Proto != probe.UDP || o.Dst.Port() != 4791 || slices.Min(o.Ports) < 49152 {
			foreign++
		}
		return n.trace(ctx, o)
	}
	src, dst := addrOf(0), addrOf(2)
	moved := make(chan struct{}, 100)
	p := c.Open(ccl.PathConn{Comm: 1, Peer: 1, RoCE: true, Local: src, Remote: netip.AddrPortFrom(dst, 4791)}, func() {
		select {
		case moved <- struct{}{}:
		default:
		}
	})
	defer p.Close()
	lanes := make([]ccl.LaneState, 4)
	p.Seen(lanes)
	if ports := p.Ports(context.Background(), len(lanes)); ports != nil {
		t.Errorf("ports %v before anything was sent", ports)
	}
	// takes awaits ports that take the planned paths.
	takes := func(what string) {
		t.Helper()
		for end := time.Now().Add(patience); ; {
			for i := range lanes {
				lanes[i].Acked += bulk
			}
			p.Seen(lanes)
			select {
			case <-moved:
				ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
				ports := p.Ports(ctx, len(lanes)) // it may have taken those of an earlier call
				cancel()
				good := len(ports) == len(lanes)
				mu.Lock()
				for _, a := range s.Assignments("a") {
					if good {
						up, down := n.route(src, dst, ports[a.Lane])
						good = a.Path == pathplan.Path{Up: up, Down: down} && ports[a.Lane] >= 49152
					}
				}
				mu.Unlock()
				for i, port := range ports {
					lanes[i].Port = port
				}
				if sorted := slices.Sorted(slices.Values(ports)); good && len(slices.Compact(sorted)) == len(lanes) {
					return
				}
			case <-time.After(time.Millisecond):
			}
			if time.Now().After(end) {
				t.Fatalf("%s: no ports of the plan's; the last are %v", what, lanes)
			}
		}
	}
	takes("at first")
	mu.Lock()
	n.seed++
	mu.Unlock()
	takes("when switches hash otherwise")
	lanes[1].Port = 0
	takes("when a queue pair broke")
	if foreign > 0 {
		t.Errorf("%d traces are not like the queue pairs' packets", foreign)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.used) > 0 {
		t.Errorf("ports %v are kept from other connections", c.used)
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
