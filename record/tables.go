package record

import (
	"sync/atomic"
	"unsafe"
)

// CommEntry is what is fixed about a communicator as one member sees it. The
// world ranks of its members are not in it: they are learnt by joining all
// members' entries with the same ID.
type CommEntry struct {
	ID     uint64
	Name   string // at most 63 bytes; longer is cut
	Rank   int32  // this process's rank in the communicator
	Size   int32
	Parent uint64 // ID of the communicator it was split from, 0 when none
	State  CommState

	// Of a communicator whose operations a GPU stamps: how many of those of
	// kernels and of copy engines are kept, each rounded up to a power of two, and
	// the Device whose clock it is. Such an entry tells of the stamped operations
	// only: its words Enqueued, Started and Finished are not read.
	Stamps, Copies int
	Device         uint16
}

// ConnEntry is what is fixed about a connection. One entry carries both halves
// of a pair as this process sees them: sent to the peer, received from it.
type ConnEntry struct {
	Comm      uint16 // index of the communicator
	Peer      int32  // rank in the communicator
	Transport Transport
	Channel   uint16
	ID        uint64 // QP number or socket inode, 0 when it has none
	Name      string // at most 63 bytes, such as "tcp 127.0.0.1:4000->127.0.0.1:5000"
}

// Comm writes one communicator's live words. Each word is stored whole and a
// sequence is stored after the words that go with it, so a reader never sees
// a sequence without its time. Enqueued may be called by one thread at a time
// and Started, Finished and AddPhases by another; nil is no-op.
type Comm struct {
	w     *Writer // keeps the mapping
	d     *diskComm
	index uint16
}

// AddComm takes a slot of the comm table. It returns nil and false, and counts
// the overflow, when the table is full.
func (w *Writer) AddComm(e CommEntry) (*Comm, bool) {
	if w == nil {
		return nil, false
	}
	i := atomic.AddUint64(&w.hdr.commUsed, 1) - 1
	if i >= uint64(w.geo.comms) {
		atomic.AddUint64(&w.hdr.commOverflow, 1)
		return nil, false
	}
	d := (*diskComm)(unsafe.Pointer(&w.mem[w.geo.commAt()+i*CommEntrySize]))
	d.id, d.parent, d.rank, d.size = e.ID, e.Parent, e.Rank, e.Size
	putName(&d.name, e.Name)
	c := &Comm{w: w, d: d, index: uint16(i)}
	w.addRings(d, e)
	c.SetState(e.State)
	return c, true
}

// Index is the communicator's index in the comm table, as records name it;
// NoComm for nil.
func (c *Comm) Index() uint16 {
	if c == nil {
		return NoComm
	}
	return c.index
}

// SetState tells what became of the communicator.
func (c *Comm) SetState(s CommState) {
	if c != nil {
		atomic.StoreUint64(&c.d.state, published|uint64(s))
	}
}

// Enqueued tells the last collective submitted.
func (c *Comm) Enqueued(seq uint64, mono int64, coll CollKind, bytes uint64) {
	if c == nil {
		return
	}
	d := c.d
	d.enqueuedAt, d.coll, d.opBytes = mono, uint64(coll), bytes
	release(&d.enqueued, seq)
}

// Started tells the last collective that began to run.
func (c *Comm) Started(seq uint64, mono int64) {
	if c != nil {
		c.d.startedAt = mono
		release(&c.d.started, seq)
	}
}

// Finished tells the last collective that ended.
func (c *Comm) Finished(seq uint64, mono int64) {
	if c != nil {
		c.d.finishedAt = mono
		release(&c.d.finished, seq)
	}
}

// AddPhases adds one finished operation to the communicator's sums, in ns: own
// is the time since the executor's previous operation ended (the rank's own
// compute), wait and transfer are its phases.
func (c *Comm) AddPhases(own, wait, transfer int64, bytes uint64) {
	if c == nil {
		return
	}
	d := c.d
	own = max(own, 0)
	d.ownNs += uint64(own)
	d.waitNs += uint64(max(wait, 0))
	d.transferNs += uint64(max(transfer, 0))
	d.bytes += bytes
	if uint64(own) > d.maxOwnNs {
		d.maxOwnNs = uint64(own)
	}
	release(&d.ops, d.ops+1)
}

// Conn writes one connection's live words. Byte counts are totals that the
// caller keeps. One thread at a time writes a Conn; nil is no-op.
type Conn struct {
	w     *Writer // keeps the mapping
	d     *diskConn
	index uint32
}

// AddConn takes a slot of the conn table. It returns nil and false, and counts
// the overflow, when the table is full.
func (w *Writer) AddConn(e ConnEntry) (*Conn, bool) {
	if w == nil {
		return nil, false
	}
	i := atomic.AddUint64(&w.hdr.connUsed, 1) - 1
	if i >= uint64(w.geo.conns) {
		atomic.AddUint64(&w.hdr.connOverflow, 1)
		return nil, false
	}
	d := (*diskConn)(unsafe.Pointer(&w.mem[w.geo.connAt()+i*ConnEntrySize]))
	d.id, d.peer, d.comm, d.channel, d.transport = e.ID, e.Peer, e.Comm, e.Channel, uint8(e.Transport)
	putName(&d.name, e.Name)
	atomic.StoreUint64(&d.state, published)
	return &Conn{w: w, d: d, index: uint32(i)}, true
}

// Index is the connection's index in the conn table; NoConn for nil.
func (c *Conn) Index() uint32 {
	if c == nil {
		return NoConn
	}
	return c.index
}

// Posted tells the bytes ever handed to the transport, and when the last were.
func (c *Conn) Posted(bytes uint64, mono int64) {
	if c != nil {
		c.d.postedAt = mono
		atomic.StoreUint64(&c.d.posted, bytes)
	}
}

// Completed tells the bytes ever taken by the receiver, and when the last were.
func (c *Conn) Completed(bytes uint64, mono int64) {
	if c != nil {
		c.d.completedAt = mono
		atomic.StoreUint64(&c.d.completed, bytes)
	}
}

// TxBlocked tells since when the sender has had data and no credit, 0 when it is not so.
func (c *Conn) TxBlocked(since int64) {
	if c != nil {
		atomic.StoreInt64(&c.d.txBlocked, since)
	}
}

// Received tells the bytes ever received from the peer, and when the last were.
func (c *Conn) Received(bytes uint64, mono int64) {
	if c != nil {
		c.d.receivedAt = mono
		atomic.StoreUint64(&c.d.received, bytes)
	}
}

// RxWaiting tells since when the receiver has been ready and blocked on this
// peer, 0 when it is not so.
func (c *Conn) RxWaiting(since int64) {
	if c != nil {
		atomic.StoreInt64(&c.d.rxWaiting, since)
	}
}

// Window tells the last closed window: its bandwidth in bytes/s and its cause.
func (c *Conn) Window(bps uint64, cause Cause, mono int64) {
	if c != nil {
		c.d.windowBps, c.d.windowCause = bps, uint64(cause)
		atomic.StoreInt64(&c.d.windowAt, mono)
	}
}

// Slow tells how many anomalous windows there have ever been.
func (c *Conn) Slow(windows uint64) {
	if c != nil {
		atomic.StoreUint64(&c.d.slow, windows)
	}
}

// Windows tells how many windows have ever closed.
func (c *Conn) Windows(windows uint64) {
	if c != nil {
		atomic.StoreUint64(&c.d.windows, windows)
	}
}

// Latency tells the mean time from post to completion in the last closed
// window, in ns.
func (c *Conn) Latency(ns int64) {
	if c != nil {
		atomic.StoreInt64(&c.d.latencyNs, ns)
	}
}
