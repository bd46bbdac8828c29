package engine

import (
	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/record"
)

// Op is one operation to run. The engine uses its slices until End.
type Op struct {
	Signature
	Send, Recv []byte
	// Arrivals makes the engine record what Arrived returns.
	Arrivals bool
	// Legs makes the engine record what Engine.Legs returns.
	Legs bool
	// Parts has the memory of Space GroupSpace + i at index i.
	Parts   []Part
	Divisor int // for Avg: the number of ranks
	// Gate reports whether gate number is open. If so, the track passes it, and Gate does what
	// that entails. It is nil if the schedule has no gates.
	Gate func(number int) bool
}

// Part is one message of a group.
type Part struct {
	Buf   []byte
	DType record.DType
	// Opaque says that links can send Buf but the CPU cannot read it, as with GPU memory.
	Opaque bool
}

// GroupSpace is the Space of Op.Parts[0]. The others follow by index.
const GroupSpace = algo.PartSpace

// of returns the signature that step's message carries. If counts may differ by pair of ranks, it
// has the message's own length and type. Such messages always use the byte stream.
func (op *Op) of(step *algo.Step) Signature {
	s := op.Signature
	if !s.Coll.Traits().Varies() {
		return s
	}
	s.Count = uint64(max(step.Len, step.Whole))
	if space := max(step.Src.Space, step.Dst.Space); space >= GroupSpace {
		s.DType = op.Parts[space-GroupSpace].DType
	}
	return s
}
