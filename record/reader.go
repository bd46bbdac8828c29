package record

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"syscall"
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
		r.Wait, r.Stall = unpackSpan(b.wait), unpackSpan(b.stall)
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
