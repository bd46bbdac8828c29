package proxy

import (
	"slices"
	"sync/atomic"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/engine"
	"github.com/lockstep-ccl/lockstep/record"
)

// Op is the network's part of one operation, which the communicator's executor drives.
type Op struct {
	n   *Proxy
	seq uint64
	met atomic.Bool // see gpu.Comm.Enter
	plan
	gate    func(number int) bool // see Gate
	returns func() bool           // see Returned
	reached uint32                // when the stream has come to the operation
	passed  uint32                // before its first chunk

	// Of a collective.
	peers   []int     // the others that take part, where chunks are so large that NICs may send them from their bounce buffers
	through [2]uint32 // chunks that each direction is done with
	ending  bool
}

// zeroCopy is a chunk that a NIC sends from its bounce buffer. The buffer is in use until peer
// has consumed all up to the mark.
type zeroCopy struct {
	piece uint32
	peer  int
	mark  uint64
}

// desc is what the GPU's stamps are of.
func (x *Op) desc(o *Call) record.Desc {
	d := record.Desc{
		Coll: o.Coll, DType: o.DType, Op: o.Op, Algo: x.sched.Algo, Proto: x.sched.Proto,
		Root: o.Root, Stream: o.Stream, Bytes: o.Bytes,
	}
	if o.InPlace {
		d.Flags = record.DescInPlace
	}
	return d
}

// Numbered tells the operation its number in the communicator's queue.
func (x *Op) Numbered(seq uint64) { x.seq = seq }

// Ready reports whether the stream has come to the operation.
func (x *Op) Ready() bool { return x.n.has(x.reached) }

// Schedule is what the network does, Parts the memory that it counts in.
func (x *Op) Schedule() *algo.Schedule { return x.sched }

// Parts is the memory that the schedule counts in.
func (x *Op) Parts() []engine.Part { return x.n.parts }

// Gate is engine.Op.Gate.
func (x *Op) Gate(number int) bool { return x.gate(number) }

// Returned tells the stream what peers have consumed since, and reports whether there was any.
func (x *Op) Returned() bool { return x.returns() }

// Met is the member that came last, by its rank in the communicator, as the operation's stamp
// says; -1 when nobody came after this rank. told is false where the GPU does not meet the
// node's ranks in the operation.
func (x *Op) Met(local int32) (rank int32, told bool) {
	if !x.met.Load() {
		return -1, false
	}
	if local < 0 || int(local) >= len(x.n.place.Local) {
		return -1, true
	}
	return int32(x.n.place.Local[local]), true
}

// chunkGate is the gates of a chain of chunks.
func (x *Op) chunkGate(number int) bool {
	piece, gate := algo.GateOf(number)
	mesh := x.n.mesh
	switch gate {
	case algo.Ready, algo.Left:
		x.ending = gate == algo.Left
		// After an abort kernels return early, and a bounce buffer may hold anything.
		return x.n.has(x.reached+1+uint32(piece)) && !x.n.run.Failed()
	case algo.Sent:
		for _, p := range x.peers {
			if mark := mesh.Mark(p); !mesh.Consumed(p, mark) {
				x.n.inFlight = append(x.n.inFlight, zeroCopy{uint32(piece), p, mark})
			}
		}
	case algo.Received:
		for _, p := range x.peers {
			mesh.Acknowledge(p)
		}
	}
	x.through[gate-algo.Sent] = uint32(piece) + 1
	x.pass()
	return true
}

// pass tells the stream which bounce buffers are free: both directions are done with them, and
// no zero-copy send reads them.
func (x *Op) pass() {
	free := min(x.through[0], x.through[1])
	if len(x.n.inFlight) > 0 {
		free = min(free, x.n.inFlight[0].piece)
	}
	x.n.pass(x.passed + free)
}

// returned takes back the bounce buffers that peers have consumed. At the end of the operation
// the engine waits for the rest, as it does for any zero-copy send, so records name the peer.
func (x *Op) returned() bool {
	n := x.n
	if len(n.inFlight) == 0 || x.ending && !n.mesh.Settled() {
		return false
	}
	back := 0
	for back < len(n.inFlight) && (x.ending || n.mesh.Consumed(n.inFlight[back].peer, n.inFlight[back].mark)) {
		back++
	}
	if back == 0 {
		return false
	}
	n.inFlight = slices.Delete(n.inFlight, 0, back)
	x.pass()
	return true
}
