package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/ccl/ccltest/fakenic"
	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/record"
)

// The rail that is disturbed, and then fails.
var nearNIC, farNIC = fakenic.Device(0, 0), fakenic.Device(1, 0)

// TestTracingRDMA follows collectives of four ranks on two logical nodes with RDMA between them, on fake
// devices, into a backend: while a rail is slow, while it fails over to the other, and when it is back.
func TestTracingRDMA(t *testing.T) {
	fabric := fakenic.New(t)
	w := newTraced(t, "traced-rdma")
	w.reduce(t)

	t.Run("one trace a collective", w.wholeTraces)
	var lane identity
	t.Run("windows", func(t *testing.T) { lane = w.slowRail(t, fabric) })
	if lane.own == 0 {
		t.Fatal("without a queue pair no failover can be told")
	}
	t.Run("failover", func(t *testing.T) { w.failover(t, fabric, lane) })
	t.Run("exemplars", w.exemplars)
}

// reduce starts four ranks in this process, which add up without pause until the test ends. The sums have to be
// what they are on whatever path.
func (w *traced) reduce(t *testing.T) {
	t.Helper()
	id, err := ccl.NewUniqueID(freeAddrs(t, 1)[0])
	if err != nil {
		t.Fatal(err)
	}
	var stop atomic.Bool
	var wg sync.WaitGroup
	for r := range 4 {
		node := fmt.Sprint("node", r/2)
		rec, err := record.Create(record.Options{
			Dir: filepath.Join(w.runtime, node), Identity: record.Identity{Job: w.job, Rank: int32(r), WorldSize: 4},
		})
		if err != nil {
			t.Fatal(err)
		}
		cfg := ccl.Config{ID: id, Rank: r, Size: 4, Name: "dp0", Node: node, Recorder: rec}
		cfg.Secret = []byte("a secret of at least sixteen bytes")
		fakenic.Config(&cfg, r/2)
		cfg.RDMA.FailbackAfter = 100 * time.Millisecond
		wg.Go(func() {
			defer rec.Close()
			if err := sums(context.Background(), cfg, &stop); err != nil {
				t.Errorf("rank %d: %v", r, err)
			}
		})
	}
	t.Cleanup(func() { stop.Store(true); wg.Wait() })
}

// sums calls AllReduce until stop, which any rank passes on in the first element.
func sums(ctx context.Context, cfg ccl.Config, stop *atomic.Bool) (err error) {
	c, err := ccl.Init(ctx, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	s := c.NewStream()
	in, out := make([]float32, 32<<10), make([]float32, 32<<10)
	for i := range in {
		in[i] = float32(cfg.Rank*1000 + i%1000)
	}
	for round := 0; ; round++ {
		if in[0] = 0; stop.Load() {
			in[0] = 1
		}
		err := c.AllReduce(s, ccl.Of(in), ccl.Of(out), ccl.Sum)
		if err == nil {
			err = s.Wait(ctx)
		}
		if err != nil {
			c.Abort(err)
			return err
		}
		for i, v := range out[1:] {
			if want := float32(6000 + 4*((i+1)%1000)); v != want {
				return fmt.Errorf("round %d: element %d is %v, not %v", round, i+1, v, want)
			}
		}
		if out[0] != 0 {
			return nil
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// identity is a pair of connected queue pairs, and where they are.
type identity struct {
	own, peer   uint32
	name        string
	nic         string
	rail        float64
	rank, other float64 // world ranks of both ends
}

// connOf is what an event of a span of a rank says of its connection.
func connOf(rank, e *span) identity {
	nic, _ := e.attrs[names.AttrNIC].(string)
	name, _ := e.attrs[names.AttrConnection].(string)
	return identity{
		own: uint32(e.number(names.AttrQueuePair)), peer: uint32(e.number(names.AttrPeerQueuePair)), name: name, nic: nic,
		rail: e.number(names.AttrRail), rank: rank.number(names.AttrWorldRank), other: e.number(names.AttrPeer),
	}
}

// rankOf is the span of the rank that a span is of, itself or its parent.
func rankOf(spans []span, s *span) *span {
	for i := range spans {
		if x := &spans[i]; strings.HasPrefix(x.name, "rank ") && (x.id == s.id || x.id == s.parent) {
			return x
		}
	}
	return nil
}

// slowRail delays what goes over the first rail and finds windows of it in the traces, with the queue pairs that both
// devices have. It returns those of a connection.
func (w *traced) slowRail(t *testing.T, fabric *fakenic.Fabric) (lane identity) {
	onset := record.Now()
	fabric.Delay(nearNIC, farNIC, 5*time.Millisecond)
	defer fabric.Delay(nearNIC, farNIC, 0)
	slowed := func(c *collector.Collective) bool {
		return slices.ContainsFunc(c.Windows[:c.NWindows], func(x collector.Window) bool {
			return x.First > onset && x.Cause == record.CauseNetwork && x.Conn != nil && x.Conn.NIC == nearNIC
		})
	}
	var c collector.Collective
	becomes(t, "a collective with a window of the slow rail", func() (ok bool) { c, ok = w.last(0, slowed); return ok })
	spans := w.whole(t, traceID(&c), 4)
	w.checkTrace(t, spans)
	for i := range spans {
		rank := rankOf(spans, &spans[i])
		for j := range spans[i].events {
			e := &spans[i].events[j]
			if e.name != "window" || e.attrs[names.AttrTransport] != "rdma" {
				continue
			}
			if rank == nil {
				t.Errorf("a window of no rank, of %s: %v", spans[i].name, e.attrs)
				continue
			}
			is := connOf(rank, e)
			node, rail := int(is.rank)/2, int(is.rail)-1
			near, far := fakenic.Device(node, rail), fakenic.Device(1-node, rail)
			if is.nic != near || is.name != near+"/1->"+far+"/1" || e.number(names.AttrPort) != 1 ||
				e.attrs[names.AttrAddress] == nil || e.attrs[names.AttrChannel] == nil {
				t.Errorf("a window of rank %v: %v", is.rank, e.attrs)
				continue
			}
			if !fabric.Connected(near, is.own) || !fabric.Connected(far, is.peer) {
				t.Errorf("a window names queue pairs %d->%d, which %s and %s do not have", is.own, is.peer, near, far)
			}
			if is.nic == nearNIC && e.attrs[names.AttrCause] == "network" && is.rank == float64(c.World) {
				lane = is
			}
		}
	}
	if lane.own == 0 {
		t.Error("no window of the slow rail is in the trace")
	}
	return lane
}

// failover takes down the port of a connection and brings it back: the traces of the collectives meanwhile say that
// this queue pair broke, that another one on the other rail took over, and which one replaced it.
func (w *traced) failover(t *testing.T, fabric *fakenic.Fabric, lane identity) {
	backup, farBackup := fakenic.Device(0, 1), fakenic.Device(1, 1)
	fabric.SetPort(nearNIC, false)
	w.linkOf(t, lane, "down", func(is identity) bool {
		return is.nic == nearNIC && is.name == lane.name && is.own == lane.own && is.peer == lane.peer
	})
	w.linkOf(t, lane, "switched", func(is identity) bool {
		return is.nic == backup && is.name == backup+"/1->"+farBackup+"/1" && is.rail == 2 &&
			fabric.Connected(backup, is.own) && fabric.Connected(farBackup, is.peer)
	})
	fabric.SetPort(nearNIC, true)
	w.linkOf(t, lane, "up", func(is identity) bool {
		return is.nic == nearNIC && is.name == lane.name && is.own != lane.own && fabric.Connected(nearNIC, is.own)
	})
}

// linkOf waits for a change of a path between the lane's two ranks, to a state, in the trace of a collective.
func (w *traced) linkOf(t *testing.T, lane identity, state string, fits func(identity) bool) {
	t.Helper()
	var c collector.Collective
	becomes(t, "a collective with a connection "+state, func() (ok bool) {
		c, ok = w.last(0, func(c *collector.Collective) bool {
			return float64(c.World) == lane.rank && slices.ContainsFunc(c.Links[:c.NLinks], func(l collector.LinkEvent) bool {
				k := l.Conn
				return k != nil && l.State.String() == state && float64(l.Peer) == lane.other &&
					fits(identity{own: uint32(k.QP), peer: k.PeerQP, name: k.Name, nic: k.NIC, rail: float64(k.Rail)})
			})
		})
		return ok
	})
	spans := w.whole(t, traceID(&c), 4)
	w.checkTrace(t, spans)
	var others []identity
	for i := range spans {
		rank := rankOf(spans, &spans[i])
		for j := range spans[i].events {
			e := &spans[i].events[j]
			if e.name != "link" || e.attrs[names.AttrLinkState] != state || rank == nil {
				continue
			}
			is := connOf(rank, e)
			if is.rank == lane.rank && is.other == lane.other && fits(is) {
				return
			}
			others = append(others, is)
		}
	}
	t.Errorf("no connection of rank %v became %s as it should in trace %s; those that did: %+v",
		lane.rank, state, traceID(&c), others)
}
