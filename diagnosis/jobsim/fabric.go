package jobsim

import (
	"fmt"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

// edge is a directed connection of a communicator, one path of it where a NIC has
// several ports. NVLink's are edges, too, of which nobody tells.
type edge struct {
	src, dst  int32 // members
	transport record.Transport
	path      uint8 // port of both NICs
	told      bool

	at                        int32 // index in the evidence, -1
	factor                    float64
	usual                     float64 // its delay beside other connections'
	lag                       int64   // how long at a time its receiver waits, when that is not by its bandwidth
	queue                     float64 // what its segments wait for in the network, ns
	slow                      uint64  // windows
	rare                      rare    // of a queue pair
	down                      bool    // by the word of its ends
	downAt                    int64
	switched                  bool
	switches, outages, resent uint64
}

// hit is a fault that touches an edge of a communicator.
type hit struct {
	fault *fault
	edge  int32
}

// nic is the card that a rank uses; a node without GPUs has one.
func (j *Job) nic(rank int32) int32 {
	n := int32(j.cfg.Cluster.RanksPerNode)
	if !j.cfg.Cluster.GPU {
		return rank / n
	}
	return rank
}

// leaf is the switch that a rank's port is at.
func (j *Job) leaf(rank int32, port uint8) int32 {
	c := &j.cfg.Cluster
	node, local := int(rank)/c.RanksPerNode, int(rank)%c.RanksPerNode
	group := node / c.NodesPerLeaf
	if !c.FatTree && c.GPU {
		group = group*c.RanksPerNode + local
	}
	return int32(group*c.Ports + int(port))
}

// wire makes the connections that a communicator's operations use: rings for
// collectives, all pairs of small groups for AlltoAll, neighbours for pipelines.
func (j *Job) wire(k *comm) {
	n := len(k.members)
	k.out, k.in = make([][]int32, n), make([][]int32, n)
	seen := map[[2]int]bool{}
	link := func(a, b int) {
		if a == b || n > 2 && k.slot == slotExpert && seen[[2]int{a, b}] {
			return
		}
		if k.slot == slotPipe || k.slot == slotExpert || n == 2 {
			if seen[[2]int{a, b}] {
				return
			}
			seen[[2]int{a, b}] = true
		}
		src, dst := k.members[a].World, k.members[b].World
		c := &j.cfg.Cluster
		e := edge{src: int32(a), dst: int32(b), at: -1, factor: 1, told: !c.Mute}
		paths := 1
		switch {
		case c.GPU && src/int32(c.Domain) == dst/int32(c.Domain):
			e.transport, e.told = record.TransportNVLink, false
		case !c.GPU && j.ranks[src].node == j.ranks[dst].node:
			e.transport = record.TransportSHM
		case c.RDMA:
			e.transport = record.TransportRDMA
			paths = c.Ports
		default:
			e.transport = record.TransportTCP
		}
		for p := range paths {
			e.path = uint8(p)
			if e.told {
				k.out[a] = append(k.out[a], int32(len(k.edges)))
				if j.ranks[src].node != j.ranks[dst].node { // else its source's report has both sides
					k.in[b] = append(k.in[b], int32(len(k.edges)))
				}
			}
			k.edges = append(k.edges, e)
			k.told = k.told || e.told
		}
	}
	switch {
	case k.slot == slotPipe:
		k.chans = make([]channel, 2*n)
		for i := range n {
			if i+1 < n || j.cfg.Chunks > 1 {
				link(i, (i+1)%n)
				link((i+1)%n, i)
			}
		}
	case k.slot == slotExpert && n <= 8:
		for a := range n {
			for b := range n {
				link(a, b)
			}
		}
	case k.slot == slotExpert:
		for a := range n {
			for d := 1; d < n; d *= 2 {
				link(a, (a+d)%n)
			}
		}
	default:
		if j.hierarchical(k, link) {
			return
		}
		for i := range n {
			link(i, (i+1)%n)
		}
	}
}

// hierarchical wires a communicator of several NVLink domains with several members
// each as NCCL's channels do: a ring in each domain, and from every member one to its
// like in the next domain, on its own rail. False when it is none.
func (j *Job) hierarchical(k *comm, link func(a, b int)) bool {
	if !j.cfg.Cluster.GPU {
		return false
	}
	var domains [][]int
	last, most := int32(-1), 0
	for i := range k.members {
		if d := j.domain(k, i); d != last || len(domains) == 0 {
			last, domains = d, append(domains, nil)
		}
		at := len(domains) - 1
		domains[at] = append(domains[at], i)
		most = max(most, len(domains[at]))
	}
	if len(domains) < 2 || most < 2 {
		return false
	}
	k.hierarchical = true
	for g, in := range domains {
		next := domains[(g+1)%len(domains)]
		for p, i := range in {
			link(i, in[(p+1)%len(in)])
			link(i, next[min(p, len(next)-1)])
		}
	}
	return true
}

// domain is the NVLink domain of a member.
func (j *Job) domain(k *comm, member int) int32 {
	return k.members[member].World / int32(j.cfg.Cluster.Domain)
}

func (j *Job) edgeName(k *comm, e *edge) string {
	src, dst := k.members[e.src].World, k.members[e.dst].World
	switch e.transport {
	case record.TransportRDMA:
		return fmt.Sprintf("mlx5_%d:%d", int(src)%j.cfg.Cluster.RanksPerNode, e.path+1)
	case record.TransportTCP:
		return fmt.Sprintf("10.%d.%d.1:%d", j.ranks[dst].node>>8, j.ranks[dst].node&255, 30000+dst)
	}
	return fmt.Sprintf("%s %d>%d", k.name, e.src, e.dst)
}

// transfer is how long the collective that all have entered takes, and whether it
// does not move at all. A ring is as slow as its slowest connection, and an
// all-to-all as its slowest pair.
func (j *Job) transfer(c *comm) (int64, bool) {
	d := float64(c.base) * spread(hash(c.id, c.seq, 1), j.cfg.Cluster.TransferNoise)
	if c.scale > 0 {
		d *= c.scale
	}
	if c.coll == record.AlltoAllv && j.cfg.Experts > 0 {
		d *= spread(hash(c.id, c.seq, 2), j.cfg.Experts/2)
	}
	if len(c.hits) == 0 {
		return int64(d), false
	}
	at := max(c.last, c.resumed)
	worst, add, stalled := 1.0, int64(0), false
	for _, h := range c.hits {
		f, a, stop := j.effect(h, c, at, d)
		worst, add, stalled = max(worst, f), max(add, a), stalled || stop
	}
	return int64(d*worst) + add, stalled
}

// transferPair is the same of a send and its receive.
func (j *Job) transferPair(c *comm, src, dst int, at int64) (int64, bool) {
	d := float64(c.base) * spread(hash(c.id^uint64(src), uint64(at), uint64(dst)), 2*j.cfg.Cluster.TransferNoise)
	worst, add, stalled := 1.0, int64(0), false
	for _, h := range c.hits {
		e := &c.edges[h.edge]
		if int(e.src) != src || int(e.dst) != dst {
			continue
		}
		f, a, stop := j.effect(h, c, at, d)
		worst, add, stalled = max(worst, f), max(add, a), stalled || stop
	}
	return int64(d*worst) + add, stalled
}

// effect is what a fault does to a transfer over an edge that begins at a moment:
// how much longer it takes as a factor, and as a time, and whether it stands still.
func (j *Job) effect(h hit, c *comm, at int64, d float64) (factor float64, add int64, stalled bool) {
	e, f := &c.edges[h.edge], h.fault
	factor = 1
	if f.during(at) {
		factor, add, stalled = j.harm(f, c, e, at, d)
	}
	e.factor = factor + float64(add)/max(d, 1)
	e.lag = 0
	if add > 0 { // nothing comes for as long as one message is under way, or one is lost
		e.lag = int64(f.Extra)
		if f.Kind == PairLoss {
			e.lag = int64(200 * time.Millisecond)
		}
	}
	switch {
	case f.Kind == PairLoss: // a segment that was sent again is not measured
		e.queue = 0
	case add > 0:
		e.queue = float64(f.Extra)
	default:
		e.queue = (factor - 1) * d / float64(j.windows(c))
	}
	if e.factor >= 1.5 && !stalled {
		e.slow += j.windows(c)
	}
	if e.transport.QueuePair() && !stalled {
		e.rare.transfer(d, e.factor)
	}
	return factor, add, stalled
}

// rare is what a queue pair's monitor knows of a network that is slow now and then (windowmon/rare.go), of a
// connection that a fault has touched.
type rare struct {
	is                  bool
	debt, since, behind float64 // ns
	runs                int
	slow                bool // the last transfer was
}

// transfer takes over one that would take d, ns, and took factor times as long.
func (r *rare) transfer(d, factor float64) {
	const share, told, runs, over = 0.1, 200e6, 4, 8
	slow, took, cost := factor >= 1.5, d*factor, 0.0
	if slow {
		cost = took - d
	}
	if r.debt = min(r.debt+cost-share*took, 2*told); r.debt <= 0 {
		*r = rare{slow: slow}
		return
	}
	r.since += took
	r.behind += took
	if slow {
		r.behind = 0
		if !r.slow {
			r.runs++
		}
	}
	r.slow = slow
	if r.behind*float64(r.runs) > over*r.since {
		*r = rare{}
	} else if r.debt >= told && r.runs >= runs {
		r.is = true
	}
}

// windows is how many windows of its monitor one operation fills on each connection.
func (j *Job) windows(c *comm) uint64 {
	return uint64(min(64, max(1, time.Duration(c.base)/(5*time.Millisecond))))
}
