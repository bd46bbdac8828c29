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
	reached uint32                // value of the word reached when the stream reaches the operation
	passed  uint32                // value of the word passed before the first chunk

	// The fields below are for collectives.
	peers   []int     // the route's other members, if NICs may send from bounce buffers; else nil
	through [2]uint32 // chunks that each direction has finished
	ending  bool      // all chunks are done, see returned
}

// zeroCopy is a chunk that a NIC sends to peer from its bounce buffer. The buffer is in use until
// peer has consumed the bytes up to mark.
type zeroCopy struct {
	piece uint32
	peer  int
	mark  uint64
}

// desc returns the description of the operation for the GPU's stamps.
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

// Ready reports whether the stream has reached the operation.
func (x *Op) Ready() bool { return x.n.has(x.reached) }

// Schedule returns the network's part.
func (x *Op) Schedule() *algo.Schedule { return x.sched }

// Parts returns the memory of the schedule's spaces.
func (x *Op) Parts() []engine.Part { return x.n.parts }

// Gate is engine.Op.Gate.
func (x *Op) Gate(number int) bool { return x.gate(number) }

// Returned tells the stream what peers have consumed since the last call, and reports whether that is
// anything.
func (x *Op) Returned() bool { return x.returns() }

// Met returns the rank of the member that entered last. local is its index on this node, from the
// operation's stamp. rank is -1 if none entered after this rank. told is false if the
// stamp does not say.
func (x *Op) Met(local int32) (rank int32, told bool) {
	if !x.met.Load() {
		return -1, false
	}
	if local < 0 || int(local) >= len(x.n.place.Local) {
		return -1, true
	}
	return int32(x.n.place.Local[local]), true
}

// chunkGate is the Gate of a chain of chunks.
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

// pass tells the stream which bounce buffers are free: both directions have finished them, and no
// zero-copy send reads them.
func (x *Op) pass() {
	free := min(x.through[0], x.through[1])
	if len(x.n.inFlight) > 0 {
		free = min(free, x.n.inFlight[0].piece)
	}
	x.n.pass(x.passed + free)
}

// returned frees the bounce buffers that peers have consumed. At the end of the operation it waits
// until all zero-copy sends are settled, so that records name the peer that is late.
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
