package record

import "unsafe"

// The structs of this file are the bytes of a recorder file. The C header is
// generated from them, so every field has a fixed size and every gap is
// written out. "Live" words change under a reader's eyes: they are stored and
// loaded as whole aligned words, never copied as part of a struct.

// diskHeader is the first region. What follows static words has cache lines of
// its own, by who writes it how often.
type diskHeader struct {
	magic      [8]byte
	version    uint32
	headerSize uint32
	fileSize   uint64
	commSlots  uint32
	connSlots  uint32
	stampSlots uint32
	ringSlots  uint32
	pid        int32
	rank       int32
	worldSize  int32
	localRank  int32
	attempt    uint32
	_          [4]byte
	startTime  uint64 // clock ticks since boot, field 22 of /proc/PID/stat
	created    int64  // unix ns
	bootID     [16]byte
	job        [nameSize]byte // NUL-terminated
	node       [nameSize]byte

	deviceSlots    uint32
	descSlots      uint32
	historySlots   uint32 // of the history table, behind fileSize
	historyWindows uint32 // of a bank
	peerSlots      uint32 // rows of the peer table, behind the history table
	_              [12]byte

	head uint64 // live: tickets handed out
	_    [56]byte

	dropped      uint64 // live: of them given up because the slot was held
	commOverflow uint64 // live
	connOverflow uint64 // live
	_            [40]byte

	commUsed uint64 // live: slots asked for; may exceed commSlots
	connUsed uint64 // live

	historyUsed     uint64 // live
	historyOverflow uint64 // live: connections that have no history
	_               [32]byte

	anchorCount uint64        // live: anchors written; the last is anchors[anchorCount&1]
	anchors     [2]diskAnchor // live
	closed      uint64        // live: 1 after a clean exit
	_           [16]byte

	deviceUsed    uint64 // live: entries complete
	descUsed      uint64 // live: entries complete; the first is never used
	descOverflow  uint64 // live
	stampUsed     uint64 // live
	stampOverflow uint64 // live: communicators that found no room for their rings
	_             [24]byte

	// By writers that learn of another library's operations, see Source.
	source        uint32
	sourceVersion uint32 // of the interface to that library
	eventMask     uint64 // live: events that it is asked for
	opsLost       uint64 // live: operations that have a number and no record
	opsUnseen     uint64 // live: operations recorded whose end nobody saw
	eventsLost    uint64 // live: parts of operations, and transfers, that found no room
	eventsForeign uint64 // live: events of other processes' operations, not recorded here
	_             [16]byte

	refused [8]uint64 // live: connections that the process's listeners turned away, by Refusal

	_ [HeaderSize - 704]byte
}

// diskControl is a file of its own beside the recorder, which the writer makes and
// readers of the recorder may write to.
type diskControl struct {
	magic   [8]byte
	version uint32
	size    uint32
	events  uint64 // live: an EventSet
	_       [40]byte
}

// diskAnchor pairs the two clocks.
type diskAnchor struct {
	mono int64
	real int64 // unix ns
}

// diskComm is one entry of the comm table. The enqueueing thread and the
// executor write different cache lines of it.
type diskComm struct {
	state    uint64 // live: generation << 16 | published | CommState, 0 while the entry is not complete
	id       uint64
	parent   uint64
	rank     int32
	size     int32
	bytes    uint64 // live: sum over finished operations
	maxOwnNs uint64 // live

	// Rings in the stamp table. An operation is in the slot of its sequence, by
	// the count's low bits; a count is a power of two, or 0 for none.
	stampFirst uint32 // of kernels, who write it themselves
	copyFirst  uint32 // of copy engines
	stampCount uint16
	copyCount  uint16
	device     uint16 // index into the device table: whose clock it is
	hostTells  uint16 // not 0: operations are numbered and recorded by the process, see Comm.HostTells

	name [nameSize]byte

	enqueued   uint64 // live: stored after the other words of its line
	enqueuedAt int64  // 0: it starts at once
	coll       uint64
	opBytes    uint64
	since      uint64 // ticket: older records of this index are of the slot's former owner
	stateAt    int64  // of the state word, which is stored after it; 0 when nobody has told
	fault      uint32 // Result: why it was aborted, likewise
	faultPeer  int32  // whom fault names, -1 when nobody
	_          [8]byte

	started    uint64 // live
	startedAt  int64
	finished   uint64
	finishedAt int64
	ownNs      uint64
	waitNs     uint64
	transferNs uint64
	ops        uint64
}

// diskConn is one entry of the conn table.
type diskConn struct {
	state     uint64 // live: generation << 16 | published, 0 while the entry is not complete
	id        uint64 // live: a path that comes back has another queue pair
	peer      int32
	comm      uint16
	channel   uint16
	transport uint8
	rail      uint8    // 1 + the rail, 0 when it is not told
	history   uint16   // live: 1 + its slot in the history table, 0 for none
	peerID    uint32   // live: of the peer's queue pair, stored before id
	switches  uint64   // live: how often this path has taken over from another
	resent    uint64   // bytes sent again on it for that
	address   [16]byte // of this end's port: a GID, or an IP address as one; zero when it is not told
	name      [nameSize]byte

	posted      uint64 // live: the sending half
	postedAt    int64
	completed   uint64
	completedAt int64
	txBlocked   int64
	windowBps   uint64
	windowCause uint64
	windowAt    int64
	received    uint64 // live: the receiving half
	receivedAt  int64
	rxWaiting   int64
	slow        uint64
	windows     uint64
	latencyNs   int64
	link        uint32 // LinkState, 0 for one that nobody tells
	rtt         uint32 // live: smoothed round-trip time between the two hosts, µs, 0 while it is not known
	linkAt      int64
}

// diskDevice is one GPU, and the relation of its clock to CLOCK_MONOTONIC.
type diskDevice struct {
	uuid    [16]byte
	ordinal int32
	_       [44]byte
	name    [nameSize]byte

	anchorCount uint64              // live: anchors written; the last is anchors[anchorCount&3]
	anchors     [4]diskDeviceAnchor // live: three are in use, so that none of them is being written
	_           [24]byte
}

// diskDeviceAnchor is one instant on both clocks.
type diskDeviceAnchor struct {
	gpu  int64 // %globaltimer, ns
	mono int64
	err  int64 // the true mono is within mono ± err
}

// diskDesc says what a stamped operation is.
type diskDesc struct {
	coll   uint8
	dtype  uint8
	op     uint8
	algo   uint8
	proto  uint8
	flags  uint8
	sms    uint16
	root   int32
	stream uint32
	bytes  uint64
	_      [40]byte
}

// diskStamp is one operation by the GPU's clock (%globaltimer, ns): struct Slot
// of ccl/internal/cuda/kernels/abi.h. Kernels store each half at once, the first
// when they begin; a second half that is older than the first is of the slot's
// former operation. Of a copy the host zeroes all words but the id in advance
// (and leaves the time of the enqueue in arrived), a stream memory operation
// stores the id when it begins, and the host the others after its end. Where the
// process numbers operations (hostTells) it zeroes the slot of one that is about to be
// launched.
type diskStamp struct {
	id      uint64 // live: sequence << 16 | descriptor; the sequence counts from 1
	start   uint64 // live
	arrived uint64 // live: ns from start until the last peer was seen << 8 | that peer, 0xff when nobody came after
	end     uint64 // live
}

// diskRecord is one slot of the ring. The body belongs to the kind.
type diskRecord struct {
	seq    uint64 // live: ticket+1, with busy set while a producer fills the slot
	mono   int64
	kind   uint8
	flags  uint8
	comm   uint16
	thread uint32
	opSeq  uint64
	body   [32]byte
}

type bodyEnqueue struct {
	coll   uint8
	dtype  uint8
	op     uint8
	_      [1]byte
	root   int32
	bytes  uint64
	stream uint32
	launch uint32 // by packSpan, from the record's own time; 0 when it is not known
	_      [8]byte
}

// bodyRun is the body of KindStart and KindEnd.
type bodyRun struct {
	coll  uint8
	algo  uint8
	proto uint8
	clock uint8
	code  uint8
	_     [1]byte
	chans uint16
	stamp int64
	slot  uint32
	_     [12]byte
}

// bodyWhole is the body of KindWhole: the record's own time is the end, and its
// collective was submitted when it started unless an enqueue record says otherwise.
type bodyWhole struct {
	coll   uint8
	elem   uint8 // dtype | op << 4
	path   uint8 // algo & 15 | (proto & 3) << 4 | (algo & 16) << 2 | (proto & 4) << 5
	code   uint8
	root   int32
	bytes  uint64
	stream uint32
	peer   int32  // who was waited for last
	dur    uint32 // by packSpan, from start to end
	wait   uint32 // by packSpan, of dur
}

type bodyPhase struct {
	code  uint8
	index uint8
	clock uint8
	_     [1]byte
	peer  int32
	stamp int64
	dur   int64
	wait  uint32 // spans
	stall uint32
}

// bodyConn is the body of KindWindow and KindLink (which uses its first word only).
type bodyConn struct {
	peer  int32
	conn  uint16
	code  uint8
	_     [1]byte
	bytes uint64
	wrs   uint16 // saturates
	back  uint16 // saturates
	span  uint32 // last-first by packSpan
	last  int64
}

// bodyValue is the body of KindMark and KindComm; result and peer are KindComm's.
type bodyValue struct {
	code   uint8
	result uint8
	_      [2]byte
	peer   int32
	value  uint64
	_      [16]byte
}

const (
	nameSize  = 64      // bytes of a name, its NUL included
	published = 1 << 8  // of a table entry's state word
	genShift  = 16      // of its generation in there
	busy      = 1 << 63 // of a slot's sequence word
	spanMicro = 1 << 31 // of a span: the rest is microseconds, not nanoseconds
)

// NoComm and NoConn are the indices of a handle that has no slot.
const (
	NoComm = 1<<16 - 1
	NoConn = 1<<16 - 1
)

// packSpan keeps up to 2.1 s in nanoseconds, and up to 35 min in microseconds.
func packSpan(d int64) uint32 {
	switch {
	case d < 0:
		return 0
	case d < spanMicro:
		return uint32(d)
	}
	return spanMicro | uint32(min(d/1000, spanMicro-1))
}

func unpackSpan(s uint32) int64 {
	if s&spanMicro != 0 {
		return int64(s&^spanMicro) * 1000
	}
	return int64(s)
}

// packPath keeps the low halves where recorders from before the 16th algorithm have them.
func packPath(a Algo, p Proto) uint8 {
	return uint8(a)&15 | uint8(p)&3<<4 | uint8(a)&16<<2 | uint8(p)&4<<5
}

func unpackPath(b uint8) (Algo, Proto) { return Algo(b&15 | b&64>>2), Proto(b>>4&3 | b>>7<<2) }

var (
	_ [HeaderSize]byte      = [unsafe.Sizeof(diskHeader{})]byte{}
	_ [CommEntrySize]byte   = [unsafe.Sizeof(diskComm{})]byte{}
	_ [ConnEntrySize]byte   = [unsafe.Sizeof(diskConn{})]byte{}
	_ [DeviceEntrySize]byte = [unsafe.Sizeof(diskDevice{})]byte{}
	_ [DescEntrySize]byte   = [unsafe.Sizeof(diskDesc{})]byte{}
	_ [StampEntrySize]byte  = [unsafe.Sizeof(diskStamp{})]byte{}
	_ [RecordSize]byte      = [unsafe.Sizeof(diskRecord{})]byte{}
	_ [ControlSize]byte     = [unsafe.Sizeof(diskControl{})]byte{}
	_ [32]byte              = [unsafe.Sizeof(bodyEnqueue{})]byte{}
	_ [32]byte              = [unsafe.Sizeof(bodyRun{})]byte{}
	_ [32]byte              = [unsafe.Sizeof(bodyWhole{})]byte{}
	_ [32]byte              = [unsafe.Sizeof(bodyPhase{})]byte{}
	_ [16 - numDTypes]byte  // of bodyWhole's half bytes
	_ [16 - numOps]byte
	_ [32 - numAlgos]byte
	_ [8 - numProtos]byte
	_ [32]byte = [unsafe.Sizeof(bodyConn{})]byte{}
	_ [32]byte = [unsafe.Sizeof(bodyValue{})]byte{}
)

// geometry is how many slots each region has, and so where each region lies.
type geometry struct {
	comms, conns, devices, descs, stamps, ring uint32
	histories, peers                           uint32
}

func (g geometry) commAt() uint64   { return HeaderSize }
func (g geometry) connAt() uint64   { return g.commAt() + uint64(g.comms)*CommEntrySize }
func (g geometry) deviceAt() uint64 { return g.connAt() + uint64(g.conns)*ConnEntrySize }
func (g geometry) descAt() uint64   { return g.deviceAt() + uint64(g.devices)*DeviceEntrySize }
func (g geometry) stampAt() uint64  { return g.descAt() + uint64(g.descs)*DescEntrySize }
func (g geometry) ringAt() uint64 {
	return (g.stampAt() + uint64(g.stamps)*StampEntrySize + 63) &^ 63
}
func (g geometry) size() uint64 { return g.ringAt() + uint64(g.ring)*RecordSize }

// historyAt is where the history table is, behind what size tells, and peersAt where the peer
// table is, behind that; memory is the size with both.
func (g geometry) historyAt() uint64 { return g.size() }
func (g geometry) peersAt() uint64 {
	return g.historyAt() + uint64(g.histories)*uint64(historySize)
}
func (g geometry) memory() uint64 { return g.peersAt() + uint64(g.peers)*peerRowSize }
