package diagnosis_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

// gpuJob is a job of one communicator of GPUs on one node, whose NVLink connections are told of.
type gpuJob struct {
	*job
	rng *rand.Rand
	// late is how much a rank may be late in an operation; transfer how long one takes once all
	// have come, and times, by connection, how much more than usual that is there.
	late, transfer time.Duration
	times          []float64
	slow           []bool
}

func newGPUJob(n int) *gpuJob {
	g := &gpuJob{job: newJob(n), rng: rand.New(rand.NewPCG(3, 4)), late: 2 * time.Millisecond, transfer: 4 * time.Millisecond}
	var all []int
	for r := range n {
		all = append(all, r)
	}
	c := g.comm("world", all...)
	for i := range c.Members {
		c.Members[i].OwnNs = 0
	}
	for src := range n {
		for dst := range n {
			if src != dst {
				g.conn(c, src, dst).Transport = record.TransportNVLink
				g.times, g.slow = append(g.times, 1), append(g.slow, false)
			}
		}
	}
	return g
}

// run has as many operations in each 100 ms as there is time for, and returns what the
// engine said, once each.
func (g *gpuJob) run(d time.Duration) map[string]bool {
	said := map[string]bool{}
	for end := g.ev.Now + int64(d); g.ev.Now < end; {
		c := &g.ev.Comms[0]
		op := 5*time.Millisecond + g.transfer
		ops := uint64(100 * time.Millisecond / op)
		last := 0
		for range ops {
			last = g.rng.IntN(len(c.Members))
			late := uint64(g.rng.Int64N(int64(g.late)))
			for i := range c.Members {
				m := &c.Members[i]
				m.Ops++
				m.Enqueued, m.Started, m.Finished = m.Enqueued+1, m.Started+1, m.Finished+1
				m.TransferNs += uint64(g.transfer)
				own := uint64(5*time.Millisecond) - late
				if i == last {
					own += late
				} else {
					m.WaitNs += late
				}
				m.OwnNs += own
				m.EnqueuedAt, m.StartedAt, m.FinishedAt = g.ev.Now+95e6, g.ev.Now+95e6, g.ev.Now+99e6
			}
		}
		for i := range g.ev.Conns {
			k := &g.ev.Conns[i]
			k.Windows += ops * 2
			k.LatencyNs, k.Cause = g.times[i]*2e6*(0.9+0.2*g.rng.Float64()), record.CauseNone
			if g.slow[i] {
				k.SlowWindows += ops * 2
				k.Cause = record.CauseNetwork
			}
			k.LastWindowAt = g.ev.Now
		}
		for _, v := range g.pass(100 * time.Millisecond) {
			for _, k := range v.Culprits {
				said[fmt.Sprintf("%v %v %d %d", v.Class, k.Kind, k.Rank, k.Peer)] = true
			}
		}
	}
	return said
}

// TestSlowNVLink: connections of GPUs are judged as others are: the pair whose link is slow is
// named, of two ranks and of four, and nobody is while ranks are late in turn, or all
// operations take longer and no link does.
func TestSlowNVLink(t *testing.T) {
	for _, n := range []int{2, 4} {
		t.Run(fmt.Sprint(n, " GPUs"), func(t *testing.T) {
			g := newGPUJob(n)
			if said := g.run(15 * time.Second); len(said) != 0 {
				t.Fatalf("healthy: %v", said)
			}
			g.late = 4 * time.Millisecond
			if said := g.run(10 * time.Second); len(said) != 0 {
				t.Fatalf("ranks that are late in turn: %v", said)
			}
			g.transfer *= 2
			for i := range g.ev.Conns {
				if k := &g.ev.Conns[i]; k.Src+k.Dst == 1 { // 0 and 1
					g.times[i], g.slow[i] = 2.5, true
				}
			}
			said := g.run(15 * time.Second)
			if !said["communication_slow connection 0 1"] || !said["communication_slow connection 1 0"] || len(said) != 2 {
				t.Errorf("the links between ranks 0 and 1 are slow: %v", said)
			}
		})
	}
}
