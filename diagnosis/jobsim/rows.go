package jobsim

import (
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

func one(rank int) []int32 { return []int32{int32(rank)} }

// dies makes a row of a process that ends.
func dies(name string, end Fault) row {
	return row{name, nil, func(m *maker) bool {
		f, r := end, m.rank()
		f.Kind, f.Rank = Die, r
		return m.hang(f, Truth{Ranks: one(r)})
	}}
}

// hangs makes a row of a rank that does not go on.
func hangs(name string, kind FaultKind, fit func(*maker), classes ...diagnosis.Class) row {
	return row{name, fit, func(m *maker) bool {
		r := m.rank()
		within := 30 * time.Second
		if kind == HangBusy {
			within = 60 * time.Second // computing is given 30 s
		}
		t := Truth{Ranks: one(r), Classes: classes, Within: within}
		if len(classes) > 0 { // its communication stops as well
			t.Touches = one(r)
		}
		return m.hang(Fault{Kind: kind, Rank: r, Code: pick(m, 48, 94, 95, 119, 74)}, t)
	}}
}

// late makes a row of one slow rank.
func late(name string, fit func(*maker), f func(m *maker) Fault) row {
	return row{name, fit, func(m *maker) bool {
		x := f(m)
		x.Rank = m.rank()
		return m.slow(x, Truth{Ranks: one(x.Rank)})
	}}
}

func onGPU(m *maker) { m.c.Cluster.GPU = true }

// tells makes connections tell of themselves, and gradients wait for nobody's compute: what
// a slow network costs is then known.
func tells(m *maker) { m.c.Cluster.Mute, m.c.Buckets = false, 0 }

func inOrder(m *maker) { m.c.World, m.c.Buckets = true, 0 }

// even makes a tenth of a rank's time matter.
func even(m *maker) { m.c.Lengths, m.c.Uneven, m.c.Experts = 0, 0, 0 }

// slotTime is how long a rank is inside transfers of a slot in one step.
func (m *maker) slotTime(s slot) time.Duration {
	c := &m.c
	n, each := 0, time.Duration(0)
	for _, in := range m.wired().progs[0] {
		if in.slot == s && (in.op == opColl || in.op == opPipe) {
			n++
		}
	}
	switch s {
	case slotTensor:
		each = c.TensorTime
	case slotContext:
		each = c.ContextTime
	case slotExpert:
		each = c.ExpertTime
	case slotData:
		each = c.DataTime
	case slotPipe:
		each = c.PipeTime
	case slotWorld:
		each = time.Millisecond
	}
	return time.Duration(n) * each
}

// slowness is the factor by which a connection has to be slower for it to cost a
// share of a step, 0 when no factor does.
func (m *maker) slowness(share float64, touches func(src, dst int32) bool) float64 {
	j := m.wired()
	busy := time.Duration(0)
	seen := [numSlots]bool{}
	for _, c := range j.comms {
		if seen[c.slot] {
			continue
		}
		for i := range c.edges {
			e := &c.edges[i]
			if e.told && touches(c.members[e.src].World, c.members[e.dst].World) {
				seen[c.slot] = true
				busy += m.slotTime(c.slot)
				break
			}
		}
	}
	if f := 1 + share*float64(m.s.Step)/float64(max(busy, 1)); f <= 60 && busy > 0 {
		return max(f, 1.5)
	}
	return 0
}

// share is what a slow network costs, in parts of a step.
func (m *maker) share() float64 { return m.factor(0.2, 1) }

func (m *maker) pairSlow() bool {
	a, b, ok := m.pair(true)
	if !ok {
		return false
	}
	f := m.slowness(m.share(), func(x, y int32) bool { return int(x) == a && int(y) == b })
	return f > 0 && m.slow(Fault{Kind: PairSlow, Rank: a, Peer: b, Factor: f}, Truth{Classes: commSlow, Pairs: [][2]int32{{int32(a), int32(b)}}})
}

// cut takes a connection away for a while, 0: for good.
func (m *maker) cut(for_ time.Duration, oneWay, nodes bool) bool {
	a, b, ok := m.pair(true)
	if !ok {
		return false
	}
	f := Fault{Kind: PairCut, Rank: a, Peer: b, OneWay: oneWay, Nodes: nodes, At: m.early()}
	t := Truth{Classes: []diagnosis.Class{diagnosis.CommunicationHang, diagnosis.CommunicationSlow}, Pairs: [][2]int32{{int32(a), int32(b)}, {int32(b), int32(a)}}, Within: 45 * time.Second}
	if nodes {
		t.Between = [][2]int32{{m.node(a), m.node(b)}, {m.node(b), m.node(a)}}
	}
	if for_ > 0 {
		f.Until = f.At + for_
		t.Within = for_ + 20*time.Second
	}
	if for_ == 0 || for_ > m.c.Dying.Bound {
		t.Want = diagnosis.Confirmed
		t.Classes = commHang
	}
	return m.fault(f, t)
}

func (m *maker) loss() bool {
	a, b, ok := m.pair(true)
	if !ok {
		return false
	}
	p := pick(m, 0.01, 0.05, 0.1)
	cost := time.Duration(0) // of a step, as harm has it
	j := m.wired()
	seen := [numSlots]bool{}
	for _, c := range j.comms {
		for i := range c.edges {
			x, y := int(c.members[c.edges[i].src].World), int(c.members[c.edges[i].dst].World)
			if !seen[c.slot] && (x == a && y == b || x == b && y == a) {
				seen[c.slot] = true
				busy := m.slotTime(c.slot)
				ops := float64(busy) / float64(c.base)
				cost += time.Duration(float64(busy)*40*p + ops*min(0.9, 8*p)*float64(200*time.Millisecond))
			}
		}
	}
	return m.slow(Fault{Kind: PairLoss, Rank: a, Peer: b, Factor: p},
		Truth{Classes: commSlow, Pairs: [][2]int32{{int32(a), int32(b)}, {int32(b), int32(a)}}}) && (cost > m.s.Step/5 || m.optional())
}

var rows = []row{
	{"healthy", nil, (*maker).healthy},
	{"healthy, checkpoint of all", func(m *maker) {
		m.pauses(Pause{Every: 20 + m.rng.intn(60), Length: m.between(time.Second, 8*time.Second), Spread: time.Second, Mark: pick(m, record.MarkNone, record.MarkCheckpoint), IO: true, Rank: AllRanks})
	}, (*maker).healthy},
	{"healthy, checkpoint of rank 0", func(m *maker) {
		p := Pause{Every: 20 + m.rng.intn(60), Length: m.between(time.Second, 6*time.Second), Mark: pick(m, record.MarkNone, record.MarkCheckpoint), IO: m.chance(0.7)}
		p.Sleep = !p.IO && m.chance(0.5)
		m.pauses(p)
	}, (*maker).healthy},
	{"healthy, asynchronous checkpoint", func(m *maker) {
		m.pauses(Pause{Every: 10 + m.rng.intn(30), Length: m.between(100*time.Millisecond, 600*time.Millisecond), Spread: 300 * time.Millisecond, IO: true, Rank: AllRanks})
	}, (*maker).healthy},
	{"healthy, evaluation", func(m *maker) {
		m.pauses(Pause{Every: 50 + m.rng.intn(100), Length: m.between(3*time.Second, 20*time.Second), Spread: time.Second, Mark: pick(m, record.MarkNone, record.MarkEvaluation), Sleep: m.chance(0.3), Rank: AllRanks})
	}, (*maker).healthy},
	{"healthy, compile pauses", func(m *maker) {
		m.pauses(Pause{Length: m.between(10*time.Second, 40*time.Second), Spread: 8 * time.Second, Mark: pick(m, record.MarkNone, record.MarkCompile), Rank: AllRanks},
			Pause{Every: 97, Length: m.between(time.Second, 5*time.Second), Spread: 2 * time.Second, Mark: pick(m, record.MarkNone, record.MarkCompile), Rank: AllRanks})
	}, (*maker).healthy},
	{"healthy, epochs", func(m *maker) {
		m.pauses(Pause{Every: 40 + m.rng.intn(80), Length: m.between(time.Second, 3*time.Second), Spread: 2 * time.Second, Sleep: true, Rank: AllRanks})
	}, (*maker).healthy},
	{"healthy, uneven lengths", func(m *maker) { m.c.Lengths = m.factor(0.15, 0.4) }, (*maker).healthy},
	{"healthy, uneven experts", func(m *maker) { m.c.Experts = m.factor(0.2, 0.5) }, func(m *maker) bool { return m.c.Expert > 1 && m.healthy() }},
	{"healthy, oversubscribed hosts", func(m *maker) {
		m.c.Hiccups, m.c.Hiccup, m.c.Noise = 0.1, m.between(20*time.Millisecond, 150*time.Millisecond), 0.15
		m.c.Agents.Busy, m.c.Agents.Late, m.c.Agents.LateBy, m.c.Agents.Drop = 0.5, 1, 1500*time.Millisecond, 0.05
	}, (*maker).healthy},
	{"healthy, agents restart", func(m *maker) { m.c.Agents.Restart = 0.5 / float64(max(1, m.ranks/64)) }, (*maker).healthy},
	{"healthy, agent lost", nil, func(m *maker) bool {
		at := m.early()
		m.c.Faults = append(m.c.Faults, Fault{Kind: AgentGone, Rank: m.rank(), At: at, Until: at + m.between(5*time.Second, 40*time.Second)})
		return m.healthy()
	}},
	{"healthy, resize", func(m *maker) { m.c.Expert, m.c.Experts, m.c.ResizeAt = 1, 0, 20+m.rng.intn(20) }, func(m *maker) bool { return m.c.Data > 2 && m.healthy() }},
	{"healthy, all slower", nil, func(m *maker) bool {
		m.c.Faults = append(m.c.Faults, Fault{Kind: AllSlow, At: m.late(), Factor: m.factor(1.3, 2)})
		return m.healthy()
	}},
	{"healthy, GPU noise", onGPU, func(m *maker) bool {
		m.c.Faults = append(m.c.Faults, Fault{Kind: GPUNoise, Rank: m.rank(), At: m.late(), Code: pick(m, 63, 92, 13, 154)})
		return m.healthy()
	}},

	dies("kill -9", Fault{Signal: 9}),
	dies("exit 0", Fault{}),
	dies("exit 0, closed", Fault{Closed: true}),
	dies("exit 3", Fault{Code: 3}),
	dies("panic", Fault{Code: 2}),
	{"two deaths", nil, func(m *maker) bool {
		a, b := m.rank(), m.rank()
		at := m.early()
		for i, r := range []int{a, b} {
			m.c.Faults = append(m.c.Faults, Fault{Kind: Die, Rank: r, Signal: 9, At: at + time.Duration(i)*m.between(0, 2*time.Second)})
		}
		m.s.Truths = []Truth{{Classes: []diagnosis.Class{diagnosis.NoncommunicationHang}, Ranks: []int32{int32(a), int32(b)}, Want: diagnosis.Confirmed, Within: 30 * time.Second}}
		m.s.Length = at + 40*time.Second
		return a != b
	}},
	{"node down", nil, func(m *maker) bool {
		r := m.rank()
		return m.hang(Fault{Kind: NodeDown, Rank: r}, Truth{Nodes: []int32{m.node(r)}, Within: 45 * time.Second})
	}},
	{"node cut off", nil, func(m *maker) bool {
		r := m.rank()
		return m.hang(Fault{Kind: NodeCut, Rank: r}, Truth{Nodes: []int32{m.node(r)}, Within: 45 * time.Second, Classes: commHang})
	}},

	{"outage 1-3 s", tells, func(m *maker) bool { return m.cut(m.between(time.Second, 3*time.Second), false, m.chance(0.5)) }},
	{"outage 3-25 s", tells, func(m *maker) bool { return m.cut(m.between(3*time.Second, 25*time.Second), false, m.chance(0.5)) }},
	{"outage 60 s", tells, func(m *maker) bool { return m.cut(time.Minute, false, m.chance(0.5)) }},
	{"partition two-way", tells, func(m *maker) bool { return m.cut(0, false, m.chance(0.5)) }},
	{"partition one-way", tells, func(m *maker) bool { return m.cut(0, true, m.chance(0.5)) }},
	{"loss on a pair", tells, (*maker).loss},
	{"slow pair", tells, (*maker).pairSlow},
	{"slow node links", tells, func(m *maker) bool { return m.outside(NodeSlow, Truth{}, 0) }},
	{"node links + delay", tells, func(m *maker) bool {
		return m.outside(NodeSlow, Truth{}, m.between(10*time.Millisecond, 40*time.Millisecond))
	}},
	{"slow sender", tells, func(m *maker) bool { return m.outside(SendSlow, Truth{}, 0) }},
	{"slow receiver", tells, func(m *maker) bool { return m.outside(ReceiveSlow, Truth{}, 0) }},
	{"slow switch", tells, func(m *maker) bool { return m.nodes() >= 4 && m.outside(SwitchSlow, Truth{}, 0) }},
	{"collision of two flows", tells, func(m *maker) bool {
		a, b, ok := m.pair(true)
		x, y, ok2 := m.pair(true)
		if !ok || !ok2 || a == x {
			return false
		}
		f := m.slowness(m.share(), func(p, q int32) bool { return int(p) == a && int(q) == b })
		t := Truth{Classes: commSlow, Pairs: [][2]int32{{int32(a), int32(b)}, {int32(x), int32(y)}}, Sources: []int32{int32(x), int32(a)}, Touches: one(x)}
		m.allOf(&t, func(p, q int32) bool { return int(p) == a && int(q) == b || int(p) == x })
		return f > 0 && m.slow(Fault{Kind: Collision, Rank: a, Peer: b, Other: x, Factor: f}, t)
	}},
	{"one port of two down", func(m *maker) { tells(m); m.c.Cluster.GPU, m.c.Cluster.RDMA, m.c.Cluster.Ports = true, true, 2 }, func(m *maker) bool {
		a, _, ok := m.pair(true)
		return ok && m.slow(Fault{Kind: PortDown, Rank: a, Factor: 2}, Truth{Classes: commSlow, Touches: one(a), Nodes: []int32{m.node(a)}}) && m.optional()
	}},

	{"opposite order", inOrder, func(m *maker) bool {
		r := m.rank()
		return m.c.Data > 1 && m.hang(Fault{Kind: OppositeOrder, Rank: r}, Truth{Ranks: one(r)})
	}},
	{"collective skipped", inOrder, func(m *maker) bool {
		r := m.rank()
		return m.c.Data > 1 && m.hang(Fault{Kind: Skip, Rank: r}, Truth{Ranks: one(r)})
	}},
	{"mismatched call", inOrder, func(m *maker) bool {
		r := m.rank()
		return m.hang(Fault{Kind: Mismatch, Rank: r}, Truth{Ranks: one(r)})
	}},
	hangs("hang, idle", HangIdle, nil),
	hangs("hang, computing", HangBusy, nil),
	hangs("hang, disk sleep", HangDisk, nil),
	hangs("hang, stopped", HangStop, nil),
	hangs("GPU off the bus", GPULost, onGPU, diagnosis.CommunicationHang),
	hangs("fatal Xid", GPUFatal, onGPU, diagnosis.CommunicationHang),

	{"NVLink lanes lost", func(m *maker) { onGPU(m); m.c.Tensor = max(m.c.Tensor, 2) }, func(m *maker) bool {
		r := m.rank()
		f := 1 + m.share()*float64(m.s.Step)/float64(max(m.slotTime(slotTensor), 1))
		return m.c.Tensor > 1 && m.c.Tensor <= m.c.Cluster.RanksPerNode && f < 40 &&
			m.slow(Fault{Kind: LaneLoss, Rank: r, Factor: f}, Truth{Classes: commSlow, Ranks: one(r), Touches: one(r), Nodes: []int32{m.node(r)}})
	}},
	{"PCIe downgrade", func(m *maker) { tells(m); onGPU(m) }, func(m *maker) bool {
		r, _, ok := m.pair(true)
		return ok && m.slow(Fault{Kind: PCIeSlow, Rank: r, Factor: m.factor(3, 8)},
			Truth{Classes: []diagnosis.Class{diagnosis.NoncommunicationSlow, diagnosis.CommunicationSlow}, Ranks: one(r), Touches: one(r)})
	}},
	late("thermal throttle", onGPU, func(m *maker) Fault { return Fault{Kind: Throttle, Factor: m.factor(1.3, 2)} }),
	late("cgroup of 8 % CPU", nil, func(m *maker) Fault { return Fault{Kind: CPUStarved, Factor: 12} }),
	late("memory pressure", nil, func(m *maker) Fault { return Fault{Kind: MemoryShort, Factor: m.factor(1.5, 3)} }),
	late("straggler x 1.1-1.3", even, func(m *maker) Fault { return Fault{Kind: Straggler, Factor: m.factor(1.15, 1.3)} }),
	late("straggler x 1.3-2", nil, func(m *maker) Fault { return Fault{Kind: Straggler, Factor: m.factor(1.35, 2)} }),
	late("straggler, periodic", even, func(m *maker) Fault {
		return Fault{Kind: Straggler, Factor: m.factor(1.5, 2), Shape: Periodic, Period: 12 * m.s.Step}
	}),
	late("straggler, + 2 % a step", even, func(m *maker) Fault {
		return Fault{Kind: Straggler, Factor: 1.5, Shape: Drifting, Growth: 0.02}
	}),
	late("straggler, now and then x 2.2", even, func(m *maker) Fault {
		return Fault{Kind: Straggler, Factor: 2.2, Shape: NowAndThen, Every: 3}
	}),
	{"straggler, migrating", even, func(m *maker) bool {
		f := Fault{Kind: Straggler, Rank: m.rank(), Factor: m.factor(1.5, 2), Shape: Migrating, Period: 14 * m.s.Step}
		t := Truth{Within: 5*time.Second + 40*m.s.Step, Steps: 40}
		for i := range 8 {
			t.Ranks = append(t.Ranks, int32((f.Rank+i*(m.ranks/3+1))%m.ranks))
		}
		return m.slow(f, t)
	}},
	{"node x 1.5", even, func(m *maker) bool {
		r := m.rank()
		return m.slow(Fault{Kind: NodeStraggler, Rank: r, Factor: m.factor(1.3, 1.6)}, Truth{Nodes: []int32{m.node(r)}})
	}},
	{"straggler and slow pair", func(m *maker) { tells(m); even(m) }, func(m *maker) bool {
		if !m.pairSlow() {
			return false
		}
		r := m.rank()
		p := &m.c.Faults[0]
		if r == p.Rank || r == p.Peer {
			return false
		}
		return m.slow(Fault{Kind: Straggler, Rank: r, Factor: m.factor(1.5, 2)}, Truth{Ranks: one(r)})
	}},
	{"straggler, then death", nil, func(m *maker) bool {
		a, b := m.rank(), m.rank()
		if a == b || !m.slow(Fault{Kind: Straggler, Rank: a, Factor: m.factor(1.5, 2)}, Truth{Ranks: one(a)}) {
			return false
		}
		m.s.Truths[0].Want = 0
		at := m.c.Faults[0].At + 16*m.s.Step
		return m.fault(Fault{Kind: Die, Rank: b, Signal: 9, At: at}, Truth{Classes: []diagnosis.Class{diagnosis.NoncommunicationHang}, Ranks: one(b), Want: diagnosis.Confirmed})
	}},
}

// optional makes saying nothing of the last fault right, too.
func (m *maker) optional() bool {
	m.s.Truths[len(m.s.Truths)-1].Want = 0
	return true
}
