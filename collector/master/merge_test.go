package master

import (
	"fmt"
	"math"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

var small = Limits{Nodes: 4, Ranks: 64, Comms: 8, Members: 256, Conns: 64, Arrivals: 512, Calls: 40}

// check holds what every evidence must hold, whatever was merged.
func check(s *state) error {
	ev := &s.ev
	l := &s.limits
	if len(ev.Ranks) > l.Ranks || len(ev.Comms) > l.Comms || len(ev.Conns) > l.Conns || len(ev.Arrivals) > maxArrivals || len(ev.Nodes) > l.Nodes {
		return fmt.Errorf("%d ranks, %d communicators, %d connections, %d arrivals, %d nodes", len(ev.Ranks), len(ev.Comms), len(ev.Conns), len(ev.Arrivals), len(ev.Nodes))
	}
	if len(ev.Ranks) != len(s.ranks) || len(ev.Comms) != len(s.comms) || len(ev.Comms) != len(s.commOf) || len(ev.Conns) != len(s.conns) || len(ev.Conns) != len(s.connOf) || len(ev.Arrivals) != len(s.arrived) || len(ev.Arrivals) != len(s.samples) {
		return fmt.Errorf("indices and evidence differ in length")
	}
	for c := range ev.Comms {
		n := 0
		for i := range ev.Comms[c].Members {
			if present(&ev.Comms[c].Members[i]) {
				n++
			}
		}
		if n != s.comms[c].present {
			return fmt.Errorf("communicator %d: %d present, counted %d", c, n, s.comms[c].present)
		}
	}
	claims := 0
	for i := range s.nodes {
		owned, running := 0, 0
		for r := range s.ranks {
			if s.ranks[r].node == int32(i) {
				owned++
				if !ended(ev.Ranks[r].Proc) {
					running++
				}
			}
		}
		nd := &s.nodes[i]
		if nd.claim.created != 0 {
			claims++
		}
		if owned != nd.owned || running != nd.running || owned > l.PerNode {
			return fmt.Errorf("node %d: %d ranks (counted %d), %d running (counted %d)", i, owned, nd.owned, running, nd.running)
		}
	}
	if claims != s.claims || len(s.ranks) > 0 && len(s.ranks) != int(s.world) || len(s.free)+len(s.nodeOf) != len(s.nodes) {
		return fmt.Errorf("%d claims (counted %d), %d ranks of %d, %d nodes: %d named, %d free", claims, s.claims, len(s.ranks), s.world, len(s.nodes), len(s.nodeOf), len(s.free))
	}
	members, cells, seen, calls := 0, 0, 0, 0
	for i := range ev.Ranks {
		r := &ev.Ranks[i]
		if int(r.Node) >= len(ev.Nodes) || r.Node < -1 || r.Proc > diagnosis.ProcExited || r.CPU < 0 || r.CPU != r.CPU {
			return fmt.Errorf("rank %d: %+v", i, *r)
		}
		for _, x := range []float32{r.Starved, r.Throttled, r.MemoryPressure} {
			if !(x >= 0 && x <= 1) {
				return fmt.Errorf("rank %d: %+v", i, *r)
			}
		}
		if len(r.Calls) > diagnosis.MaxCalls || r.Exit.By > diagnosis.ExitKernel || r.Exit.Signal < 0 || r.Exit.Signal > maxSignal {
			return fmt.Errorf("rank %d: %+v", i, *r)
		}
		calls += len(r.Calls)
		if r.Node >= 0 {
			seen++
		}
	}
	for i := range ev.Comms {
		c := &ev.Comms[i]
		members += len(c.Members)
		if s.commOf[c.ID] != int32(i) || len(c.Name) > wire.MaxName {
			return fmt.Errorf("communicator %d: %x %q", i, c.ID, c.Name)
		}
		for _, m := range c.Members {
			if int(m.World) >= len(ev.Ranks) || m.World < -1 || m.FaultPeer < -1 || int(m.FaultPeer) >= len(c.Members) {
				return fmt.Errorf("communicator %d: member's world rank %d of %d", i, m.World, len(ev.Ranks))
			}
		}
	}
	for i := range ev.Conns {
		c := &ev.Conns[i]
		if c.Comm < 0 || int(c.Comm) >= len(ev.Comms) {
			return fmt.Errorf("connection %d: communicator %d of %d", i, c.Comm, len(ev.Comms))
		}
		if n := int32(len(ev.Comms[c.Comm].Members)); c.Src < 0 || c.Dst < 0 || c.Src >= n || c.Dst >= n {
			return fmt.Errorf("connection %d: %d → %d of %d", i, c.Src, c.Dst, n)
		}
		if !(c.BytesPerSec >= 0) || math.IsInf(c.BytesPerSec, 0) || s.connOf[s.conns[i]] != int32(i) {
			return fmt.Errorf("connection %d: %+v", i, *c)
		}
	}
	for i := range ev.Arrivals {
		a := &ev.Arrivals[i]
		cells += len(a.Start)
		if a.Comm < 0 || int(a.Comm) >= len(ev.Comms) || len(a.Start) != len(ev.Comms[a.Comm].Members) || len(a.End) != len(a.Start) {
			return fmt.Errorf("arrival %d: %+v", i, *a)
		}
	}
	if members != s.members || members > l.Members || cells != s.cells || cells > l.Arrivals || seen != s.seen || calls != s.calls || calls > l.Calls {
		return fmt.Errorf("%d members (counted %d), %d cells (counted %d), %d seen (counted %d)", members, s.members, cells, s.cells, seen, s.seen)
	}
	return nil
}

// FuzzMerge feeds a master with two nodes' hostile reports.
func FuzzMerge(f *testing.F) {
	add := func(r *wire.Report) {
		b, err := proto.Marshal(r)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, b)
	}
	add(report(4, 0))
	add(report(4, 1))
	add(troubled())
	huge := report(2, math.MaxUint32)
	huge.Ranks[1].WorldSize, huge.Members[0].Size, huge.Connections[0].Peer = math.MaxInt32, math.MaxInt32, math.MinInt32
	huge.Connections[0].BytesPerSecond, huge.Connections[1].BytesPerSecond = math.NaN(), math.Inf(1)
	huge.MonoSentNs, huge.Arrivals[0].Rank = math.MinInt64, -1
	add(huge)
	trouble := troubled()
	w := trouble.Ranks[0]
	w.Starved, w.MemoryPressure, w.Exit.By, w.Exit.Signal = float32(math.NaN()), float32(math.Inf(-1)), 9, -1
	for range 100 {
		w.Calls = append(w.Calls, &wire.Call{Coll: math.MaxUint32, Peer: math.MinInt32, MonoAtNs: math.MinInt64})
	}
	trouble.Members[0].Fault, trouble.Members[0].FaultPeer = math.MaxUint32, math.MinInt32
	add(trouble)
	f.Fuzz(func(t *testing.T, a, b []byte) {
		s, engine := newState("job", small), diagnosis.New(diagnosis.Config{})
		now := int64(1e18)
		for i, raw := range [][]byte{a, b, a} {
			var r wire.Report
			_ = proto.Unmarshal(raw, &r) // what could be read before an error is as good as any
			now += 1e8
			s.merge(s.node(fmt.Sprint("n", i%2)), &r, now)
			if err := check(s); err != nil {
				t.Fatal(err)
			}
			s.ev.Now = now
			engine.Diagnose(&s.ev)
		}
		now += 2 * leftFor
		s.collect(now)
		s.disconnected(0)
		if err := check(s); err != nil {
			t.Fatal(err)
		}
		s.ev.Now = now
		engine.Diagnose(&s.ev)
	})
}

// report is a well-formed full report of n ranks in one communicator.
func report(n int32, attempt uint32) *wire.Report {
	r := &wire.Report{Sequence: 1, MonoSentNs: 1e9}
	for i := range n {
		r.Ranks = append(r.Ranks, &wire.Rank{WorldRank: i, WorldSize: n, Pid: 100 + i, Attempt: attempt, CreatedUnixNs: 1e18, Proc: uint32(diagnosis.ProcRunning), Step: 3})
		r.Members = append(r.Members, &wire.Member{
			CommId: 7 + uint64(attempt), CommName: "dp", WorldRank: i, Rank: i, Size: n, Attempt: attempt, State: uint32(record.CommJoined),
			Coll: uint32(record.AllReduce), Peer: -1, Bytes: 8, Enqueued: 5, Started: 5, Finished: 4,
			MonoEnqueuedNs: 5e8, MonoStartedNs: 6e8, MonoFinishedNs: 4e8, Ops: 4, OwnNs: 1, WaitNs: 2, TransferNs: 3, MaxOwnNs: 1,
		})
		r.Connections = append(r.Connections, &wire.Connection{
			CommId: 7 + uint64(attempt), Rank: i, Peer: (i + 1) % n, Transport: uint32(record.TransportTCP), Name: "tcp",
			Posted: 100, Completed: 60, Received: 10, MonoPostedNs: 7e8, MonoRxWaitingNs: 8e8, Windows: 2, SlowWindows: 1, BytesPerSecond: 1e9,
		})
		r.Arrivals = append(r.Arrivals, &wire.Arrival{CommId: 7 + uint64(attempt), Seq: 4, Coll: uint32(record.AllReduce), Rank: i, MonoStartedNs: 3e8, MonoEndedNs: 4e8})
	}
	return r
}

func TestMerge(t *testing.T) {
	const now = int64(1e18)
	s := newState("job", Limits{})
	n := s.node("n0")
	s.merge(n, report(4, 0), now)
	if err := check(s); err != nil {
		t.Fatal(err)
	}
	ev := &s.ev
	if len(ev.Ranks) != 4 || len(ev.Comms) != 1 || len(ev.Conns) != 8 || len(ev.Arrivals) != 1 || s.refused+s.overflow != 0 {
		t.Fatalf("%d ranks, %d communicators, %d connections, %d arrivals, %d refused, %d overflow", len(ev.Ranks), len(ev.Comms), len(ev.Conns), len(ev.Arrivals), s.refused, s.overflow)
	}
	m := ev.Comms[0].Members[3]
	if m.World != 3 || !m.Open() || m.StartedAt != now-4e8 || m.EnqueuedAt != now-5e8 || m.Coll != record.AllReduce || m.Peer != -1 || m.WaitNs != 2 {
		t.Errorf("member: %+v", m)
	}
	c := ev.Conns[0]
	if c.Src != 0 || c.Dst != 1 || c.Outstanding != 40 || c.LastPost != now-3e8 || c.LastCompletion != 0 || c.RxWaitingSince != 0 || ev.Conns[1].RxWaitingSince != now-2e8 || c.Name != "tcp" || c.SlowWindows != 1 {
		t.Errorf("connection: %+v", c)
	}
	if a := ev.Arrivals[0]; a.Seq != 4 || a.Start[2] != now-7e8 || a.End[2] != now-6e8 {
		t.Errorf("arrival: %+v", a)
	}

	t.Run("twice is once", func(t *testing.T) {
		before := len(ev.Conns)
		s.merge(n, report(4, 0), now)
		if err := check(s); err != nil || len(ev.Conns) != before || len(ev.Arrivals) != 1 || s.refused != 0 {
			t.Errorf("merging again: %v; %d connections, %d arrivals, %d refused", err, len(ev.Conns), len(ev.Arrivals), s.refused)
		}
	})
	t.Run("the pid on its node is found out later", func(t *testing.T) {
		r := report(4, 0)
		r.Ranks[2].Pid, r.Members = 9042, nil
		s.merge(n, r, now)
		if err := check(s); err != nil || ev.Ranks[2].PID != 9042 || ev.Comms[0].Members[2].World != 2 || s.refused != 0 {
			t.Errorf("%v; pid %d, member %+v, %d refused", err, ev.Ranks[2].PID, ev.Comms[0].Members[2], s.refused)
		}
	})
	t.Run("an agent that left knows nothing", func(t *testing.T) {
		s.disconnected(n)
		if ev.Ranks[1].Proc != diagnosis.ProcUnknown {
			t.Errorf("process state %v", ev.Ranks[1].Proc)
		}
	})
	t.Run("a restart of the job", func(t *testing.T) {
		r := report(2, 1)
		s.merge(n, r, now)
		if err := check(s); err != nil || s.attempt != 1 || len(ev.Ranks) != 2 || len(ev.Comms) != 1 || ev.Comms[0].ID != 8 {
			t.Errorf("%v; attempt %d, %d ranks, communicators %v", err, s.attempt, len(ev.Ranks), ev.Comms)
		}
		s.merge(n, report(4, 0), now) // a late word of the last attempt
		if err := check(s); err != nil || s.attempt != 1 || len(ev.Ranks) != 2 || len(ev.Comms) != 1 || s.refused == 0 {
			t.Errorf("%v; attempt %d, %d ranks, %d refused", err, s.attempt, len(ev.Ranks), s.refused)
		}
	})
	t.Run("another process of a rank", func(t *testing.T) {
		other := s.node("n1")
		r := report(2, 1)
		r.Ranks, r.Members, r.Connections, r.Arrivals = r.Ranks[:1], nil, nil, nil
		r.Ranks[0].CreatedUnixNs++
		s.merge(other, r, now)
		if ev.Ranks[0].Node != n || s.foreign == 0 {
			t.Errorf("rank 0 is node %d's, and node %d's agent is heard", ev.Ranks[0].Node, n)
		}
		s.ev.Nodes[n].Lost, s.ev.Nodes[n].LastSeen = true, now-strangerAfter
		s.disconnected(n)
		s.merge(other, r, now)
		if err := check(s); err != nil || ev.Ranks[0].Node != other || ev.Comms[0].Members[0].World != -1 || ev.Comms[0].Members[1].World != 1 {
			t.Errorf("%v; rank 0 on node %d, members %+v", err, ev.Ranks[0].Node, ev.Comms[0].Members)
		}
		s.merge(n, report(2, 1), now) // its former node still tells of the former process
		if ev.Ranks[0].Node != other || ev.Comms[0].Members[0].World != -1 {
			t.Errorf("the former process is back: node %d, members %+v", ev.Ranks[0].Node, ev.Comms[0].Members)
		}
	})
	t.Run("a communicator that all have left", func(t *testing.T) {
		for i := range 2 {
			r := report(2, 1)
			r.Ranks, r.Connections, r.Arrivals = nil, nil, nil
			r.Members = r.Members[i : i+1]
			r.Members[0].State = uint32(record.CommLeft)
			s.merge(int32(1-i), r, now)
		}
		s.ev.Comms[0].Members[0] = diagnosis.Member{World: -1}
		s.collect(now + leftFor + 1)
		if err := check(s); err != nil || len(ev.Comms) != 0 || len(ev.Conns) != 0 || len(ev.Arrivals) != 0 {
			t.Errorf("%v; left over: %d communicators, %d connections, %d arrivals", err, len(ev.Comms), len(ev.Conns), len(ev.Arrivals))
		}
	})
}

func TestLimitsAreCounted(t *testing.T) {
	s := newState("job", small)
	for i := range 10 {
		n := s.node(fmt.Sprint("n", i))
		if n < 0 {
			continue
		}
		for c := range uint32(64) {
			r := report(int32(small.Ranks), 0)
			for i := range r.Members {
				r.Members[i].CommId = uint64(c)
				r.Connections[i].CommId, r.Connections[i].Channel = uint64(c), c
				r.Arrivals[i].CommId, r.Arrivals[i].Seq = uint64(c), uint64(c)
			}
			s.merge(n, r, 1e18)
			if err := check(s); err != nil {
				t.Fatal(err)
			}
		}
	}
	r := report(int32(small.Ranks)+1, 0)
	s.merge(0, r, 1e18)
	if err := check(s); err != nil || s.overflow == 0 {
		t.Errorf("%v; overflow %d", err, s.overflow)
	}
}

func BenchmarkMerge(b *testing.B) {
	s := newState("job", Limits{})
	n := s.node("n0")
	r := report(64, 0)
	s.merge(n, r, 1e18)
	entries := len(r.Ranks) + len(r.Members) + len(r.Connections) + len(r.Arrivals)
	b.ReportAllocs()
	for b.Loop() {
		s.merge(n, r, 1e18)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(entries), "ns/entry")
}

func BenchmarkDecodeAndMerge(b *testing.B) {
	s := newState("job", Limits{})
	n := s.node("n0")
	raw, err := proto.Marshal(report(64, 0))
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	b.SetBytes(int64(len(raw)))
	for b.Loop() {
		var r wire.Report
		if err := proto.Unmarshal(raw, &r); err != nil {
			b.Fatal(err)
		}
		s.merge(n, &r, 1e18)
	}
}
