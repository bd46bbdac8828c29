package record

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

// Identity is what a process says of itself in its header.
type Identity struct {
	Job       string // at most 63 bytes; longer is cut
	Node      string // logical node name, at most 63 bytes
	Rank      int32  // rank in the job's world, -1 when none
	WorldSize int32
	LocalRank int32
	Attempt   uint32 // restart count of the job, from 0 (LOCKSTEP_RESTART_COUNT)
}

// Options of Create. Zero slots means the default of layout.go. StampSlots is
// for a process with a GPU, and brings the device and descriptor tables with it;
// by default there are none.
type Options struct {
	Dir      string // "" is that of the package's Dir
	Identity Identity
	// Source is who writes. One that observes another process says which in PID, by which
	// this program's /proc has it; 0 is this one.
	Source Source
	PID    int

	RingSlots  int // rounded up to a power of two
	CommSlots  int
	ConnSlots  int
	StampSlots int
	// HistorySlots is how many connections have a history; by default DefaultHistorySlots in a
	// recorder of package ccl, none in others.
	HistorySlots int

	// MarksOnly makes a file of marks, with a small ring and no tables: for a process whose
	// library has a recorder of its own, or none. Its marks count as those of the process.
	MarksOnly bool
}

// Writer appends to one recorder file. Its methods, and those of its Comm and
// Conn handles, do nothing on a nil receiver: that is a recorder turned off.
// All of them are safe for concurrent use; those of one handle are not.
type Writer struct {
	hdr  *diskHeader
	ring unsafe.Pointer
	mask uint64
	mem  []byte
	geo  geometry
	path string
	// private has the stamps where GPUs cannot be given mem; nil: they can.
	private atomic.Pointer[[]byte]

	anchoring sync.Mutex

	tables  sync.Mutex // over what follows, and the tables' fixed words
	descs   map[Desc]uint16
	byIndex map[uint16]*Comm
	closed  []closedComm // oldest first
	comms   freeSlots
	conns   freeSlots
	// histories are the free slots of the history table.
	histories freeSlots
	rings     map[[2]uint16][]uint32 // free ranges of the stamp table, by the counts of both rings
	grace     int64                  // graceNs
}

// Create makes a recorder file <job>.<rank>.<pid>.rec, mode 0600, in o.Dir,
// which is made with mode 0700 when missing. The file appears under its name
// only when its header is complete, and all its memory is reserved first, so
// that a full file system is an error here and not a SIGBUS later. It must not
// be truncated while the process lives; removing it is harmless.
func Create(o Options) (*Writer, error) {
	geo, err := o.geometry()
	if err != nil {
		return nil, fmt.Errorf("create recorder: %w", err)
	}
	dir := o.Dir
	if dir == "" {
		dir, _, err = Dir("")
	} else {
		err = UseDir(dir)
	}
	if err != nil {
		return nil, fmt.Errorf("create recorder: %w", err)
	}
	w, err := create(dir, o, geo)
	if err != nil {
		return nil, fmt.Errorf("create recorder in %s: %w (set LOCKSTEP_RUNTIME_DIR to a directory with %d bytes free)", dir, err, geo.memory())
	}
	return w, nil
}

func (o Options) geometry() (geometry, error) {
	var g geometry
	for _, s := range []struct {
		what      string
		n, or, to int
		dst       *uint32
	}{
		{"RingSlots", o.RingSlots, DefaultRingSlots, MaxRingSlots, &g.ring},
		{"CommSlots", o.CommSlots, DefaultCommSlots, MaxCommSlots, &g.comms},
		{"ConnSlots", o.ConnSlots, DefaultConnSlots, MaxConnSlots - 1, &g.conns}, // the last index is NoConn
		{"StampSlots", o.StampSlots, 0, MaxStampSlots, &g.stamps},
		{"HistorySlots", o.HistorySlots, o.histories(), MaxHistorySlots, &g.histories},
	} {
		n := s.n
		if n == 0 {
			n = s.or
		}
		if n < 0 || n > s.to {
			return g, fmt.Errorf("%s is %d, want 0 to %d", s.what, n, s.to)
		}
		*s.dst = uint32(n)
	}
	ring := uint32(1)
	for ring < g.ring {
		ring *= 2
	}
	g.ring = ring
	if o.MarksOnly {
		g = geometry{ring: min(g.ring, MarksRingSlots)}
	}
	if g.stamps > 0 {
		g.devices, g.descs, g.peers = DefaultDeviceSlots, DefaultDescSlots, g.stamps
	}
	return g, nil
}

// histories is the default of HistorySlots.
func (o Options) histories() int {
	if o.Source != SourceCCL {
		return 0
	}
	return DefaultHistorySlots
}

func create(dir string, o Options, geo geometry) (*Writer, error) {
	id, pid := o.Identity, cmp.Or(o.PID, os.Getpid())
	start, _, err := processStart(pid)
	if err != nil {
		return nil, err
	}
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	f, err := os.CreateTemp(dir, ".new-*") // O_EXCL, 0600
	if err != nil {
		return nil, err
	}
	defer f.Close()
	defer os.Remove(f.Name())
	size := geo.memory()
	if err := reserve(f, int64(size)); err != nil {
		return nil, fmt.Errorf("reserve %d bytes: %w", size, err)
	}
	mem, err := syscall.Mmap(int(f.Fd()), 0, int(size), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", size, err)
	}

	h := (*diskHeader)(unsafe.Pointer(&mem[0]))
	copy(h.magic[:], Magic)
	h.version, h.headerSize, h.fileSize = LayoutVersion, HeaderSize, geo.size()
	h.commSlots, h.connSlots, h.stampSlots, h.ringSlots = geo.comms, geo.conns, geo.stamps, geo.ring
	h.deviceSlots, h.descSlots, h.descUsed = geo.devices, geo.descs, min(uint64(geo.descs), 1)
	h.historySlots, h.historyWindows = geo.histories, HistoryWindows
	h.peerSlots = geo.peers
	h.source = uint32(o.Source)
	h.pid, h.startTime, h.bootID, h.created = int32(pid), start, boot, time.Now().UnixNano()
	h.rank, h.worldSize, h.localRank, h.attempt = id.Rank, id.WorldSize, id.LocalRank, id.Attempt
	putName(&h.job, id.Job)
	putName(&h.node, id.Node)

	w := &Writer{
		hdr:  h,
		ring: unsafe.Pointer(&mem[geo.ringAt()]),
		mask: uint64(geo.ring) - 1,
		mem:  mem,
		geo:  geo,

		descs:   map[Desc]uint16{},
		byIndex: map[uint16]*Comm{},
		rings:   map[[2]uint16][]uint32{},
		grace:   graceNs,
	}
	w.Anchor()
	if w.path, err = publish(f.Name(), dir, id, pid, start); err != nil {
		return nil, errors.Join(err, syscall.Munmap(mem))
	}
	// Handles and late appends of other goroutines may outlive Close; the
	// mapping goes when none of them can reach it any more.
	runtime.AddCleanup(w, func(mem []byte) { _ = syscall.Munmap(mem) }, mem)
	return w, nil
}

// reserve gives the file its size and its memory.
func reserve(f *os.File, size int64) error {
	err := syscall.Fallocate(int(f.Fd()), 0, 0, size)
	// tmpfs starts all over after a signal, and the runtime sends many: write then.
	if !errors.Is(err, syscall.EOPNOTSUPP) && !errors.Is(err, syscall.EINTR) {
		return err
	}
	zeros := make([]byte, 1<<20)
	for size > 0 {
		n, err := f.Write(zeros[:min(size, int64(len(zeros)))])
		if err != nil {
			return err
		}
		size -= int64(n)
	}
	return nil
}

// publish links the complete file under its name. A file that a dead process
// of the same pid left there is replaced; one of this very process (a second
// recorder of the same job and rank) is kept, and the new one gets a suffix.
func publish(tmp, dir string, id Identity, pid int, start uint64) (string, error) {
	stem := fmt.Sprintf("%s.%d.%d", fileName(id.Job), id.Rank, pid)
	for i := 1; i <= 100; i++ {
		path := filepath.Join(dir, stem+Suffix)
		if i > 1 {
			path = filepath.Join(dir, fmt.Sprintf("%s-%d%s", stem, i, Suffix))
		}
		err := os.Link(tmp, path)
		if errors.Is(err, os.ErrExist) && !writtenBy(path, start) {
			if err = os.Remove(path); err == nil {
				err = os.Link(tmp, path)
			}
		}
		if !errors.Is(err, os.ErrExist) {
			return path, err
		}
	}
	return "", fmt.Errorf("this process already has 100 recorders named %s", stem)
}

// writtenBy reports whether the recorder at path was made by the living process
// that started at start, and so is not to be replaced.
func writtenBy(path string, start uint64) bool {
	r, err := Open(path)
	if err != nil {
		return false
	}
	defer r.Close()
	return r.Header().StartTime == start && r.Alive()
}

// Suffix ends the name of every recorder file.
const Suffix = ".rec"

func fileName(job string) string {
	clean := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '-', r == '_':
			return r
		}
		return '_'
	}, job)
	if clean == "" {
		return "job"
	}
	return clean[:min(len(clean), nameSize-1)]
}

func putName(dst *[nameSize]byte, s string) { copy(dst[:nameSize-1], s) }

// Path returns the file's name, "" for a nil Writer.
func (w *Writer) Path() string {
	if w == nil {
		return ""
	}
	return w.path
}

// Memory is the whole mapping, nil for a nil Writer: for a GPU to be given
// access to its rings (Comm.StampRange). It begins on a page and lives for as
// long as the Writer or a handle of it can be reached.
func (w *Writer) Memory() []byte {
	if w == nil {
		return nil
	}
	return w.mem
}

// Close marks the file as left in good order. It leaves the file, for readers
// to finish, and the mapping, until no handle can reach it.
func (w *Writer) Close() error {
	if w == nil {
		return nil
	}
	atomic.StoreUint64(&w.hdr.closed, 1)
	return nil
}

// Anchor pairs the clocks anew. A Writer starts no goroutine: its owner calls
// Anchor at least every 10 s, for readers to follow steps and slews of REALTIME.
func (w *Writer) Anchor() {
	if w == nil {
		return
	}
	w.anchoring.Lock()
	defer w.anchoring.Unlock()
	// The slot that readers do not use is filled, then made the current one: a
	// process that dies in between leaves the old anchor readable.
	a, n := takeAnchor(), w.hdr.anchorCount+1
	slot := &w.hdr.anchors[n&1]
	atomic.StoreInt64(&slot.mono, a.Mono)
	atomic.StoreInt64(&slot.real, a.Real)
	atomic.StoreUint64(&w.hdr.anchorCount, n)
}

// Append adds one record; Ticket is ignored, and of the fields only those of
// r.Kind are kept. It is wait-free for any number of goroutines. It does not
// read the clock: the caller sets r.Mono.
//
// A ticket is taken, then its slot is claimed by one compare-and-swap. Where
// the slot is held by a producer that stalled a whole lap ago, or already has
// a newer record because this producer itself stalled, the record is dropped
// and counted: nobody ever waits, and no two producers ever write one slot.
func (w *Writer) Append(r *Record) {
	if w == nil {
		return
	}
	ticket := atomic.AddUint64(&w.hdr.head, 1) - 1
	d := (*diskRecord)(unsafe.Add(w.ring, (ticket&w.mask)*RecordSize))
	seq := atomic.LoadUint64(&d.seq) // busy counts as newest
	if seq > ticket || !atomic.CompareAndSwapUint64(&d.seq, seq, busy|(ticket+1)) {
		atomic.AddUint64(&w.hdr.dropped, 1)
		return
	}
	d.mono = r.Mono
	d.kind = uint8(r.Kind)
	d.flags = r.Flags
	d.comm = r.Comm
	d.thread = r.Thread
	d.opSeq = r.Seq
	switch r.Kind {
	case KindEnqueue:
		b := (*bodyEnqueue)(unsafe.Pointer(&d.body))
		b.coll, b.dtype, b.op = uint8(r.Coll), uint8(r.DType), uint8(r.Op)
		b.root, b.bytes, b.stream, b.launch = r.Root, r.Bytes, r.Stream, packSpan(r.Dur)
	case KindStart, KindEnd:
		b := (*bodyRun)(unsafe.Pointer(&d.body))
		b.coll, b.algo, b.proto, b.clock, b.code = uint8(r.Coll), uint8(r.Algo), uint8(r.Proto), uint8(r.Clock), r.Code
		b.chans, b.stamp, b.slot = r.Chan, r.Stamp, r.Slot
	case KindWhole:
		b := (*bodyWhole)(unsafe.Pointer(&d.body))
		b.coll, b.elem, b.path, b.code = uint8(r.Coll), uint8(r.DType)&15|uint8(r.Op)<<4, packPath(r.Algo, r.Proto), r.Code
		b.root, b.bytes, b.stream, b.peer = r.Root, r.Bytes, r.Stream, r.Peer
		b.dur, b.wait = packSpan(r.Dur), packSpan(r.Wait)
	case KindPhase:
		b := (*bodyPhase)(unsafe.Pointer(&d.body))
		b.code, b.index, b.clock = r.Code, r.Index, uint8(r.Clock)
		b.peer, b.stamp, b.dur = r.Peer, r.Stamp, r.Dur
		b.wait, b.stall = packSpan(r.Wait), packSpan(r.Stall)
	case KindWindow, KindLink:
		b := (*bodyConn)(unsafe.Pointer(&d.body))
		b.peer, b.conn, b.code = r.Peer, uint16(min(r.Conn, NoConn)), r.Code
		b.bytes, b.last, b.span = r.Bytes, r.Last, packSpan(r.Last-r.First)
		b.wrs, b.back = uint16(min(r.WRs, 1<<16-1)), uint16(min(r.Back, 1<<16-1))
	case KindMark, KindComm:
		b := (*bodyValue)(unsafe.Pointer(&d.body))
		b.code, b.result, b.peer, b.value = r.Code, uint8(r.Result), r.Peer, r.Value
	}
	release(&d.seq, ticket+1)
}
