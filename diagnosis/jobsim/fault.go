package jobsim

import (
	"fmt"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// FaultKind is what goes wrong.
type FaultKind uint8

const (
	NoFault FaultKind = iota

	Die      // Rank's process ends: by Signal, or with Code; Closed: its recorder is closed in good order
	NodeDown // Rank's node is gone, with its agent
	NodeCut  // nothing from outside reaches Rank's node any more; its processes and its agent go on
	AgentGone

	PairCut  // nothing passes from Rank to Peer, nor back unless OneWay
	PairSlow // Rank → Peer takes Factor times as long
	PairLoss // a share Factor of what passes between Rank and Peer is lost
	NodeSlow // all links of Rank's node: Factor times as long, Extra more
	SendSlow // what Rank's NIC sends
	ReceiveSlow
	SwitchSlow // all that passes the leaf of Rank's port
	Collision  // Rank → Peer and Other → Other's neighbour share a path: each takes Factor times as long
	PortDown   // one port of Rank's NIC: its connections go over the other one

	OppositeOrder // Rank calls two collectives of different communicators in the other order
	Skip          // Rank leaves out a collective
	Mismatch      // Rank calls another collective than the others

	HangIdle // Rank sleeps in its own code for ever
	HangBusy // computes
	HangDisk // uninterruptible sleep
	HangStop // SIGSTOP

	GPULost  // falls off its bus: Xid 79, and the process waits for it for ever
	GPUFatal // Xid Code: likewise
	GPUNoise // Xid Code, which nobody feels
	LaneLoss // Rank's NVLink loses lanes: its transfers take Factor times as long
	PCIeSlow // Rank's link to its host and NIC is narrower: own time and what it sends and receives
	Throttle // heat: own time Factor times as long, and the GPU says so

	CPUStarved  // Rank's cgroup has a quota: own time and its transfers
	MemoryShort // Rank's cgroup is short of memory
	Straggler   // Rank's own time is Factor times as long
	NodeStraggler
	AllSlow // everybody's
	numFaults
)

var faultNames = [numFaults]string{"none", "die", "node_down", "node_cut", "agent_gone", "pair_cut", "pair_slow", "pair_loss", "node_slow", "send_slow", "receive_slow",
	"switch_slow", "collision", "port_down", "opposite_order", "skip", "mismatch", "hang_idle", "hang_busy", "hang_disk", "hang_stop",
	"gpu_lost", "gpu_fatal", "gpu_noise", "lane_loss", "pcie_slow", "throttle", "cpu_starved", "memory_short", "straggler", "node_straggler", "all_slow"}

func (k FaultKind) String() string {
	if k < numFaults {
		return faultNames[k]
	}
	return "unknown"
}

// Shape is how a slow fault goes over time.
type Shape uint8

const (
	Constant   Shape = iota
	Periodic         // on for half of Period
	Migrating        // at another rank every Period
	Drifting         // grows from 1 to Factor, by Step a step of the program
	NowAndThen       // one computation of a step in Every
)

// Fault is one injected fault.
type Fault struct {
	Kind   FaultKind
	At     time.Duration // since the start
	Until  time.Duration // 0: for ever
	Rank   int
	Peer   int
	Other  int
	Factor float64
	Extra  time.Duration
	OneWay bool
	Nodes  bool // PairCut, PairSlow, PairLoss: all between the nodes of Rank and Peer

	Signal int
	Code   int
	Closed bool

	Shape  Shape
	Period time.Duration // Periodic, Migrating
	Growth float64       // Drifting: a step
	Every  int           // NowAndThen
}

func (f *Fault) String() string {
	s := fmt.Sprintf("%v rank %d", f.Kind, f.Rank)
	switch f.Kind {
	case PairCut, PairSlow, PairLoss:
		s += fmt.Sprintf(" peer %d", f.Peer)
		if f.Nodes {
			s += " (nodes)"
		}
		if f.OneWay {
			s += " one way"
		}
	case Collision:
		s += fmt.Sprintf(" > %d with rank %d", f.Peer, f.Other)
	case Die:
		s += fmt.Sprintf(" signal %d code %d", f.Signal, f.Code)
		if f.Closed {
			s += " closed"
		}
	case GPUFatal, GPUNoise:
		s += fmt.Sprintf(" xid %d", f.Code)
	}
	if f.Factor != 0 {
		s += fmt.Sprintf(" x %.2f", f.Factor)
	}
	if f.Extra != 0 {
		s += fmt.Sprintf(" + %v", f.Extra)
	}
	if f.Shape != Constant {
		s += [...]string{"", " periodic", " migrating", " drifting", " now and then"}[f.Shape]
	}
	s += fmt.Sprintf(" at %v", f.At.Round(time.Millisecond))
	if f.Until != 0 {
		s += fmt.Sprintf(" for %v", (f.Until - f.At).Round(time.Millisecond))
	}
	return s
}

// fault is an injected fault and what has become of it.
type fault struct {
	*Fault
	onset int64 // when it was first felt by the program, 0: not yet
	step  int32 // of the job when it began
	cured int64 // PairCut: when connections resume, after Until
	comms []*comm
}

func (f *fault) during(t int64) bool {
	if t < int64(f.At) {
		return false
	}
	end := int64(f.Until)
	if f.Kind == PairCut && f.cured > 0 {
		end = f.cured
	}
	if end != 0 && t >= end {
		return false
	}
	return f.Shape != Periodic || (t-int64(f.At))/max(1, int64(f.Period)/2)%2 == 0
}

// stalls reports whether a fault lets nothing pass at a moment.
func (f *fault) stalls(t int64) bool {
	switch f.Kind {
	case PairCut, NodeCut, NodeDown:
		return f.during(t)
	case PortDown:
		return t >= int64(f.At) && t < int64(f.At)+switchOver
	}
	return false
}

// switchOver is how long RDMA's connections take to leave a port that is down.
const switchOver = int64(700 * time.Millisecond)

// inject schedules all faults.
func (j *Job) inject() error {
	j.faults = make([]fault, len(j.cfg.Faults))
	for i := range j.faults {
		f := &j.faults[i]
		f.Fault = &j.cfg.Faults[i]
		if f.Rank < 0 || f.Rank >= len(j.ranks) || f.Peer < 0 || f.Peer >= len(j.ranks) || f.Kind >= numFaults {
			return fmt.Errorf("jobsim: fault %d (%v): no such rank in a job of %d", i, f.Fault, len(j.ranks))
		}
		j.touches(f)
		r := &j.ranks[f.Rank]
		at := int64(f.At)
		switch f.Kind {
		case Die:
			j.at(at, func() {
				f.onset = j.now
				j.end(r, ending{code: f.Code, signal: f.Signal, closed: f.Closed})
			})
		case NodeDown:
			j.at(at, func() { f.onset = j.now; j.nodeDown(r.node) })
		case NodeCut:
			j.at(at, func() { f.onset = j.now; j.nodeCut(f, r.node) })
		case AgentGone:
			j.at(at, func() { j.nodes[r.node].silent = true })
			if f.Until > 0 {
				j.at(int64(f.Until), func() { j.nodes[r.node].silent, j.nodes[r.node].again = false, true })
			}
		case PairCut:
			j.at(at, func() { j.cut(f) })
		case PortDown:
			j.at(at, func() { j.portDown(f) })
		case HangStop:
			j.at(at, func() { f.onset = j.now; j.freeze(r, stuckStop) })
			if f.Until > 0 {
				j.at(int64(f.Until), func() { j.thaw(r) })
			}
		case HangDisk:
			j.at(at, func() { f.onset = j.now; j.freeze(r, stuckDisk) })
		case GPULost, GPUFatal:
			j.at(at, func() {
				f.onset = j.now
				r.xid, r.gpu.XidAt = uint32(f.Code), j.now
				if f.Kind == GPULost {
					r.xid, r.gpu.LostAt = 79, j.now+int64(r.rng.between(0.2, 2)*1e9)
				}
				j.freezeGPU(r)
			})
		case GPUNoise:
			j.at(at, func() { r.xid, r.gpu.XidAt = uint32(f.Code), j.now })
		case Throttle:
			j.at(at, func() {
				r.gpu.Throttle, r.gpu.ThrottledAt = diagnosis.ThrottleSWThermal|diagnosis.ThrottleHWThermal, j.now
			})
		case CPUStarved:
			j.at(at, func() {
				r.throttled, r.starved = float32(1-1/f.Factor), 0.2
				j.nodes[r.node].cpu = max(j.nodes[r.node].cpu, r.throttled)
			})
		case MemoryShort:
			j.at(at, func() {
				r.memory = float32(min(0.95, 1-1/f.Factor+0.2))
				j.nodes[r.node].memory = r.memory // somebody of the host waits
			})
		}
		switch f.Kind {
		case Straggler, NodeStraggler, Throttle, CPUStarved, MemoryShort, PCIeSlow, AllSlow, HangIdle, HangBusy:
			j.slowing = true
		case OppositeOrder, Skip, Mismatch:
			j.odd = true
		}
	}
	return nil
}

// touches notes the connections that a fault acts on.
func (j *Job) touches(f *fault) {
	a, b := int32(f.Rank), int32(f.Peer)
	ra, rb := &j.ranks[a], &j.ranks[b]
	between := func(x, y int32) bool {
		if f.Nodes {
			return j.ranks[x].node == ra.node && j.ranks[y].node == rb.node
		}
		return x == a && y == b
	}
	on := func(e *edge, x, y int32) bool {
		outside := j.ranks[x].node != j.ranks[y].node
		switch f.Kind {
		case PairCut, PairLoss:
			return outside && (between(x, y) || !f.OneWay && between(y, x))
		case PairSlow:
			return between(x, y)
		case NodeSlow, NodeCut, NodeDown:
			return outside && (j.ranks[x].node == ra.node || j.ranks[y].node == ra.node)
		case SendSlow:
			return outside && j.nic(x) == j.nic(a)
		case ReceiveSlow:
			return outside && j.nic(y) == j.nic(a)
		case PCIeSlow:
			return outside && (x == a || y == a)
		case CPUStarved:
			return e.transport != record.TransportNVLink && (x == a || y == a)
		case SwitchSlow:
			return outside && (j.leaf(x, e.path) == j.leaf(a, 0) || j.leaf(y, e.path) == j.leaf(a, 0))
		case Collision:
			return outside && (x == a && y == b || x == int32(f.Other))
		case PortDown:
			return outside && (j.nic(x) == j.nic(a) || j.nic(y) == j.nic(a))
		case LaneLoss:
			return e.transport == record.TransportNVLink && (x == a || y == a)
		}
		return false
	}
	for _, c := range j.comms {
		before := len(c.hits)
		for k := range c.edges {
			e := &c.edges[k]
			if on(e, c.members[e.src].World, c.members[e.dst].World) {
				c.hits = append(c.hits, hit{f, int32(k)})
			}
		}
		if len(c.hits) > before {
			f.comms = append(f.comms, c)
		}
	}
}

// harm is effect of a fault that is at work.
func (j *Job) harm(f *fault, c *comm, e *edge, at int64, d float64) (factor float64, add int64, stalled bool) {
	if f.onset == 0 {
		f.onset = max(at, int64(f.At))
	}
	switch f.Kind {
	case PairCut, NodeCut, NodeDown:
		return 1, 0, true
	case PortDown:
		if f.stalls(at) {
			return 1, 0, true
		}
		return max(f.Factor, 1), 0, false
	case PairLoss:
		// TCP: a loss costs a round trip, or a retransmission time-out when it was the
		// last segment of a burst. RDMA goes back to it and sends all again, and tells nobody.
		draw := unit(hash(c.id, c.seq, uint64(at)))
		if e.transport == record.TransportTCP {
			e.resent += uint64(f.Factor * 64e6)
		}
		factor = 1 + 40*f.Factor
		if draw < min(0.9, 8*f.Factor) {
			add = int64(200 * time.Millisecond)
			if draw < min(0.3, f.Factor) {
				add *= 3
			}
		}
		return factor, add, false
	case PCIeSlow, CPUStarved:
		if e.transport == record.TransportSHM {
			return 1 + (f.Factor-1)/3, 0, false
		}
		return f.Factor, 0, false
	}
	hops := int64(1)
	if c.slot != slotPipe {
		hops = int64(min(8, 2*(len(c.members)-1)))
	}
	return max(f.Factor, 1), int64(f.Extra) * hops, false
}

// slowed is how long a computation takes that would take d.
func (j *Job) slowed(r *rank, d int64) int64 {
	out := float64(d)
	for i := range j.faults {
		f := &j.faults[i]
		if !f.during(r.t) {
			continue
		}
		var factor float64
		switch f.Kind {
		case HangIdle, HangBusy:
			if int32(f.Rank) != r.id {
				continue
			}
			f.onset = max(f.onset, r.t)
			r.stuck, r.stuckAt = stuckIdle, r.t
			if f.Kind == HangBusy {
				r.stuck = stuckBusy
			}
			if f.Until == 0 {
				return never
			}
			rest := int64(f.Until) - r.t
			j.at(int64(f.Until), func() { r.stuck = notStuck })
			return d + rest
		case Straggler, Throttle, MemoryShort:
			if who := f.Rank; int(r.id) != j.moved(f, who, r.t) {
				continue
			}
			factor = j.grown(f, r)
			if f.Kind == MemoryShort {
				factor = 1 + (factor-1)*2*r.rng.float()
			}
		case CPUStarved:
			if int32(f.Rank) != r.id {
				continue
			}
			factor = f.Factor
			if j.cfg.Cluster.GPU {
				factor = 1 + (f.Factor-1)/8 // only what the host does for it: launches, data
			}
		case PCIeSlow:
			if int32(f.Rank) != r.id {
				continue
			}
			factor = 1 + (f.Factor-1)/4
		case NodeStraggler:
			if r.node != j.ranks[f.Rank].node {
				continue
			}
			factor = j.grown(f, r)
		case AllSlow:
			factor = f.Factor
		default:
			continue
		}
		if factor > 1 && f.onset == 0 {
			f.onset, f.step = max(r.t, 1), r.step
		}
		out *= max(factor, 1)
		out += float64(f.Extra)
	}
	return int64(out)
}

// moved is which rank a migrating fault is at.
func (j *Job) moved(f *fault, who int, t int64) int {
	if f.Shape != Migrating {
		return who
	}
	n := (t - int64(f.At)) / max(1, int64(f.Period))
	return (who + int(n)*(len(j.ranks)/3+1)) % len(j.ranks)
}

func (j *Job) grown(f *fault, r *rank) float64 {
	switch f.Shape {
	case Drifting:
		if f.onset == 0 {
			f.onset, f.step = max(r.t, 1), r.step
		}
		return min(f.Factor, 1+f.Growth*float64(r.step-f.step+1))
	case NowAndThen:
		if hash(j.cfg.Seed, uint64(r.id), uint64(r.step))%uint64(max(f.Every, 1)) != 0 {
			return 1
		}
	}
	return f.Factor
}

// oddProgram is the program of a rank that does not call what the others call, nil
// when it does. It is asked for at the start of every step.
func (j *Job) oddProgram(r *rank) []instr {
	for i := range j.faults {
		f := &j.faults[i]
		if int32(f.Rank) != r.id || f.onset != 0 || r.t < int64(f.At) || f.Kind != OppositeOrder && f.Kind != Skip && f.Kind != Mismatch {
			continue
		}
		prog := append([]instr(nil), j.progs[r.stage]...)
		pick := -1
		for k := len(prog) - 1; k >= 0; k-- { // the last that will do: it meets others soon
			in := &prog[k]
			if in.op != opColl || r.comms[in.slot].comm == nil {
				continue
			}
			if f.Kind != OppositeOrder {
				pick = k
				if f.Factor == 0 || k < len(prog)/2 {
					break
				}
				continue
			}
			for l := k - 1; l >= 0; l-- {
				if x := &prog[l]; x.op == opColl && x.slot != in.slot && r.comms[x.slot].comm != nil {
					*x, *in = *in, *x
					x.fault, in.fault = int8(i+1), 0
					return prog
				}
			}
		}
		if pick < 0 {
			return nil
		}
		in := &prog[pick]
		in.fault = int8(i + 1)
		if f.Kind == Skip {
			in.op = opSkip
			return prog
		}
		if in.coll == record.AllReduce {
			in.coll = record.ReduceScatter
		} else {
			in.bytes *= 2
		}
		return prog
	}
	return nil
}

// Onset is when a fault was first felt, as a unix time; 0: not yet.
func (j *Job) Onset(i int) int64 {
	if on := j.faults[i].onset; on > 0 {
		return Start + on
	}
	return 0
}
