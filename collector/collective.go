package collector

import "github.com/lockstep-ccl/lockstep/record"

// Collective is one finished (or, when End is 0, still open) collective of one
// rank, folded from its records. An agent hands it to every Sink as it is
// folded; the value is reused, so a Sink copies what it keeps.
type Collective struct {
	Job      string
	Node     string // of the rank
	Comm     string // communicator name
	CommID   uint64
	Rank     int32 // in the communicator
	Size     int32 // of the communicator
	World    int32 // rank in the job
	Attempt  uint32
	Workload *Workload // of the rank's process: its pod, its Slurm job
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
	// RealOffset maps them to unix ns: real = mono + RealOffset. By the job's clock (JobClock)
	// the times of all ranks of the job can be compared: MapErr bounds how much this one's
	// are off. Else it is the node's own wall clock, and nobody knows.
	RealOffset int64
	JobClock   bool
	MapErr     int64 // ns
	Correction int64 // job's clock - node's wall clock, ns
	// SeenAt is when an open one was looked at, host time; 0 of those that have ended.
	SeenAt int64
	// WaitedFor is the last peer to enter, a rank in the communicator, -1 when it is not known.
	WaitedFor int32

	// Peers is what each peer sent, by phase, where that was timed, else nil. It is the agent's: whoever keeps the
	// Collective copies it.
	Peers *Peers

	// Windows that closed abnormally while it ran; at most MaxWindows. Of an open one also those before.
	Windows  [MaxWindows]Window
	NWindows int
	// Links are changes of its connections, and of their ports, while it ran; at most MaxLinks.
	Links  [MaxLinks]LinkEvent
	NLinks int
	// PathChanged says that a connection's path changed, or its port went down, among Links or
	// what found no room there. (Counters of ports move on healthy fabrics, too.)
	PathChanged bool
	// LeftOut is how many windows and changes found no room here.
	LeftOut int
	// Former says that it ended before this agent ran: its predecessor may have counted it.
	Former bool
	// Anomalous is set by the agent: slow against this communicator's own
	// history, failed, or touched by an abnormal window.
	Anomalous bool
	// Rootless says that nobody sends a span that covers those of all ranks: an operation on the host
	// of a communicator that a GPU stamps is numbered by itself, and the master knows nothing of it.
	Rootless bool
	// Traced is set by a Tracer that exports it, so that sinks after that one may link to its trace.
	Traced bool
}

// Bounds of what a Collective carries.
const (
	MaxWindows = 8
	MaxLinks   = 8
	MaxPeers   = 16
)

// Peers are the first MaxPeers legs of a collective.
type Peers struct {
	Legs [MaxPeers]Leg
	N    int
}

// All are those that there are; none of a nil one.
func (p *Peers) All() []Leg {
	if p == nil {
		return nil
	}
	return p.Legs[:p.N]
}

// Leg is what one peer sent to a rank in one phase of a collective: to be reduced, or as it is. Times are ns.
type Leg struct {
	Peer        int32
	Reduce      bool
	First, Last int64 // host times of its first bytes and of its last
	Wait        int64 // before First, since the rank came to it
	Stall       int64 // of Last-First, when nothing came
}

// Conn is the identity of a connection. It is not changed once it is made.
type Conn struct {
	Transport record.Transport
	Channel   uint16
	QP        uint64 // number of this end's queue pair, 0 where there is none
	PeerQP    uint32 // of the other end's, 0 when it is not known
	Address   string // of this end's port (GID or IP), "" when it is not known
	NIC       string // device of this end's port, "" where there is none
	Port      int    // its number on that
	Rail      int    // of it among its node's, from 1; 0 when it is not known
	Name      string // both ends' ports or addresses
}

// Workload is what a process was started as: attributes by OpenTelemetry's semantic conventions.
type Workload struct{ Attributes []Attribute }

// Attribute is one of them.
type Attribute struct{ Key, Value string }

// LinkEvent is a change of a connection's path, or, where Counter is set, what one of the
// counters of its port has gained.
type LinkEvent struct {
	Peer  int32 // -1 of a port
	State record.LinkState
	At    int64 // host time, ns
	Conn  *Conn // nil when it is not known; of a port one of its connections

	Counter string // the driver's name, or CounterFlaps
	Gained  uint64 // from Since, the look before, to At
	Since   int64
}

// CounterFlaps is how often a port went down, which agents count.
const CounterFlaps = "flaps"

// Window is one transport window of a connection of this rank.
type Window struct {
	Peer        int32
	Conn        *Conn // nil when it is not known
	Bytes       uint64
	WRs         uint32
	Backlog     uint32
	First, Last int64
	Cause       record.Cause
	State       record.Cause // of the connection after it, of a window of its history
	Overlaps    bool         // an estimate over the last requests, which are those of other windows, too
}

// Sink consumes folded collectives. It is called from the agent's one fold
// goroutine, must not block and must not keep c.
type Sink interface {
	Collective(c *Collective)
}

// Tracer is a Sink that exports some of what it is handed as traces, and can also export what
// it has kept of one collective (retroactive tracing). Like a Sink's, its methods are called from
// the agent's one fold goroutine.
type Tracer interface {
	Sink
	// Retroactive exports what is kept of one collective and returns how many spans that is,
	// those that had gone out before included. each is called for every rank whose spans go out now.
	Retroactive(job string, commID uint64, kind record.CollKind, seq uint64, each func(Traced)) int
	// Held names the newest collective of a communicator that is kept.
	Held(job string, commID uint64) (kind record.CollKind, seq uint64, ok bool)
	// Root exports the span that covers those of all ranks: c's Started to Ended, by its
	// RealOffset. ranks is how many have told of theirs.
	Root(c *Collective, ranks int)
}

// HistoryTracer is a Tracer that exports what was of connections around a collective, too.
type HistoryTracer interface {
	Tracer
	// History exports, once for each rank of which spans of the collective are out, what read returns
	// for the time from first to last (host time, ns). It returns how many spans that is.
	History(job string, commID uint64, kind record.CollKind, seq uint64, read func(rank int32, first, last int64) Around) int
}

// Around is what was of a rank's connections around a collective. The tracer copies it.
type Around struct {
	Windows []Window    // at most MaxHistory
	Links   []LinkEvent // at most MaxHistory
	LeftOut int         // how many more there were
}

// MaxHistory bounds the windows of one rank around one collective, and the changes.
const MaxHistory = 128

// Traced is one rank's part in a trace: how far its spans reach, as they say themselves: unix ns.
type Traced struct {
	Rank        int32 // in the communicator
	First, Last int64
	Err         int64 // bound on the error that they state
	NodeClock   bool  // they lie on the node's wall clock: its agent has not been told of the job's clock
}
