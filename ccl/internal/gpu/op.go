package gpu

import (
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/record"
)

// Op is one collective on device memory, already checked by the caller. Count
// follows algo.Call: elements of one rank's share where there are shares.
type Op struct {
	Coll  record.CollKind
	DType record.DType
	RedOp record.RedOp
	Root  int
	Count uint64
	// Stride is the distance of shares in elements where it is not Count: the
	// operation is on a part of each share.
	Stride     uint64
	Send, Recv cuda.Ptr // 0 where this rank has none
	Bytes      uint64   // as recorded
	Stream     uint32   // likewise
	InPlace    bool     // likewise
	Captured   bool     // likewise; set by Run
}

// bytes is Count in bytes.
func (op *Op) bytes() uint64 { return op.Count * uint64(op.DType.Size()) }

// ParseAlgo reads the name of a GPU's algorithm; "" is AlgoNone.
func ParseAlgo(s string) (record.Algo, error) { return record.ParseAlgo(s, record.Algo.OnGPU) }

// lines: data travels with its flags, and no peer needs access to any buffer.
func lines(a record.Algo) bool {
	return a >= record.AlgoLL && a <= record.AlgoLL12 || a == record.AlgoChain
}

// proto is the protocol of an algorithm, as it is recorded.
func proto(a record.Algo) record.Proto {
	if lines(a) {
		return record.ProtoLL
	}
	return record.ProtoSimple
}
