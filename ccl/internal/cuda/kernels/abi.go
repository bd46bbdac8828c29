package kernels

import (
	"unsafe"

	"github.com/lockstep-ccl/lockstep/record"
)

// Limits, as in abi.h.
const (
	MaxRanks    = 8        // GPUs that reach each other by loads and stores
	MaxBlocks   = 32       // of any kernel that speaks with peers
	MaxMessages = 8        // sends, and receives, of one kernel: one each way with each peer
	MaxLanes    = 16       // of a message
	MaxQueues   = 28       // of P2PListArgs
	Items       = 104      // messages that P2PListArgs has itself
	MoreItems   = 1 << 16  // and those that HeapItems has room for
	LoadItems   = 127      // messages of one ls_p2p_items
	RingBytes   = 16 << 20 // of Args.Ring
	llLines     = 1024
	ll12Lines   = 1536
	chainWarps  = 16
	chainBytes  = 256 << 10
	laneLines   = 4 * llLines
	phases      = 4
)

// Args.Flags.
const (
	First = 1 // the operation begins with this kernel
	Last  = 2 // it ends with it
	Meet  = 4 // its ranks meet in this kernel first, after ls_mark has stamped its begin
)

// Args is the parameter of every collective kernel. Addresses are device
// addresses of this rank's process, but for Reduce on root: there Recv of a peer is
// root's receive buffer as that peer has mapped it, or 0 where it has not, or where
// its alignment to 16 bytes is not that of what is sent.
type Args struct {
	Heap, Send, Recv [MaxRanks]uint64
	Count            uint64
	Slots, Abort     uint64
	SlotMask, Desc   uint32
	Rank, Ranks      uint32
	Root, Op, Flags  uint32
	Room             uint32 // of Reduce: bytes of the memory at Ring that results may pass through
	Pace             uint32 // ps that a KiB of bulk copies to peers takes each block at least; 0: as fast as they go
	Peers            uint32 // rows of what is stamped by peer are at Slots + 16*Peers, by kernels of modules ByPeer names; 0: none is
	Ring, Stride     uint64 // rank r has RingBytes for what peers push to be reduced, at Ring + r*Stride
}

// P2PMessage is one send or receive of P2PArgs, on Lanes of Piece bytes, of which
// the last may have fewer; both sides have the same ones. By LL, it wants a block
// for each lane, and Piece is at most LaneBytes. A Direct send wants one to Lanes
// blocks. A direct receive says in Target where its bytes shall go, as the sender
// has mapped it: the buffer, for which one block will do, or staging memory, which
// is also at Stage and has two places of Room bytes for each lane.
type P2PMessage struct {
	Buf, Bytes, Piece, Target, Stage uint64
	Room, Peer, Lanes, Direct        uint32
	First, Blocks                    uint32
}

// P2PArgs is the parameter of the kernels that send and receive: in a launch at
// most one message each way with each peer, and none with this rank itself. Blocks
// may be those of an LL send and an LL receive both.
type P2PArgs struct {
	Heaps, Stride                      uint64 // rank r's heap is at Heaps + r*Stride
	Slots, Abort                       uint64
	SlotMask, Desc, Rank, Ranks, Flags uint32
	Pace                               uint32 // as in Args, of each block that pushes
	Send, Recv                         [MaxMessages]P2PMessage
}

// P2PItem is a message of a list, with lanes as P2PMessage has them; Piece is in units
// of PieceUnit bytes. Target is that of a direct receive which goes straight into its
// buffer, and 0 of one through staging memory.
type P2PItem struct {
	Buf, Bytes, Target uint64
	Piece, Lanes       uint32
}

// PieceUnit is what lanes' pieces are multiples of.
const PieceUnit = 128

// P2PQueue is Count items from Begin on, all with one peer, in one direction, and
// Direct or not. It has Blocks blocks, from First on, and no two queues share one.
// Target is staging memory of direct receives, as the sender has mapped it.
type P2PQueue struct {
	Target             uint64
	Begin, Count       uint32
	First, Blocks      uint16
	Peer, Send, Direct uint8
	_                  uint8
}

// P2PListArgs is the parameter of the kernels that send and receive any number of
// messages of each pair. Items is how many there are in all queues; what Item has no
// room for ls_p2p_items brings to this rank's heap, to HeapItems. Stage is staging
// memory: for each rank two places of Room bytes for each lane, rank 0's first.
type P2PListArgs struct {
	Heaps, Stride                      uint64
	Slots, Abort                       uint64
	SlotMask, Desc, Rank, Ranks, Flags uint32
	Room                               uint32
	Stage                              uint64
	Items                              uint32
	Pace                               uint32
	Queue                              [MaxQueues]P2PQueue
	Item                               [Items]P2PItem
}

// ItemsArgs is ls_p2p_items' parameter: Count items, which it stores from To on.
type ItemsArgs struct {
	To    uint64
	Count uint32
	_     uint32
	Item  [LoadItems]P2PItem
}

// StagedPad is what a place of a message in pinned memory has besides: its bytes begin
// there as the message does in a line of 16.
const StagedPad = 64 // LS_STAGED_PAD

// StagedMessage is a message of ls_staged, which copies pieces of Half bytes between Buffer and
// two places from Slot on in turn, and counts them at Mine; at Theirs the host counts
// those that it has sent, or brought. Counts are of all messages that way with a peer,
// First before this one. Where After is not 0, pieces come in only after as many
// have gone out by the count there, beyond AfterFirst.
type StagedMessage struct {
	Buffer, Bytes, Slot, Mine, Theirs, After uint64
	Half, First, AfterFirst, Send            uint32
}

// StagedArgs is ls_staged's parameter: Count messages at List, in pinned memory.
type StagedArgs struct {
	Abort, List uint64
	Count       uint32
	_           uint32
}

// MarkArgs is ls_mark's parameter: the begin (First) or the end (Last) of the operation
// that Slot is of, and ID names, is stamped there, and the u32 at Word becomes Count.
type MarkArgs struct {
	Heap, Slot, ID, Word uint64
	Count, Flags         uint32
}

// FoldArgs is ls_fold's parameter: Dst becomes the reduction of Count elements of
// the first K of Src, in their order. Ranks is what Avg divides by.
type FoldArgs struct {
	Heap                               [MaxRanks]uint64
	Slots, Abort                       uint64
	SlotMask, Desc, Rank, Ranks, Flags uint32
	Op                                 uint32
	Src                                [MaxRanks]uint64
	Dst, Count                         uint64
	K                                  uint32
	_                                  uint32
}

// ClockArgs is ls_clock's parameter: one thread answers Rounds changes of the u32
// at Word, which holds First, with %globaltimer and the new word, 8 bytes each,
// at Slot. It gives up after Turns looks.
type ClockArgs struct {
	Word, Slot, Abort uint64
	First, Rounds     uint32
	Turns             uint64
}

// DelayArgs is ls_delay's parameter: one thread waits for so many nanoseconds.
type DelayArgs struct{ Ns, Abort uint64 }

// PatternArgs is the parameter of ls_fill, which writes Bytes of Seed's pattern
// to Buffer (aligned to 8), and of ls_check, which adds to the u64 at Wrong how
// many bytes differ from it.
type PatternArgs struct{ Buffer, Bytes, Seed, Wrong uint64 }

// Slot is an operation's stamps; operation seq, from 1, has slot seq & SlotMask.
type Slot struct{ ID, Start, Arrived, End uint64 }

// PeerStamp is one peer's entry in an operation's row of MaxRanks of them.
type PeerStamp struct{ Came, There, Seq, Trip uint32 }

// ByPeer is the name of the module with the collectives' kernels of another one that stamp
// by peer. Not every module has one.
func ByPeer(module string) string { return module + "_peers" }

type line [4]uint32

type (
	blockState [32]uint32 // epoch, steps, tiles, what chains have sent and received, padding
	laneState  [4]uint32  // sent, received, pushed, taken
)

// heap mirrors Heap, for the offsets of what the host and copy engines touch.
type heap struct {
	_  [MaxBlocks]blockState
	op struct {
		seq, start, arrived uint64
		blocksDone          uint32
		_                   [25]uint32
	}
	flag [phases][MaxBlocks][MaxRanks]uint32
	here [MaxRanks]uint32
	_    [24]uint32

	copied, ready [2][MaxRanks]uint32

	landed, taken [MaxBlocks][MaxRanks]uint32
	_             [MaxBlocks][32]uint32 // ring: sent, received, landed, taken, padding
	target        [MaxBlocks]line

	ll, ll2 [2][MaxBlocks][MaxRanks][llLines]line
	ll12    [2][MaxBlocks][MaxRanks * ll12Lines]line
	read    [MaxBlocks][chainWarps]uint64
	chain   [MaxBlocks][chainBytes]byte
	lane    [MaxRanks][MaxLanes]laneState

	credit, arrived [MaxRanks][MaxLanes]uint32

	offer [MaxRanks][MaxLanes][2][2]line
	p2p   [MaxRanks][MaxLanes][2][laneLines]line
	item  [MoreItems]P2PItem
}

// HeapSize is a rank's control memory, zeroed before first use; HeapSeq is the byte
// offset of the uint64 that counts its operations, HeapItems is that of
// its [MoreItems]P2PItem, the others are those of its [MaxRanks]uint32 arrays.
const (
	HeapSize   = unsafe.Sizeof(heap{})
	HeapSeq    = unsafe.Offsetof(heap{}.op)
	HeapCopied = unsafe.Offsetof(heap{}.copied)
	HeapReady  = unsafe.Offsetof(heap{}.ready)
	HeapItems  = unsafe.Offsetof(heap{}.item)
)

// llBytes is the data that one block's lines from one rank hold.
const llBytes = 8 * llLines

// LaneBytes is the data that the lines of a message's lane hold.
const LaneBytes = 8 * laneLines

// MoveKernels are the kernels of the module "move"; ReduceKernels are in each
// "reduce_…". Where devices are of 9.0 or newer BulkKernels are there too, and
// BulkMoveKernels in "move".
var (
	MoveKernels = []string{
		"ls_allgather_ll", "ls_alltoall_ll", "ls_barrier", "ls_broadcast_ll", "ls_broadcast_ll2", "ls_allgather_ll12", "ls_alltoall_ll12", "ls_broadcast_ll12", "ls_broadcast_chain", "ls_p2p_ll", "ls_p2p_direct", "ls_p2p_list", "ls_p2p_items",
		"ls_allgather_push", "ls_alltoall_push", "ls_broadcast_push", "ls_broadcast_ring", "ls_allgather_ring", "ls_copy",
		"ls_check", "ls_clock", "ls_delay", "ls_staged", "ls_fill", "ls_mark",
	}
	ReduceKernels = []string{
		"ls_allreduce_ll", "ls_allreduce_ll2", "ls_reduce_ll", "ls_reducescatter_ll",
		"ls_allreduce_ll12", "ls_reduce_ll12", "ls_reducescatter_ll12", "ls_reduce_chain",
		"ls_allreduce_sym", "ls_reduce_sym", "ls_reducescatter_sym", "ls_fold",
	}
	// RingKernels are in the modules of types that are summed in themselves.
	RingKernels     = []string{"ls_allreduce_ring", "ls_reduce_ring", "ls_reducescatter_ring"}
	BulkKernels     = []string{"ls_allreduce_bulk", "ls_reduce_bulk", "ls_reducescatter_bulk", "ls_fold_bulk", "ls_allreduce_pushbulk"}
	BulkMoveKernels = []string{"ls_allgather_bulk", "ls_alltoall_bulk", "ls_broadcast_bulk", "ls_p2p_bulk", "ls_p2p_list_bulk"}
)

// LLCapacity is the most bytes that a kernel on LL lines takes with so many
// blocks: of the whole for AllReduce, Reduce and Broadcast, of one rank's share
// for the others. twoShot means kernels of two stages, ls_…_ll2.
func LLCapacity(coll record.CollKind, twoShot bool, ranks, blocks int) uint64 {
	parts := 1 // of a buffer, for lines of one source each
	switch {
	case !twoShot:
	case coll.Traits().Root == record.RootNone:
		parts = ranks
	default:
		parts = ranks - 1 // root has none
	}
	return uint64(parts) * uint64(blocks) * llBytes
}

// ChainCapacity is the most bytes that ls_…_chain takes, on any number of blocks.
const ChainCapacity = 1 << 30

// LL12Capacity is LLCapacity of lines of 12 bytes: ls_…_ll12.
func LL12Capacity(ranks, blocks int) uint64 {
	lines := ll12Lines
	switch {
	case ranks <= 2:
		lines *= 4
	case ranks <= 4:
		lines *= 2
	}
	return uint64(blocks) * 12 * uint64(lines)
}
