package record

import (
	"cmp"
	"math"
	"math/bits"
	"slices"
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
	host    stampRing // where HostTells was called, and only then

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

// stampRing follows one ring of slots.
type stampRing struct {
	slots []diskStamp // its length is a power of two
	next  uint64      // sequence to hand over next
	top   uint64      // newest that has begun
	after uint64      // GPU time that all from next on begin after
}

// rawStamp is a slot's content, of one moment.
type rawStamp struct {
	seq                 uint64
	desc                uint16
	start, arrived, end uint64
}

type slotState int

const (
	slotNone    slotState = iota // not begun, or overwritten
	slotBegun                    // begun, its start is not known
	slotRunning                  // its start is known
	slotEnded
)

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
		r.stamps.comms[i] = c
	}
	return c
}

func (g *stampRing) slot(seq uint64) *diskStamp { return &g.slots[seq&uint64(len(g.slots)-1)] }

// advance finds the newest operation that has begun.
func (g *stampRing) advance() {
	for range g.slots {
		switch seq := atomic.LoadUint64(&g.slot(g.top+1).id) >> 16; {
		case seq == g.top+1:
			g.top = seq
			continue
		case seq > g.top+1 && (seq^(g.top+1))&uint64(len(g.slots)-1) == 0:
			// A lap behind, or more: any slot may have the newest.
			for i := range g.slots {
				seq := atomic.LoadUint64(&g.slots[i].id) >> 16
				if seq&uint64(len(g.slots)-1) == uint64(i) {
					g.top = max(g.top, seq)
				}
			}
		}
		return
	}
}

// look reads one operation's slot. A start before the given time is one
// that the slot still has from its former operation.
func (g *stampRing) look(seq, after uint64) (rawStamp, slotState) {
	d := g.slot(seq)
	var s rawStamp
	for try := 0; ; try++ {
		id := atomic.LoadUint64(&d.id)
		s = rawStamp{seq: id >> 16, desc: uint16(id), start: atomic.LoadUint64(&d.start), arrived: atomic.LoadUint64(&d.arrived), end: atomic.LoadUint64(&d.end)}
		if s.seq != seq {
			return s, slotNone
		}
		if atomic.LoadUint64(&d.id) == id && atomic.LoadUint64(&d.start) == s.start &&
			atomic.LoadUint64(&d.arrived) == s.arrived && atomic.LoadUint64(&d.end) == s.end {
			break
		}
		if try == 3 { // it changes under every look: the next pass will see
			return s, slotBegun
		}
	}
	switch {
	case s.start == 0 || s.start < after:
		return s, slotBegun
	case s.end < s.start:
		return s, slotRunning
	}
	return s, slotEnded
}

// candidate returns the operation to hand over next, and how many were lost before it.
func (g *stampRing) candidate() (s rawStamp, st slotState, lost uint64) {
	if len(g.slots) == 0 {
		return s, slotNone, 0
	}
	n := uint64(len(g.slots))
	for range 3 {
		if g.top >= n && g.next <= g.top-n { // lapped
			lost += g.top - n + 1 - g.next
			g.next = g.top - n + 1
		}
		if g.next > g.top {
			return s, slotNone, lost
		}
		if s, st = g.look(g.next, g.after); st == slotEnded {
			return s, st, lost
		}
		if st == slotNone { // overwritten since top was found
			g.advance()
			if g.top >= n && g.next <= g.top-n {
				continue
			}
			return s, slotNone, lost // hostile: a sequence went back
		}
		if g.next == g.top {
			return s, st, lost
		}
		// Younger ones have begun. When the next has ended, and this one still
		// has not, nobody will ever tell its end.
		if _, later := g.look(g.next+1, g.after); later != slotEnded {
			return s, st, lost
		}
		if s, st = g.look(g.next, g.after); st == slotEnded {
			return s, st, lost
		}
		lost++
		g.next++
	}
	return s, slotNone, lost
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

// last looks at the ring's newest operation, and moves end to the end of its last.
func (g *stampRing) last(end *uint64) (rawStamp, slotState) {
	if g.top == 0 {
		return rawStamp{}, slotNone
	}
	after := uint64(0)
	if g.next == g.top {
		after = g.after
	}
	if before, st := g.look(g.top-1, 0); st != slotNone && len(g.slots) > 1 && g.top > 1 {
		after = max(after, before.start)
		if st == slotEnded {
			*end = max(*end, before.end)
		}
	}
	s, st := g.look(g.top, after)
	switch st {
	case slotNone: // overwritten since top was found: something has begun
		return rawStamp{seq: g.top}, slotBegun
	case slotEnded:
		*end = max(*end, s.end)
	}
	return s, st
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

// ownTime works out what a process did outside of operations: what lies before each
// of them, and after the former one on its device, of whichever communicator.
// Communicators are read one after the other, so an operation counts only when
// all that ended before it must have been read.
type ownTime struct {
	spans []ownSpan
	ends  map[uint16]*ownEnds // by device
}

type ownSpan struct {
	comm       *stampComm
	start, end uint64 // GPU time
}

type ownEnds struct {
	last  uint64 // of what has been counted
	known uint64 // all that ended until then have been read
	next  uint64 // known, after another look
}

// maxSpans bounds what waits to be counted.
const maxSpans = 1 << 14

func (o *ownTime) add(c *stampComm, s *rawStamp) {
	if o.ends == nil {
		o.ends = map[uint16]*ownEnds{}
	}
	if c.ends == nil {
		if c.ends = o.ends[c.device]; c.ends == nil {
			c.ends = &ownEnds{}
			o.ends[c.device] = c.ends
		}
	}
	c.ends.next = max(c.ends.next, s.end)
	if o.spans = append(o.spans, ownSpan{c, s.start, s.end}); len(o.spans) == maxSpans {
		o.look()
		o.settle()
	}
}

// look begins another look; false when there is nothing to count.
func (o *ownTime) look() bool {
	for _, e := range o.ends {
		e.known = e.next
	}
	return len(o.spans) > 0
}

// settle counts what can be counted.
func (o *ownTime) settle() {
	if len(o.spans) == 0 {
		return
	}
	slices.SortFunc(o.spans, func(a, b ownSpan) int { return cmp.Compare(a.start, b.start) })
	left := o.spans[:0]
	for _, s := range o.spans {
		e := s.comm.ends
		if s.end > e.known {
			left = append(left, s)
			continue
		}
		if e.last != 0 && s.start > e.last {
			sum, own := &s.comm.sums, s.start-e.last
			sum.own += own
			sum.maxOwn = max(sum.maxOwn, own)
		}
		e.last = max(e.last, s.end)
	}
	clear(o.spans[len(left):])
	o.spans = left
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

func (g *stampRing) pending() uint64 {
	return g.top + 1 - min(g.next, g.top+1)
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

// DeviceStatus is one GPU's entry, and its clock.
type DeviceStatus struct {
	DeviceEntry
	Anchor DeviceAnchor // the latest
	Err    int64        // bound on the error of a stamp that is made now, ns
}

// Devices appends the status of every GPU to dst, by index.
func (r *Reader) Devices(dst []DeviceStatus) []DeviceStatus {
	r.guard(func() {
		for i := range min(atomic.LoadUint64(&r.hdr.deviceUsed), uint64(r.geo.devices)) {
			d := (*diskDevice)(unsafe.Pointer(&r.mem[r.geo.deviceAt()+i*DeviceEntrySize]))
			a := r.clock(uint16(i)).anchors[0]
			dst = append(dst, DeviceStatus{
				DeviceEntry: DeviceEntry{UUID: d.uuid, Ordinal: d.ordinal, Name: getName(&d.name)},
				Anchor:      a, Err: a.Err + drift(Now()-a.Mono),
			})
		}
	})
	return dst
}

// deviceClock maps a GPU's time to the host's by the device's last two anchors.
type deviceClock struct {
	anchors [2]DeviceAnchor // the last, and the one before
	n       int
}

func (r *Reader) clock(device uint16) (c deviceClock) {
	if uint64(device) >= min(atomic.LoadUint64(&r.hdr.deviceUsed), uint64(r.geo.devices)) {
		return c
	}
	return (*diskDevice)(unsafe.Pointer(&r.mem[r.geo.deviceAt()+uint64(device)*DeviceEntrySize])).clock()
}

func (d *diskDevice) clock() (c deviceClock) {
	for range 3 { // anchors are written seconds apart
		count := atomic.LoadUint64(&d.anchorCount)
		c.n = int(min(count, 2))
		for i := range c.n {
			a := &d.anchors[(count-uint64(i))&3]
			c.anchors[i] = DeviceAnchor{GPU: atomic.LoadInt64(&a.gpu), Mono: atomic.LoadInt64(&a.mono), Err: max(atomic.LoadInt64(&a.err), 0)}
		}
		if atomic.LoadUint64(&d.anchorCount)-count < 2 { // none of the two has been written anew
			break
		}
	}
	return c
}

// mono maps a GPU time, and bounds the error. Each anchor by itself bounds it
// from both sides, as DriftPPB is what two clocks may run apart; the line
// through both anchors says where within those bounds to look.
func (c deviceClock) mono(gpu uint64) (t, err int64) {
	a, b := &c.anchors[0], &c.anchors[1]
	since := int64(gpu) - a.GPU
	t = a.Mono + since
	if c.n < 2 {
		return t, a.Err + drift(since)
	}
	if d := a.GPU - b.GPU; d != 0 {
		rate := (float64(a.Mono-b.Mono) - float64(d)) / float64(d)
		t += int64(float64(since) * min(max(rate, -DriftPPB*1e-9), DriftPPB*1e-9))
	}
	at, bt := a.Mono+since, b.Mono+int64(gpu)-b.GPU
	ae, be := a.Err+drift(since), b.Err+drift(int64(gpu)-b.GPU)
	lo, hi := max(at-ae, bt-be), min(at+ae, bt+be)
	if lo > hi { // the host's clock was slewed: the last anchor counts
		return at, max(ae+lo-hi, 0)
	}
	t = min(max(t, lo), hi)
	return t, max(hi-t, t-lo)
}

// drift is how far two clocks may run apart in so many ns.
func drift(ns int64) int64 { return int64(math.Abs(float64(ns)) * (DriftPPB * 1e-9)) }
