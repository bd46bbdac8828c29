package transport

import (
	"fmt"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/record"
)

// publishStep is how much of a large send the receiver may already read while
// the rest is being copied.
const publishStep = 16 << 10

// shmLink is a Link through shared memory.
type shmLink struct {
	m        *Mesh
	peer     int
	tx, rx   pipe
	doorbell *doorbell // the peer's
	wakeFD   int
	gate     *gate // nil without fault injection
	meter    meter
	err      error

	sent  uint64 // tx stream position
	acked uint64 // the receiver's tail as last seen
	got   uint64 // rx stream position
	avail uint64 // the sender's head as last seen

	linesSent, linesAcked uint64
	linesGot, linesTold   uint64
	blocked               bool // pipeBlocked is set
	looks                 uint
}

func (l *shmLink) Peer() int              { return l.peer }
func (l *shmLink) Kind() record.Transport { return record.TransportSHM }

func (l *shmLink) TrySend(b []byte) (int, error) {
	if l.gate != nil {
		return l.gate.send(b)
	}
	return l.push(b)
}

// TrySendKept copies: the receiver reads from shared memory only.
func (l *shmLink) TrySendKept(b []byte) (int, error) { return l.TrySend(b) }

// credit is how many bytes the receiver has room for.
func (l *shmLink) credit() int { return len(l.tx.ring) - int(l.sent-l.acked) }

func (l *shmLink) push(b []byte) (int, error) {
	if l.err != nil {
		return 0, l.err
	}
	room := l.credit()
	if room < len(b) {
		if err := l.readTail(); err != nil {
			return 0, err
		}
		room = l.credit()
	}
	n := len(b)
	if n > room {
		// Keep pieces aligned, so that the receiver can reduce them in place.
		n = max(0, int((l.sent+uint64(room))&^(lineSize-1)-l.sent))
		if n > room { // sent is less than a line before its boundary
			n = 0
		}
	}
	if n == 0 {
		if len(b) > 0 {
			return 0, l.block()
		}
		return 0, nil
	}
	if l.blocked {
		l.unblock()
	}
	for rest := b[:n]; len(rest) > 0; {
		at := l.sent & l.tx.mask
		k := copy(l.tx.ring[at:], rest[:min(len(rest), publishStep)])
		rest = rest[k:]
		l.sent += uint64(k)
		l.tx.head.Store(l.sent)
		l.ring()
	}
	l.m.progressed = true
	l.meter.postPaced(n, l.posted(), l.m.waits)
	return n, nil
}

// readTail learns what the receiver has consumed.
func (l *shmLink) readTail() error {
	tail := l.tx.tail.Load()
	if tail-l.acked > uint64(len(l.tx.ring))+lineSize {
		return l.corrupt("tail", tail)
	}
	// Between two aligned messages the receiver may be a few bytes ahead.
	if tail != l.acked && int64(tail-l.sent) <= 0 {
		l.acked = tail
		l.meter.completeNext(l.completed())
	}
	return nil
}

// block asks the receiver to wake this rank when it gives credit.
func (l *shmLink) block() error {
	if !l.blocked {
		l.blocked = true
		l.tx.flags.Or(pipeBlocked)
		l.meter.block()
	}
	return l.check()
}

func (l *shmLink) unblock() {
	l.blocked = false
	l.tx.flags.And(^uint32(pipeBlocked))
	l.meter.unblock()
}

// ring wakes the peer when it sleeps. It follows the store that it tells of;
// both are sequentially consistent, and the peer looks again after it said that
// it will sleep, so one of the two sees the other.
func (l *shmLink) ring() {
	if l.doorbell.state.Load() != awake {
		l.doorbell.wake(l.wakeFD)
	}
}

func (l *shmLink) TryRecv(b []byte) (int, error) {
	n := 0
	for n < len(b) {
		p, err := l.Peek()
		if len(p) == 0 {
			return n, err
		}
		k := copy(b[n:], p)
		n += k
		l.Advance(k)
	}
	return n, nil
}

func (l *shmLink) Peek() ([]byte, error) {
	n := l.avail - l.got
	if int64(n) < publishStep {
		l.avail = l.rx.head.Load()
		n = l.avail - l.got
		if int64(n) <= 0 {
			return nil, l.check()
		}
		if n > uint64(len(l.rx.ring)) {
			return nil, l.corrupt("head", l.avail)
		}
	}
	at := l.got & l.rx.mask
	return l.rx.ring[at:min(at+n, uint64(len(l.rx.ring)))], nil
}

func (l *shmLink) Advance(n int) {
	if n == 0 {
		return
	}
	l.got += uint64(n)
	l.rx.tail.Store(l.got)
	l.credited()
	l.m.progressed = true
}

// credited wakes a sender that waits for credit.
func (l *shmLink) credited() {
	if l.rx.flags.Load()&pipeBlocked != 0 {
		l.ring()
	}
}

func (l *shmLink) AlignSend() {
	if l.gate != nil {
		l.gate.align()
		return
	}
	l.alignSend()
}

func (l *shmLink) alignSend() { l.sent = (l.sent + lineSize - 1) &^ (lineSize - 1) }

func (l *shmLink) AlignRecv() { l.got = (l.got + lineSize - 1) &^ (lineSize - 1) }

func (l *shmLink) TryWriteLine(b []byte, tag uint32) (bool, error) {
	if l.gate != nil {
		return l.gate.sendLine(b, tag)
	}
	return l.pushLine(b, tag)
}

func (l *shmLink) pushLine(b []byte, tag uint32) (bool, error) {
	if l.err != nil {
		return false, l.err
	}
	if l.linesSent-l.linesAcked >= lineSlots {
		l.linesAcked = l.tx.lineTail.Load()
		if l.linesSent-l.linesAcked >= lineSlots {
			return false, l.block()
		}
	}
	if l.blocked {
		l.unblock()
	}
	ln := l.tx.line(l.linesSent)
	ln.n = uint32(copy(ln.payload[:], b))
	ln.tag = tag
	l.linesSent++
	ln.flag.Store(l.linesSent)
	l.ring()
	l.m.progressed = true
	return true, nil
}

func (l *shmLink) TryReadLine(b []byte) (int, uint32, bool, error) {
	ln := l.rx.line(l.linesGot)
	if ln.flag.Load() != l.linesGot+1 {
		return 0, 0, false, l.check()
	}
	n, tag := int(ln.n), ln.tag
	if n > LinePayload {
		return 0, 0, false, l.corrupt("line length", uint64(n))
	}
	copy(b, ln.payload[:n])
	l.linesGot++
	if l.linesGot-l.linesTold >= lineSlots/4 {
		l.tellLines()
	}
	l.m.progressed = true
	return n, tag, true, nil
}

func (l *shmLink) PrefetchLine() { prefetch(unsafe.Pointer(l.rx.line(l.linesGot))) }

// tellLines gives credit for lines, a quarter of the ring at a time: the word
// is the sender's to read only when it runs out, or looks while idle.
func (l *shmLink) tellLines() {
	l.linesTold = l.linesGot
	l.rx.lineTail.Store(l.linesGot)
	l.credited()
}

// check is why nothing arrives any more, nil when something may.
func (l *shmLink) check() error {
	if l.err == nil && (l.rx.flags.Load()|l.tx.flags.Load())&pipeDropped != 0 {
		l.err = fmt.Errorf("shared memory with rank %d: %w", l.peer, ErrDropped)
		l.meter.link(record.LinkDown)
	}
	return l.err
}

func (l *shmLink) corrupt(what string, v uint64) error {
	l.err = fmt.Errorf("shared memory with rank %d: %w: %s is %d at %d sent, %d received", l.peer, ErrCorrupt, what, v, l.sent, l.got)
	return l.err
}

// drop cuts the connection, both directions, for both sides.
func (l *shmLink) drop() {
	l.tx.flags.Or(pipeDropped)
	l.ring()
	_ = l.check()
}

func (l *shmLink) room() int {
	_ = l.readTail()
	return l.credit()
}

func (l *shmLink) WantRecv(since int64) { l.meter.want(since) }

func (l *shmLink) posted() uint64 {
	return l.sent + l.linesSent*lineSize + uint64(l.gate.held())
}
func (l *shmLink) completed() uint64 { return min(l.acked, l.sent) + l.linesAcked*lineSize }
func (l *shmLink) received() uint64  { return l.got + l.linesGot*lineSize }

func (l *shmLink) Flush(now int64) { l.meter.flush(now, l.posted(), l.completed(), l.received()) }

func (l *shmLink) refresh(now int64) bool {
	if l.linesTold != l.linesGot {
		l.tellLines()
	}
	l.linesAcked = l.tx.lineTail.Load()
	_ = l.readTail()
	l.meter.idle(now, l.posted(), l.completed(), l.received())
	return l.completed() < l.posted()
}

// look asks seldom while this rank polls: the word is the receiver's, who has to
// get it back to write on, and a work request takes some 100 µs (memPaceNs).
func (l *shmLink) look() {
	if l.looks++; l.looks%128 == 0 && l.meter.due() {
		_ = l.readTail()
	}
}

func (l *shmLink) holds() bool { return l.gate.holds() }
func (l *shmLink) due() bool {
	return l.meter.on && (l.completed() < l.posted() || l.linesTold != l.linesGot)
}

func (l *shmLink) pump(now int64) int64 {
	if l.gate == nil {
		return 0
	}
	return l.gate.pump(now)
}
