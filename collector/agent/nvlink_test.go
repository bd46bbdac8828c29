package agent

import (
	"math/rand/v2"
	"testing"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/record"
)

// gpuRank is a process whose GPU stamps operations of a communicator of so many by peer.
func gpuRank(rank, size int32) *source.Process {
	p := process()
	p.Comms = p.Comms[1:]
	p.Comms[0].Index, p.Comms[0].Rank, p.Comms[0].Size, p.Comms[0].Stamps = 0, rank, size, 16
	p.Rank, p.WorldSize = rank, size
	for peer := range size {
		if peer != rank {
			p.Conns = append(p.Conns, record.ConnStatus{
				ConnEntry: record.ConnEntry{Peer: peer, Transport: record.TransportNVLink, Name: "GPU-a->GPU-b"}, Index: uint32(len(p.Conns)),
			})
		}
	}
	return p
}

// links plays operations on one rank: an operation's kind and size change all the time, peers
// come late at random, and all of it takes from half to twice as long as the middle one, a read of a
// peer's memory slower by trip.
type links struct {
	rng  *rand.Rand
	seq  uint64
	at   int64
	trip [record.MaxStampPeers]float64 // 1: as usual
	pace float64                       // of all transfers
}

func (l *links) stamp(rank, size int32) record.Stamp {
	bytes := uint64(256<<10) << l.rng.IntN(7)
	coll := record.AllReduce
	if l.rng.IntN(3) == 0 {
		coll = record.AllGather
	}
	noise := func() float64 { return 0.8 + 0.4*l.rng.Float64() }
	l.seq++
	st := record.Stamp{Desc: record.Desc{Coll: coll, Algo: record.AlgoBulk, Root: -1, Bytes: bytes}, Seq: l.seq, Start: l.at, Peer: -1}
	met := uint32(0)
	for p := range size {
		if p == rank {
			continue
		}
		x := &st.Peers[p]
		x.Seen = true
		if l.rng.IntN(2) == 0 {
			x.Came = uint32(l.rng.IntN(3_000_000)) // late: up to 3 ms
		}
		x.Trip = uint32(1300 * noise() * l.trip[p])
		met = max(met, x.Came)
	}
	last := uint32(0)
	for p := range size {
		if x := &st.Peers[p]; x.Seen {
			x.There = met + uint32((8000+float64(bytes)/300)*noise()*l.pace)
			last = max(last, x.There)
		}
	}
	st.End, st.Wait = st.Start+int64(last)+200, int64(met)
	l.at = st.End + int64(l.rng.IntN(2_000_000))
	return st
}

// TestNVLinks: a link that is slow to read closes slow windows, between two ranks where transfers
// take longer as well, and no other one does: not for late peers, other sizes, other kinds, nor
// where all of an operation's peers are slow to end, or the GPUs themselves.
func TestNVLinks(t *testing.T) {
	for _, tt := range []struct {
		name string
		size int32
		slow func(l *links)
		want []int32 // peers
	}{
		{"healthy pair", 2, func(*links) {}, nil},
		{"healthy", 4, func(*links) {}, nil},
		{"a pair's link is shared", 2, func(l *links) { l.trip[0], l.pace = 1.5, 2.5 }, []int32{0}},
		{"a pair's GPUs are busy", 2, func(l *links) { l.trip[0], l.pace = 1.12, 8 }, nil},
		{"one link of four", 4, func(l *links) { l.trip[3], l.pace = 2.5, 1.6 }, []int32{3}},
		{"all are slow to end", 4, func(l *links) { l.pace = 2.5 }, nil},
		{"one way in for all of four is shared", 4, func(l *links) { l.trip[0], l.trip[2], l.trip[3], l.pace = 1.45, 1.45, 1.45, 2.6 }, []int32{0, 2, 3}},
		{"another's way is shared", 4, func(l *links) { l.trip[0], l.pace = 1.1, 2.6 }, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			const me = 1
			a, p := newAgent(t), gpuRank(me, tt.size)
			l := &links{rng: rand.New(rand.NewPCG(1, 2)), at: 1e9, pace: 1}
			for i := range l.trip {
				l.trip[i] = 1
			}
			play := func(n int) map[int32]*wire.Connection {
				for range n {
					a.foldStamps(p, []record.Stamp{l.stamp(me, tt.size)})
				}
				r := a.ranks[p]
				a.learn(r)
				var rep wire.Report
				r.report(&rep, wire.MaxEntries)
				got := map[int32]*wire.Connection{}
				for _, c := range rep.Connections {
					if c.Peer != me || c.Transport != uint32(record.TransportNVLink) || c.Name == "" && n == 4000 {
						t.Fatalf("connection %v", c)
					}
					got[c.Rank] = c
				}
				return got
			}
			before := play(4000)
			for peer, c := range before {
				if c.Windows < 10 || c.SlowWindows != 0 || c.BytesPerSecond <= 0 || c.LatencyNs <= 0 {
					t.Errorf("healthy, from %d: %v", peer, c)
				}
			}
			if len(before) != int(tt.size)-1 {
				t.Fatalf("%d connections", len(before))
			}
			tt.slow(l)
			for peer, c := range play(2000) {
				windows, slow := c.Windows-before[peer].Windows, c.SlowWindows-before[peer].SlowWindows
				named := false
				for _, p := range tt.want {
					named = named || p == peer
				}
				if named && (windows < 5 || slow+2 < windows || record.Cause(c.Cause) != record.CauseNetwork || c.LatencyNs < before[peer].LatencyNs*3/2) || !named && slow != 0 {
					t.Errorf("from %d: %d of %d windows slow, %d ns, before %d: %v", peer, slow, windows, c.LatencyNs, before[peer].LatencyNs, c)
				}
			}
		})
	}
}

// TestStampedPeersAreLegs: what is stamped by peer is what peers sent, in spans.
func TestStampedPeersAreLegs(t *testing.T) {
	var legs []collector.Leg
	a := newAgent(t, sinkFunc(func(c *collector.Collective) { legs = append(legs, c.Peers.All()...) }))
	st := record.Stamp{Desc: record.Desc{Coll: record.AllReduce, Algo: record.AlgoLL, Root: -1, Bytes: 64}, Seq: 1, Start: 1000, End: 1900, Wait: 300, Peer: 2}
	st.Peers[0] = record.StampPeer{Seen: true, There: 500}
	st.Peers[2] = record.StampPeer{Seen: true, Came: 300, There: 800}
	p := gpuRank(1, 3)
	a.foldStamps(p, []record.Stamp{st})
	want := []collector.Leg{{Peer: 0, Reduce: true, First: 1000, Last: 1500}, {Peer: 2, Reduce: true, First: 1300, Last: 1800, Wait: 300}}
	if len(legs) != 2 || legs[0] != want[0] || legs[1] != want[1] {
		t.Errorf("legs %+v\nwant %+v", legs, want)
	}
	st.Seq, st.Peers = 2, [record.MaxStampPeers]record.StampPeer{}
	if a.foldStamps(p, []record.Stamp{st}); len(legs) != 2 {
		t.Errorf("an operation of which no peer was stamped has legs %+v", legs[2:])
	}
}
