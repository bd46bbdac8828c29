package diagnosis

import (
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/record"
)

// A finding on a connection says what its NICs saw since: loss, congestion, a flap, each with
// rates before and after; or that they saw nothing; and nothing where nobody knows.
func TestNICEvidence(t *testing.T) {
	const sec = int64(1e9)
	onset := 1000 * sec
	counter := func(name string, kind NICKind, values ...uint64) NICCounter {
		c := NICCounter{Name: name, Kind: kind}
		for i, v := range values {
			c.Add(onset+int64(i-2)*20*sec, v) // 40 and 20 s before, at the onset, 20 s after
		}
		return c
	}
	evidence := func(nics ...NIC) string {
		ev := &Evidence{
			Now:   onset + 20*sec,
			Ranks: []Rank{{Node: 0}, {Node: 1}},
			Nodes: []Node{{Name: "n0"}, {Name: "n1"}},
			Comms: []Comm{{ID: 7, Members: []Member{{World: 0}, {World: 1}}}},
			Conns: []Conn{
				{Src: 0, Dst: 1, Transport: record.TransportRDMA, Name: "mlx5_0/1->mlx5_2/1", QueuePair: 284, PeerQueuePair: 301, Link: record.LinkDown, LinkAt: onset},
				{Src: 0, Dst: 1, Transport: record.TransportRDMA, Name: "mlx5_1/1->mlx5_3/1", QueuePair: 285, PeerQueuePair: 302, Link: record.LinkSwitched, LinkAt: onset, Switches: 1, Resent: 65536},
				{Src: 1, Dst: 0, Transport: record.TransportRDMA, Name: "mlx5_9/1->mlx5_8/1"},
			},
			NICs: nics,
		}
		v := &New(Config{}).view
		v.take(ev)
		f := finding{}
		f.Class, f.Since = CommunicationSlow, onset
		for range maxWhy {
			f.why("what was known")
		}
		f.blame(Culprit{Kind: CulpritConnection, Rank: 0, Peer: 1})
		v.pathsAndNICs(&f)
		if len(f.Why) != maxWhy {
			t.Errorf("%d sentences", len(f.Why))
		}
		return strings.Join(f.Why, "\n")
	}
	for _, c := range []struct {
		name string
		nics []NIC
		want []string
		not  []string
	}{
		{"nothing known", nil, []string{"(rdma mlx5_0/1->mlx5_2/1 qp 284->301) broke at", "qp 285->302) carries what another path no longer does since", "1 time and sent 65536 bytes again"}, []string{"NIC", "mlx5_9"}},
		{"loss", []NIC{{Node: 0, Device: "mlx5_0", Port: 1, Counters: []NICCounter{counter("packet_seq_err", NICLoss, 10, 10, 10, 410)}}},
			[]string{"NIC mlx5_0/1 of n0 saw loss (packet_seq_err by 400: 16 a second, before 0)"}, nil},
		{"congestion at the other end", []NIC{{Node: 1, Device: "mlx5_2", Port: 1, Counters: []NICCounter{counter("np_cnp_sent", NICCongestion, 0, 20, 40, 1040)}}, {Node: 0, Device: "mlx5_0", Port: 1}},
			[]string{"NIC mlx5_2/1 of n1 saw congestion (np_cnp_sent by 1", "before 0.9)", "no loss, congestion or errors were seen by NIC mlx5_0/1 of n0"}, nil},
		{"as always", []NIC{{Node: 0, Device: "mlx5_0", Port: 1, Counters: []NICCounter{counter("np_cnp_sent", NICCongestion, 0, 1000, 2000, 3000)}}},
			[]string{"no loss, congestion or errors were seen by NIC mlx5_0/1 of n0"}, nil},
		{"a flap", []NIC{{Node: 0, Device: "mlx5_0", Port: 1, Flaps: 2, FlapAt: onset}}, []string{"saw its link go down at", "(2 times in all)"}, nil},
		{"down", []NIC{{Node: 1, Device: "mlx5_3", Port: 1, DownAt: onset}}, []string{"NIC mlx5_3/1 of n1 saw its link down since"}, nil},
		{"an old flap, another port", []NIC{{Node: 0, Device: "mlx5_0", Port: 1, Flaps: 2, FlapAt: onset - 600*sec}, {Node: 0, Device: "mlx5_7", Port: 1, DownAt: onset}},
			[]string{"no loss, congestion or errors were seen"}, []string{"mlx5_7", "go down"}},
	} {
		got := evidence(c.nics...)
		for _, w := range c.want {
			if !strings.Contains(got, w) {
				t.Errorf("%s: no %q in\n%s", c.name, w, got)
			}
		}
		for _, w := range c.not {
			if strings.Contains(got, w) {
				t.Errorf("%s: %q in\n%s", c.name, w, got)
			}
		}
	}
}

// However values come, a counter keeps a bounded number of them, in order.
func TestNICCounterAdd(t *testing.T) {
	var c NICCounter
	for i := range int64(100) {
		c.Add(i/2, uint64(i))
	}
	if len(c.Samples) != maxNICSamples {
		t.Fatalf("%d samples", len(c.Samples))
	}
	c.Add(1000, 3) // the driver was loaded anew
	if len(c.Samples) != 1 || c.Samples[0].Value != 3 {
		t.Errorf("%+v", c.Samples)
	}
	if before, after, by := c.grown(900, 1000); before != 0 || after != 0 || by != 0 {
		t.Error(before, after, by)
	}
}
