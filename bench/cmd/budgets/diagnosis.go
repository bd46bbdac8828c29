package main

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// A job of 100,000 ranks: tensor-parallel in a node of 8, 10 pipeline stages,
// data-parallel 1,250 times. Each of the 8 kinds of communicator has every rank
// in exactly one group, with a ring of connections.
const (
	tensor, stages, replicas = 8, 10, 1250
	worldSize                = tensor * stages * replicas
)

var groupings = []struct {
	name  string
	group func(t, p, d int) int
}{
	{"world", func(t, p, d int) int { return 0 }},
	{"tp", func(t, p, d int) int { return d*stages + p }},
	{"pp", func(t, p, d int) int { return d*tensor + t }},
	{"dp", func(t, p, d int) int { return p*tensor + t }},
	{"mp", func(t, p, d int) int { return d }},
	{"stage", func(t, p, d int) int { return p }},
	{"ep", func(t, p, d int) int { return (d/50*stages+p)*tensor + t }},
	{"edp", func(t, p, d int) int { return (d%50*stages+p)*tensor + t }},
}

const passEvery = 100 * time.Millisecond // of the evidence's clock

// diagnosisPass times the engine's passes on one core over a job that goes on,
// in which one rank then stops. The first pass, in which everything is new, is
// left out; of all others the slowest counts, each in its fastest round.
func diagnosisPass() ([]row, error) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	const healthy, hung = 12, 40
	var best [healthy + hung]time.Duration
	for round := range 3 {
		ev := largeJob()
		engine := diagnosis.New(diagnosis.Config{})
		var verdicts []diagnosis.Verdict
		for i := range best {
			if i < healthy {
				advance(ev)
			} else if i == healthy {
				stop(ev, worldSize/2)
			} else {
				tick(ev)
			}
			runtime.GC() // the evidence's garbage is not the pass's
			start := time.Now()
			verdicts = engine.Diagnose(ev)
			took := time.Since(start)
			if round == 0 || took < best[i] {
				best[i] = took
			}
			if i < healthy && len(verdicts) > 0 {
				return nil, fmt.Errorf("a healthy job got the verdict %+v", verdicts[0])
			}
		}
		if len(verdicts) == 0 || verdicts[0].Level != diagnosis.Confirmed || verdicts[0].Culprits[0].Rank != worldSize/2 {
			return nil, errors.New("the stopped rank was not blamed")
		}
	}
	slowest := func(passes []time.Duration) (ms float64) {
		for _, d := range passes {
			ms = max(ms, d.Seconds()*1e3)
		}
		return ms
	}
	return []row{
		{"diagnosis_pass_healthy", slowest(best[1:healthy]), "ms", 100},
		{"diagnosis_pass_hang", slowest(best[healthy:]), "ms", 100},
	}, nil
}

func largeJob() *diagnosis.Evidence {
	ev := &diagnosis.Evidence{Job: "budgets", Now: time.Now().UnixNano()}
	for n := range worldSize / tensor {
		ev.Nodes = append(ev.Nodes, diagnosis.Node{Name: fmt.Sprintf("node%05d", n)})
	}
	for r := range worldSize {
		ev.Ranks = append(ev.Ranks, diagnosis.Rank{
			Node: int32(r / tensor), PID: int32(1000 + r), Proc: diagnosis.ProcRunning, CPU: 0.5,
		})
	}
	for k, g := range groupings {
		first := len(ev.Comms)
		for r := range worldSize {
			t, p, d := r%tensor, r/tensor%stages, r/tensor/stages
			c := first + g.group(t, p, d)
			for len(ev.Comms) <= c {
				ev.Comms = append(ev.Comms, diagnosis.Comm{ID: uint64(k+1)<<32 | uint64(len(ev.Comms)), Name: g.name})
			}
			ev.Comms[c].Members = append(ev.Comms[c].Members, diagnosis.Member{
				World: int32(r), State: record.CommJoined, Coll: record.AllReduce, Peer: -1, Bytes: 1 << 20,
			})
		}
		for c := first; c < len(ev.Comms); c++ {
			for i, size := 0, len(ev.Comms[c].Members); i < size; i++ {
				ev.Conns = append(ev.Conns, diagnosis.Conn{
					Comm: int32(c), Src: int32(i), Dst: int32((i + 1) % size), Transport: record.TransportTCP,
				})
			}
		}
	}
	return ev
}

// tick moves the clock; all nodes have just reported.
func tick(ev *diagnosis.Evidence) {
	ev.Now += int64(passEvery)
	for i := range ev.Nodes {
		ev.Nodes[i].LastSeen = ev.Now
	}
}

// advance is one more step of the job: four operations on each communicator.
func advance(ev *diagnosis.Evidence) {
	const ops, own, waited, transfer = 4, 2e6, 1e5, 9e5
	tick(ev)
	for i := range ev.Ranks {
		ev.Ranks[i].Step++
	}
	for c := range ev.Comms {
		for i := range ev.Comms[c].Members {
			m := &ev.Comms[c].Members[i]
			m.Enqueued, m.Started, m.Finished = m.Enqueued+ops, m.Started+ops, m.Finished+ops
			m.EnqueuedAt, m.StartedAt, m.FinishedAt = ev.Now-2e6, ev.Now-2e6, ev.Now-1e6
			m.Ops, m.MaxOwnNs = m.Ops+ops, 2*own
			m.OwnNs += ops * (own + uint64(m.World)%1000)
			m.WaitNs += ops * (waited + uint64(m.World)%1000)
			m.TransferNs += ops * transfer
		}
	}
	for i := range ev.Conns {
		n := &ev.Conns[i]
		n.Windows += ops
		n.BytesPerSec = 1e9 + float64(i%1000)*1e4
		n.LatencyNs = 1e5
		n.LastPost, n.LastCompletion, n.LastWindowAt = ev.Now-2e6, ev.Now-1e6, ev.Now-1e6
	}
}

// stop stops a rank's process before the next operation of every communicator:
// its peers enter and wait, and everybody else waits in the world.
func stop(ev *diagnosis.Evidence, rank int32) {
	tick(ev)
	ev.Ranks[rank].Proc, ev.Ranks[rank].ProcAt, ev.Ranks[rank].CPU = diagnosis.ProcStopped, ev.Now, 0
	var its []int // communicators of the stopped rank, the world first
	for c := range ev.Comms {
		for i := range ev.Comms[c].Members {
			if ev.Comms[c].Members[i].World == rank {
				its = append(its, c)
			}
		}
	}
	waits := make([]bool, worldSize)
	for _, c := range slices.Backward(its) {
		for i := range ev.Comms[c].Members {
			m := &ev.Comms[c].Members[i]
			if m.World == rank || waits[m.World] {
				continue
			}
			waits[m.World] = true
			m.Enqueued, m.Started = m.Enqueued+1, m.Started+1
			m.EnqueuedAt, m.StartedAt = ev.Now, ev.Now
		}
	}
}
