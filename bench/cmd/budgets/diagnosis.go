package main

import (
	"fmt"
	"math"
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

// culprit is the rank that gets slow and then stops.
const culprit = worldSize / 2

// diagnosisPass times the engine's passes on one core over a job that goes on,
// in which one rank then becomes a straggler and at last stops. The first pass,
// in which everything is new, is left out; of all others the slowest counts,
// each in its fastest round.
func diagnosisPass() ([]row, error) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	phases := []struct {
		name   string
		passes int
		step   func(ev *diagnosis.Evidence, pass int)
		class  diagnosis.Class // of the verdict in the end
	}{
		{"healthy", 30, func(ev *diagnosis.Evidence, _ int) { advance(ev, -1) }, diagnosis.Healthy},
		{"slow", 30, func(ev *diagnosis.Evidence, _ int) { advance(ev, culprit) }, diagnosis.NoncommunicationSlow},
		{"hang", 40, func(ev *diagnosis.Evidence, pass int) {
			if tick(ev, passEvery); pass == 0 {
				stop(ev, culprit)
			}
		}, diagnosis.NoncommunicationHang},
	}
	best := map[string][]time.Duration{}
	for range 3 {
		ev := largeJob()
		engine := diagnosis.New(diagnosis.Config{})
		for _, phase := range phases {
			if best[phase.name] == nil {
				best[phase.name] = slices.Repeat([]time.Duration{math.MaxInt64}, phase.passes)
			}
			var verdicts []diagnosis.Verdict
			for i := range phase.passes {
				phase.step(ev, i)
				runtime.GC() // the evidence's garbage is not the pass's
				start := time.Now()
				verdicts = engine.Diagnose(ev)
				best[phase.name][i] = min(best[phase.name][i], time.Since(start))
			}
			if err := expect(verdicts, phase.class); err != nil {
				return nil, fmt.Errorf("phase %s: %w", phase.name, err)
			}
		}
	}
	best["healthy"] = best["healthy"][1:]
	var rows []row
	for _, phase := range phases {
		rows = append(rows, row{"diagnosis_pass_" + phase.name, slices.Max(best[phase.name]).Seconds() * 1e3, "ms", 100})
	}
	return rows, nil
}

// expect makes sure that what was timed was the finding of the fault.
func expect(verdicts []diagnosis.Verdict, class diagnosis.Class) error {
	switch {
	case class == diagnosis.Healthy && len(verdicts) > 0:
		return fmt.Errorf("a healthy job got the verdict %+v", verdicts[0])
	case class == diagnosis.Healthy:
		return nil
	case len(verdicts) == 0:
		return fmt.Errorf("no verdict, want %v", class)
	case verdicts[0].Class != class || verdicts[0].Level != diagnosis.Confirmed || verdicts[0].Culprits[0].Rank != culprit:
		return fmt.Errorf("verdict %+v, want %v of rank %d, confirmed", verdicts[0], class, culprit)
	}
	return nil
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
func tick(ev *diagnosis.Evidence, d time.Duration) {
	ev.Now += int64(d)
	for i := range ev.Nodes {
		ev.Nodes[i].LastSeen = ev.Now
	}
}

// advance is one more step of the job: four operations on each communicator,
// before each of which a late rank computes for three times as long as the others.
func advance(ev *diagnosis.Evidence, late int32) {
	const ops, own, waited, transfer = 4, 2e6, 1e5, 9e5
	delay := uint64(0)
	if late >= 0 {
		delay = 2 * own
	}
	tick(ev, passEvery+time.Duration(len(groupings)*ops*int(delay)))
	for i := range ev.Ranks {
		ev.Ranks[i].Step++
	}
	for c := range ev.Comms {
		for i := range ev.Comms[c].Members {
			m := &ev.Comms[c].Members[i]
			m.Enqueued, m.Started, m.Finished = m.Enqueued+ops, m.Started+ops, m.Finished+ops
			m.EnqueuedAt, m.StartedAt, m.FinishedAt = ev.Now-2e6, ev.Now-2e6, ev.Now-1e6
			m.Ops, m.MaxOwnNs = m.Ops+ops, 4*own
			m.OwnNs += ops * (own + uint64(m.World)%1000)
			m.TransferNs += ops * transfer
			if m.World == late {
				m.OwnNs += ops * delay
				m.StartedAt += int64(waited)
			} else {
				m.WaitNs += ops * (waited + delay + uint64(m.World)%1000)
			}
		}
	}
	arrive(ev)
	for i := range ev.Conns {
		n := &ev.Conns[i]
		n.Windows += ops
		n.BytesPerSec = 1e9 + float64(i%1000)*1e4
		n.LatencyNs = 1e5
		n.LastPost, n.LastCompletion, n.LastWindowAt = ev.Now-2e6, ev.Now-1e6, ev.Now-1e6
	}
}

// arrive samples one collective of the world; as many are kept as a master keeps.
func arrive(ev *diagnosis.Evidence) {
	const kept = (1 << 20) / worldSize
	if len(ev.Arrivals) == kept {
		ev.Arrivals = slices.Delete(ev.Arrivals, 0, 1)
	}
	world := ev.Comms[0].Members
	a := diagnosis.Arrival{Seq: world[0].Finished, Coll: record.AllReduce, Start: make([]int64, worldSize), End: make([]int64, worldSize)}
	for i := range world {
		a.Start[i], a.End[i] = world[i].StartedAt, world[i].FinishedAt
	}
	ev.Arrivals = append(ev.Arrivals, a)
}

// stop stops a rank's process before the next operation of every communicator:
// its peers enter and wait, and everybody else waits in the world.
func stop(ev *diagnosis.Evidence, rank int32) {
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
