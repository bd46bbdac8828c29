package record

import (
	"math/bits"
	"sync/atomic"
	"unsafe"
)

// Desc is what a stamped operation is. Operations that are alike share one: a
// stamp has only 16 bits to name it by.
type Desc struct {
	Coll   CollKind
	DType  DType
	Op     RedOp
	Algo   Algo
	Proto  Proto
	Flags  uint8 // DescInPlace, DescCaptured
	SMs    uint16
	Root   int32 // root or peer, -1 when none
	Stream uint32
	Bytes  uint64 // payload bytes by NCCL's convention
}

// AddDesc returns the descriptor's index in the table; one that is there
// already is found again. When the table is full it returns 0 (an operation
// that nothing is known of) and false, and counts the overflow. It takes a lock:
// callers keep the index with what they launch.
func (w *Writer) AddDesc(d Desc) (index uint16, ok bool) {
	if w == nil {
		return 0, false
	}
	w.tables.Lock()
	defer w.tables.Unlock()
	if i, ok := w.descs[d]; ok {
		return i, true
	}
	i := atomic.LoadUint64(&w.hdr.descUsed)
	if i >= uint64(w.geo.descs) {
		atomic.AddUint64(&w.hdr.descOverflow, 1)
		return 0, false
	}
	*(*diskDesc)(unsafe.Pointer(&w.mem[w.geo.descAt()+i*DescEntrySize])) = diskDesc{
		coll: uint8(d.Coll), dtype: uint8(d.DType), op: uint8(d.Op), algo: uint8(d.Algo), proto: uint8(d.Proto),
		flags: d.Flags, sms: d.SMs, root: d.Root, stream: d.Stream, bytes: d.Bytes,
	}
	atomic.StoreUint64(&w.hdr.descUsed, i+1)
	w.descs[d] = uint16(i)
	return uint16(i), true
}

// DeviceEntry is what is fixed about a GPU.
type DeviceEntry struct {
	UUID    [16]byte
	Ordinal int32  // as the process counts them
	Name    string // at most 63 bytes
}

// DeviceAnchor is one instant on a GPU's clock and on the host's.
type DeviceAnchor struct {
	GPU  int64 // %globaltimer, ns
	Mono int64 // CLOCK_MONOTONIC, ns
	Err  int64 // the true Mono is within Mono ± Err
}

// Device writes one GPU's entry. One thread at a time; nil is no-op.
type Device struct {
	w     *Writer // keeps the mapping
	d     *diskDevice
	index uint16
}

// AddDevice takes a slot of the device table. The first anchor comes with it, so
// that no stamp is ever without a clock. It returns nil and false when the
// table is full, or was not asked for.
func (w *Writer) AddDevice(e DeviceEntry, first DeviceAnchor) (*Device, bool) {
	if w == nil {
		return nil, false
	}
	w.tables.Lock()
	defer w.tables.Unlock()
	i := atomic.LoadUint64(&w.hdr.deviceUsed)
	if i >= uint64(w.geo.devices) {
		return nil, false
	}
	d := (*diskDevice)(unsafe.Pointer(&w.mem[w.geo.deviceAt()+i*DeviceEntrySize]))
	d.uuid, d.ordinal = e.UUID, e.Ordinal
	putName(&d.name, e.Name)
	dev := &Device{w: w, d: d, index: uint16(i)}
	dev.Anchor(first.GPU, first.Mono, first.Err)
	atomic.StoreUint64(&w.hdr.deviceUsed, i+1)
	return dev, true
}

// Index is the device's index in the table, for CommEntry.Device; 0 for nil.
func (d *Device) Index() uint16 {
	if d == nil {
		return 0
	}
	return d.index
}

// Anchor tells that the GPU's clock showed gpu when CLOCK_MONOTONIC was within
// mono ± err, all in ns. A reader measures the clocks' rates between the last two
// anchors, and maps by these, with an error that grows by DriftPPB with the
// distance from them (by RatePPB while there is one alone): once a second,
// while the host can, is a good pace.
func (d *Device) Anchor(gpu, mono, err int64) {
	if d == nil {
		return
	}
	n := d.d.anchorCount + 1
	a := &d.d.anchors[n&3]
	atomic.StoreInt64(&a.gpu, gpu)
	atomic.StoreInt64(&a.mono, mono)
	atomic.StoreInt64(&a.err, max(err, 0))
	atomic.StoreUint64(&d.d.anchorCount, n)
}

// Mono maps a time of the GPU's clock to CLOCK_MONOTONIC ns, which it is within err of.
func (d *Device) Mono(gpu int64) (mono, err int64) { return d.d.clock().mono(uint64(gpu)) }

// maxStampRing bounds one ring of stamps, whose count has 16 bits. In a ring of
// one, a slot's former operation would be the one before.
const maxStampRing = 1 << 15

func ringCount(n int) uint32 {
	if n <= 0 {
		return 0
	}
	return 1 << bits.Len32(uint32(min(max(n, 2), maxStampRing)-1))
}

// addRings gives a communicator its rings of the stamp table, both or, when
// there is no room or no clock to read them by, none.
func (w *Writer) addRings(d *diskComm, e CommEntry) {
	stamps, copies := ringCount(e.Stamps), ringCount(e.Copies)
	if stamps+copies == 0 {
		return
	}
	if uint64(e.Device) >= atomic.LoadUint64(&w.hdr.deviceUsed) {
		atomic.AddUint64(&w.hdr.stampOverflow, 1)
		return
	}
	first := atomic.LoadUint64(&w.hdr.stampUsed)
	n := [2]uint16{uint16(stamps), uint16(copies)}
	if free := w.rings[n]; len(free) > 0 {
		first, w.rings[n] = uint64(free[0]), free[1:]
		clear(w.mem[w.stampOffset(first):][:(stamps+copies)*StampEntrySize])
		clear(w.mem[w.geo.peersAt():][first*peerRowSize:][:uint64(stamps)*peerRowSize])
		if at := w.private.Load(); at != nil {
			clear((*at)[w.stampOffset(first):][:(stamps+copies)*StampEntrySize])
		}
	} else {
		if first+uint64(stamps+copies) > uint64(w.geo.stamps) {
			atomic.AddUint64(&w.hdr.stampOverflow, 1)
			return
		}
		atomic.StoreUint64(&w.hdr.stampUsed, first+uint64(stamps+copies))
	}
	d.stampFirst, d.stampCount = uint32(first), uint16(stamps)
	d.copyFirst, d.copyCount = uint32(first)+stamps, uint16(copies)
	d.device = e.Device
}

// StampRange is where a communicator's kernels leave their stamps: n slots of
// StampEntrySize bytes (struct Slot of the kernels' abi.h) at byte off of
// Writer.Memory. The operation of sequence seq, which counts from 1, belongs in
// slot seq mod n, and n is a power of two. n is 0 when there are none: nil, not
// asked for, or no room.
func (c *Comm) StampRange() (off, n int) {
	if c == nil || c.d.Load().stampCount == 0 {
		return 0, 0
	}
	d := c.d.Load()
	return int(c.w.geo.stampAt()) + int(d.stampFirst)*StampEntrySize, int(d.stampCount)
}

// StampSlot prepares the slot of operation seq, which is about to be launched, where
// HostTells was called: the GPU is to store stamps at byte off of Writer.Memory, with
// the 8-byte word id first. There must be more slots than operations under way. ok is
// false when there is none.
func (c *Comm) StampSlot(seq uint64, desc uint16) (off int, id uint64, ok bool) {
	s := c.hostSlot(seq)
	if s == nil {
		return 0, 0, false
	}
	release(&s.id, 0) // then nobody looks at the others
	release(&s.start, 0)
	release(&s.end, 0)
	return c.offset(c.d.Load().stampFirst, c.d.Load().stampCount, seq), seq<<16 | uint64(desc), true
}

// HostStamp is what a GPU has stamped of an operation so far, by its own clock.
type HostStamp struct {
	Start, End int64 // End is 0 while there is none
	Wait       int64 // from Start until the last of those that its first kernel waits for had come, 0 before the end
	Peer       int32 // that one, as the kernel counts ranks; -1 when nobody came after
}

// HostStamp returns what there is of operation seq; false before it has begun.
func (c *Comm) HostStamp(seq uint64) (s HostStamp, ok bool) {
	d := c.hostSlot(seq)
	if d == nil || atomic.LoadUint64(&d.id)>>16 != seq {
		return s, false
	}
	s = HostStamp{Start: int64(atomic.LoadUint64(&d.start)), Peer: -1}
	if end := int64(atomic.LoadUint64(&d.end)); end >= s.Start {
		arrived := atomic.LoadUint64(&d.arrived)
		s.End, s.Wait = end, min(int64(arrived>>8), end-s.Start)
		if peer := uint8(arrived); peer != noPeer {
			s.Peer = int32(peer)
		}
	}
	return s, s.Start > 0
}

func (c *Comm) hostSlot(seq uint64) *diskStamp {
	if c == nil {
		return nil
	}
	d := c.d.Load()
	if d.hostTells == 0 || d.stampCount == 0 {
		return nil
	}
	return c.w.stamp(uint64(d.stampFirst) + seq&(uint64(d.stampCount)-1))
}

// offset is where in Writer.Memory the slot of operation seq is, in a ring of count.
func (c *Comm) offset(first uint32, count uint16, seq uint64) int {
	return int(c.w.stampOffset(uint64(first) + seq&(uint64(count)-1)))
}

// CopyQueued prepares the slot of a copy-engine operation that is about to be
// enqueued: seq counts the communicator's copies from 1, mono is now. The
// stream is to store the 8-byte word id at byte off of Writer.Memory when it
// gets to the operation. ok is false when there is no slot: a nil Comm, or one
// without a ring for copies. One thread at a time queues a communicator's copies.
func (c *Comm) CopyQueued(seq uint64, desc uint16, mono int64) (off int, id uint64, ok bool) {
	s, n := c.copySlot(seq)
	if s == nil {
		return 0, 0, false
	}
	// While the slot's former operation is still the newest to have begun, its
	// words are needed. A reader then tells stale ones by their age.
	if next, _ := c.copySlot(seq + 1); next != nil && atomic.LoadUint64(&next.id)>>16+n > seq {
		atomic.StoreUint64(&s.start, 0)
		atomic.StoreUint64(&s.end, 0)
		atomic.StoreUint64(&s.arrived, uint64(mono))
	}
	return c.offset(c.d.Load().copyFirst, c.d.Load().copyCount, seq), seq<<16 | uint64(desc), true
}

// CopyDone tells a copy's times by the GPU's clock, once it has ended: start,
// when the last peer was ready (ns after start, and which, -1 when none came
// after), and end. Copies are told in the order of their sequence. One whose
// slot has gone to a younger operation is passed over; readers count it lost.
func (c *Comm) CopyDone(seq uint64, start, wait int64, peer int32, end int64) {
	s, _ := c.copySlot(seq)
	if s == nil || atomic.LoadUint64(&s.id)>>16 != seq {
		return
	}
	atomic.StoreUint64(&s.arrived, uint64(max(wait, 0))<<8|uint64(uint8(peer)))
	atomic.StoreUint64(&s.end, uint64(end))
	atomic.StoreUint64(&s.start, uint64(start)) // last: while it is 0, the rest is not looked at
}

// copySlot returns the slot of a copy, and how many there are.
func (c *Comm) copySlot(seq uint64) (*diskStamp, uint64) {
	if c == nil {
		return nil, 0
	}
	d := c.d.Load()
	n := uint64(d.copyCount)
	if n == 0 {
		return nil, 0
	}
	return c.w.stamp(uint64(d.copyFirst) + seq&(n-1)), n
}
