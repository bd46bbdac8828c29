package demo

import (
	"fmt"
	"math/rand/v2"
	"syscall"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/ccltest"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/train"
	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// Faults that can be injected.
const (
	faultKilled     = "rank_killed"
	faultStopped    = "rank_stopped"
	faultSlowGPU    = "gpu_slow"
	faultNode       = "node_lost"
	stalledForever  = time.Hour
	slowLoader      = 120 * time.Millisecond // added to a step of about 50 ms
	throttledBytes  = 128 << 10              // bytes/s on a connection that carries about 1 MB/s
	loaderComponent = "data loader"
	busyGPU         = 6 * time.Millisecond // before each of about 20 operations of a step
)

// fault is one thing to break, and what the pipeline ought to say about it.
type fault struct {
	Name  string // as on the command line
	Class string // expected verdict
	Rank  int
	Peer  int    // -1: the fault is a rank's, not a connection's
	Comm  string // communicator whose connection is broken
	Node  string // the fault is the whole node's
	Src   int    // its ends, as ranks of Comm
	Dst   int
	Text  string   // what is done, for the story
	Or    []string // culprits that are right as well
	// Again: the launcher begins anew by itself, and may do so before anybody asks for it.
	Again bool
}

// culprit is the expected culprit in words, as in alert labels.
func (f *fault) culprit() string {
	if f.Node != "" {
		return "node " + f.Node
	}
	if f.Peer >= 0 {
		return fmt.Sprintf("rank %d → rank %d", f.Rank, f.Peer)
	}
	return fmt.Sprintf("rank %d", f.Rank)
}

// faultsOn are the faults that ranks on a device can have. GPU ranks have no
// connection that could be broken from outside: NVLink is the hardware's.
func faultsOn(device string) []string {
	if device == "cpu" {
		return []string{names.ClassCommunicationHang, names.ClassNoncommunicationHang, names.ClassCommunicationSlow, names.ClassNoncommunicationSlow, faultKilled, faultStopped}
	}
	return []string{names.ClassNoncommunicationHang, names.ClassNoncommunicationSlow, faultKilled, faultStopped, faultSlowGPU}
}

// choose picks a fault's victim. rank is -1 to pick any. Connections are picked
// among those of data-parallel pairs, which cross nodes.
func choose(name string, rank int, shape shape, r *rand.Rand) (fault, error) {
	world := shape.world()
	switch {
	case rank < 0 && name == faultNode: // not on the first node, which may have the launcher
		each := world / shape.nodes
		rank = each + r.IntN(world-each)
	case rank < 0:
		rank = r.IntN(world)
	}
	f := fault{Name: name, Class: name, Rank: rank, Peer: -1}
	replica := shape.pp * shape.tp
	f.Peer, f.Comm = (rank+replica)%world, fmt.Sprintf("dp%d", rank%replica)
	f.Src, f.Dst = f.Rank/replica, f.Peer/replica
	switch name {
	case names.ClassCommunicationHang:
		f.Text = fmt.Sprintf("connection %s (%s, TCP) delivers nothing any more", f.culprit(), f.Comm)
		return f, nil
	case names.ClassCommunicationSlow:
		f.Text = fmt.Sprintf("connection %s (%s, TCP) is throttled to %d KB/s", f.culprit(), f.Comm, throttledBytes>>10)
		return f, nil
	}
	f.Peer, f.Comm = -1, ""
	switch name {
	case names.ClassNoncommunicationHang:
		f.Text = fmt.Sprintf("rank %d never comes back from its %s", rank, loaderComponent)
	case names.ClassNoncommunicationSlow:
		f.Text = fmt.Sprintf("rank %d's %s takes %v longer, every step", rank, loaderComponent, slowLoader)
	case faultStopped:
		f.Class = names.ClassNoncommunicationHang
		f.Text = fmt.Sprintf("rank %d is stopped with SIGSTOP", rank)
	case faultSlowGPU:
		f.Class = names.ClassNoncommunicationSlow
		f.Text = fmt.Sprintf("rank %d's GPU is busy with a kernel on all its multiprocessors for %v before each operation", rank, busyGPU)
	case faultKilled:
		f.Class = names.ClassNoncommunicationHang
		f.Text = fmt.Sprintf("rank %d is killed with SIGKILL", rank)
	case faultNode:
		f.Class = names.ClassNoncommunicationHang
		f.Text = "a node loses power"
	default:
		return fault{}, fmt.Errorf("unknown fault %q", name)
	}
	return f, nil
}

// on says which node it is, once that is known.
func (f *fault) on(node string) {
	if f.Name == faultNode {
		f.Node, f.Text = node, fmt.Sprintf("node %s of rank %d loses power", node, f.Rank)
	}
}

// inject breaks it.
func (f *fault) inject(dir string, attempt, pid int) error {
	switch f.Name {
	case faultKilled:
		if err := train.Killed(dir); err != nil {
			return err
		}
		return syscall.Kill(pid, syscall.SIGKILL)
	case faultStopped:
		return syscall.Kill(pid, syscall.SIGSTOP)
	case names.ClassNoncommunicationHang:
		return train.SlowLoader(dir, f.Rank, attempt, stalledForever)
	case names.ClassNoncommunicationSlow:
		return train.SlowLoader(dir, f.Rank, attempt, slowLoader)
	}
	c, err := ccltest.Dial(train.FaultSocket(dir, f.Rank))
	if err != nil {
		return fmt.Errorf("inject %s into rank %d: %w", f.Name, f.Rank, err)
	}
	defer c.Close()
	switch f.Name {
	case names.ClassCommunicationHang:
		return c.Stall(f.Comm, f.Src, f.Dst)
	case faultSlowGPU:
		return c.DelayRank(busyGPU)
	}
	return c.Throttle(f.Comm, f.Src, f.Dst, throttledBytes)
}
