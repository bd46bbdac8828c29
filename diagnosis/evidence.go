package diagnosis

import "github.com/lockstep-ccl/lockstep/record"

// Evidence is what the master knows of one job at one moment. It is a plain
// value: the engine neither keeps nor changes it, and a test can write one by
// hand. All times are unix nanoseconds on the master's clock (each agent's
// reports are mapped before they get here; MapError bounds the mistake);
// 0 means "never" or "not".
type Evidence struct {
	Job   string
	Now   int64
	Ranks []Rank // index = world rank
	Comms []Comm
	Conns []Conn
	// Arrivals are the collectives that every rank sampled alike (by a hash of
	// communicator and sequence), newest last; bounded by the collector.
	Arrivals []Arrival
	// Nodes by index; a Rank names its node by index.
	Nodes []Node
	// RAS is what NCCL's own RAS knows of some communicators, at most one entry each. It is
	// said beside a verdict, and changes none; recordings leave it out.
	RAS []RAS
	// NICs are nodes' RDMA ports, likewise said beside a verdict and left out of recordings.
	NICs []NIC
	// Paused is true when the master itself, or most agents, did not run for a
	// while (suspended machine, starved host): ages measured across the gap are void.
	Paused bool
}

// Node is one agent's host.
type Node struct {
	Name     string
	LastSeen int64 // last report received
	Lost     bool  // its agent is disconnected for longer than the master's patience
	MapError int64 // bound on the error of this node's time mapping, ns
	// CPUPressure is the share of the last ten seconds or so in which some task of
	// the host waited for a CPU, MemoryPressure the same for memory (PSI "some").
	CPUPressure, MemoryPressure float32
}

// ProcState is what the agent sees of a rank's process in /proc.
type ProcState uint8

const (
	ProcUnknown ProcState = iota // no agent can tell
	ProcRunning                  // exists and is runnable or in an interruptible sleep
	ProcStopped                  // T: stopped or traced
	ProcDisk                     // D: uninterruptible sleep for longer than one sample
	ProcGone                     // no such process, and its recorder was never closed
	ProcExited                   // no such process, recorder closed in good order
)

// Rank is one member of the job's world.
type Rank struct {
	Node    int32 // index into Evidence.Nodes, -1 when the rank was never seen
	PID     int32
	Attempt uint32 // restart count of the process seen
	Proc    ProcState
	ProcAt  int64 // when Proc took this value
	// CPU is the share of one core used by the process, or by its children while it
	// waits for them, over about the last second; IO says that they read or wrote
	// storage in that time. A rank that computes or checkpoints is given more time than
	// one that sleeps.
	CPU float32
	IO  bool
	// Starved is the share of about the last second in which the process's busiest thread was
	// runnable and did not run (schedstat), Throttled the share in which its cgroup's
	// quota held it back: a rank that is short of CPU, not of network.
	Starved, Throttled float32
	// MemoryPressure is the share of time in which tasks of its cgroup waited for memory (PSI "some").
	MemoryPressure float32
	OffCPU         OffCPU
	// Starting: its process is there and has made no communicator so far, by an agent's word;
	// WaitsIn is what its first thread waits in then.
	Starting bool
	WaitsIn  WaitIn
	// Exit is how the process ended, by the word of whoever reaped it; the zero
	// value while nobody has said.
	Exit Exit
	// Calls are the rank's last calls on any communicator, oldest first, at most
	// MaxCalls. Agents tell them of ranks that are held up; nil of all others.
	Calls []Call
	Mark  record.MarkCode // open span of the program's own (checkpoint, evaluation, compile), 0 when none
	// MarkAt is when it opened; Step is the last step mark.
	MarkAt int64
	Step   uint64
	// Xid is the fatal fault that the rank's GPU reported in this process's time
	// (of several the gravest, and of these the first), 0 when none.
	Xid uint32
	GPU GPU
}

// MaxCalls bounds Rank.Calls.
const MaxCalls = 32

// Call is one operation that a rank has called: what it is, not how it went.
type Call struct {
	Comm  uint64 // communicator's id
	Seq   uint64
	Coll  record.CollKind
	Peer  int32 // peer or root in the communicator, -1 when none
	Bytes uint64
	At    int64
}

// Exit is how a process ended.
type Exit struct {
	By     ExitSource
	Code   int32 // exit status; 0 when a signal ended it
	Signal int32 // 0 when none did
	At     int64 // when it was reaped
	// Asked is true when the one that tells had sent SIGTERM or SIGKILL before the process
	// ended, whatever it then ended with: a supervisor that ends the rest of a job after
	// the first death.
	Asked bool
}

// ExitSource is who saw a process end.
type ExitSource uint8

const (
	ExitUnknown    ExitSource = iota // nobody has said how
	ExitSupervisor                   // its parent: lockstep run
	ExitKernel                       // the agent, by the kernel's word (a pidfd)
)

// Comm is one communicator. Members is indexed by rank in the communicator;
// a member that nobody has reported has World == -1.
type Comm struct {
	ID      uint64
	Name    string
	Members []Member
	// Rev grows with every change of Members, ConnRev with every change of the
	// communicator's connections: a pass looks only at what has changed since the
	// one before. 0: nobody counts, and every pass looks.
	Rev, ConnRev uint64
}

// Member is one rank's progress in one communicator. Sequences count from 1.
// Send and Recv (and groups of them) do not involve every member: for them
// Coll says so and "entered" means nothing for others.
type Member struct {
	World   int32
	State   record.CommState
	StateAt int64 // when State took this value
	// Fault is why State is CommAborted, ResultOK when the program asked for it or
	// nobody has said; FaultPeer is whom the error named, a rank in the
	// communicator, -1 when nobody. It means nothing while Fault is ResultOK.
	Fault     record.Result
	FaultPeer int32
	Coll      record.CollKind // of the last enqueued
	Peer      int32           // its peer or root in the communicator, -1 when none
	Bytes     uint64
	Enqueued  uint64
	Started   uint64
	Finished  uint64

	EnqueuedAt int64
	StartedAt  int64
	FinishedAt int64

	// Monotone sums over this rank's finished operations on this communicator.
	Ops        uint64
	OwnNs      uint64 // outside collectives before each of them: the rank's own compute
	WaitNs     uint64 // inside, before the last peer had entered
	TransferNs uint64 // inside, after
	MaxOwnNs   uint64 // longest single own time ever seen (the job's history of pauses)
}

// Open reports whether the member is inside a collective.
func (m *Member) Open() bool { return m.Started > m.Finished }

// failedLast reports whether the member's last operation ended because its
// communicator did: that is no progress. Unless the time of the abort says
// otherwise, it is taken for one that did.
func (m *Member) failedLast() bool {
	return m.State == record.CommAborted && (m.StateAt == 0 || m.FinishedAt >= m.StateAt-abortSlack)
}

// Conn is one directed connection, source → destination, merged from both
// ends' reports. Src and Dst are ranks in the communicator.
type Conn struct {
	Comm      int32 // index into Evidence.Comms
	Src, Dst  int32
	Transport record.Transport
	// Name is NIC and port of both ends (RDMA), or their addresses. QueuePair is Src's, PeerQueuePair
	// Dst's, Address and Rail are of Src's port; zero where there is none, or nobody has told.
	Name          string
	QueuePair     uint32
	PeerQueuePair uint32
	Address       Address
	Rail          uint16 // from 1

	Outstanding    uint64 // bytes posted by the source and not yet taken by the destination
	LastPost       int64
	LastCompletion int64
	TxBlockedSince int64 // source has data and no credit since
	RxWaitingSince int64 // destination is ready and has nothing to receive since

	Windows      uint64 // windows closed so far
	SlowWindows  uint64 // of them outside the normal, by the source's own monitor
	BytesPerSec  float64
	LatencyNs    float64 // mean of post → completion in the last windows
	Cause        record.Cause
	LastWindowAt int64

	// Link is the state of the path by the word of Src's process; LinkNone where
	// it tells none. A connection with several paths is several Conns.
	Link     record.LinkState
	LinkAt   int64  // since when
	Switches uint64 // how often this path has taken over from another
	Outages  uint64 // how often it was interrupted and resumed
	Resent   uint64 // bytes that were sent again: by RDMA's failover, by TCP's retransmissions

	// RTTNs is the smoothed round-trip time between the hosts of Src and Dst, as TCP measures it: hardly any
	// lateness of either process is in it. 0 while it is not known.
	RTTNs float64
}

// Arrival is one sampled collective: when each member started and ended it,
// index = rank in the communicator, 0 = not known (yet).
type Arrival struct {
	Comm  int32
	Seq   uint64
	Coll  record.CollKind
	Start []int64
	End   []int64
}

// RAS is what NCCL's RAS, asked at At, knows of one communicator. Ranks are the communicator's.
type RAS struct {
	Comm    uint64
	At      int64
	Missing []RASRank // did not answer it
	Behind  []RASBehind
	More    bool // there are more of either
}

// RASRank is a rank that RAS misses.
type RASRank struct {
	Rank int32
	Dead bool // RAS has given it up
}

// RASBehind is a rank that has launched fewer operations of a kind than another one has.
type RASBehind struct {
	Rank           int32
	Coll           string // NCCL's word, "" for all kinds together
	Launched, Most uint64
}

// RASKeep is for how long an answer of RAS is of interest.
const RASKeep = int64(60e9)
