package fabric_test

import (
	"context"
	"net/netip"
	"reflect"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/deploy/fabric"
	"github.com/lockstep-ccl/lockstep/pathplan"
	"github.com/lockstep-ccl/lockstep/pathplan/probe"
)

// TestTraces: on real switches of namespaces each source port has one path, by name, the
// same each time; when a link is gone none takes it, and probes from end to end tell.
func TestTraces(t *testing.T) {
	long(t) // on a machine of which others want all, answers come later than anybody waits
	b := setUp(t, fabric.Shape{Pods: 2, Spines: 2, Hosts: 2, Rate: 1000})
	names := probe.Names{}
	for _, i := range b.up.Fabric().Interfaces {
		names[i.Addr] = i.Link
	}
	var ports []uint16
	for p := range uint16(64) {
		ports = append(ports, 20000+p)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	trace := func(proto probe.Proto) (hops []probe.Hops) {
		must(t, fabric.Enter(b.up.Host(0), func() (err error) {
			hops, err = probe.Trace(ctx, probe.TraceOptions{
				Proto: proto, Src: b.up.Addr(0), Dst: netip.AddrPortFrom(b.up.Addr(1), 4791), Ports: ports, Tries: 5, Timeout: 2 * time.Second,
			})
			return err
		}))
		return hops
	}
	paths := func(hops []probe.Hops) map[pathplan.Path]int {
		sorted, unknown := names.Sort(ports, hops)
		if unknown > 0 {
			t.Errorf("%d of %d ports have no path: %v", unknown, len(ports), hops)
		}
		n := map[pathplan.Path]int{}
		for _, p := range sorted {
			n[p.Path] = len(p.Ports)
		}
		return n
	}
	for _, proto := range []probe.Proto{probe.TCP, probe.UDP} {
		hops := trace(proto)
		if n := paths(hops); len(n) != 8 { // from left and right, over two spines, to left and right
			t.Errorf("protocol %d: %d paths: %v", proto, len(n), n)
		}
		if again := trace(proto); !reflect.DeepEqual(hops, again) {
			t.Errorf("protocol %d: ports have changed their paths:\n%v\n%v", proto, hops, again)
		}
	}

	var r *probe.Responder
	must(t, fabric.Enter(b.up.Host(1), func() (err error) {
		r, err = probe.Listen(netip.AddrPortFrom(b.up.Addr(1), 4791))
		return err
	}))
	done := make(chan error, 1)
	responding, stop := context.WithCancel(ctx)
	go func() { done <- r.Run(responding) }()
	defer func() {
		stop()
		must(t, <-done)
	}()
	ping := func(from []uint16) (pings []probe.Ping) {
		must(t, fabric.Enter(b.up.Host(0), func() (err error) {
			pings, err = probe.PingPorts(ctx, probe.PingOptions{Src: b.up.Addr(0), Dst: netip.AddrPortFrom(b.up.Addr(1), 4791), Ports: from, Count: 5, Timeout: 2 * time.Second})
			return err
		}))
		return pings
	}
	before, _ := names.Sort(ports, trace(probe.UDP))
	dead := pathplan.Link{From: fabric.LeafName(0), To: fabric.SpineName(1)}
	must(t, b.up.Silence(0, 1))
	for _, p := range before { // one port a path: loss is of the way there, whatever the way back
		three := []uint16{p.Ports[0], before[0].Ports[0], before[len(before)-1].Ports[0]}
		g := ping(three)[0]
		for try := 0; g.Lost > 0 && p.Path.Up != dead && try < 10; try++ {
			g = ping(three)[0] // an answer that was late
		}
		if lost := g.Lost > 0; g.Answered && lost != (p.Path.Up == dead) {
			t.Errorf("%v: %+v, and %v is dead", p.Path, g, dead)
		}
	}
	must(t, b.up.Cut(0, 1))
	must(t, b.up.Withdraw(0, 1))
	for p := range paths(trace(probe.TCP)) {
		if p.Up == dead || p.Down == dead.Reverse() {
			t.Errorf("%v is taken, and there is no such link", p)
		}
	}
}
