package record

import (
	"errors"
	"fmt"
	"math/bits"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
	"unicode"
	"unsafe"
)

// What can be wrong with a recorder file. Errors wrap one of these with the
// path and the detail.
var (
	ErrMagic     = errors.New("not a recorder file")
	ErrVersion   = errors.New("recorder layout of another version")
	ErrTruncated = errors.New("recorder file is truncated")
	ErrCorrupt   = errors.New("recorder file is corrupt")
)

// maxPending bounds the tickets that a Reader waits for. There is one for
// each producer in the middle of an Append, and one a lap for each stalled.
const maxPending = 1024

// Header is what a recorder file says of its process.
type Header struct {
	Identity
	Version   uint32
	BootID    [16]byte
	PID       int32  // in the process's own PID namespace
	StartTime uint64 // clock ticks since boot, field 22 of /proc/PID/stat
	Created   time.Time
	Closed    bool // the process left in good order
	Anchor    Anchor

	RingSlots, CommSlots, ConnSlots, DeviceSlots, DescSlots, StampSlots int
	HistorySlots                                                        int // 0 in files of before there were any

	Appended        uint64 // records ever, dropped ones included
	DroppedByWriter uint64
	CommOverflow    uint64 // communicators that found no slot
	ConnOverflow    uint64
	DescOverflow    uint64 // operations whose descriptor found no slot
	StampOverflow   uint64 // communicators whose stamps found no room
	HistoryOverflow uint64 // connections that have no history

	Refused [NumRefusals]uint64 // connections that the process's listeners turned away

	// Source is what wrote it. Of a writer that learns of another library's operations: by which version of
	// that library's interface, which events (a mask of that interface) it asks for
	// now, operations that have a number and no record, operations recorded whose end
	// nobody saw, parts of operations and transfers that found no room, events of
	// other processes' operations.
	Source        Source
	SourceVersion uint32
	EventMask     uint64
	OpsLost       uint64
	OpsUnseen     uint64
	EventsLost    uint64
	EventsForeign uint64
}

// MarksOnly reports whether the file is of Options.MarksOnly.
func (h Header) MarksOnly() bool { return h.CommSlots == 0 }

// ToReal maps a recorder time to wall-clock time by the latest anchor.
func (h Header) ToReal(mono int64) time.Time {
	return time.Unix(0, h.Anchor.Real+(mono-h.Anchor.Mono))
}

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
	FinishedAt int64

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
}

// Outstanding is how many bytes the receiver has not taken yet.
func (c *ConnStatus) Outstanding() uint64 {
	if c.Completed > c.Posted { // the words are not read at one instant
		return 0
	}
	return c.Posted - c.Completed
}

// Reader follows one recorder file. It is for one goroutine at a time; it
// holds a read-only mapping and no file descriptor, and does not disturb the
// writer. When the file shrinks under the mapping, methods return what they
// have and Err tells.
type Reader struct {
	path string
	mem  []byte
	hdr  *diskHeader
	geo  geometry
	ring unsafe.Pointer
	mask uint64

	static  Header // its live fields are zero
	owner   uint32
	comms   []cached[CommEntry]
	conns   []cached[ConnEntry]
	err     error
	head    uint64 // as of the last Next
	cursor  uint64 // next ticket to look at
	read    uint64
	lost    uint64
	skipped uint64
	pending []uint64 // tickets behind the cursor that are not published yet, ascending
	stamps  stampCursor
}

// Open maps a recorder file read-only, after checking all that it says of its
// own shape.
func Open(path string) (*Reader, error) {
	r, err := open(path)
	if err != nil {
		return nil, fmt.Errorf("open recorder %s: %w", path, err)
	}
	return r, nil
}

func open(path string) (*Reader, error) {
	// NONBLOCK: opening a FIFO must not wait for its writer.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		var pe *os.PathError
		if errors.As(err, &pe) {
			err = pe.Err
		}
		if errors.Is(err, syscall.ELOOP) {
			err = fmt.Errorf("%w: it is a symbolic link", ErrMagic)
		}
		return nil, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !fi.Mode().IsRegular() {
		return nil, fmt.Errorf("%w: it is no regular file (%v)", ErrMagic, fi.Mode().Type())
	}
	if fi.Mode().Perm()&0o022 != 0 {
		return nil, fmt.Errorf("others can write it (mode %v): %w", fi.Mode().Perm(), ErrForeign)
	}
	var owner uint32
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		owner = st.Uid
	}
	// The header is checked in a copy first: nothing can change it meanwhile.
	var raw [HeaderSize]byte
	n, err := f.ReadAt(raw[:], 0)
	if n < len(Magic) || string(raw[:len(Magic)]) != Magic {
		return nil, fmt.Errorf("%w: it does not begin with %q", ErrMagic, Magic)
	}
	if n < HeaderSize {
		return nil, fmt.Errorf("%w: %d of %d header bytes (%w)", ErrTruncated, n, HeaderSize, err)
	}
	h := (*diskHeader)(unsafe.Pointer(&raw))
	geo, err := h.check(fi.Size())
	if err != nil {
		return nil, err
	}
	mem, err := syscall.Mmap(int(f.Fd()), 0, int(geo.memory()), syscall.PROT_READ, syscall.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", geo.memory(), err)
	}
	r := &Reader{
		path:    path,
		mem:     mem,
		hdr:     (*diskHeader)(unsafe.Pointer(&mem[0])),
		geo:     geo,
		ring:    unsafe.Pointer(&mem[geo.ringAt()]),
		mask:    uint64(geo.ring) - 1,
		static:  h.header(),
		owner:   owner,
		pending: make([]uint64, 0, min(maxPending, int(geo.ring))),
	}
	return r, nil
}

func (h *diskHeader) check(size int64) (geometry, error) {
	g := geometry{comms: h.commSlots, conns: h.connSlots, devices: h.deviceSlots, descs: h.descSlots, stamps: h.stampSlots, ring: h.ringSlots}
	if h.historyWindows == HistoryWindows { // else this program does not know that table
		g.histories = h.historySlots
	}
	switch {
	case h.version > LayoutVersion:
		return g, fmt.Errorf("%w: layout %d, this program reads %d to %d: upgrade this program (the node's agent, lockstep inspect) to the version of the job's library", ErrVersion, h.version, OldestLayout, LayoutVersion)
	case h.version < OldestLayout:
		return g, fmt.Errorf("%w: layout %d, this program reads %d to %d: build the job with a newer library, or load a newer libnccl-profiler-lockstep.so, and start it again", ErrVersion, h.version, OldestLayout, LayoutVersion)
	}
	if h.headerSize != HeaderSize {
		return g, fmt.Errorf("%w: header of %d bytes, want %d", ErrCorrupt, h.headerSize, HeaderSize)
	}
	for _, s := range []struct {
		what   string
		n, max uint32
	}{
		{"communicator", g.comms, MaxCommSlots}, {"connection", g.conns, MaxConnSlots}, {"device", g.devices, MaxDeviceSlots},
		{"descriptor", g.descs, MaxDescSlots}, {"stamp", g.stamps, MaxStampSlots}, {"ring", g.ring, MaxRingSlots},
		{"history", g.histories, MaxHistorySlots},
	} {
		if s.n > s.max {
			return g, fmt.Errorf("%w: %d %s slots, at most %d are possible", ErrCorrupt, s.n, s.what, s.max)
		}
	}
	if bits.OnesCount32(g.ring) != 1 {
		return g, fmt.Errorf("%w: %d ring slots, not a power of two", ErrCorrupt, g.ring)
	}
	if h.fileSize != g.size() {
		return g, fmt.Errorf("%w: header says %d bytes, its regions need %d", ErrCorrupt, h.fileSize, g.size())
	}
	if uint64(size) < g.memory() {
		return g, fmt.Errorf("%w: %d of %d bytes", ErrTruncated, size, g.memory())
	}
	return g, nil
}

// header decodes the words that never change.
func (h *diskHeader) header() Header {
	source := SourceCCL
	if h.source < uint32(numSources) {
		source = Source(h.source)
	}
	return Header{
		Source: source,
		Identity: Identity{
			Job: getName(&h.job), Node: getName(&h.node),
			Rank: h.rank, WorldSize: h.worldSize, LocalRank: h.localRank, Attempt: h.attempt,
		},
		Version: h.version, BootID: h.bootID, PID: h.pid, StartTime: h.startTime,
		Created:   time.Unix(0, h.created),
		RingSlots: int(h.ringSlots), CommSlots: int(h.commSlots), ConnSlots: int(h.connSlots), DeviceSlots: int(h.deviceSlots), DescSlots: int(h.descSlots), StampSlots: int(h.stampSlots),
		HistorySlots: int(h.historySlots),
	}
}

// getName reads a NUL-terminated name; what a terminal or a label could not
// show becomes U+FFFD.
func getName(b *[nameSize]byte) string {
	s, _, _ := strings.Cut(string(b[:]), "\x00")
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return unicode.ReplacementChar
		}
		return r
	}, s)
}

// Owner is the user whose file it is, and whose process it can speak of.
func (r *Reader) Owner() uint32 { return r.owner }

// Path returns the name that the file was opened by.
func (r *Reader) Path() string { return r.path }

// Err tells why the Reader can read no more, nil while it can. It wraps
// ErrTruncated when the file has shrunk under the mapping.
func (r *Reader) Err() error { return r.err }

// Close unmaps the file. The Reader must not be used after it.
func (r *Reader) Close() error {
	if r.mem == nil {
		return nil
	}
	mem := r.mem
	r.mem = nil
	if r.err == nil {
		r.err = fmt.Errorf("recorder %s: %w", r.path, os.ErrClosed)
	}
	return syscall.Munmap(mem)
}

// guard runs f on the mapping. A page that is gone (the file was truncated)
// faults; the fault is turned into a sticky error instead of a crash.
func (r *Reader) guard(f func()) {
	if r.err != nil {
		return
	}
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		p := recover()
		if p == nil {
			return
		}
		fault, ok := p.(interface {
			runtime.Error
			Addr() uintptr
		})
		base := uintptr(unsafe.Pointer(&r.mem[0]))
		if !ok || fault.Addr() < base || fault.Addr() >= base+uintptr(len(r.mem)) {
			panic(p)
		}
		r.err = fmt.Errorf("read recorder %s: %w: offset %d is gone", r.path, ErrTruncated, fault.Addr()-base)
	}()
	f()
}

// Header returns the header as it is now.
func (r *Reader) Header() Header {
	h := r.static
	r.guard(func() {
		d := r.hdr
		h.Closed = atomic.LoadUint64(&d.closed) != 0
		h.Appended = atomic.LoadUint64(&d.head)
		h.DroppedByWriter = atomic.LoadUint64(&d.dropped)
		h.CommOverflow = atomic.LoadUint64(&d.commOverflow)
		h.ConnOverflow = atomic.LoadUint64(&d.connOverflow)
		h.DescOverflow = atomic.LoadUint64(&d.descOverflow)
		h.StampOverflow = atomic.LoadUint64(&d.stampOverflow)
		h.HistoryOverflow = atomic.LoadUint64(&d.historyOverflow)
		for i := range h.Refused {
			h.Refused[i] = atomic.LoadUint64(&d.refused[i])
		}
		h.Source, h.SourceVersion = Source(atomic.LoadUint32(&d.source)), atomic.LoadUint32(&d.sourceVersion)
		h.EventMask = atomic.LoadUint64(&d.eventMask)
		h.OpsLost, h.OpsUnseen = atomic.LoadUint64(&d.opsLost), atomic.LoadUint64(&d.opsUnseen)
		h.EventsLost, h.EventsForeign = atomic.LoadUint64(&d.eventsLost), atomic.LoadUint64(&d.eventsForeign)
		// Anchors are rewritten seconds apart: one that changes under three
		// reads in a row is hostile, and as good as any other.
		for range 3 {
			n := atomic.LoadUint64(&d.anchorCount)
			slot := &d.anchors[n&1]
			h.Anchor = Anchor{Mono: atomic.LoadInt64(&slot.mono), Real: atomic.LoadInt64(&slot.real)}
			if atomic.LoadUint64(&d.anchorCount) == n {
				break
			}
		}
	})
	return h
}

// Alive reports whether the process still exists: same boot, pid and start
// time, and no zombie. It looks in this program's PID namespace.
func (r *Reader) Alive() bool {
	if boot, err := bootID(); err != nil || boot != r.static.BootID {
		return false
	}
	start, dead, err := processStart(int(r.static.PID))
	return err == nil && !dead && start == r.static.StartTime
}

// Process returns the pid by which this program's /proc has the process, and
// whether it still exists. In a container the process has another pid than here,
// Header().PID, so all of /proc is searched when there is none such.
func (r *Reader) Process() (pid int, alive bool) {
	if pid := int(r.static.PID); r.Alive() {
		return pid, true
	}
	if boot, err := bootID(); err != nil || boot != r.static.BootID {
		return 0, false
	}
	return processInside(int(r.static.PID), r.static.StartTime)
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
			s.Link = LinkState(atomic.LoadUint64(&d.link))
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

// Next fills dst with records since the cursor, in ticket order except that a
// late producer's record may come after younger ones. It returns how many; a
// count below len(dst) means that the reader has caught up. It does not
// allocate.
func (r *Reader) Next(dst []Record) (n int) {
	r.guard(func() {
		r.head = max(r.head, atomic.LoadUint64(&r.hdr.head))
		kept := r.pending[:0]
		for _, t := range r.pending {
			switch {
			case n == len(dst):
				kept = append(kept, t)
			case r.fetch(t, &dst[n]):
				n++
			case r.gone(t):
				r.lost++
			default:
				kept = append(kept, t)
			}
		}
		r.pending = kept

		if slots := r.mask + 1; r.head-r.cursor > slots {
			r.lost += r.head - slots - r.cursor
			r.cursor = r.head - slots
		}
		for ; r.cursor < r.head && n < len(dst); r.cursor++ {
			switch {
			case r.fetch(r.cursor, &dst[n]):
				n++
			case r.gone(r.cursor):
				r.lost++
			default:
				r.wait(r.cursor)
			}
		}
	})
	r.read += uint64(n)
	return n
}

// wait remembers a ticket that is not published yet; when there are too many,
// the oldest is given up.
func (r *Reader) wait(t uint64) {
	if len(r.pending) == cap(r.pending) {
		r.pending = append(r.pending[:0], r.pending[1:]...)
		r.lost++
	}
	r.pending = append(r.pending, t)
}

func (r *Reader) slot(t uint64) *diskRecord {
	return (*diskRecord)(unsafe.Add(r.ring, (t&r.mask)*RecordSize))
}

// gone reports whether ticket t can never be read any more: its slot has a
// younger record, or a younger ticket of that slot has been handed out.
func (r *Reader) gone(t uint64) bool {
	return atomic.LoadUint64(&r.slot(t).seq)&^busy > t+1 || r.head-t > r.mask+1
}

// fetch copies ticket t into dst if it is there, and was there to the end of the copy.
func (r *Reader) fetch(t uint64, dst *Record) bool {
	src := (*[RecordSize / 8]uint64)(unsafe.Pointer(r.slot(t)))
	if atomic.LoadUint64(&src[0]) != t+1 {
		return false
	}
	var copied [RecordSize / 8]uint64
	for i := 1; i < len(copied); i++ {
		copied[i] = atomic.LoadUint64(&src[i])
	}
	if atomic.LoadUint64(&src[0]) != t+1 {
		return false
	}
	(*diskRecord)(unsafe.Pointer(&copied)).decode(t, dst)
	return true
}

func (d *diskRecord) decode(ticket uint64, r *Record) {
	*r = Record{
		Ticket: ticket,
		Mono:   d.mono,
		Kind:   Kind(d.kind),
		Flags:  d.flags,
		Comm:   d.comm,
		Thread: d.thread,
		Seq:    d.opSeq,
	}
	switch r.Kind {
	case KindEnqueue:
		b := (*bodyEnqueue)(unsafe.Pointer(&d.body))
		r.Coll, r.DType, r.Op = CollKind(b.coll), DType(b.dtype), RedOp(b.op)
		r.Root, r.Bytes, r.Stream, r.Dur = b.root, b.bytes, b.stream, unpackSpan(b.launch)
	case KindStart, KindEnd:
		b := (*bodyRun)(unsafe.Pointer(&d.body))
		r.Coll, r.Algo, r.Proto, r.Clock, r.Code = CollKind(b.coll), Algo(b.algo), Proto(b.proto), Clock(b.clock), b.code
		r.Chan, r.Stamp, r.Slot = b.chans, b.stamp, b.slot
	case KindWhole:
		b := (*bodyWhole)(unsafe.Pointer(&d.body))
		r.Coll, r.DType, r.Op = CollKind(b.coll), DType(b.elem&15), RedOp(b.elem>>4)
		r.Algo, r.Proto = unpackPath(b.path)
		r.Code, r.Root, r.Bytes, r.Stream, r.Peer = b.code, b.root, b.bytes, b.stream, b.peer
		r.Dur = unpackSpan(b.dur)
		r.Wait = min(unpackSpan(b.wait), r.Dur)
	case KindPhase:
		b := (*bodyPhase)(unsafe.Pointer(&d.body))
		r.Code, r.Index, r.Clock = b.code, b.index, Clock(b.clock)
		r.Peer, r.Stamp, r.Dur = b.peer, b.stamp, b.dur
	case KindWindow, KindLink:
		b := (*bodyConn)(unsafe.Pointer(&d.body))
		r.Peer, r.Conn, r.Code = b.peer, uint32(b.conn), b.code
		r.Bytes, r.WRs, r.Back = b.bytes, uint32(b.wrs), uint32(b.back)
		r.First, r.Last = b.last-unpackSpan(b.span), b.last
	case KindMark, KindComm:
		b := (*bodyValue)(unsafe.Pointer(&d.body))
		r.Code, r.Value = b.code, b.value
		if r.Kind == KindComm {
			r.Result, r.Peer = Result(b.result), b.peer
		}
	}
}

// Lost counts the records that were overwritten before this Reader saw them
// and those that their writer dropped, once their slot has moved on. It is
// exact: at any moment, of the records that had been appended at the last
// Next, Read + Lost + Pending + Skipped make all.
func (r *Reader) Lost() uint64 { return r.lost }

// Read counts the records that Next has returned.
func (r *Reader) Read() uint64 { return r.read }

// Pending counts the records appended by the last Next that may still be read:
// those beyond the cursor and those that were not complete.
func (r *Reader) Pending() int { return len(r.pending) + int(r.head-r.cursor) }

// Skipped counts the records passed over by SeekTail.
func (r *Reader) Skipped() uint64 { return r.skipped }

// SeekTail moves the cursor to n records before the head, or to the oldest
// that the ring may still hold. What it passes over is Skipped, not Lost; so
// are the stamps that were overwritten by now.
func (r *Reader) SeekTail(n int) {
	r.guard(func() {
		r.seekStamps()
		r.head = max(r.head, atomic.LoadUint64(&r.hdr.head))
		r.skipped += uint64(len(r.pending))
		r.pending = r.pending[:0]
		to := r.head - min(r.head, r.mask+1, uint64(max(n, 0)))
		if to > r.cursor {
			r.skipped += to - r.cursor
			r.cursor = to
		}
	})
}

// List returns the recorder files of a directory, sorted; none when it does not exist.
func List(dir string) ([]string, error) { return list(dir, Suffix) }
