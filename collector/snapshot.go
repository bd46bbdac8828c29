package collector

import (
	"slices"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// AgentSnapshot is what an agent publishes of itself, taken a few times a
// second; exporters read the latest and never reach into the agent.
type AgentSnapshot struct {
	Node    string
	At      time.Time
	Jobs    []AgentJob
	Sources []SourceStatus
	Master  []StreamStatus // one per job
	GPUs    *GPUs          // nil when the agent sees none
	NICs    *NICs          // likewise
	Probes  *Probes        // nil when it was not told to use any
	Fences  []AgentFences  // one per job

	RefusedRecorders []Refused
}

// Refused counts what is not read, for one reason.
type Refused struct {
	Reason string
	Count  uint64
}

// Probes is what the ebpf source does: how many it watches now, and what it has ever seen.
type Probes struct {
	Missing      string // what keeps it from seeing anything: not_permitted, not_supported, ...; "" when nothing does
	Libraries    int    // with probes on them
	Processes    int    // that have one mapped
	Watched      int    // of them with a recorder kept in their name
	Unidentified int    // communicators of which it is not known which they are
	// Calls is all calls of collectives, PointToPoint of sends and receives. Of the former
	// SampledOut were not recorded on purpose, RingFull because they came too fast, and
	// Unplaced because it is not known whose they are: all are counted in their communicator.
	Calls, PointToPoint, SampledOut, RingFull, Unplaced uint64
	TableFull                                           uint64 // communicators for which there was no room
	Unread                                              uint64 // unique ids that could not be read
}

// AgentJob is one job's part on this node.
type AgentJob struct {
	Job             string
	Ranks           map[diagnosis.ProcState]int
	Comms           []AgentComm
	Transports      []AgentTransport
	Connections     []ConnDetail // at most MaxConnDetails, anomalous ones first
	Records         uint64       // read
	Lost            uint64       // overwritten before they were read, or dropped by the writer
	TableOverflow   uint64       // communicators or connections that found no slot in a recorder's tables
	WithoutHistory  uint64       // connections that have no history of windows
	GPUs            int          // of processes that are alive; GPUClockErrorNs bounds the mapping of their clocks, the worst of them
	GPUClockErrorNs int64
	RanksOnGPU      map[int]int // ranks that are alive, by index of the GPU that they use
	Step            uint64      // highest step mark seen
	UnknownResults  uint64      // ends without a start and the like
	DroppedArrivals uint64      // sampled arrivals not sent because too many waited

	RefusedConns [record.NumRefusals]uint64 // that ranks' listeners turned away
}

// AgentComm is one communicator name on this node. Ids are not exported: several
// communicators of one name are folded together.
type AgentComm struct {
	Name        string
	Members     int     // local members
	OpenMembers int     // of them inside a collective now
	OldestOpen  float64 // seconds that the longest open collective has been open, 0 when none
	Finished    uint64  // collectives finished, summed over local members
}

// AgentTransport sums the connections of one transport.
type AgentTransport struct {
	Transport   record.Transport
	Connections int
	Outstanding uint64
	Broken      int // paths that are down now
	ConnTotals
}

// MaxConnDetails bounds the connections of a job that are published one by one.
const MaxConnDetails = 64

// ConnDetail is one connection: who it is, and how it does.
type ConnDetail struct {
	ID        string // unique on its node
	Comm      string
	Rank      int32 // in the job
	Peer      int32 // in the communicator
	PeerWorld int32 // in the job; -1 where an agent tells, which does not know
	Conn
	State       record.LinkState
	BytesPerSec float64 // of the last window
	LatencyNs   int64
	Cause       record.Cause
	Windows     uint64
	Slow        uint64
	Switches    uint64
	Outages     uint64
	Resent      uint64
	RTTNs       int64 // between the two hosts; 0 while it is not known
}

// Anomaly is how much a connection deserves attention: more for what is wrong now.
func (c *ConnDetail) Anomaly() int {
	switch {
	case c.State == record.LinkDown:
		return 4
	case c.Cause == record.CauseNetwork:
		return 3
	case c.State == record.LinkSwitched || c.Switches+c.Outages > 0:
		return 2
	case c.Slow > 0:
		return 1
	}
	return 0
}

// FirstConnDetails sorts connections, those first that deserve attention most, and cuts
// off what is beyond MaxConnDetails. Those alike keep their order.
func FirstConnDetails(all []ConnDetail) []ConnDetail {
	slices.SortStableFunc(all, func(a, b ConnDetail) int { return b.Anomaly() - a.Anomaly() })
	return all[:min(len(all), MaxConnDetails)]
}

// ConnTotals counts what connections ever did.
type ConnTotals struct {
	Windows  [record.NumCauses]uint64 // closed, by record.Cause
	Switches uint64                   // paths that took over from another
	Resent   uint64                   // bytes sent again for it
}

// SourceStatus tells how a source of evidence is doing.
type SourceStatus struct {
	Name     string // recorder, proc, nvml, ...
	Up       bool
	NoData   bool          // this node has nothing for it to see, which is no failure
	Duration time.Duration // of the last pass
	Err      string
	Note     string // what this node does not show; no failure
}

// StreamStatus tells how an agent's connection to a master is doing.
type StreamStatus struct {
	Job       string
	Connected bool
	Reports   uint64
	Dropped   uint64 // reports not built because the stream was down or slow
	Reconnect uint64 // times that the stream ended, or did not come about
	// JobClock says that the master has told of the job's clock: ClockError bounds the error of
	// this node's times on it, and Correction is what it is ahead of the node's wall clock.
	JobClock               bool
	ClockError, Correction time.Duration
}

// MasterSnapshot is what a master publishes.
type MasterSnapshot struct {
	Job           string
	At            time.Time
	Attempt       uint32
	Settling      bool // it has not heard yet what runs: nothing is judged, and Attempt may be one that is over
	Ranks         map[diagnosis.ProcState]int
	WorldSize     int
	Step          uint64
	Agents        []AgentStatus
	Incidents     []Incident                   // open ones, then the last closed ones; at most MaxIncidents
	Opened        [diagnosis.NumClasses]uint64 // incidents ever opened, by diagnosis.Class
	Confirmed     [diagnosis.NumClasses]uint64 // of them ever confirmed
	DiagnosisLast time.Duration
	Diagnoses     uint64
	DiagnosisNs   uint64 // total
	Delay         []DelayMatrix
	Fences        FenceCalls
	FencedAttempt int64            // up to which agents are told to stop what is left; -1: none
	Connections   []ConnDetail     // at most MaxConnDetails, anomalous ones first
	Overflow      uint64           // ranks, communicators or connections not tracked because a bound was reached
	Refused       uint64           // entries of agents' reports that contradict what is known, late words of former attempts among them
	Denied        uint64           // calls that the caller's certificate does not allow
	Messages      uint64           // messages refused before they were taken apart
	Handshakes    uint64           // connections refused before a call: by certificate, or by the owner of their socket
	Insecure      bool             // agents are not authenticated
	Unseen        int              // ranks of the world that no agent tells of now
	Foreign       uint64           // of Refused, those about ranks that another node's agent tells of
	Disagreeing   int              // agents that say the job is in another attempt, or of another size, than most do
	Duplicates    uint64           // agents refused because another one of the same node is heard
	StateError    string           // why the state directory cannot be written now, "" when it can or there is none
	Recording     *RecordingStatus // nil when evidence is not recorded
}

// RecordingStatus tells how the recording of evidence is doing.
type RecordingStatus struct {
	Passes  uint64            // recorded
	Skipped map[string]uint64 // passes that were not, by reason: paced, busy, failed
	Bytes   uint64            // written to the rolling recording
	Size    int64             // of it now, in bytes
	Oldest  time.Time         // its first pass; zero while there is none
}

// MaxIncidents bounds MasterSnapshot.Incidents.
const MaxIncidents = 64

// AgentStatus is an agent as its master sees it.
type AgentStatus struct {
	Node      string
	Connected bool
	Lost      bool // for longer than the master's patience
	LastSeen  time.Time
	Ranks     int
	MapError  time.Duration // bound on the error of its times, 0 until it has reported
}

// Incident is a verdict's life: opened when first suspected, confirmed, closed
// when the evidence is gone or the job has restarted.
type Incident struct {
	ID        string // stable and unique: <job>-<unix ms of opening>-<n>
	Verdict   diagnosis.Verdict
	Opened    time.Time
	Confirmed time.Time // zero when never
	Closed    time.Time // zero while open
	Attempt   uint32    // of the job when it was opened
	TraceID   [16]byte  // of the collective that shows it and that agents have exported; zero while there is none
	Notes     []Note    `json:",omitempty"` // what was done about it; at most MaxNotes
}

// DelayMatrix is one communicator's connections as ratios to the median of
// their kind (1 = normal), row-major by source; NaN where there is no connection, or
// nothing has been measured of late. Rows and columns are ranks in the communicator.
type DelayMatrix struct {
	Comm  string
	Size  int
	Ratio []float32
	World []int32 // by rank in the communicator: its rank in the world, -1 when nobody has reported it
}

// FenceCalls counts the calls that asked for proof that nothing of an attempt goes on.
type FenceCalls struct{ Proven, Unproven, Refused uint64 }

// AgentFences counts what an agent has done to processes of attempts that were fenced.
type AgentFences struct {
	Job     string
	Stopped uint64 // ended after SIGTERM
	Killed  uint64 // ended after SIGKILL
	Spared  uint64 // whose environment does not allow it
	Failed  uint64 // that could not be told to end
	Leases  uint64 // times that this was done because the master was not heard for too long
}
