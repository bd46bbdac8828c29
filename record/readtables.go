package record

import (
	"sync/atomic"
	"unsafe"
)

// CommStatus is one communicator's entry and live words. Times are
// CLOCK_MONOTONIC ns, 0 for never.
type CommStatus struct {
	CommEntry
	Index uint16
	Gen   uint64 // a slot that is used again has another
	Since uint64 // records of this index with an older ticket are of a former Gen

	StateAt int64 // when State took its value
	// Fault is why State is CommAborted (ResultOK when nobody has told), FaultPeer whom
	// that names, -1 when nobody.
	Fault     Result
	FaultPeer int32

	Enqueued   uint64   // last sequence submitted, 0 when none
	EnqueuedAt int64    // StartedAt when it started at once
	Coll       CollKind // of the last submitted
	Bytes      uint64   // of the last submitted
	Started    uint64
	StartedAt  int64
	Finished   uint64
	FinishedAt int64 // StartedAt when the end is assumed: see Assumed

	// Sums over finished operations.
	Ops        uint64
	TotalBytes uint64
	OwnNs      uint64
	WaitNs     uint64
	TransferNs uint64
	MaxOwnNs   uint64
}

// Open reports whether the member is inside a collective.
func (c *CommStatus) Open() bool { return c.Started > c.Finished }

// Assumed reports whether the member's last operation, one that nobody leaves
// before all have entered it, is taken for over because nothing more was heard of
// it: NCCL was not asked to time it, and nothing that it was asked for came after
// it. While another member has not called it, it is not over.
func (c *CommStatus) Assumed() bool {
	return c.Finished > 0 && c.Finished == c.Enqueued && c.Finished == c.Started && c.FinishedAt == c.StartedAt && c.Coll.Synchronizes()
}

// ConnStatus is one connection's entry and live words. Times are
// CLOCK_MONOTONIC ns, 0 for never or not.
type ConnStatus struct {
	ConnEntry
	Index   uint32
	Gen     uint64
	History uint16 // 1 + its slot in the history table, 0 while it has none

	Posted         uint64 // bytes ever handed to the transport
	PostedAt       int64
	Completed      uint64 // bytes ever taken by the receiver
	CompletedAt    int64
	TxBlockedSince int64
	Received       uint64 // bytes ever received
	ReceivedAt     int64
	RxWaitingSince int64

	WindowBps   uint64 // of the last closed window
	WindowCause Cause
	WindowAt    int64
	SlowWindows uint64
	Windows     uint64 // closed ever
	LatencyNs   int64  // mean from post to completion in the last closed window

	Link     LinkState // LinkNone where nobody tells
	LinkAt   int64     // since when
	Switches uint64    // how often this path has taken over from another
	Resent   uint64    // bytes sent again on it because the other path had lost them

	RTT int64 // smoothed round-trip time between the two hosts, ns; 0 while it is not known
}

// Outstanding is how many bytes the receiver has not taken yet.
func (c *ConnStatus) Outstanding() uint64 {
	if c.Completed > c.Posted { // the words are not read at one instant
		return 0
	}
	return c.Posted - c.Completed
}

// Comms appends the status of every communicator to dst, by index.
func (r *Reader) Comms(dst []CommStatus) []CommStatus {
	r.guard(func() {
		n := min(atomic.LoadUint64(&r.hdr.commUsed), uint64(r.geo.comms))
		for i := range n {
			d := (*diskComm)(unsafe.Pointer(&r.mem[r.geo.commAt()+i*CommEntrySize]))
			state := atomic.LoadUint64(&d.state)
			if state&published == 0 {
				continue
			}
			gen := state >> genShift
			s := CommStatus{CommEntry: r.commEntry(i, gen, d), Index: uint16(i), Gen: gen, Since: atomic.LoadUint64(&d.since)}
			s.State, s.StateAt = CommState(state), atomic.LoadInt64(&d.stateAt)
			if s.State == CommAborted {
				if f := atomic.LoadUint32(&d.fault); f < uint32(numResults) {
					s.Fault, s.FaultPeer = Result(f), atomic.LoadInt32(&d.faultPeer)
				}
			}
			// The order matters, see Comm: finished before started before
			// enqueued can only make an operation look open for longer.
			s.Finished = atomic.LoadUint64(&d.finished)
			s.FinishedAt = atomic.LoadInt64(&d.finishedAt)
			s.Started = atomic.LoadUint64(&d.started)
			s.StartedAt = atomic.LoadInt64(&d.startedAt)
			s.Enqueued = atomic.LoadUint64(&d.enqueued)
			s.EnqueuedAt = atomic.LoadInt64(&d.enqueuedAt)
			if s.EnqueuedAt == 0 {
				s.EnqueuedAt = s.StartedAt
			}
			s.Coll = CollKind(atomic.LoadUint64(&d.coll))
			s.Bytes = atomic.LoadUint64(&d.opBytes)
			s.Ops = atomic.LoadUint64(&d.ops)
			s.TotalBytes = atomic.LoadUint64(&d.bytes)
			s.OwnNs = atomic.LoadUint64(&d.ownNs)
			s.WaitNs = atomic.LoadUint64(&d.waitNs)
			s.TransferNs = atomic.LoadUint64(&d.transferNs)
			s.MaxOwnNs = atomic.LoadUint64(&d.maxOwnNs)
			switch {
			case s.Stamps+s.Copies > 0:
				r.stampStatus(&s)
			case s.HostStamps > 0 && s.State == CommJoined: // what an abort lets go of is no end
				r.hostStatus(&s)
			}
			if now := atomic.LoadUint64(&d.state); now&published == 0 || now>>genShift != gen {
				r.comms[i].known = false
				continue // it is going to another communicator
			}
			dst = append(dst, s)
		}
	})
	return dst
}

// Conns appends the status of every connection to dst, by index.
func (r *Reader) Conns(dst []ConnStatus) []ConnStatus {
	r.guard(func() {
		n := min(atomic.LoadUint64(&r.hdr.connUsed), uint64(r.geo.conns))
		for i := range n {
			d := (*diskConn)(unsafe.Pointer(&r.mem[r.geo.connAt()+i*ConnEntrySize]))
			state := atomic.LoadUint64(&d.state)
			if state&published == 0 {
				continue
			}
			s := ConnStatus{ConnEntry: r.connEntry(i, state>>genShift, d), Index: uint32(i), Gen: state >> genShift}
			s.Completed = atomic.LoadUint64(&d.completed)
			s.CompletedAt = atomic.LoadInt64(&d.completedAt)
			s.Posted = atomic.LoadUint64(&d.posted)
			s.PostedAt = atomic.LoadInt64(&d.postedAt)
			s.TxBlockedSince = atomic.LoadInt64(&d.txBlocked)
			s.Received = atomic.LoadUint64(&d.received)
			s.ReceivedAt = atomic.LoadInt64(&d.receivedAt)
			s.RxWaitingSince = atomic.LoadInt64(&d.rxWaiting)
			s.WindowAt = atomic.LoadInt64(&d.windowAt)
			s.WindowBps = atomic.LoadUint64(&d.windowBps)
			s.WindowCause = Cause(atomic.LoadUint64(&d.windowCause))
			s.SlowWindows = atomic.LoadUint64(&d.slow)
			s.Windows = atomic.LoadUint64(&d.windows)
			s.LatencyNs = atomic.LoadInt64(&d.latencyNs)
			s.LinkAt = atomic.LoadInt64(&d.linkAt)
			s.Link = LinkState(atomic.LoadUint32(&d.link))
			s.RTT = int64(atomic.LoadUint32(&d.rtt)) * 1e3
			s.Switches = atomic.LoadUint64(&d.switches)
			s.Resent = atomic.LoadUint64(&d.resent)
			s.ID = atomic.LoadUint64(&d.id)
			s.PeerID = atomic.LoadUint32(&d.peerID)
			if now := atomic.LoadUint64(&d.id); now != s.ID { // renamed in between, which takes seconds to come again
				s.ID, s.PeerID = now, atomic.LoadUint32(&d.peerID)
			}
			s.History = d.history
			if atomic.LoadUint64(&d.state) != state {
				r.conns[i].known = false
				continue
			}
			dst = append(dst, s)
		}
	})
	return dst
}

// cached is the fixed part of an entry, decoded when its generation is first seen.
type cached[T any] struct {
	entry T
	gen   uint64
	known bool
}

func (r *Reader) commEntry(i, gen uint64, d *diskComm) CommEntry {
	for uint64(len(r.comms)) <= i {
		r.comms = append(r.comms, cached[CommEntry]{})
	}
	c := &r.comms[i]
	if !c.known || c.gen != gen {
		e := CommEntry{ID: d.id, Name: getName(&d.name), Rank: d.rank, Size: max(d.size, 0), Parent: d.parent}
		r.commRings(&e, d)
		*c = cached[CommEntry]{e, gen, true}
	}
	return c.entry
}

func (r *Reader) connEntry(i, gen uint64, d *diskConn) ConnEntry {
	for uint64(len(r.conns)) <= i {
		r.conns = append(r.conns, cached[ConnEntry]{})
	}
	c := &r.conns[i]
	if !c.known || c.gen != gen {
		e := ConnEntry{Comm: d.comm, Peer: max(d.peer, -1), Transport: Transport(d.transport), Channel: d.channel, ID: d.id, Address: d.address, Rail: int(d.rail), Name: getName(&d.name)}
		*c = cached[ConnEntry]{e, gen, true}
	}
	return c.entry
}
