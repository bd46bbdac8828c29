package agent

import (
	"slices"
	"testing"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/record"
)

// Counters that move at each look push no change of a path out of its collective, nor hide it.
func TestPathChangesBesideCounters(t *testing.T) {
	s := &collect{}
	a := newAgent(t, s)
	p := process()
	p.Conns = []record.ConnStatus{{ConnEntry: record.ConnEntry{Comm: 0, Peer: 2, Transport: record.TransportRDMA, Channel: 1, ID: 77, Name: "mlx5_0/1->mlx5_2/1"}, Index: 1}}
	port := collector.NICPort{Device: "mlx5_0", Port: 1, Congestion: []collector.NICCounter{{Name: "np_cnp_sent"}}}
	a.fold(p, one(0, 1, 1000))
	for i := range 2 * maxLinks {
		port.Congestion = []collector.NICCounter{{Name: "np_cnp_sent", Value: float64(i)}}
		a.view.NICs = &collector.NICs{ProbedAt: int64(1200 + i), Ports: []collector.NICPort{port}}
		a.portsMoved()
	}
	a.fold(p, slices.Insert(one(0, 2, 2000), 2, record.Record{Kind: record.KindLink, Comm: 0, Conn: 1, Peer: 2, Code: uint8(record.LinkDown), Mono: 2050}))
	c := &s.got[1]
	if !c.Anomalous || !c.PathChanged || c.NLinks != collector.MaxLinks || c.Links[0].State != record.LinkDown || c.Links[1].Counter == "" {
		t.Errorf("anomalous %v, path changed %v, %+v", c.Anomalous, c.PathChanged, c.Links[:c.NLinks])
	}
}

// What a port's counters gain between two looks is told with the next collective of a
// communicator that has a connection there, once, and does not have it exported; that the port
// went down does.
func TestPortsMoved(t *testing.T) {
	s := &collect{}
	a := newAgent(t, s)
	p := process()
	p.Conns = []record.ConnStatus{
		{ConnEntry: record.ConnEntry{Comm: 0, Peer: 2, Transport: record.TransportRDMA, Channel: 1, ID: 77, Name: "mlx5_0/1->mlx5_2/1"}, Index: 1},
		{ConnEntry: record.ConnEntry{Comm: 0, Peer: 3, Transport: record.TransportRDMA, Channel: 1, ID: 78, Name: "mlx5_0/1->mlx5_3/1"}, Index: 2},
	}
	port := collector.NICPort{
		Device: "mlx5_0", Port: 1,
		Retransmissions: []collector.NICCounter{{Name: "packet_seq_err", Value: 4}, {Name: "out_of_sequence", Value: 9}},
		Congestion:      []collector.NICCounter{{Name: "np_cnp_sent", Value: 100}},
	}
	other := collector.NICPort{Device: "mlx5_1", Port: 1, Errors: []collector.NICCounter{{Name: "link_downed"}}}
	look := func(at int64) {
		a.view.NICs = &collector.NICs{ProbedAt: at, Ports: []collector.NICPort{port, other}}
		port.Retransmissions, port.Congestion, other.Errors = slices.Clone(port.Retransmissions), slices.Clone(port.Congestion), slices.Clone(other.Errors)
		a.portsMoved()
	}
	a.fold(p, one(0, 1, 1000))
	look(1500) // counts from the driver's start are no news
	a.fold(p, one(0, 2, 2000))
	port.Retransmissions[0].Value, port.Retransmissions[1].Value = 5, 16
	port.Congestion[0].Value = 103
	other.Errors[0].Value = 8 // on a port that it has no connection on
	look(2500)
	look(2500) // the same look
	a.fold(p, one(0, 3, 3000))
	a.fold(p, one(0, 4, 4000))
	port.Retransmissions[0].Value = 0 // the driver was loaded again
	port.Flaps, port.FlapAt = 1, 4400
	look(4500)
	a.fold(p, one(0, 5, 5000))
	if kept := a.ranks[p].comm(0).ports.around(nil, 2500, 4400); len(kept) != 3 || kept[2].Counter != collector.CounterFlaps {
		t.Errorf("kept around a collective: %+v", kept)
	}
	var got [][]collector.LinkEvent
	for i := range s.got {
		c := &s.got[i]
		if c.Anomalous != (c.Seq == 5) {
			t.Errorf("collective %d: anomalous %v", c.Seq, c.Anomalous)
		}
		var events []collector.LinkEvent
		for _, l := range c.Links[:c.NLinks] {
			if l.Conn == nil || l.Conn.NIC != "mlx5_0" || l.Conn.Port != 1 {
				t.Fatalf("%+v of %+v", l, l.Conn)
			}
			l.Conn = nil
			events = append(events, l)
		}
		got = append(got, events)
	}
	want := [][]collector.LinkEvent{
		nil, nil,
		{
			{Peer: -1, At: 2500, Counter: "out_of_sequence", Gained: 7, Since: 1500},
			{Peer: -1, At: 2500, Counter: "np_cnp_sent", Gained: 3, Since: 1500},
		},
		nil,
		{{Peer: -1, At: 4400, Counter: collector.CounterFlaps, Gained: 1, Since: 2500}},
	}
	if !slices.EqualFunc(got, want, slices.Equal[[]collector.LinkEvent]) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}
