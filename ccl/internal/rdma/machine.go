package rdma

import "fmt"

// kind is what a message on a lane is; it travels in the immediate word.
type kind uint8

const (
	kindData     kind = iota // bytes of the stream
	kindLine                 // a line
	kindNote                 // credit was written, nothing else
	kindZeroCopy             // as kindData; the sender keeps them until it hears that they were consumed
)

// The immediate word: kind in bits 31..30, bytes of padding before the chunk in
// 29..24, the number of the data chunk or line in 23..0.
const (
	numBits = 24
	numMask = 1<<numBits - 1
)

func immediate(e *entry) uint32 {
	k := e.kind
	if e.from.addr != 0 {
		k = kindZeroCopy
	}
	return uint32(k)<<30 | uint32(e.pad)<<numBits | e.num&numMask
}

const (
	lineSize = 64
	// LineSlots is how many lines may be on their way.
	LineSlots = 64
	// LineSize is a line's room.
	LineSize = lineSize
)

// shape is what the two ends of a connection have to agree on.
type shape struct {
	ring     uint64 // bytes of the stream that may be unconsumed, a power of two
	maxChunk uint64 // bytes of a chunk
	depth    uint64 // messages of a lane that may be unacknowledged
	table    uint64 // chunks that may be out of order, a power of two
	lanes    int
	// spares: a path has two places for queue pairs, 2p and 2p+1, of which one waits to take
	// the other's; else one, p. What follows says path for either.
	spares bool
}

// pathOf is the path of which a place is.
func (s *shape) pathOf(place int) int {
	if s.spares {
		return place / 2
	}
	return place
}

// sibling is the other place of a path, -1 for none.
func (s *shape) sibling(place int) int {
	if s.spares {
		return place ^ 1
	}
	return -1
}

// reserve is how many messages of a lane only credit may use.
func (s *shape) reserve() uint64 { return s.depth / 8 }

// block is the credit that a receiver writes into the sender's memory. All of
// it only grows, so the sender takes what is largest, and a late write is harmless.
type block struct {
	bytes    uint64 // consumed, or skipped by AlignRecv
	chunks   uint64 // arrived in order
	lines    uint64 // consumed
	received uint64 // messages of the lane whose block it is
}

// actor carries out what a machine decides. It must not call back.
type actor interface {
	// post gives message s of a lane to the path's queue pair.
	post(lane, path int, s uint64, e *entry)
	// credit writes a lane's block, telling nobody.
	credit(lane, path int, b block)
	// stop moves a queue pair to the error state; machine.stopped follows when
	// its completions have all been delivered. It is left willingly when no end has
	// found a fault in it.
	stop(lane, path int, willing bool)
	// drop gives up a queue pair that was never connected.
	drop(lane, path int)
	// connect joins the offered queue pair to the peer's; false when it cannot.
	connect(lane, path int, to endpoint) bool
	// chosen tells that a lane goes over to a path. What is to be sent again is posted next.
	chosen(lane, path int)
	// tell sends a control message.
	tell(g *message)
	// switched tells that a lane has gone over to another path (from is -1 when it
	// had none), and how much was sent again.
	switched(lane, from, to int, messages, bytes uint64)
}

// machine is one end of a connection: two streams in each direction, of bytes
// and of lines, over lanes. It has no I/O, no clock and no lock.
type machine struct {
	shape
	act   actor
	lanes []lane
	next  int // lane for the next message
	tx    sender
	rx    receiver
	err   error
}

type sender struct {
	sent, acked   uint64 // stream: taken, consumed by the peer
	pad           uint64 // skipped since the last chunk
	chunks, ahead uint64 // chunks sent; how many the peer has in order
	lines, lacked uint64 // lines sent, consumed by the peer
	kept          uint64 // up to where chunks were sent from where they lie
}

type receiver struct {
	got, front uint64 // consumed; arrived in order
	chunks     uint64 // arrived in order
	table      []arrival
	lines      uint64 // consumed
	linesIn    uint64 // arrived, by number mod LineSlots
	zeroCopied uint64 // end of the last chunk that the peer sent without a copy, and so keeps
	told       block  // bytes, chunks and lines, as the peer was last told
	toldBy     int    // over which lane
}

// arrival is a chunk that has arrived before others.
type arrival struct {
	here     bool
	zeroCopy bool
	pad      uint8
	n        uint32
}

func newMachine(s shape, act actor) *machine {
	m := &machine{shape: s, act: act, lanes: make([]lane, s.lanes)}
	m.rx.table = make([]arrival, s.table)
	for i := range m.lanes {
		m.lanes[i].log = make([]entry, s.depth)
		m.lanes[i].active, m.lanes[i].hope = -1, true
	}
	return m
}

// corrupt ends the connection because of what the peer did.
func (m *machine) corrupt(format string, args ...any) error {
	if m.err == nil {
		m.err = fmt.Errorf("%w: %s", ErrCorrupt, fmt.Sprintf(format, args...))
	}
	return m.err
}

// ---- sending ----

// credit is how many bytes the receiver has room for. AlignSend may have skipped
// bytes that there is no room for yet.
func (m *machine) credit() uint64 {
	return m.ring - min(m.ring, m.tx.sent-min(m.tx.acked, m.tx.sent))
}

// pick finds a lane with room for a message besides the reserve, -1 if there is
// none. Small messages prefer the first lane.
func (m *machine) pick(small bool) int {
	if small {
		m.next = 0
	}
	for range m.lanes {
		i := m.next % len(m.lanes)
		if m.room(&m.lanes[i]) > int(m.reserve()) {
			return i
		}
		m.next = i + 1
	}
	return -1
}

// chunk decides how many of n bytes go next, in one chunk over which lane; 0
// when credit (starved) or lanes do not allow any. Pieces of a message end at
// multiples of 64, so that the receiver can reduce them in place.
func (m *machine) chunk(n uint64) (size uint64, lane int, starved bool) {
	room := m.credit()
	if m.tx.chunks-m.tx.ahead >= m.table {
		room = 0
	}
	size = min(n, m.maxChunk, m.ring-m.tx.sent%m.ring)
	if size > room {
		end := (m.tx.sent + room) &^ (lineSize - 1)
		if end <= m.tx.sent {
			return 0, -1, true
		}
		size = end - m.tx.sent
	}
	if lane = m.pick(n <= smallSend); lane < 0 {
		return 0, -1, false
	}
	return size, lane, false
}

// smallSend goes over the first lane: the fewer lanes, the fewer receives.
const smallSend = 4 << 10

// send posts the next n bytes of the stream, which chunk has allowed. They lie in
// the outbox, or at from until settled.
func (m *machine) send(lane int, n uint64, from source) {
	t := &m.tx
	e := entry{kind: kindData, pad: uint8(t.pad), num: uint32(t.chunks & numMask), n: uint32(n), pos: t.sent, from: from}
	t.pad = 0
	t.sent += n
	t.chunks++
	if from.addr != 0 {
		t.kept = t.sent
	}
	m.next = lane + 1
	m.queue(lane, e)
}

// settled reports whether the peer has consumed all that was not sent from the
// outbox: it will not have to be sent again.
func (m *machine) settled() bool { return m.tx.acked >= m.tx.kept }

// alignSend skips to the next 64-byte boundary.
func (m *machine) alignSend() {
	up := (m.tx.sent + lineSize - 1) &^ (lineSize - 1)
	m.tx.pad += up - m.tx.sent
	m.tx.sent = up
}

// line decides over which lane the next line may go, -1 when none; starved when
// the receiver is why.
func (m *machine) line() (lane int, starved bool) {
	if m.tx.lines-m.tx.lacked >= LineSlots {
		return -1, true
	}
	return m.pick(true), false
}

// sendLine posts the next line, which lies in its slot.
func (m *machine) sendLine(lane int) {
	e := entry{kind: kindLine, num: uint32(m.tx.lines & numMask), n: lineSize, pos: m.tx.lines}
	m.tx.lines++
	m.queue(lane, e)
}

// credited takes in a lane's block, of which the peer may have written a part.
func (m *machine) credited(i int, b block) error {
	t, l := &m.tx, &m.lanes[i]
	// Between two aligned messages the receiver may be a few bytes ahead.
	if b.bytes > t.sent && b.bytes-t.sent >= lineSize || b.chunks > t.chunks || b.lines > t.lines || b.received > l.posted {
		return m.corrupt("credit of %d bytes, %d chunks, %d lines, %d messages, of %d, %d, %d, %d sent",
			b.bytes, b.chunks, b.lines, b.received, t.sent, t.chunks, t.lines, l.posted)
	}
	t.acked = max(t.acked, b.bytes)
	t.ahead = max(t.ahead, b.chunks)
	t.lacked = max(t.lacked, b.lines)
	l.acked = max(l.acked, b.received)
	return nil
}

// ---- receiving ----

// arrive takes in the completion of a receive: a message of n bytes that came
// over a path of a lane.
func (m *machine) arrive(i, p int, imm, n uint32) error {
	if m.err != nil {
		return m.err
	}
	l := &m.lanes[i]
	if !l.takes(p) {
		return m.corrupt("a message over path %d of lane %d in phase %d", p, i, l.phase)
	}
	l.received++
	num := uint64(imm & numMask)
	switch k, pad := kind(imm>>30), uint8(imm>>numBits&63); k {
	case kindData, kindZeroCopy:
		return m.data(num, pad, n, k == kindZeroCopy)
	case kindLine:
		d := (num - m.rx.lines) & numMask
		if d >= LineSlots || m.rx.linesIn&bit(num) != 0 || n != lineSize || pad != 0 {
			return m.corrupt("line %d with %d bytes, %d consumed", num, n, m.rx.lines)
		}
		m.rx.linesIn |= bit(num)
	case kindNote:
		if num != 0 || pad != 0 {
			return m.corrupt("a note numbered %d", num)
		}
	}
	return nil
}

func (m *machine) data(num uint64, pad uint8, n uint32, zeroCopy bool) error {
	r := &m.rx
	d := (num - r.chunks) & numMask
	if d >= m.table || n == 0 || uint64(n) > m.maxChunk {
		return m.corrupt("chunk %d of %d bytes after %d chunks", num, n, r.chunks)
	}
	a := &r.table[(r.chunks+d)&(m.table-1)]
	if a.here {
		return m.corrupt("chunk %d twice", num)
	}
	*a = arrival{here: true, zeroCopy: zeroCopy, pad: pad, n: n}
	for {
		a := &r.table[r.chunks&(m.table-1)]
		if !a.here {
			return nil
		}
		start := r.front + uint64(a.pad)
		end := start + uint64(a.n)
		if start < r.got || end-r.got > m.ring || start%m.ring+uint64(a.n) > m.ring || a.pad > 0 && start%lineSize != 0 {
			return m.corrupt("bytes %d to %d, %d consumed", start, end, r.got)
		}
		a.here = false
		if a.zeroCopy {
			r.zeroCopied = end
		}
		r.front = end
		r.chunks++
	}
}

// arrived is how many bytes wait at got.
func (m *machine) arrived() uint64 { return m.rx.front - min(m.rx.got, m.rx.front) }

func (m *machine) consume(n uint64) { m.rx.got += n }

// alignRecv skips to the next 64-byte boundary.
func (m *machine) alignRecv() { m.rx.got = (m.rx.got + lineSize - 1) &^ (lineSize - 1) }

// lineHere reports whether the next line has arrived.
func (m *machine) lineHere() bool { return m.rx.linesIn&bit(m.rx.lines) != 0 }

func (m *machine) consumeLine() {
	m.rx.linesIn &^= bit(m.rx.lines)
	m.rx.lines++
}

// grant tells the peer what was consumed. Eager tells only what it may be
// waiting for; otherwise whatever is news, for a rank that has time.
func (m *machine) grant(eager bool) {
	r := &m.rx
	t := &r.told
	step := func(now, told, of uint64) bool { return now-told >= of/4 || !eager && now != told }
	news := step(r.got, t.bytes, m.ring) || step(r.chunks, t.chunks, m.table) || step(r.lines, t.lines, LineSlots)
	news = news || m.lanes[r.toldBy].owes
	for i := range m.lanes {
		l := &m.lanes[i]
		if l.phase != running {
			continue
		}
		// Notes alone are worth an answer only when the peer runs out of them;
		// else two idle ends would write notes to each other for ever.
		if news || l.owes || l.received-l.told >= m.depth/4 {
			if m.note(i); news {
				*t = block{bytes: r.got, chunks: r.chunks, lines: r.lines}
				r.toldBy, news = i, false
			}
		}
	}
}

// release tells the peer of what it may have to keep until it hears of it.
func (m *machine) release() {
	r := &m.rx
	if r.zeroCopied > r.told.bytes && r.got > r.told.bytes || r.zeroCopied > 0 && m.lanes[r.toldBy].owes {
		m.grant(false)
	}
}

// credits reports whether grant has something to tell.
func (m *machine) credits() bool {
	for i := range m.lanes {
		if m.lanes[i].owes {
			return true
		}
	}
	return m.rx.got != m.rx.told.bytes || m.rx.lines != m.rx.told.lines
}

// note writes a lane's block: with a message that wakes the peer if the lane
// has one left, else silently. The peer posts receives for messages only.
func (m *machine) note(i int) {
	l := &m.lanes[i]
	l.told, l.owes = l.received, false
	if m.room(l) > 0 {
		m.queue(i, entry{kind: kindNote})
	} else {
		m.act.credit(i, l.active, m.block(i))
	}
}

// block is a lane's block now.
func (m *machine) block(i int) block {
	return block{bytes: m.rx.got, chunks: m.rx.chunks, lines: m.rx.lines, received: m.lanes[i].received}
}
