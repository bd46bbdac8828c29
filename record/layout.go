package record

import (
	"fmt"
	"strings"
)

// This file is the one definition of the flight recorder's binary layout.
// The C header record/c/lockstep_record.h is generated from it (go generate
// ./record), so an offset or a value is written down exactly once.
//
// A recorder file is seven regions, in this order, each 64-byte aligned:
//
//	header       HeaderSize bytes
//	comm table   CommSlots   × CommEntrySize
//	conn table   ConnSlots   × ConnEntrySize
//	device table DeviceSlots × DeviceEntrySize (GPUs and their clocks)
//	desc table   DescSlots   × DescEntrySize   (what stamped operations are)
//	stamp table  StampSlots  × StampEntrySize  (GPU stamps)
//	ring         RingSlots   × RecordSize      (RingSlots is a power of two)
//
// The three tables of a GPU are empty in the file of a process without one.
// All integers are little-endian; all times are CLOCK_MONOTONIC nanoseconds
// of the writing host unless a field says otherwise.
const (
	Magic = "LOCKSTEP"
	// LayoutVersion changes when a reader of one version would misunderstand a
	// file of another. A word that is added where files had zeros, and whose zero
	// means that nobody has told, changes nothing for either.
	LayoutVersion = 4
	// OldestLayout is the oldest that this program reads: an agent may be one version
	// ahead of the ranks' library. Layout 3 lacks words that 4 has where 3 has zeros.
	OldestLayout = 3

	HeaderSize      = 4096
	CommEntrySize   = 256
	ConnEntrySize   = 256
	DeviceEntrySize = 256
	DescEntrySize   = 64
	StampEntrySize  = 32
	RecordSize      = 64
	ControlSize     = 64

	// ControlMagic and ControlVersion begin a control file, see SetEvents.
	ControlMagic   = "LOCKCTRL"
	ControlVersion = 1

	// Limits that a reader enforces before it trusts a file's own numbers.
	MaxCommSlots   = 4096
	MaxConnSlots   = 1 << 16
	MaxDeviceSlots = 16
	MaxDescSlots   = 1 << 16 // an index has 16 bits
	MaxStampSlots  = 1 << 20
	MaxRingSlots   = 1 << 22

	// What a file with a stamp table has of the other tables of a GPU.
	DefaultDeviceSlots = 16
	DefaultDescSlots   = 4096

	// GPUStampSlots is what a process with a GPU asks for: room for a dozen
	// communicators.
	GPUStampSlots = 1 << 14

	// RatePPB bounds the difference between the rates of a GPU's clock and CLOCK_MONOTONIC
	// where it has not been measured, in parts of 10⁹: crystals are within 50 ppm, each of the
	// two. One H200 and its host differed by 3,600.
	RatePPB = 100_000

	// DriftPPB bounds how far the rates' difference is, at any time, from its mean between a
	// device's last two anchors, in parts of 10⁹: by so much, and by what the anchors leave
	// open, grows the error of a mapping with the time since the last one. Crystals that
	// warm up and a host's clock that NTP keeps in step stay within it.
	DriftPPB = 10_000

	// SlewPPB takes its place while that mean changes by more than DriftPPB: the host's clock
	// is being slewed, which Linux's NTP discipline does by 500 ppm at most.
	SlewPPB = 500_000

	// Defaults of Options: 1 MiB of ring (16,384 records), 256 communicators,
	// 1,024 connections.
	DefaultCommSlots = 256
	DefaultConnSlots = 1024
	DefaultRingSlots = 1 << 14

	// MarksRingSlots is the ring of a file that has marks only (Options.MarksOnly): one
	// without communicator slots.
	MarksRingSlots = 1 << 10
)

// Kind says which fields of a Record beyond the common ones have a meaning.
type Kind uint8

const (
	KindNone    Kind = iota
	KindComm         // a communicator changed state: Code is a CommState; when it is CommAborted, Result says why and Peer whom the error named
	KindEnqueue      // a collective was submitted: Coll, DType, Op, Root, Bytes, Stream
	KindStart        // a collective began to run: Stamp, Clock, Algo, Proto, Channel
	KindPhase        // one phase of it ended: Index, Peer, Stamp (end), Dur, Code is a PhaseCode
	KindEnd          // it ended: Stamp, Clock, Code is a Result
	KindWindow       // a transport window closed: Conn, Peer, Bytes, WRs, Backlog, First, Last, Code is a Cause
	KindLink         // a connection or port changed state: Conn, Peer, Code is a LinkState
	KindMark         // the program's own words: Code is a MarkCode, Value
	KindWhole        // a collective has ended, all of it at once: Coll, DType, Op, Algo, Proto, Root, Bytes, Stream, Peer, Dur, Wait, Code is a Result
	numKinds
)

// CollKind is a collective's kind. Values are stable: they are on disk and in trace ids.
type CollKind uint8

const (
	CollNone CollKind = iota
	AllReduce
	Reduce
	Broadcast
	AllGather
	ReduceScatter
	AlltoAll
	AlltoAllv
	Gather
	Scatter
	Send
	Recv
	Barrier
	Group // sends and receives fused by GroupStart/GroupEnd
	numColl
)

// NumColls is how many kinds of collectives this version knows, CollNone among them.
const NumColls = int(numColl)

// DType is an element type, in NCCL's order (ncclDataType_t).
type DType uint8

const (
	Int8 DType = iota
	Uint8
	Int32
	Uint32
	Int64
	Uint64
	Float16
	Float32
	Float64
	BFloat16
	Float8E4M3
	Float8E5M2
	numDTypes
)

// RedOp is a reduction operator, in NCCL's order (ncclRedOp_t).
type RedOp uint8

const (
	Sum RedOp = iota
	Prod
	Max
	Min
	Avg
	numOps
)

// UnknownOp is the operator of a reduction whose library does not tell it.
const UnknownOp RedOp = 15

// CommState is the state of a communicator as its own rank sees it.
type CommState uint8

const (
	CommNone    CommState = iota
	CommJoining           // waiting in rendezvous
	CommJoined
	CommLeft    // destroyed in good order
	CommAborted // aborted by the program or after an error
)

// Source is what wrote a recorder.
type Source uint8

const (
	SourceCCL        Source = iota // a program of package ccl, or one that uses the C header itself
	SourceNCCLPlugin               // the profiler plugin in a process that uses NCCL
	SourceNCCLProbes               // uprobes on NCCL, by the agent's word
	numSources
)

// EventSet is what a writer that learns of another library's operations asks it for.
type EventSet uint8

const (
	EventsDefault EventSet = iota // what the writer was told at its start
	EventsOps                     // operations and their kernels
	EventsNet                     // and each transfer over the network
	EventsAll                     // and the queue pairs' work requests, launches and copies
	numEventSets
)

// CallsOnly reports whether calls are all that is known: a collective starts when it is called and
// is finished when the call has returned, which for a GPU is when it was enqueued. Records
// are enqueue records only.
func (s Source) CallsOnly() bool { return s == SourceNCCLProbes }

// Clock says which clock made a stamp.
type Clock uint8

const (
	ClockHost Clock = iota // CLOCK_MONOTONIC
	ClockGPU               // %globaltimer
)

// Algo is the algorithm that a collective ran with: one vocabulary for options,
// the choice, kernels, records, spans and metrics. Values are stable. Recorders from
// before AlgoLL tell LL, LL12, Sym, Bulk and PushBulk as AlgoDirect and LL2 as AlgoDoubling.
type Algo uint8

const (
	AlgoNone Algo = iota
	// Of the CPU, and of what crosses nodes. A GPU's direct messages are pushed to
	// where they are received, by loads and stores; its rings pass chunks through
	// staging memory, likewise.
	AlgoDirect
	AlgoRing
	AlgoDoubling // recursive doubling / halving-doubling
	AlgoTree
	AlgoHierarchical
	// Of GPUs of one node.
	AlgoCopyEngine // copy engines
	AlgoLL         // kernel, flags in the data, everyone to everyone at once
	AlgoLL2        // the same in two stages: reduce-scatter, all-gather
	AlgoLL12       // AlgoLL by lines that carry 12 bytes instead of 8
	AlgoSym        // kernel on symmetric windows, loads and stores
	AlgoBulk       // likewise, by the bulk copy engine of an SM (sm_90)
	AlgoPushBulk   // kernel that pushes into peers' staging memory and reduces there, by bulk copies (sm_90)
	// NCCL's, beside those above.
	AlgoNVLS
	AlgoNVLSTree
	AlgoCollNet
	AlgoCollNetChain
	AlgoPAT
	// Of GPUs of one node again.
	AlgoChain // kernel, flags in the data, from each rank to the next: lines of 128 bytes, which NVLink alone brings whole
	numAlgos
)

// OnGPU reports whether a is an algorithm of Lockstep on GPUs.
func (a Algo) OnGPU() bool {
	return a == AlgoRing || a >= AlgoCopyEngine && a <= AlgoPushBulk || a == AlgoChain
}

// OnCPU reports whether the CPU's schedules may have the algorithm a.
func (a Algo) OnCPU() bool { return a > AlgoNone && a < AlgoCopyEngine }

// ParseAlgo reads the name of an algorithm among those that among accepts; "" is AlgoNone.
func ParseAlgo(s string, among func(Algo) bool) (Algo, error) {
	if s == "" {
		return AlgoNone, nil
	}
	var names []string
	for a := AlgoNone + 1; a < numAlgos; a++ {
		if !among(a) {
			continue
		}
		if strings.EqualFold(s, a.String()) {
			return a, nil
		}
		names = append(names, a.String())
	}
	return AlgoNone, fmt.Errorf("%q is no algorithm, want one of %s", s, strings.Join(names, ", "))
}

// Proto is the protocol of the data path.
type Proto uint8

const (
	ProtoNone   Proto = iota
	ProtoLL           // flags in the data, latency-bound
	ProtoSimple       // credits and chunks, bandwidth-bound
	ProtoLL128        // NCCL's: a flag in each 128 bytes
	numProtos
)

// Transport is what carries a connection.
type Transport uint8

const (
	TransportNone Transport = iota
	TransportSHM
	TransportTCP
	TransportRDMA
	TransportNVLink
	numTransports
)

// PhaseCode names a phase of a collective.
type PhaseCode uint8

const (
	PhaseNone     PhaseCode = iota
	PhaseWait               // from start until the last peer that this rank needs had entered
	PhaseTransfer           // from there to the end
	// What one peer sent: Peer; Stamp when the last of it had been taken, Dur since the first of it came, Wait before that
	// since it was asked for, Stall while it did not come on in between, as far as that was noticed.
	PhaseReduce  // to be reduced
	PhaseReceive // as it is
)

// Result is how a collective ended.
type Result uint8

const (
	ResultOK Result = iota
	ResultPeerLost
	ResultMismatch
	ResultAborted
	ResultTimeout
	ResultInternal
	numResults
)

// NumResults is how many results this version knows.
const NumResults = int(numResults)

// Cause is why a window was slow (ICCL's monitor, with the causes it lacks).
type Cause uint8

const (
	CauseNone             Cause = iota // not slow
	CauseNetwork                       // backlog high, bandwidth low
	CauseSenderStarved                 // nothing to send: the sender's own program is late
	CauseReceiverNotReady              // the receiver grants no credit
	CauseCPUStarved                    // the progress thread itself did not run
	numCauses
)

// NumCauses is how many causes this version knows, CauseNone among them.
const NumCauses = int(numCauses)

// LinkState is the state of a connection or port.
type LinkState uint8

const (
	LinkNone LinkState = iota
	LinkUp
	LinkDown
	LinkSwitched // this path carries what another one did
	LinkRetreat  // rolled back to the last chunk both sides agree on
)

// MarkCode is the program's own word about what it is doing. A mark with
// FlagBegin opens a span that the same code without it closes.
type MarkCode uint8

const (
	MarkNone MarkCode = iota
	MarkStep
	MarkCheckpoint
	MarkEvaluation
	MarkCompile
	MarkDataLoading // explains, and does not excuse: a data loader that does not return is a fault
	numMarks
)

// NumMarks is how many marks this version knows, MarkNone among them.
const NumMarks = int(numMarks)

// Flags of a record.
const (
	FlagBegin   = 1 << 0 // KindMark: the span opens
	FlagInPlace = 1 << 1 // KindEnqueue, KindWhole
	FlagAnomaly = 1 << 2 // KindWindow: the window is outside the normal
	FlagReplay  = 1 << 3 // KindStart: a CUDA graph replay
	FlagStamped = 1 << 4 // KindWhole: a GPU stamped the start and the end, so that Dur is exact
	FlagUnseen  = 1 << 5 // KindEnd: nobody saw it end; it is over by now
)

// Flags of a descriptor.
const (
	DescInPlace  = 1 << 0
	DescCaptured = 1 << 1 // the operation was captured: each one stamped is a graph's replay
)

// Record is one decoded 64-byte record. Every record carries Ticket, Mono,
// Kind, Flags, Comm, Thread and Seq; the others belong to the kinds that
// KindX's comments name and share bytes on disk.
type Record struct {
	Ticket uint64 // position in the stream of all records of the file, from 0
	Mono   int64  // when it was appended, ns; KindWhole: when the collective ended
	Kind   Kind
	Flags  uint8
	Comm   uint16 // index into the comm table
	Thread uint32 // producer's thread or goroutine slot, informative
	Seq    uint64 // collective's sequence number in its communicator, from 1; point-to-point operations have numbers of their own per communicator in the same space

	Coll   CollKind // KindEnqueue, KindStart, KindEnd, KindWhole
	DType  DType    // KindEnqueue, KindWhole
	Op     RedOp    // KindEnqueue, KindWhole
	Algo   Algo     // KindStart, KindEnd, KindWhole
	Proto  Proto    // KindStart, KindEnd, KindWhole
	Clock  Clock    // KindStart, KindPhase, KindEnd
	Code   uint8    // CommState, PhaseCode, Result, Cause, LinkState or MarkCode by Kind
	Index  uint8    // KindPhase: ordinal of the phase
	Result Result   // KindComm: why it was aborted
	Root   int32    // KindEnqueue, KindWhole: root or peer, -1 when none
	Peer   int32    // KindPhase, KindWindow, KindLink: rank in the communicator, -1 when none; KindWhole: who was waited for last; KindComm: whom Result names
	Stream uint32   // KindEnqueue, KindWhole
	Chan   uint16   // KindStart: channels used
	Conn   uint32   // KindWindow, KindLink: index into the conn table
	Bytes  uint64   // KindEnqueue, KindWhole: payload bytes by NCCL's convention; KindWindow: bytes in the window
	Stamp  int64    // KindStart, KindPhase, KindEnd: when it happened, by Clock
	Dur    int64    // KindEnqueue: from the call to the kernel's launch, 0 when not known; KindPhase: length, ns; KindWhole: from start to end (exact up to 2.1 s, else to the microsecond)
	Wait   int64    // KindWhole: part of Dur from the start until the last peer that this rank needs had entered; the rest is transfer. KindPhase of a peer: before its first bytes came
	Stall  int64    // KindPhase of a peer: part of Dur in which nothing came
	Slot   uint32   // KindStart, KindEnd: 1 + index into the stamp table, 0 when none
	WRs    uint32   // KindWindow: work requests in the window
	Back   uint32   // KindWindow: largest backlog, work requests
	First  int64    // KindWindow: first post
	Last   int64    // KindWindow: last completion
	Value  uint64   // KindMark: step number or the like; KindComm: communicator id
}

// String forms are the names used in traces, metrics and messages.
func (k CollKind) String() string { return name(collNames[:], int(k), "coll") }
func (d DType) String() string    { return name(dtypeNames[:], int(d), "dtype") }
func (k Kind) String() string     { return name(kindNames[:], int(k), "kind") }
func (a Algo) String() string     { return name(algoNames[:], int(a), "algo") }
func (p Proto) String() string    { return name(protoNames[:], int(p), "proto") }
func (c Cause) String() string    { return name(causeNames[:], int(c), "cause") }
func (r Result) String() string   { return name(resultNames[:], int(r), "result") }
func (m MarkCode) String() string { return name(markNames[:], int(m), "mark") }
func (s Source) String() string   { return name(sourceNames[:], int(s), "source") }
func (e EventSet) String() string { return name(eventSetNames[:], int(e), "events") }
func (o RedOp) String() string {
	if o == UnknownOp {
		return "unknown"
	}
	return name(opNames[:], int(o), "op")
}
func (s CommState) String() string {
	return name([]string{"none", "joining", "joined", "left", "aborted"}, int(s), "state")
}
func (s LinkState) String() string {
	return name([]string{"none", "up", "down", "switched", "retreat"}, int(s), "link")
}

var (
	collNames     = [numColl]string{"none", "AllReduce", "Reduce", "Broadcast", "AllGather", "ReduceScatter", "AlltoAll", "AlltoAllv", "Gather", "Scatter", "Send", "Recv", "Barrier", "Group"}
	dtypeNames    = [numDTypes]string{"int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16", "float8_e4m3", "float8_e5m2"}
	dtypeSizes    = [numDTypes]int{1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}
	opNames       = [numOps]string{"sum", "prod", "max", "min", "avg"}
	kindNames     = [numKinds]string{"none", "comm", "enqueue", "start", "phase", "end", "window", "link", "mark", "whole"}
	algoNames     = [numAlgos]string{"none", "direct", "ring", "doubling", "tree", "hierarchical", "ce", "ll", "ll2", "ll12", "sym", "bulk", "pushbulk", "nvls", "nvls_tree", "collnet", "collnet_chain", "pat", "chain"}
	protoNames    = [numProtos]string{"none", "ll", "simple", "ll128"}
	causeNames    = [numCauses]string{"none", "network", "sender_starved", "receiver_not_ready", "cpu_starved"}
	resultNames   = [numResults]string{"ok", "peer_lost", "mismatch", "aborted", "timeout", "internal"}
	sourceNames   = [numSources]string{"ccl", "nccl_plugin", "nccl_probes"}
	eventSetNames = [numEventSets]string{"default", "ops", "net", "all"}
	markNames     = [numMarks]string{"none", "step", "checkpoint", "evaluation", "compile", "data_loading"}
)

func name(names []string, i int, what string) string {
	if i < len(names) {
		return names[i]
	}
	return fmt.Sprintf("%s(%d)", what, i)
}

// Known reports whether c is a cause of this version.
func (c Cause) Known() bool { return c < numCauses }

// Known reports whether r is a result of this version.
func (r Result) Known() bool { return r < numResults }

// Size returns the element size in bytes, 0 for an unknown type.
func (d DType) Size() int {
	if int(d) < len(dtypeSizes) {
		return dtypeSizes[d]
	}
	return 0
}
