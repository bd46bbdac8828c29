package master

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// A connection with a path that is down and one that has carried nothing yet is
// not dead.
func TestIdlePathCounts(t *testing.T) {
	s, engine := newState("job", Limits{}), diagnosis.New(diagnosis.Config{})
	now := int64(1e18)
	dead := func(backup record.LinkState) bool {
		r := report(2, 0)
		r.Connections = nil
		for rank := range int32(2) {
			for path, link := range []record.LinkState{record.LinkDown, backup} {
				r.Connections = append(r.Connections, &wire.Connection{CommId: 7, Rank: rank, Peer: 1 - rank, Channel: uint32(path),
					Transport: uint32(record.TransportRDMA), Name: "a->b", Link: uint32(link), MonoLinkNs: 9e8})
			}
		}
		now += 1e8
		s.merge(s.node("n"), r, now)
		s.ev.Now = now
		for _, v := range engine.Diagnose(&s.ev) {
			if v.Culprits[0].Reason == "link_down" {
				return true
			}
		}
		return false
	}
	if dead(record.LinkUp) {
		t.Error("dead with an idle path that is up")
	}
	if !dead(record.LinkDown) {
		t.Error("not dead with both paths down")
	}
}

// A connection's identity arrives, by a report of this version and of the one before, which
// has the queue pair in the name only; reports without a name leave it as it is.
func TestConnectionIdentity(t *testing.T) {
	s := newState("job", Limits{})
	now := int64(1e18)
	tell := func(w *wire.Connection) diagnosis.Conn {
		r := report(2, 0)
		w.CommId, w.Peer, w.Transport, w.Posted = 7, 1, uint32(record.TransportRDMA), 100
		r.Connections = []*wire.Connection{w}
		now += 1e8
		s.merge(s.node("n"), r, now)
		return s.ev.Conns[0]
	}
	want := "rdma mlx5_0/1->mlx5_2/1 qp 284->301 rail 1 gid 10.0.0.7"
	c := tell(&wire.Connection{Name: "mlx5_0/1->mlx5_2/1 qp 284", QueuePair: 284, PeerQueuePair: 301, Rail: 1, Address: "10.0.0.7"})
	if c.String() != want {
		t.Errorf("got %q, want %q", c.String(), want)
	}
	if c = tell(&wire.Connection{}); c.String() != want {
		t.Errorf("without a name: %q", c.String())
	}
	if c = tell(&wire.Connection{Name: "mlx5_0/1->mlx5_2/1 qp 290", QueuePair: 290}); c.String() != "rdma mlx5_0/1->mlx5_2/1 qp 290" {
		t.Errorf("of the version before: %q", c.String())
	}
	if d := connDetails(&s.ev); len(d) != 1 || d[0].QP != 290 || d[0].NIC != "mlx5_0" || d[0].Port != 1 || d[0].Rank != 0 || d[0].PeerWorld != 1 {
		t.Errorf("%+v", d)
	}
}
