package record

import (
	"cmp"
	"slices"
	"sync/atomic"
	"unsafe"
)

// A connection's history is its last windows at their own resolution, also those of which
// there is no record since nothing was worth telling. It is three banks of HistoryWindows
// windows. While nothing is wrong the writer goes round in one of them. When the
// connection becomes slow that bank is left as it is: what was before. The next bank takes
// the first windows of the anomaly, once, and the writer then goes round in the
// third. So there are always the last windows, and of the last anomaly how it began.
//
// The history table lies behind all other regions, beyond the size that the header
// tells: a reader that does not know it sees a file as it was before.
const (
	historyBanks = 3

	// HistoryWindows is how many windows a bank has. One of them may be being written, so
	// readers count on one fewer.
	HistoryWindows = 128
	// DefaultHistorySlots is how many connections have a history, those first whose
	// windows close first: 792 KiB.
	DefaultHistorySlots = 64
	MaxHistorySlots     = 1 << 12
)

// diskHistory is one entry of the history table.
type diskHistory struct {
	banks [historyBanks]struct {
		begin, end uint64 // live: numbers of the bank's first window and the one after its last; the last HistoryWindows of them are there
	}
	_       [16]byte
	windows [historyBanks][HistoryWindows]diskWindow
}

// diskWindow is one window.
type diskWindow struct {
	last    int64
	bytes   uint64
	span    uint32 // last-first, by packSpan
	latency uint32 // by packSpan
	wrs     uint16 // saturates
	back    uint16 // saturates
	cause   uint8
	state   uint8
	flags   uint8
	_       [1]byte
}

const (
	historySize  = unsafe.Sizeof(diskHistory{})
	flagAnomaly  = 1 << 0 // of a diskWindow
	flagOverlaps = 1 << 1
)

var _ [64 + historyBanks*HistoryWindows*32]byte = [historySize]byte{}

// Window is one window of a connection's history. Times are CLOCK_MONOTONIC ns.
type Window struct {
	Number      uint64 // of the connection's, from 0; assigned by Log
	First, Last int64
	Bytes       uint64
	WRs         uint32
	Backlog     uint32
	Latency     int64 // mean from post to completion, ns
	Cause       Cause // of this window
	State       Cause // of the connection after it
	Anomaly     bool
	// Overlaps: an estimate over the last requests that turned bad within a window, whose requests
	// are also those of windows before or after it.
	Overlaps bool
}

// historyLog is the writer's side of one connection's history; the zero value takes nothing.
type historyLog struct {
	d          *diskHistory
	slot       uint32
	number     uint64
	begin, end uint64 // of the current bank
	bank       uint8
	fills      bool // the bank takes the first windows of an anomaly, and is not gone round in
	slow       bool
}

// noHistory is the log of a connection that has none.
var noHistory = new(historyLog)

// Log adds a window to the connection's history. w.Number is ignored.
func (c *Conn) Log(w *Window) {
	if c == nil {
		return
	}
	h := c.log.Load()
	if h == nil {
		h = c.openHistory()
	}
	if h.d != nil {
		h.add(w)
	}
}

func (h *historyLog) add(w *Window) {
	slow := w.State != CauseNone
	if slow && !h.slow {
		h.turn(true)
	}
	h.slow = slow
	if h.fills && h.end-h.begin == HistoryWindows-1 {
		h.turn(false)
	}
	d := &h.d.windows[h.bank][(h.end-h.begin)%HistoryWindows]
	d.last, d.bytes = w.Last, w.Bytes
	d.span, d.latency = packSpan(w.Last-w.First), packSpan(w.Latency)
	d.wrs, d.back = uint16(min(w.WRs, 1<<16-1)), uint16(min(w.Backlog, 1<<16-1))
	d.cause, d.state, d.flags = uint8(w.Cause), uint8(w.State), 0
	if w.Anomaly {
		d.flags = flagAnomaly
	}
	if w.Overlaps {
		d.flags |= flagOverlaps
	}
	h.number++
	h.end = h.number
	release(&h.d.banks[h.bank].end, h.end)
}

// turn goes on in the next bank, whose windows are the oldest.
func (h *historyLog) turn(fills bool) {
	h.bank, h.fills = (h.bank+1)%historyBanks, fills
	h.begin, h.end = h.number, h.number
	b := &h.d.banks[h.bank]
	atomic.StoreUint64(&b.begin, h.begin) // readers find the bank empty, or changed
	atomic.StoreUint64(&b.end, h.end)
}

// openHistory gives a connection its history when its first window closes.
func (c *Conn) openHistory() *historyLog {
	w := c.w
	w.tables.Lock()
	defer w.tables.Unlock()
	if h := c.log.Load(); h != nil { // its slot has gone to another one
		return h
	}
	h := noHistory
	if i, _, ok := w.histories.take(&w.hdr.historyUsed, w.hdr.historySlots, func() bool { return false }); ok {
		h = &historyLog{slot: i, d: (*diskHistory)(unsafe.Pointer(&w.mem[w.geo.historyAt()+uint64(i)*uint64(historySize)]))}
		for b := range h.d.banks {
			atomic.StoreUint64(&h.d.banks[b].begin, 0)
			atomic.StoreUint64(&h.d.banks[b].end, 0)
		}
		c.d.Load().history = uint16(i + 1)
	} else {
		atomic.AddUint64(&w.hdr.historyOverflow, 1)
	}
	c.log.Store(h)
	return h
}

// closeHistory gives it back; under Writer.tables, when nothing of the entry is published any more.
func (c *Conn) closeHistory() {
	if h := c.log.Swap(noHistory); h != nil && h.d != nil {
		c.w.histories = append(c.w.histories, freeSlot{index: h.slot})
	}
}

// History appends what is kept of a connection's windows, oldest first, at most
// 3 × (HistoryWindows-1) of them. s is of the last Conns.
func (r *Reader) History(s *ConnStatus, dst []Window) []Window {
	if s.History == 0 || uint32(s.History) > r.geo.histories || uint64(s.Index) >= uint64(r.geo.conns) {
		return dst
	}
	from := len(dst)
	r.guard(func() {
		d := (*diskHistory)(unsafe.Pointer(&r.mem[r.geo.historyAt()+uint64(s.History-1)*uint64(historySize)]))
		for b := range d.banks {
			dst = d.read(b, dst)
		}
		conn := (*diskConn)(unsafe.Pointer(&r.mem[r.geo.connAt()+uint64(s.Index)*ConnEntrySize]))
		if state := atomic.LoadUint64(&conn.state); state&published == 0 || state>>genShift != s.Gen || conn.history != s.History {
			dst = dst[:from] // it was another connection's by then
		}
	})
	sortWindows(dst[from:])
	return dst
}

// read appends the windows of one bank that were there from the beginning of the copy to its end.
func (d *diskHistory) read(bank int, dst []Window) []Window {
	b := &d.banks[bank]
	from := len(dst)
	begin, end := atomic.LoadUint64(&b.begin), atomic.LoadUint64(&b.end)
	if end <= begin {
		return dst
	}
	first := begin
	if end-begin > HistoryWindows {
		first = end - HistoryWindows
	}
	for n := first; n < end; n++ {
		src := (*[4]uint64)(unsafe.Pointer(&d.windows[bank][(n-begin)%HistoryWindows]))
		var raw [4]uint64
		for i := range raw {
			raw[i] = atomic.LoadUint64(&src[i])
		}
		dst = append(dst, (*diskWindow)(unsafe.Pointer(&raw)).window(n))
	}
	now := atomic.LoadUint64(&b.end)
	if atomic.LoadUint64(&b.begin) != begin || now < end {
		return dst[:from] // the bank was taken for another time
	}
	// The writer may be in the middle of window now, over the one a bank's length before.
	over := 0
	for over < len(dst)-from && now-begin >= HistoryWindows && dst[from+over].Number <= now-HistoryWindows {
		over++
	}
	return append(dst[:from], dst[from+over:]...)
}

func (d *diskWindow) window(number uint64) Window {
	w := Window{
		Number: number, First: d.last - unpackSpan(d.span), Last: d.last, Bytes: d.bytes, WRs: uint32(d.wrs), Backlog: uint32(d.back),
		Latency: unpackSpan(d.latency), Anomaly: d.flags&flagAnomaly != 0, Overlaps: d.flags&flagOverlaps != 0,
	}
	if d.cause < uint8(numCauses) {
		w.Cause = Cause(d.cause)
	}
	if d.state < uint8(numCauses) {
		w.State = Cause(d.state)
	}
	return w
}

func sortWindows(ws []Window) {
	slices.SortFunc(ws, func(a, b Window) int { return cmp.Compare(a.Number, b.Number) })
}
