package record

import (
	"math"
	"math/bits"
	"sync/atomic"
	"unsafe"
)

// Stamp is one operation that a GPU stamped, with times mapped to
// CLOCK_MONOTONIC ns.
//
// Kernels and copy engines count their operations apart. Seq is the operation's
// number in the communicator, from 1, by order of start: operations of one
// communicator never overlap, so it is the sum of both counters. All members
// agree on it as long as all of them run the same operations in the same order.
// Where stamps were lost, those around the gap may be numbered in a wrong
// order; after it, numbers are right again, since both counters are absolute.
type Stamp struct {
	Desc // zero when it is not known
	Comm uint16
	Seq  uint64

	Start, End int64 // End is 0 while it runs; it comes again when it has ended
	Wait       int64 // from Start until the last peer was there, ns
	Peer       int32 // that peer, -1 when nobody came after
	Err        int64 // Start and End are off by at most so much, ns; the same for both, so that their difference is exact

	// Peers is what was stamped of each peer, by rank, of an operation that has ended; of most nothing is.
	Peers [MaxStampPeers]StampPeer
}

// Replay reports whether the operation is a CUDA graph's.
func (s *Stamp) Replay() bool { return s.Flags&DescCaptured != 0 }

// stampCursor is how far a Reader has followed the stamps.
type stampCursor struct {
	comms   []*stampComm // by index in the comm table; nil for those without rings
	next    int          // round robin
	read    uint64
	lost    uint64
	skipped uint64
	own     ownTime
}

// stampComm follows one communicator.
type stampComm struct {
	index   uint16
	gen     uint64
	device  uint16
	kernels stampRing
	copies  stampRing
	host    stampRing     // where HostTells was called, and only then
	peers   []diskPeerRow // of kernels' slots; nil: there are none

	// What orders the newest copy while the host has not told its times: the
	// kernels that had begun when the copy was first seen, and the last look
	// before that.
	kernelsAtCopy uint64
	copyAfter     int64 // CLOCK_MONOTONIC
	lookedAt      int64

	told uint64 // number of the last operation handed over as running
	sums stampSums
	ends *ownEnds // of its device
}

type stampSums struct{ ops, bytes, own, wait, transfer, maxOwn uint64 }

// commRings fills in the rings of an entry, as far as they lie in the table.
func (r *Reader) commRings(e *CommEntry, d *diskComm) {
	in := func(first uint32, count uint16) bool {
		return bits.OnesCount16(count) == 1 && uint64(first)+uint64(count) <= uint64(r.geo.stamps)
	}
	if in(d.stampFirst, d.stampCount) {
		e.Stamps = int(d.stampCount)
	}
	if in(d.copyFirst, d.copyCount) {
		e.Copies = int(d.copyCount)
	}
	if e.Stamps+e.Copies > 0 {
		e.Device = d.device
	}
	if d.hostTells != 0 {
		e.HostStamps, e.Stamps, e.Copies = e.Stamps, 0, 0
	}
}

// stampComm returns the follower of an entry with rings.
func (r *Reader) stampComm(i uint16, gen uint64, e *CommEntry) *stampComm {
	for len(r.stamps.comms) <= int(i) {
		r.stamps.comms = append(r.stamps.comms, nil)
	}
	c := r.stamps.comms[i]
	if c == nil || c.gen != gen {
		if c != nil { // what its former owner did last and was not read
			r.stamps.lost += c.kernels.pending() + c.copies.pending()
		}
		d := (*diskComm)(unsafe.Pointer(&r.mem[r.geo.commAt()+uint64(i)*CommEntrySize]))
		ring := func(first uint32, n int) stampRing {
			if n == 0 || uint64(first)+uint64(n) > uint64(r.geo.stamps) { // it may have changed since it was checked
				return stampRing{next: 1}
			}
			at := &r.mem[r.geo.stampAt()+uint64(first)*StampEntrySize]
			return stampRing{slots: unsafe.Slice((*diskStamp)(unsafe.Pointer(at)), n), next: 1}
		}
		c = &stampComm{index: i, gen: gen, device: e.Device, kernels: ring(d.stampFirst, e.Stamps), copies: ring(d.copyFirst, e.Copies), host: ring(d.stampFirst, e.HostStamps)}
		if len(c.kernels.slots) > 0 {
			c.peers = r.peerRows(d.stampFirst, len(c.kernels.slots))
		}
		r.stamps.comms[i] = c
	}
	return c
}

// advance looks which operations have begun. Copies are looked at first: a
// kernel beyond kernelsAtCopy began after the newest copy had begun.
func (c *stampComm) advance() {
	now, before := Now(), c.copies.top
	c.copies.advance()
	c.kernels.advance()
	if c.copies.top != before {
		c.kernelsAtCopy, c.copyAfter = c.kernels.top, c.lookedAt
	}
	c.lookedAt = now
}

// newest is the operation of a communicator that began last.
type newest struct {
	raw   rawStamp
	state slotState
	copy  bool
	end   uint64 // GPU time at which the last one ended
}

func (c *stampComm) newest() (n newest) {
	k, ks := c.kernels.last(&n.end)
	d, ds := c.copies.last(&n.end)
	// Operations do not overlap: while a kernel runs, or when one has begun
	// since, a copy is over, whatever the host has not told yet.
	switch {
	case ds == slotNone, ks == slotRunning, ks == slotBegun:
		n.raw, n.state = k, ks
	case ds != slotEnded && c.kernels.top > c.kernelsAtCopy:
		n.raw, n.state = k, ks
	case ds != slotEnded, ks == slotNone, d.start > k.start:
		n.raw, n.state, n.copy = d, ds, true
	default:
		n.raw, n.state = k, ks
	}
	return n
}

// stampStatus adds to the words of a communicator, which are of its operations
// on the host, what a GPU has stamped of the others.
func (r *Reader) stampStatus(s *CommStatus) {
	c := r.stampComm(s.Index, s.Gen, &s.CommEntry)
	c.advance()
	clock := r.clock(c.device)
	n := c.newest()
	begun := c.kernels.top + c.copies.top
	if n.state == slotNone {
		return
	}

	host, running := s.Open(), n.state != slotEnded
	start := c.startOf(&n, clock)
	// What runs is told, or else what began last.
	if s.Enqueued == 0 || running && !host || running == host && start >= s.StartedAt {
		desc := r.desc(n.raw.desc)
		s.Coll, s.Bytes, s.StartedAt, s.EnqueuedAt = desc.Coll, desc.Bytes, start, max(start, s.EnqueuedAt)
	}
	if n.end != 0 {
		end, _ := clock.mono(n.end)
		s.FinishedAt = max(s.FinishedAt, end)
	}
	s.Enqueued += begun
	s.Started += begun
	s.Finished += begun
	if running {
		s.Finished--
	}
	s.Ops += c.sums.ops
	s.TotalBytes += c.sums.bytes
	s.OwnNs += c.sums.own
	s.WaitNs += c.sums.wait
	s.TransferNs += c.sums.transfer
	s.MaxOwnNs = max(s.MaxOwnNs, c.sums.maxOwn)
}

// hostStatus adds to the words of a communicator whose process tells of its operations
// what a GPU has stamped of those that come next: the process may be stopped. An
// operation whose turn it is not yet on the host, where what was called before goes on,
// does not count as begun.
func (r *Reader) hostStatus(s *CommStatus) {
	c := r.stampComm(s.Index, s.Gen, &s.CommEntry)
	clock := r.clock(s.Device)
	for range c.host.slots {
		seq := s.Finished + 1
		if seq > s.Enqueued {
			return
		}
		stamp, state := c.host.look(seq, 0)
		if state == slotNone || state == slotBegun {
			return
		}
		if seq >= s.Started {
			s.Started = seq
			s.StartedAt, _ = clock.mono(stamp.start)
		}
		if state == slotRunning {
			return
		}
		s.Finished = seq
		s.FinishedAt, _ = clock.mono(stamp.end)
	}
}

// startOf is when the newest operation began. Of a copy that the host has not
// told of, that is the latest time at which it cannot have begun yet.
func (c *stampComm) startOf(n *newest, clock deviceClock) int64 {
	if n.state != slotBegun {
		t, _ := clock.mono(n.raw.start)
		return t
	}
	t := c.copyAfter
	if n.end != 0 {
		end, _ := clock.mono(n.end)
		t = max(t, end)
	}
	if n.copy && n.raw.start == 0 {
		t = max(t, int64(n.raw.arrived)) // when it was enqueued
	}
	return t
}

// Stamps fills dst with operations that have ended since the last call, each
// communicator's in order, and with those that run and were not told yet. It
// returns how many; a count below len(dst) means that the reader has caught up.
// Sums of CommStatus (Ops, OwnNs, ...) count what it has returned.
//
// A copy's times are told by the host: until then, later kernels of the same
// communicator are kept back, for at most half a ring.
func (r *Reader) Stamps(dst []Stamp) (n int) {
	if r.geo.stamps == 0 {
		return 0
	}
	r.guard(func() {
		own := &r.stamps.own
		n = r.sweepStamps(dst)
		if own.look() && n < len(dst) {
			// What ended before the newest of these is known after another look.
			n += r.sweepStamps(dst[n:])
		}
		if n < len(dst) {
			own.settle()
		}
		r.stamps.next++
	})
	return n
}

// sweepStamps drains each communicator once.
func (r *Reader) sweepStamps(dst []Stamp) (n int) {
	used := int(min(atomic.LoadUint64(&r.hdr.commUsed), uint64(r.geo.comms)))
	for i := range used {
		if c := r.follower(uint64((r.stamps.next + i) % used)); c != nil && n < len(dst) {
			n += r.drainStamps(c, dst[n:])
		}
	}
	return n
}

// follower returns an entry's follower, nil when it has no rings.
func (r *Reader) follower(i uint64) *stampComm {
	d := (*diskComm)(unsafe.Pointer(&r.mem[r.geo.commAt()+i*CommEntrySize]))
	state := atomic.LoadUint64(&d.state)
	if state&published == 0 {
		return nil
	}
	gen := state >> genShift
	e := r.commEntry(i, gen, d)
	if e.Stamps+e.Copies == 0 {
		return nil
	}
	return r.stampComm(uint16(i), gen, &e)
}

func (r *Reader) drainStamps(c *stampComm, dst []Stamp) (n int) {
	c.advance()
	clock := r.clock(c.device)
	// No more than what both rings hold: a writer may be as quick as its reader.
	for range len(c.kernels.slots) + len(c.copies.slots) {
		if n == len(dst) {
			return n
		}
		k, ks, lost := c.kernels.candidate()
		d, ds, more := c.copies.candidate()
		r.stamps.lost += lost + more
		var g *stampRing
		var s *rawStamp
		switch {
		case ds == slotEnded && (ks != slotEnded || d.start < k.start):
			g, s = &c.copies, &d
		case ks != slotEnded:
		case ds == slotNone, ds == slotEnded, c.kernels.top-c.kernels.next >= uint64(len(c.kernels.slots)/2):
			g, s = &c.kernels, &k
		}
		if g == nil {
			break
		}
		seq := c.kernels.next + c.copies.next - 1
		dst[n] = r.stamp(c, clock, s, seq)
		if g == &c.kernels {
			c.peersOf(s.seq, s.end-s.start, &dst[n].Peers)
		}
		c.add(s, &dst[n])
		r.stamps.own.add(c, s)
		g.next, g.after = g.next+1, s.start
		r.stamps.read++
		n++
	}
	if n == len(dst) {
		return n
	}
	// A kernel whose start is not there yet is in the middle of telling it.
	now := c.newest()
	runs := now.state == slotRunning || now.state == slotBegun && now.copy
	if seq := c.kernels.top + c.copies.top; runs && seq > c.told {
		c.told = seq
		dst[n] = Stamp{Desc: r.desc(now.raw.desc), Comm: c.index, Seq: seq, Start: c.startOf(&now, clock), Peer: -1}
		if now.state == slotRunning {
			_, dst[n].Err = clock.mono(now.raw.start)
		} else {
			dst[n].Err = max(c.lookedAt-dst[n].Start, 0)
		}
		n++
	}
	return n
}

func (r *Reader) stamp(c *stampComm, clock deviceClock, s *rawStamp, seq uint64) Stamp {
	out := Stamp{Desc: r.desc(s.desc), Comm: c.index, Seq: seq, Peer: -1}
	out.Start, out.Err = clock.mono(s.start)
	took := min(s.end-s.start, math.MaxInt64/4)
	out.End = out.Start + int64(took)
	out.Wait = int64(min(s.arrived>>8, took))
	if peer := uint8(s.arrived); peer != noPeer {
		out.Peer = int32(peer)
	}
	return out
}

const noPeer = 0xff

// add counts an operation that has ended.
func (c *stampComm) add(s *rawStamp, out *Stamp) {
	sum := &c.sums
	sum.ops++
	sum.bytes += out.Bytes
	sum.wait += uint64(out.Wait)
	sum.transfer += uint64(out.End - out.Start - out.Wait)
}

// StampCount accounts for the stamped operations that had begun at the last
// look: those that Stamps has returned as ended, those that were overwritten
// unread or whose end was never told, and those it may still return. With those
// that SeekTail skipped they make all.
func (r *Reader) StampCount() (read, lost, pending uint64) {
	for _, c := range r.stamps.comms {
		if c != nil {
			pending += c.kernels.pending() + c.copies.pending()
		}
	}
	return r.stamps.read, r.stamps.lost, pending
}

// seekStamps passes over what was overwritten before this reader came.
func (r *Reader) seekStamps() {
	for i := range min(atomic.LoadUint64(&r.hdr.commUsed), uint64(r.geo.comms)) {
		c := r.follower(i)
		if c == nil {
			continue
		}
		c.advance()
		for _, g := range []*stampRing{&c.kernels, &c.copies} {
			if n := uint64(len(g.slots)); n > 0 && g.top >= n && g.next <= g.top-n {
				r.stamps.skipped += g.top - n + 1 - g.next
				g.next = g.top - n + 1
			}
		}
	}
}

// desc decodes a descriptor, the zero Desc when it is not known.
func (r *Reader) desc(i uint16) Desc {
	if i == 0 || uint64(i) >= min(atomic.LoadUint64(&r.hdr.descUsed), uint64(r.geo.descs)) {
		return Desc{Root: -1}
	}
	d := (*diskDesc)(unsafe.Pointer(&r.mem[r.geo.descAt()+uint64(i)*DescEntrySize]))
	return Desc{
		Coll: CollKind(d.coll), DType: DType(d.dtype), Op: RedOp(d.op), Algo: Algo(d.algo), Proto: Proto(d.proto),
		Flags: d.flags, SMs: d.sms, Root: max(d.root, -1), Stream: d.stream, Bytes: d.bytes,
	}
}
