package record

import (
	"math"
	"net/netip"
	"strconv"
	"strings"
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
	// the index of the Device, added before, whose clock it is. The words Enqueued,
	// Started and Finished tell of operations on the host only; readers add both.
	Stamps, Copies int
	Device         uint16
	// HostStamps is, for readers, how many stamps there are instead of those where
	// Comm.HostTells was called.
	HostStamps int
}

// ConnEntry is what is fixed about a connection. One entry carries both halves
// of a pair as this process sees them: sent to the peer, received from it.
type ConnEntry struct {
	Comm      uint16 // index of the communicator
	Peer      int32  // rank in the communicator
	Transport Transport
	Channel   uint16 // no two connections of a communicator between the same ranks have one transport and one channel; ID may change
	ID        uint64 // QP number or socket inode, 0 when it has none; see Conn.Renamed
	PeerID    uint32 // of the peer's queue pair, 0 when it has none
	// Address is this end's port: a GID, or an IP address as one (IPv4-mapped); zero when it is not known.
	Address [16]byte
	Rail    int    // of this end's port among its node's, from 1; 0 when it is not known
	Name    string // at most 63 bytes: NIC and port of both ends ("mlx5_0/1->mlx5_2/1"), or addresses ("tcp 127.0.0.1:4000->127.0.0.1:5000")
}

// NIC is the device of this end's port and the port's number, by Name; "" and 0 where the
// connection has none.
func (e *ConnEntry) NIC() (device string, port int) {
	if !e.Transport.QueuePair() {
		return "", 0
	}
	return NICOf(e.Name)
}

// NICOf is the NIC and port that the name of a path begins with, "" and 0 when it does not.
func NICOf(path string) (device string, port int) {
	own, _, ok := strings.Cut(path, "->")
	device, number, named := strings.Cut(own, "/")
	port, err := strconv.Atoi(number)
	if !ok || !named || err != nil || port < 1 {
		return "", 0
	}
	return device, port
}

// AddressText is a connection's address in words, "" for none.
func AddressText(a [16]byte) string {
	if a == ([16]byte{}) {
		return ""
	}
	return netip.AddrFrom16(a).Unmap().String()
}

// Comm writes one communicator's live words. Each word is stored whole and a
// sequence is stored after the words that go with it, so a reader never sees
// a sequence without its time. Enqueued may be called by one thread at a time
// and Started, Finished and AddPhases by another; nil is no-op.
//
// Some time after it has been left or aborted, its slot may go to another
// communicator. What is written through the handle then goes nowhere.
type Comm struct {
	w      *Writer // keeps the mapping
	d      atomic.Pointer[diskComm]
	index  uint16
	gen    uint64
	closed bool    // under Writer.tables
	conns  []*Conn // likewise
}

// AddComm takes a slot of the comm table: a new one, or when there is none one
// of a communicator that was closed long enough ago. Else it returns nil and
// false, and counts the overflow.
func (w *Writer) AddComm(e CommEntry) (*Comm, bool) {
	if w == nil {
		return nil, false
	}
	w.tables.Lock()
	defer w.tables.Unlock()
	i, gen, ok := w.comms.take(&w.hdr.commUsed, w.geo.comms, w.recycle)
	if !ok {
		atomic.AddUint64(&w.hdr.commOverflow, 1)
		return nil, false
	}
	d := (*diskComm)(unsafe.Pointer(&w.mem[w.geo.commAt()+uint64(i)*CommEntrySize]))
	*d = diskComm{id: e.ID, parent: e.Parent, rank: e.Rank, size: e.Size}
	putName(&d.name, e.Name)
	if gen > 0 {
		d.since = atomic.LoadUint64(&w.hdr.head)
	}
	w.addRings(d, e)
	c := &Comm{w: w, index: uint16(i), gen: gen}
	c.d.Store(d)
	w.byIndex[uint16(i)] = c
	c.setState(e.State)
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

// SetState tells what became of the communicator. After CommLeft and
// CommAborted nothing more is to be told of it and its connections.
func (c *Comm) SetState(s CommState) {
	if c == nil {
		return
	}
	c.w.tables.Lock()
	defer c.w.tables.Unlock()
	c.setState(s)
}

// Aborted is SetState(CommAborted) with the reason: why, and the rank in the
// communicator that the error named, -1 for none. The first reason stands.
func (c *Comm) Aborted(why Result, peer int32) {
	if c == nil {
		return
	}
	c.w.tables.Lock()
	defer c.w.tables.Unlock()
	d := c.d.Load()
	if CommState(atomic.LoadUint64(&d.state)) == CommAborted {
		return
	}
	atomic.StoreInt32(&d.faultPeer, peer)
	atomic.StoreUint32(&d.fault, uint32(why))
	c.setState(CommAborted)
}

func (c *Comm) setState(s CommState) {
	d := c.d.Load()
	if d.stateAt == 0 || CommState(atomic.LoadUint64(&d.state)) != s {
		atomic.StoreInt64(&d.stateAt, Now())
	}
	atomic.StoreUint64(&d.state, c.gen<<genShift|published|uint64(s))
	if (s == CommLeft || s == CommAborted) && !c.closed {
		c.closed = true
		c.w.closed = append(c.w.closed, closedComm{c, Now()})
	}
}

// HostTells tells that the process numbers the communicator's operations and records
// them, whole, as if there were no GPU. What the GPU stamps of one, in the slot of its
// number (StampSlot), goes into that record; of an operation under way readers take
// from it what the process has not told yet, since it may be stopped. It comes before
// the first operation.
func (c *Comm) HostTells() {
	if c == nil || c.d.Load().stampCount+c.d.Load().copyCount == 0 {
		return
	}
	c.w.tables.Lock()
	defer c.w.tables.Unlock()
	d := c.d.Load()
	state := CommState(atomic.LoadUint64(&d.state))
	atomic.StoreUint64(&d.state, 0)
	d.hostTells = 1
	c.gen++ // readers keep what was fixed about a generation
	c.setState(state)
}

// Enqueued tells the last collective submitted. mono is 0 for one that is going
// to start at once: its start is its time.
func (c *Comm) Enqueued(seq uint64, mono int64, coll CollKind, bytes uint64) {
	if c == nil {
		return
	}
	d := c.d.Load()
	d.enqueuedAt, d.coll, d.opBytes = mono, uint64(coll), bytes
	release(&d.enqueued, seq)
}

// Started tells the last collective that began to run.
func (c *Comm) Started(seq uint64, mono int64) {
	if c != nil {
		d := c.d.Load()
		d.startedAt = mono
		release(&d.started, seq)
	}
}

// Finished tells the last collective that ended.
func (c *Comm) Finished(seq uint64, mono int64) {
	if c != nil {
		d := c.d.Load()
		d.finishedAt = mono
		release(&d.finished, seq)
	}
}

// AddPhases adds one finished operation to the communicator's sums, in ns: own
// is the time since the executor's previous operation ended (the rank's own
// compute), wait and transfer are its phases.
func (c *Comm) AddPhases(own, wait, transfer int64, bytes uint64) {
	if c == nil {
		return
	}
	d := c.d.Load()
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
// caller keeps. One thread at a time writes a Conn; nil is no-op. Its slot goes
// with its communicator's.
type Conn struct {
	w     *Writer // keeps the mapping
	d     atomic.Pointer[diskConn]
	log   atomic.Pointer[historyLog] // nil until there is a window
	index uint32
}

// AddConn takes a slot of the conn table, as AddComm does. It returns nil and
// false, and counts the overflow, when there is none.
func (w *Writer) AddConn(e ConnEntry) (*Conn, bool) {
	if w == nil {
		return nil, false
	}
	w.tables.Lock()
	defer w.tables.Unlock()
	i, gen, ok := w.conns.take(&w.hdr.connUsed, w.geo.conns, w.recycle)
	if !ok {
		atomic.AddUint64(&w.hdr.connOverflow, 1)
		return nil, false
	}
	d := (*diskConn)(unsafe.Pointer(&w.mem[w.geo.connAt()+uint64(i)*ConnEntrySize]))
	*d = diskConn{
		id: e.ID, peer: e.Peer, comm: e.Comm, channel: e.Channel, transport: uint8(e.Transport),
		peerID: e.PeerID, address: e.Address, rail: uint8(min(max(e.Rail, 0), 255)),
	}
	putName(&d.name, e.Name)
	c := &Conn{w: w, index: i}
	c.d.Store(d)
	if owner := w.byIndex[e.Comm]; owner != nil {
		owner.conns = append(owner.conns, c)
	}
	atomic.StoreUint64(&d.state, gen<<genShift|published)
	return c, true
}

// freeSlots is the slots of a table that were used and may be used again.
type freeSlots []freeSlot

type freeSlot struct {
	index uint32
	gen   uint64 // of its next owner
}

// take returns a slot that was never used, or one that is free, once recycle
// has freed some.
func (f *freeSlots) take(used *uint64, slots uint32, recycle func() bool) (index uint32, gen uint64, ok bool) {
	if n := atomic.LoadUint64(used); n < uint64(slots) {
		atomic.StoreUint64(used, n+1)
		return uint32(n), 0, true
	}
	for len(*f) == 0 {
		if !recycle() {
			return 0, 0, false
		}
	}
	s := (*f)[len(*f)-1]
	*f = (*f)[:len(*f)-1]
	return s.index, s.gen, true
}

// closedComm is a communicator that was left or aborted.
type closedComm struct {
	c  *Comm
	at int64
}

// graceNs is how long a closed communicator's slots keep its last words: for
// readers to have read them, and its threads to have ended.
const graceNs = 10e9

// recycle frees the slots of the communicator that was closed first, if that was
// long enough ago.
func (w *Writer) recycle() bool {
	if len(w.closed) == 0 || Now()-w.closed[0].at < w.grace {
		return false
	}
	c := w.closed[0].c
	w.closed = w.closed[1:]
	d := c.d.Swap(new(diskComm))
	atomic.StoreUint64(&d.state, 0)
	if n := [2]uint16{d.stampCount, d.copyCount}; n != [2]uint16{} {
		w.rings[n] = append(w.rings[n], d.stampFirst)
	}
	delete(w.byIndex, c.index)
	w.comms = append(w.comms, freeSlot{uint32(c.index), c.gen + 1})
	for _, k := range c.conns {
		d := k.d.Swap(new(diskConn))
		gen := atomic.SwapUint64(&d.state, 0) >> genShift
		k.closeHistory()
		w.conns = append(w.conns, freeSlot{k.index, gen + 1})
	}
	c.conns = nil
	return true
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
		d := c.d.Load()
		d.postedAt = mono
		release(&d.posted, bytes)
	}
}

// Completed tells the bytes ever taken by the receiver, and when the last were.
func (c *Conn) Completed(bytes uint64, mono int64) {
	if c != nil {
		d := c.d.Load()
		d.completedAt = mono
		release(&d.completed, bytes)
	}
}

// TxBlocked tells since when the sender has had data and no credit, 0 when it is not so.
func (c *Conn) TxBlocked(since int64) {
	if c != nil {
		d := c.d.Load()
		release(word(&d.txBlocked), uint64(since))
	}
}

// Received tells the bytes ever received from the peer, and when the last were.
func (c *Conn) Received(bytes uint64, mono int64) {
	if c != nil {
		d := c.d.Load()
		d.receivedAt = mono
		release(&d.received, bytes)
	}
}

// RxWaiting tells since when the receiver has been ready and blocked on this
// peer, 0 when it is not so.
func (c *Conn) RxWaiting(since int64) {
	if c != nil {
		d := c.d.Load()
		release(word(&d.rxWaiting), uint64(since))
	}
}

// Window tells the last closed window: its bandwidth in bytes/s and its cause.
func (c *Conn) Window(bps uint64, cause Cause, mono int64) {
	if c != nil {
		d := c.d.Load()
		d.windowBps, d.windowCause = bps, uint64(cause)
		release(word(&d.windowAt), uint64(mono))
	}
}

// Slow tells how many anomalous windows there have ever been.
func (c *Conn) Slow(windows uint64) {
	if c != nil {
		d := c.d.Load()
		release(&d.slow, windows)
	}
}

// Windows tells how many windows have ever closed.
func (c *Conn) Windows(windows uint64) {
	if c != nil {
		d := c.d.Load()
		release(&d.windows, windows)
	}
}

// Latency tells the mean time from post to completion in the last closed
// window, in ns.
func (c *Conn) Latency(ns int64) {
	if c != nil {
		d := c.d.Load()
		release(word(&d.latencyNs), uint64(ns))
	}
}

// Link tells the state of the connection's path and since when. A connection
// with several paths has an entry each: LinkUp carries traffic or is ready to,
// LinkSwitched carries what another entry's path no longer does, LinkDown is broken.
func (c *Conn) Link(state LinkState, since int64) {
	if c != nil {
		d := c.d.Load()
		d.linkAt = since
		atomic.StoreUint32(&d.link, uint32(state))
	}
}

// Switched tells how often this path has taken over from another, and how many
// bytes have ever been sent again on it because the other path had lost them.
func (c *Conn) Switched(switches, resent uint64) {
	if c != nil {
		d := c.d.Load()
		d.resent = resent
		release(&d.switches, switches)
	}
}

// RTT tells the smoothed round-trip time between the two hosts, ns, as their kernels measure it; 0 when
// it is not known any more.
func (c *Conn) RTT(ns int64) {
	if c != nil {
		d := c.d.Load()
		atomic.StoreUint32(&d.rtt, uint32(min(max(ns/1e3, 0), math.MaxUint32)))
	}
}

// Renamed tells new IDs of both ends: a path that comes back has other queue pairs.
func (c *Conn) Renamed(id uint64, peer uint32) {
	if c != nil {
		d := c.d.Load()
		atomic.StoreUint32(&d.peerID, peer)
		release(&d.id, id)
	}
}

// word is a time's word.
func word(p *int64) *uint64 { return (*uint64)(unsafe.Pointer(p)) }
