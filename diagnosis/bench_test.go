package diagnosis_test

import (
	"slices"
	"testing"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// bigJob is 100,000 ranks in 8 communicators each: groups of neighbours (as
// tensor parallelism makes them), strided groups (data parallelism), and one of
// all ranks, with a ring of connections in each.
func bigJob(ranks int) *diagnosis.Evidence {
	ev := &diagnosis.Evidence{Job: "big", Now: 1e18}
	for n := range ranks / 8 {
		ev.Nodes = append(ev.Nodes, diagnosis.Node{Name: diagnosisNode(n), LastSeen: 1e18})
	}
	for r := range ranks {
		ev.Ranks = append(ev.Ranks, diagnosis.Rank{Node: int32(r / 8), PID: int32(r), Proc: diagnosis.ProcRunning, CPU: 1, Step: 1})
	}
	comm := func(size int, world func(i int) int) {
		c := diagnosis.Comm{ID: uint64(len(ev.Comms) + 1), Name: "c", Members: make([]diagnosis.Member, size)}
		for i := range c.Members {
			c.Members[i] = diagnosis.Member{World: int32(world(i)), State: record.CommJoined, Coll: record.AllReduce, Peer: -1,
				Enqueued: 100, Started: 100, Finished: 100, EnqueuedAt: 1e18, StartedAt: 1e18 - 2e6, FinishedAt: 1e18 - 1e6, Ops: 100, OwnNs: 100e6, WaitNs: 50e6, TransferNs: 50e6, MaxOwnNs: 5e6}
			ev.Conns = append(ev.Conns, diagnosis.Conn{Comm: int32(len(ev.Comms)), Src: int32(i), Dst: int32((i + 1) % size), Transport: record.TransportTCP, Windows: 10, LatencyNs: 1e6, LastCompletion: 1e18})
		}
		ev.Comms = append(ev.Comms, c)
	}
	for _, size := range []int{8, 8, 8, 8} {
		for g := range ranks / size {
			comm(size, func(i int) int { return g*size + i })
		}
	}
	for _, size := range []int{100, 1000, 1000} {
		groups := ranks / size
		for g := range groups {
			comm(size, func(i int) int { return g + i*groups })
		}
	}
	comm(ranks, func(i int) int { return i })
	return ev
}

func diagnosisNode(n int) string {
	return string([]byte{'n', byte('a' + n%26), byte('a' + n/26%26), byte('a' + n/676%26)})
}

// advance lets everyone finish five operations and two steps.
func advance(ev *diagnosis.Evidence) {
	ev.Now += 250e6
	for i := range ev.Nodes {
		ev.Nodes[i].LastSeen = ev.Now
	}
	for i := range ev.Ranks {
		ev.Ranks[i].Step += 2
	}
	for ci := range ev.Comms {
		for i := range ev.Comms[ci].Members {
			m := &ev.Comms[ci].Members[i]
			m.Enqueued, m.Started, m.Finished, m.Ops = m.Enqueued+5, m.Started+5, m.Finished+5, m.Ops+5
			m.EnqueuedAt, m.StartedAt, m.FinishedAt = ev.Now, ev.Now-2e6, ev.Now-1e6
			m.OwnNs, m.WaitNs, m.TransferNs = m.OwnNs+5e6+uint64(i%7)*1e5, m.WaitNs+3e6, m.TransferNs+2e6
		}
	}
	for i := range ev.Conns {
		k := &ev.Conns[i]
		k.Windows++
		k.LatencyNs = 1e6 + float64(i%97)*1e3
		k.LastCompletion = ev.Now
	}
}

// BenchmarkPass is one pass over 100,000 ranks × 8 communicators with a
// connection each: between windows, the same where the master counts revisions and nothing
// has changed, at a window's end (every slow decision
// made), while the agents of a hundredth of the nodes are lost, and with one rank
// holding up the whole job. Budget: 100 ms.
func BenchmarkPass(b *testing.B) {
	const ranks = 100_000
	b.Run("healthy", func(b *testing.B) {
		ev, e := bigJob(ranks), diagnosis.New(diagnosis.Config{})
		e.Diagnose(ev)
		b.ReportAllocs()
		for b.Loop() {
			ev.Now += 1e6
			if v := e.Diagnose(ev); v != nil {
				b.Fatal(v)
			}
		}
	})
	b.Run("nothing changed", func(b *testing.B) {
		ev, e := bigJob(ranks), diagnosis.New(diagnosis.Config{})
		for i := range ev.Comms {
			ev.Comms[i].Rev, ev.Comms[i].ConnRev = 1, 1
		}
		e.Diagnose(ev)
		b.ReportAllocs()
		for b.Loop() {
			ev.Now += 1e6
			if v := e.Diagnose(ev); v != nil {
				b.Fatal(v)
			}
		}
	})
	b.Run("window", func(b *testing.B) {
		ev, e := bigJob(ranks), diagnosis.New(diagnosis.Config{})
		for range 10 {
			advance(ev)
			e.Diagnose(ev)
		}
		b.ReportAllocs()
		for b.Loop() {
			b.StopTimer()
			advance(ev)
			b.StartTimer()
			if v := e.Diagnose(ev); v != nil {
				b.Fatal(v)
			}
		}
	})
	b.Run("lost agents", func(b *testing.B) {
		ev, e := bigJob(ranks), diagnosis.New(diagnosis.Config{})
		for range 10 {
			advance(ev)
			e.Diagnose(ev)
		}
		for i := range ev.Nodes {
			if ev.Nodes[i].Lost = i%100 == 0; ev.Nodes[i].Lost {
				ev.Nodes[i].LastSeen -= 60e9
			}
		}
		b.ReportAllocs()
		for b.Loop() {
			ev.Now += 1e6
			if v := e.Diagnose(ev); v != nil {
				b.Fatal(v)
			}
		}
	})
	b.Run("hang", func(b *testing.B) {
		ev, e := bigJob(ranks), diagnosis.New(diagnosis.Config{})
		for range 3 {
			advance(ev)
			e.Diagnose(ev)
		}
		for ci := range ev.Comms {
			if !slices.ContainsFunc(ev.Comms[ci].Members, func(m diagnosis.Member) bool { return m.World == 4321 }) {
				continue
			}
			for i := range ev.Comms[ci].Members {
				if m := &ev.Comms[ci].Members[i]; m.World != 4321 {
					m.Started, m.StartedAt = m.Started+1, ev.Now
				}
			}
		}
		ev.Ranks[4321].CPU = 0
		ev.Now += 3e9
		for i := range ev.Nodes {
			ev.Nodes[i].LastSeen = ev.Now
		}
		b.ReportAllocs()
		for b.Loop() {
			ev.Now += 1e6
			if v := e.Diagnose(ev); len(v) != 1 || v[0].Culprits[0].Rank != 4321 {
				b.Fatal(v)
			}
		}
	})
}
