package agent

import (
	"math"
	"math/bits"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/record"
)

// GPUs' kernels stamp when each peer came, when the last of it was here, and how long a read of
// its memory took meanwhile. This file derives from that what transports' monitors derive from
// work requests: legs of the operation, and windows of the NVLink connection from the peer to
// this rank.

const (
	nvlinkLeast = 64 << 10 // bytes from a peer, below which an operation tells of no link
	// nvlinkWindow is a window's length, ns: the time that its operations usually take once all
	// peers have come. The connection's delay is the time that they did take.
	nvlinkWindow = 2e6
	// nvlinkSlow is by which factor they take longer when the link is slow.
	nvlinkSlow = 1.5
	// nvlinkTrip is by which factor a read of the peer's memory takes longer when the link is what
	// is slow. On two H100s it was 1.5 when another process copied over the link, and 1.0 to 1.15
	// when a GEMM beside the operations left their blocks to wait for multiprocessors. Where reads
	// vary by nature, it takes nvlinkVaries times as much as one of them differs from the mean.
	nvlinkTrip   = 1.25
	nvlinkVaries = 3
	// nvlinkUsual is how many operations of a kind make a history.
	nvlinkUsual = 32
)

// nvlink is the monitor of one direction of a pair of GPUs, by stamps of the receiving one.
// Operations are compared with others of their kind and size: a change of the mix is no change
// of the link.
type nvlink struct {
	classes map[nvlinkClass]*usual
	trip    usual
	varies  usual // how far a read is from the mean, as a share of that

	// The window under way.
	bytes, moving uint64
	took, usually float64 // ns
	trips         float64 // by which factor reads took longer, of all operations
	operations    int
	// What it makes of windows.
	windows, slow uint64
	bps           uint64
	latency       int64
	cause         record.Cause
	at            int64
}

// nvlinkClass are operations that usually take the same time.
type nvlinkClass struct {
	coll record.CollKind
	algo record.Algo
	size uint8 // bits of the bytes
}

// usualMemory is over how many operations a mean runs: a second or two of a busy job. The first
// operations on a link that has become slow belong to a window of its history still.
const usualMemory = 2048

// usual is a running mean that a few long times move little.
type usual struct {
	mean float64
	n    int
}

func (u *usual) learn(v float64) {
	u.n++
	if u.n > 4 {
		v = min(v, 2*u.mean)
	}
	u.mean += (v - u.mean) / float64(min(u.n, usualMemory))
}

// maxClasses bounds what one link keeps.
const maxClasses = 64

// stampedPeers takes in what was stamped by peer of an operation that has ended: its legs, and
// what it says of the links to this rank.
func (r *rank) stampedPeers(c *comm, s *record.Stamp) {
	met, n := uint32(0), 0
	for p := range s.Peers {
		if s.Peers[p].Seen {
			met = max(met, s.Peers[p].Came)
			n++
		}
	}
	if n == 0 {
		return
	}
	if c.legs == nil {
		c.legs = new(collector.Peers)
	}
	c.legs.N, c.legsOf = 0, s.Seq
	for p := range s.Peers {
		x := &s.Peers[p]
		if !x.Seen || p >= int(c.size) {
			continue
		}
		c.legs.Legs[c.legs.N] = collector.Leg{
			Peer: int32(p), Reduce: s.Coll.Reduces(), First: s.Start + int64(x.Came), Last: s.Start + int64(x.There), Wait: int64(x.Came),
		}
		c.legs.N++
		if k := r.nvlinkOf(c, int32(p)); k != nil {
			k.add(s, x, met, fromPeer(s.Coll, s.Bytes, uint64(c.size)))
		}
	}
}

// fromPeer is how many bytes a rank hears from each of its peers, about, of an operation of so
// many bytes among n.
func fromPeer(coll record.CollKind, bytes, n uint64) uint64 {
	switch t := coll.Traits(); {
	case t.Root != record.RootNone:
		return bytes
	case t.Reduces && t.Send == t.Recv: // to be reduced, and results
		return 2 * bytes / n
	default:
		return bytes / n
	}
}

// nvlinkOf is the monitor of the link from a peer, nil where the recorder has no such connection.
func (r *rank) nvlinkOf(c *comm, peer int32) *nvlink {
	if int(peer) >= len(c.nvlinks) {
		return nil
	}
	return c.nvlinks[peer]
}

// learnNVLink gives a connection between GPUs its monitor, and fills in what that has found: no
// transport does.
func (r *rank) learnNVLink(s *record.ConnStatus) {
	c := r.comm(s.Comm)
	if c == nil || s.Peer < 0 || s.Peer >= record.MaxStampPeers || s.Peer == c.rank {
		return
	}
	k := c.nvlinks[s.Peer]
	if k == nil {
		k = &nvlink{classes: map[nvlinkClass]*usual{}}
		c.nvlinks[s.Peer] = k
	}
	s.Windows, s.SlowWindows, s.WindowBps, s.WindowCause, s.WindowAt, s.LatencyNs = k.windows, k.slow, k.bps, k.cause, k.at, k.latency
}

// add takes in an operation. x is the peer's part, met the time at which the last peer came,
// bytes what came from this one.
func (k *nvlink) add(s *record.Stamp, x *record.StampPeer, met uint32, bytes uint64) {
	moving := float64(x.There - min(met, x.There))
	// Kernels that read no flag of their peers also send without waiting for all of them. Their
	// time until all bytes are here includes the wait for late peers.
	if bytes < nvlinkLeast || moving == 0 || x.Trip == 0 {
		return
	}
	class := nvlinkClass{s.Coll, s.Algo, uint8(bits.Len64(s.Bytes))}
	u := k.classes[class]
	if u == nil {
		if len(k.classes) == maxClasses {
			return
		}
		u = new(usual)
		k.classes[class] = u
	}
	if k.cause == record.CauseNone || u.n < nvlinkUsual { // what is slow for long does not become usual
		u.learn(moving)
		k.trip.learn(float64(x.Trip))
		k.varies.learn(math.Abs(float64(x.Trip)/k.trip.mean - 1))
	}
	if u.n < nvlinkUsual {
		return
	}
	k.bytes += bytes
	k.moving += uint64(moving)
	k.usually += u.mean
	k.trips += float64(x.Trip) / k.trip.mean
	k.operations++
	k.took += moving
	if k.usually >= nvlinkWindow {
		k.close(s.End)
	}
}

// close ends the window, or several that one long operation has filled. Operations that take
// longer while reads do not are the GPUs' own matter, whose multiprocessors or memory are busy, or
// that of another peer, for whom this one's bytes wait as well: on four H200s, when a process
// copied between two of them, the operations of three ranks took 2.6 times as long, reads by those
// two of any peer's memory 1.4 to 1.6 times, and reads by the others 1.1 times at most.
func (k *nvlink) close(at int64) {
	ratio, n := k.took/k.usually, uint64(k.usually/nvlinkWindow)
	moving := float64(k.moving)
	if trip := k.trips / float64(k.operations); trip < max(nvlinkTrip, 1+nvlinkVaries*k.varies.mean) && ratio > max(trip, 1) {
		ratio = max(trip, 1)
		moving = k.usually * ratio
	}
	k.windows += n
	k.cause = record.CauseNone
	if ratio >= nvlinkSlow {
		k.cause = record.CauseNetwork
		k.slow += n
	}
	k.latency = max(1, int64(nvlinkWindow*ratio))
	k.bps = uint64(float64(k.bytes) / moving * 1e9)
	k.at = at
	k.bytes, k.moving, k.took, k.usually, k.trips, k.operations = 0, 0, 0, 0, 0, 0
}
