package collector

import "github.com/lockstep-ccl/lockstep/record"

// Collective is one finished (or, when End is 0, still open) collective of one
// rank, folded from its records. An agent hands it to every Sink as it is
// folded; the value is reused, so a Sink copies what it keeps.
type Collective struct {
	Job      string
	Comm     string // communicator name
	CommID   uint64
	Rank     int32 // in the communicator
	Size     int32 // of the communicator
	World    int32 // rank in the job
	Attempt  uint32
	Kind     record.CollKind
	DType    record.DType
	Op       record.RedOp
	Algo     record.Algo
	Proto    record.Proto
	Result   record.Result
	InPlace  bool
	Root     int32 // root or peer, -1 when none
	Stream   uint32
	Channels uint16 // or SMs, of an operation on a GPU
	Seq      uint64
	Bytes    uint64
	Clock    record.Clock // that made the stamps
	Replay   bool         // by a CUDA graph

	// Host times on this node, CLOCK_MONOTONIC ns; 0 when the record was lost.
	Enqueued, Started, Ended int64
	Wait, Transfer           int64 // phases, ns
	// ClockErr bounds the error of Started and Ended, ns, by the mapping of a GPU's
	// clock. It is one and the same for both.
	ClockErr int64
	// RealOffset maps them to unix ns: real = mono + RealOffset.
	RealOffset int64

	// Windows that closed abnormally while it ran; at most MaxWindows.
	Windows  [MaxWindows]Window
	NWindows int
	// Former says that it ended before this agent ran: its predecessor may have counted it.
	Former bool
	// Anomalous is set by the agent: slow against this communicator's own
	// history, failed, or touched by an abnormal window.
	Anomalous bool
}

// MaxWindows bounds the windows that a Collective carries.
const MaxWindows = 8

// Window is one transport window of a connection of this rank.
type Window struct {
	Peer        int32
	Conn        uint32
	Bytes       uint64
	WRs         uint32
	Backlog     uint32
	First, Last int64
	Cause       record.Cause
}

// Sink consumes folded collectives. It is called from the agent's one fold
// goroutine, must not block and must not keep c.
type Sink interface {
	Collective(c *Collective)
}

// Tracer is a Sink that can also export what it has kept of one collective
// (retroactive tracing); it reports how many spans it found.
type Tracer interface {
	Sink
	Retroactive(job string, commID uint64, kind record.CollKind, seq uint64) int
}
