package main

import (
	"fmt"
	"io"
	"runtime"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// The job of the scale table: every rank is in one group of each of eight kinds,
// with a ring of connections in each group.
var groupSizes = [8]int{8, 8, 8, 8, 100, 100, 1000, 0} // 0: all ranks

const passEvery = 100 * time.Millisecond

// big is that job at a size, all ranks inside nothing.
func big(ranks int) *diagnosis.Evidence {
	ev := &diagnosis.Evidence{Job: "scale", Now: 1_700_000_000e9}
	for n := 0; n*8 < ranks; n++ {
		ev.Nodes = append(ev.Nodes, diagnosis.Node{Name: fmt.Sprintf("node%05d", n), MapError: 1e5})
	}
	for r := range ranks {
		ev.Ranks = append(ev.Ranks, diagnosis.Rank{Node: int32(r / 8), PID: int32(1000 + r), Proc: diagnosis.ProcRunning, CPU: 0.7})
	}
	for k, size := range groupSizes {
		if size == 0 || size > ranks {
			size = ranks
		}
		groups := (ranks + size - 1) / size
		for g := range groups {
			c := diagnosis.Comm{ID: uint64(k+1)<<32 | uint64(g), Name: fmt.Sprintf("g%d.%d", k, g), Rev: 1, ConnRev: 1}
			for i := range size {
				w := g*size + i // neighbours
				if k >= 4 {
					w = g + i*groups // strided
				}
				if w < ranks {
					c.Members = append(c.Members, diagnosis.Member{World: int32(w), State: record.CommJoined, Coll: record.AllReduce, Peer: -1, FaultPeer: -1, Bytes: 1 << 20})
				}
			}
			for i := range c.Members {
				ev.Conns = append(ev.Conns, diagnosis.Conn{Comm: int32(len(ev.Comms)), Src: int32(i), Dst: int32((i + 1) % len(c.Members)), Transport: record.TransportRDMA, Link: record.LinkUp})
			}
			ev.Comms = append(ev.Comms, c)
		}
	}
	return ev
}

func tick(ev *diagnosis.Evidence, d time.Duration) {
	ev.Now += int64(d)
	for i := range ev.Nodes {
		ev.Nodes[i].LastSeen = ev.Now
	}
}

// goOn lets every rank finish four operations on each communicator, and a step.
func goOn(ev *diagnosis.Evidence) {
	const ops, own = 4, 2e6
	tick(ev, passEvery)
	for i := range ev.Ranks {
		ev.Ranks[i].Step++
	}
	for c := range ev.Comms {
		ev.Comms[c].Rev++
		ev.Comms[c].ConnRev++
		for i := range ev.Comms[c].Members {
			m := &ev.Comms[c].Members[i]
			m.Enqueued, m.Started, m.Finished = m.Enqueued+ops, m.Started+ops, m.Finished+ops
			m.EnqueuedAt, m.StartedAt, m.FinishedAt = ev.Now-2e6, ev.Now-2e6, ev.Now-1e6
			m.Ops, m.MaxOwnNs = m.Ops+ops, 4*own
			m.OwnNs += ops * (own + uint64(m.World)%1000)
			m.WaitNs += ops * 1e5
			m.TransferNs += ops * 9e5
		}
	}
	for i := range ev.Conns {
		k := &ev.Conns[i]
		k.Windows += ops
		k.LatencyNs, k.BytesPerSec = 1e5+float64(i%97)*100, 1e10
		k.LastPost, k.LastCompletion, k.LastWindowAt = ev.Now-2e6, ev.Now-1e6, ev.Now-1e6
	}
}

// hang stops one rank: its peers wait for it in its own communicators, everybody
// else for them in the one of all.
func hang(ev *diagnosis.Evidence, rank int32) {
	ev.Ranks[rank].Proc, ev.Ranks[rank].ProcAt, ev.Ranks[rank].CPU = diagnosis.ProcStopped, ev.Now, 0
	inside := make([]bool, len(ev.Ranks))
	for c := range ev.Comms {
		members := ev.Comms[c].Members
		if !slices.ContainsFunc(members, func(m diagnosis.Member) bool { return m.World == rank }) {
			continue
		}
		for i := range members {
			if m := &members[i]; m.World != rank && !inside[m.World] {
				inside[m.World] = true
				ev.Comms[c].Rev++
				m.Enqueued, m.Started = m.Enqueued+1, m.Started+1
				m.EnqueuedAt, m.StartedAt = ev.Now, ev.Now
			}
		}
	}
}

// scale prints what a pass costs by the size of the world: the CPU time of its
// slowest of many, and the memory of engine and evidence.
func scale(w io.Writer) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	t := tabwriter.NewWriter(w, 2, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(t, "ranks\tcommunicators\tconnections\thealthy pass ms\ta window's end ms\twith a hang ms\tgoal\tns a member\tengine MiB\tevidence MiB\tgoal\t\n")
	for _, ranks := range []int{1_000, 3_000, 10_000, 30_000, 100_000} {
		empty := heap()
		ev := big(ranks)
		filled := heap()
		e := diagnosis.New(diagnosis.Config{})
		members := 0
		for i := range ev.Comms {
			members += len(ev.Comms[i].Members)
		}
		pass := func() (time.Duration, []diagnosis.Verdict) {
			begin := cpuNow()
			v := e.Diagnose(ev)
			return time.Duration(cpuNow() - begin), v
		}
		for range 20 { // grows its tables, and makes a history
			goOn(ev)
			e.Diagnose(ev)
		}
		var healthy, window, hung []time.Duration
		for range 12 {
			goOn(ev)
			d, v := pass()
			window = append(window, d)
			if len(v) > 0 {
				return fmt.Errorf("scale %d: a healthy job got the verdict %s", ranks, said(&v[0]))
			}
			tick(ev, time.Millisecond)
			d, _ = pass()
			healthy = append(healthy, d)
		}
		culprit := int32(ranks / 2)
		hang(ev, culprit)
		var last []diagnosis.Verdict
		for range 40 {
			tick(ev, passEvery)
			d, v := pass()
			hung, last = append(hung, d), v
		}
		if len(last) == 0 || last[0].Culprits[0].Rank != culprit || last[0].Level != diagnosis.Confirmed {
			return fmt.Errorf("scale %d: rank %d hangs, and the verdicts are %+v", ranks, culprit, last)
		}
		all := heap()
		ms := func(of []time.Duration) float64 { return slices.Max(of).Seconds() * 1e3 }
		fmt.Fprintf(t, "%d\t%d\t%d\t%.2f\t%.2f\t%.2f\t100\t%.1f\t%.0f\t%.0f\t2048\t\n", ranks, len(ev.Comms), len(ev.Conns), ms(healthy), ms(window), ms(hung),
			ms(healthy)*1e6/float64(members), float64(all-filled)/(1<<20), float64(filled-empty)/(1<<20))
		runtime.KeepAlive(ev)
		runtime.KeepAlive(e)
	}
	return t.Flush()
}

// heap is what is reachable, in bytes.
func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
