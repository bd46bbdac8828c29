package jobsim

import "time"

// tuningJob draws a job to tune detectors on.
func tuningJob(m *maker) Config {
	var c Config
	n := m.ranks
	c.Cluster.RanksPerNode = 8
	switch n {
	case 8:
		c.Cluster.RanksPerNode = pick(m, 2, 4, 4)
	case 64:
		c.Cluster.RanksPerNode = pick(m, 8, 8, 4)
	}
	c.Cluster.GPU = n > 64 || m.chance(0.6)
	c.Cluster.RDMA = c.Cluster.GPU && m.chance(0.7)
	if c.Cluster.RDMA {
		c.Cluster.Ports = pick(m, 1, 2)
	}
	c.Cluster.Spin = c.Cluster.GPU && m.chance(0.5)
	c.Cluster.FatTree = m.chance(0.5)
	c.Tensor, c.Pipeline = 1, 1
	switch m.rng.intn(4) {
	case 0: // data only
		c.Buckets = pick(m, 0, 4)
		c.Layers = pick(m, 4, 8)
	case 1:
		c.Tensor = min(8, n/4)
		c.Layers = 2
		c.Micro = pick(m, 1, 4)
	case 2:
		c.Tensor = pick(m, 2, min(8, n/4))
		c.Pipeline = pick(m, 2, min(8, n/c.Tensor))
		c.Micro = c.Pipeline * pick(m, 1, 2)
		c.Uneven = pick(m, 0, 0.2)
		if m.chance(0.3) && c.Pipeline > 1 {
			c.Chunks = 2
		}
	default:
		c.Expert = min(8, n/2)
		c.Tensor = pick(m, 1, 2)
		if n/c.Tensor < c.Expert {
			c.Tensor = 1
		}
		c.Experts = pick(m, 0, 0.2)
		c.Layers = 2
		c.Micro = pick(m, 1, 2)
	}
	if n >= 4096 && c.Tensor == 1 {
		c.Tensor, c.Layers = 8, 2
	}
	c.Data = n / max(1, c.Tensor*c.Pipeline)
	c.Sharded = m.chance(0.4)
	c.World = m.chance(0.5)
	c.Steps = m.chance(0.6)
	c.Lengths = pick(m, 0, 0, 0.1)
	c.Noise = pick(m, 0.02, 0.05)
	c.Hiccups, c.Hiccup = pick(m, 0, 0.01), 20*time.Millisecond
	step := pick(m, 200*time.Millisecond, 500*time.Millisecond, time.Second)
	if n >= 512 {
		step = pick(m, 500*time.Millisecond, time.Second, 1500*time.Millisecond)
	}
	c.Compute = time.Duration(float64(step) * 0.8 / float64(3*max(c.Micro, 1)+3*(c.Pipeline-1)))
	c.TensorTime = max(500*time.Microsecond, c.Compute/20)
	c.ExpertTime = max(500*time.Microsecond, c.Compute/20)
	c.PipeTime = max(500*time.Microsecond, c.Compute/30)
	c.DataTime = max(2*time.Millisecond, step/20)
	c.Warmup = m.between(time.Second, 4*time.Second)
	c.Agents.Drop = pick(m, 0, 0.01)
	c.Agents.MapError = pick(m, 100*time.Microsecond, time.Millisecond)
	c.Cluster.TransferNoise, c.Cluster.DelayNoise, c.Cluster.DelaySpread = pick(m, 0.05, 0.2, 0.4), pick(m, 0.2, 0.4), pick(m, 0.05, 0.2)
	c.Cluster.Wake, c.Cluster.MonitorErrs = pick(m, 10*time.Microsecond, 50*time.Microsecond), pick(m, 0.001, 0.01)
	if !c.Cluster.GPU {
		c.Cluster.TransferNoise, c.Cluster.DelayNoise = pick(m, 0.2, 0.5), pick(m, 0.4, 0.8)
		c.Cluster.Wake, c.Cluster.MonitorErrs = pick(m, 100*time.Microsecond, 2*time.Millisecond), pick(m, 0.01, 0.08)
		c.Agents.Busy = pick(m, 0, 0.2, 0.5)
		c.Cluster.SentAgain = pick(m, 0, 0.01, 0.05)
	}
	c.Cluster.setRTT()
	c.Agents.Exits = pick(m, NobodyTells, SupervisorTells, KernelTells)
	c.Dying.Reaction = pick(m, LogFatal, AbortOne, AbortAll, CloseAll, Panics, AbortSleep, Linger)
	c.Dying.Launcher = pick(m, 0, 0, 500*time.Millisecond, 3*time.Second)
	return c
}
