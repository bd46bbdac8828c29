package jobsim

import (
	"math"
	"time"
)

// reportingJob draws a job to report on. Nothing here follows tuning.go: shapes are
// drawn from all factorizations that fit and not from a few kinds, parameters from
// ranges and not from lists, and the cluster has other sizes.
func reportingJob(m *maker) Config {
	n, r := m.ranks, m.rng
	var c Config
	split := func(left, most int) int { // a divisor of left that is a power of two
		var of []int
		for d := 1; d <= min(left, most) && left%d == 0; d *= 2 {
			of = append(of, d)
		}
		return of[r.intn(len(of))]
	}
	c.Cluster.RanksPerNode = 8
	if n <= 16 {
		c.Cluster.RanksPerNode = pick(m, 1, 2, 4)
	} else if m.chance(0.2) {
		c.Cluster.RanksPerNode = 4
	}
	c.Cluster.GPU = m.chance(0.75)
	c.Cluster.Domain = c.Cluster.RanksPerNode
	if c.Cluster.GPU && n >= 256 && m.chance(0.2) {
		c.Cluster.RanksPerNode, c.Cluster.Domain = 4, 72
	}
	c.Cluster.RDMA = c.Cluster.GPU && m.chance(0.8)
	if c.Cluster.RDMA {
		c.Cluster.Ports = 1 + r.intn(2)
	}
	c.Cluster.Spin = m.chance(0.4)
	c.Cluster.FatTree = m.chance(0.4)
	c.Cluster.NodesPerLeaf = pick(m, 4, 8, 32)
	left := n
	take := func(most int) int {
		d := split(left, most)
		left /= d
		return d
	}
	switch family := r.float(); {
	case family < 0.25: // sharded data parallelism, layer by layer
		c.Sharded, c.Buckets, c.Layers = true, 1+r.intn(8), 2+r.intn(8)
		c.Micro = 1 + r.intn(3)
		if n >= 1024 {
			c.Tensor = take(8)
		}
	case family < 0.5: // three-dimensional
		c.Tensor, c.Pipeline = take(8), take(16)
		c.Context = take(2)
		c.Layers = 1 + r.intn(3)
		c.Micro = c.Pipeline * (1 + r.intn(3))
		c.Uneven = r.between(0, 0.3)
		if c.Pipeline > 1 && m.chance(0.4) {
			c.Chunks = 2 + r.intn(2)
		}
		c.Sharded = m.chance(0.5)
	case family < 0.7: // mixture of experts with a pipeline
		c.Pipeline = take(4)
		c.Micro = c.Pipeline * (1 + r.intn(2))
		c.Expert = split(left, 16)
		c.Experts = r.between(0, 0.25)
		c.Layers = 1 + r.intn(3)
	case family < 0.85: // long context
		c.Context, c.Tensor = take(8), take(4)
		c.Layers = 1 + r.intn(4)
		c.Lengths = r.between(0, 0.15)
		c.Micro = 1 + r.intn(4)
	default: // gradient accumulation
		c.Micro = 4 + r.intn(12)
		c.Tensor = take(4)
		c.Layers = 1 + r.intn(2)
	}
	if n >= 4096 && c.Tensor == 0 && c.Context == 0 && c.Pipeline == 0 {
		c.Tensor = take(8)
	}
	c.Data = left
	c.Tuned = m.chance(0.3)
	c.World = m.chance(0.4)
	c.Steps = m.chance(0.5)
	c.Noise = r.between(0.01, 0.08)
	c.Hiccups, c.Hiccup = r.between(0, 0.02), m.between(5*time.Millisecond, 40*time.Millisecond)
	lo, hi := 0.15, 1.8
	if n >= 512 {
		lo, hi = 0.6, 2.5
	}
	step := time.Duration(math.Exp(r.between(math.Log(lo), math.Log(hi))) * 1e9)
	stages := max(c.Pipeline, 1)
	c.Compute = time.Duration(float64(step) * r.between(0.6, 0.85) / float64(3*max(c.Micro, 1)+3*(stages-1)))
	c.Load = time.Duration(float64(step) * r.between(0, 0.05))
	part := func(lo, hi float64) time.Duration {
		return max(300*time.Microsecond, time.Duration(float64(c.Compute)*r.between(lo, hi)))
	}
	c.TensorTime, c.ContextTime, c.ExpertTime, c.PipeTime = part(0.02, 0.1), part(0.02, 0.1), part(0.03, 0.12), part(0.01, 0.06)
	c.DataTime = max(time.Millisecond, time.Duration(float64(step)*r.between(0.02, 0.1)))
	if c.Buckets > 0 {
		c.DataTime /= time.Duration(c.Buckets)
	}
	c.Warmup = m.between(500*time.Millisecond, 10*time.Second)
	c.Agents.Every = m.between(90*time.Millisecond, 120*time.Millisecond)
	c.Agents.Drop = r.between(0, 0.02)
	c.Agents.MapError = m.between(50*time.Microsecond, 2*time.Millisecond)
	c.Agents.Exits = ExitWords(r.intn(3))
	c.Agents.Busy = r.between(0, 0.2)
	if net := &c.Cluster; net.GPU {
		net.TransferNoise, net.DelayNoise, net.DelaySpread = r.between(0.03, 0.4), r.between(0.1, 0.5), r.between(0.02, 0.2)
		net.Wake = m.between(5*time.Microsecond, 100*time.Microsecond)
		net.MonitorErrs, net.SentAgain = r.between(0.0005, 0.01), r.between(0, 0.005)
	} else {
		net.TransferNoise, net.DelayNoise, net.DelaySpread = r.between(0.1, 0.6), r.between(0.3, 1), r.between(0.05, 0.4)
		net.Wake = m.between(50*time.Microsecond, 3*time.Millisecond)
		net.MonitorErrs, net.SentAgain = r.between(0.001, 0.1), r.between(0, 0.05)
		c.Agents.Busy = r.between(0, 0.6)
	}
	c.Cluster.setRTT()
	c.Dying.Reaction = Reaction(r.intn(int(numReactions)))
	c.Dying.React = m.between(100*time.Millisecond, 2*time.Second)
	c.Dying.Silent = m.between(2*time.Second, 12*time.Second)
	if m.chance(0.5) {
		c.Dying.Launcher = m.between(200*time.Millisecond, 5*time.Second)
	}
	return c
}
