// Package source is what an agent's sources of evidence share: the processes
// of a node, and the one-method interface by which each source adds to them
// what it can see.
//
// A source is a package of its own (recorder, proc, ...). The recorder source
// finds the processes; the others fill in fields of those that are there. An agent
// runs all of them in one goroutine, one after the other, so a source waits
// for nothing: what is slow happens in a goroutine of the source's own.
package source

import (
	"cmp"
	"errors"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// Source adds to the view what it can see. An error says that this pass
// delivered less than it should have; what it did deliver stands.
type Source interface {
	Update(v *View) error
}

// ErrNoData is a source's answer when this node has nothing for it to see
// (no GPU, no RDMA port). It is no failure.
var ErrNoData = errors.New("nothing to see on this node")

// ErrPartly is a source's answer when this node does not show all that it could look at
// (a kernel without pressure stall information). It is no failure either: what there is
// stands, and the error's text says what there is not.
var ErrPartly = errors.New("not all of it is to be seen on this node")

// View is a node at one moment. It belongs to the agent's goroutine.
type View struct {
	Now       int64 // CLOCK_MONOTONIC ns of this pass
	Processes []*Process
	GPUs      *collector.GPUs   // by the nvml source; nil when it sees none
	NICs      *collector.NICs   // by the rdma source; likewise
	Probes    *collector.Probes // by the ebpf source; nil where it can see nothing
	RAS       *collector.RAS    // by the ras source; likewise
	// By the pressure source: the node's, as diagnosis.Node has them.
	CPUPressure, MemoryPressure float32
}

// Process is one process with a flight recorder, or one that is expected to make one, alive or dead. Its address
// identifies it for as long as it is in the view.
type Process struct {
	// By the recorder source: the header and the tables as of the last pass.
	record.Header
	Path    string
	Comms   []record.CommStatus
	Conns   []record.ConnStatus
	Devices []record.DeviceStatus
	Lost    uint64 // records and GPU stamps overwritten unread or dropped by the writer, and operations that it could not record

	// By the proc source. State is ProcUnknown until it has looked. HostPID is the
	// process's pid as the agent's /proc has it: a container's own is another, which
	// Header.PID is. 0: it shows none such.
	HostPID int32
	State   diagnosis.ProcState
	StateAt int64   // CLOCK_MONOTONIC ns when State took this value
	CPU     float32 // share of one core over about the last second
	IO      bool    // storage was read or written in that time
	// Exit is how the process ended: by the word of whoever started it, which the
	// recorder source reads, else by the kernel's. At is CLOCK_MONOTONIC ns.
	Exit diagnosis.Exit

	// By the pressure source, as diagnosis.Rank has them.
	Starved, Throttled, MemoryPressure float32

	// By the ebpf source, where it watches.
	OffCPU diagnosis.OffCPU

	// By the starting source: it is a rank that has made no communicator, and what its first
	// thread waits in. Such a process need not have a recorder: then Path is "", and the
	// Header has who it is, and nothing else.
	Starting bool
	WaitsIn  diagnosis.WaitIn

	// By the nvml source: the GPU that the process uses (of several the one in
	// the worst state), in CLOCK_MONOTONIC ns; and what it has reported, as diagnosis.Rank.Xid.
	GPU diagnosis.GPU
	Xid uint32

	// Superseded is set by the recorder source: a younger process has this one's job and rank.
	Superseded bool
}

// Dead reports whether the process is known to be no more.
func (p *Process) Dead() bool {
	return p.State == diagnosis.ProcGone || p.State == diagnosis.ProcExited
}

// Younger reports whether p is a later process of its rank than o. When the
// restart count and the clock contradict each other, a launcher that was started
// again counts from 0 again, or the clock was set back: when the processes began,
// counted from the boot, tells which.
func (p *Process) Younger(o *Process) bool {
	count, clock, boot := cmp.Compare(p.Attempt, o.Attempt), p.Created.Compare(o.Created), 0
	if p.BootID == o.BootID {
		boot = cmp.Compare(p.StartTime, o.StartTime)
	}
	if count*clock < 0 || count == 0 { // they contradict each other, or nothing is counted
		return cmp.Or(boot, clock) > 0
	}
	return cmp.Or(count, clock) > 0
}
