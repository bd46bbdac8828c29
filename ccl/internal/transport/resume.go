package transport

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"sort"

	"github.com/lockstep-ccl/lockstep/record"
	"golang.org/x/sys/unix"
)

// How a link goes on over other sockets. The sender keeps what the receiver has not
// consumed: what the caller leaves as it is (TrySendKept) by reference until the
// operation ends, the rest as a copy. Whoever takes over a new set of sockets closes the
// old ones, and says in a resume frame from where it wants the stream, and its lines:
//
//	0 frameResume   8 stream position   16, 24 credit   28 lines that have come, modulo 2^32
//
// Until the peer's has come, nothing else is sent but credit. So it does not matter which ends have
// taken over which sets: only both ends' last set carries anything.

// retained is what was sent and is not yet acknowledged.
type retained struct {
	ring []byte        // by position, like the receiver's; made at first use
	refs []callerBytes // what lies elsewhere, ascending
	pads []span        // between messages, ascending
	ref  int           // refs and pads before these are acknowledged
	pad  int

	lines [lineSlots]lineIn
}

// callerBytes is bytes of the caller's at a stream position.
type callerBytes struct {
	at uint64
	b  []byte
}

// retain keeps the bytes at a position, after pad bytes of padding.
func (l *tcpLink) retain(at uint64, b []byte, pad uint64, stay bool) {
	k := &l.kept
	if pad > 0 {
		k.pads = append(k.pads, span{at - pad, at})
	}
	if !stay {
		l.store(at, b)
		return
	}
	if len(k.refs) == k.ref {
		l.m.zeroCopies++
	}
	k.refs = append(k.refs, callerBytes{at, b})
}

// store copies bytes into the ring.
func (l *tcpLink) store(at uint64, b []byte) {
	k := &l.kept
	if k.ring == nil {
		k.ring = make([]byte, l.m.cfg.Window)
	}
	n := copy(k.ring[at&uint64(len(k.ring)-1):], b)
	copy(k.ring, b[n:])
}

// release lets go of what has been acknowledged.
func (l *tcpLink) release() {
	k := &l.kept
	for k.pad < len(k.pads) && k.pads[k.pad].hi <= l.acked {
		k.pad++
	}
	k.pads, k.pad = drop(k.pads, k.pad)
	if len(k.refs) == k.ref {
		return
	}
	for k.ref < len(k.refs) && k.refs[k.ref].at+uint64(len(k.refs[k.ref].b)) <= l.acked {
		k.refs[k.ref].b = nil
		k.ref++
	}
	if k.ref == len(k.refs) {
		l.m.zeroCopies--
	}
	k.refs, k.ref = drop(k.refs, k.ref)
}

// drop removes the first n of a queue, when that is at least half of it.
func drop[T any](q []T, n int) ([]T, int) {
	if 2*n < len(q) {
		return q, n
	}
	m := copy(q, q[n:])
	clear(q[m:])
	return q[:m], 0
}

// own copies what is not acknowledged of the caller's bytes: it gets them back.
func (l *tcpLink) own() {
	k := &l.kept
	if len(k.refs) == k.ref {
		return
	}
	for i := k.ref; i < len(k.refs); i++ {
		r := &k.refs[i]
		if skip := l.acked - min(l.acked, r.at); skip < uint64(len(r.b)) {
			l.store(r.at+skip, r.b[skip:])
		}
		r.b = nil
	}
	k.refs, k.ref = k.refs[:0], 0
	l.m.zeroCopies--
}

// ownAll is own on all links, when there is one that borrows.
func (m *Mesh) ownAll() {
	if m.zeroCopies == 0 {
		return
	}
	for _, l := range m.open {
		if t, ok := l.(*tcpLink); ok {
			t.own()
		}
	}
}

// piece is what to send again from a position on, in one frame, and the padding before it.
func (k *retained) piece(at, sent uint64) (b []byte, from, pad uint64) {
	i := k.pad + sort.Search(len(k.pads)-k.pad, func(i int) bool { return k.pads[k.pad+i].hi > at })
	if i < len(k.pads) && k.pads[i].lo <= at {
		pad = k.pads[i].hi - at
		at = k.pads[i].hi
		i++
	}
	end := min(sent, at+maxChunk)
	if i < len(k.pads) {
		end = min(end, k.pads[i].lo)
	}
	if at >= end {
		return nil, at, pad
	}
	i = k.ref + sort.Search(len(k.refs)-k.ref, func(i int) bool { r := &k.refs[k.ref+i]; return r.at+uint64(len(r.b)) > at })
	if i < len(k.refs) {
		r := &k.refs[i]
		if at >= r.at {
			return whole(r.b[at-r.at:min(r.at+uint64(len(r.b)), end)-r.at], at, end), at, pad
		}
		end = min(end, r.at)
	}
	lo := at & uint64(len(k.ring)-1)
	return whole(k.ring[lo:min(lo+end-at, uint64(len(k.ring)))], at, end), at, pad
}

// whole cuts a piece that ends before its message at a boundary, where the receiver
// may reduce it in place.
func whole(b []byte, at, end uint64) []byte {
	if hi := at + uint64(len(b)); hi < end || end-at == maxChunk {
		if up := hi &^ (lineSize - 1); up > at {
			return b[:up-at]
		}
	}
	return b
}

// lose notes that the link has no path: err says why. It looks for another one.
func (l *tcpLink) lose(err error) {
	if l.err != nil {
		return
	}
	if l.n.again == nil {
		_ = l.fatal(err)
		return
	}
	if !l.withdrawn(err) {
		l.down(err)
	}
	if hungUp(err) {
		l.mu.Lock()
		l.ended = true
		l.mu.Unlock()
	}
	l.n.again(l, l.peer, l.number)
}

// withdrawn reports whether the end of a set is its peer's word that it has begun another
// one: it has not seen this one whole, and is on the former one, which is sound. Both look
// for a set then, and there is an outage only when none comes.
func (l *tcpLink) withdrawn(err error) bool {
	if l.lost != nil || !l.unsure || !hungUp(err) {
		return false
	}
	l.mu.Lock()
	l.between = l.whole == l.number
	l.mu.Unlock()
	if l.withdrawnAt == 0 {
		l.withdrawnAt = record.Now()
		l.meter.unblock()
	}
	return true
}

// overdue makes an outage of a set that was withdrawn when no other takes its place.
func (l *tcpLink) overdue(now int64) {
	if l.withdrawnAt != 0 && (now-l.withdrawnAt >= int64(l.m.cfg.Bounds.Withdrawn) || l.broken.Load() != nil) {
		l.down(errWithdrawn)
	}
}

// hungUp reports whether a socket's end is its peer's host's word, and not its silence.
func hungUp(err error) bool {
	for _, e := range []error{io.EOF, unix.ECONNRESET, unix.EPIPE, unix.ENOTCONN, errClosed} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// down tells of an outage when it begins.
func (l *tcpLink) down(err error) {
	if l.lost == nil {
		l.lost = err
		l.unsure, l.withdrawnAt = false, 0
		l.mu.Lock()
		l.between = false
		l.hears()
		l.mu.Unlock()
		l.meter.unblock()
		l.meter.link(record.LinkDown)
	}
}

// regained ends an outage.
func (l *tcpLink) regained() {
	if l.lost != nil {
		l.lost = nil
		l.broken.Store(nil) // of a search that a later path has overtaken
		l.meter.link(record.LinkUp)
	}
}

// adopt takes over the sockets of a finished attempt.
func (l *tcpLink) adopt() {
	l.mu.Lock()
	fds, number, lo, hi, chosen := l.next, l.whole, l.from, l.to, l.chosen
	l.next, l.ended = nil, false
	l.fresh.Store(false)
	l.mu.Unlock()
	if l.err != nil {
		closeAll(fds)
	}
	if fds == nil || l.err != nil {
		return
	}
	again := number > 1
	if again && !chosen {
		l.down(errors.New("the peer connects again"))
	}
	l.unsure = again && l.lost == nil
	for _, s := range l.socks {
		l.retransmitted += s.retransmitted
	}
	// The peer shall not see a sound connection end before it has left it, too.
	if l.former = append(l.former, l.socks...); l.lost != nil || len(l.former) > 8*maxSockets {
		l.leave()
	}
	l.socks, l.gaps, l.number, l.half = nil, l.gaps[:0], number, 0
	l.passes, l.again = false, nil // all that has not come is sent again
	if l.lo, l.hi = lo, hi; hi == 0 {
		l.hi = len(fds)
	}
	l.lineSocket = l.lo
	var err error
	for i, fd := range fds {
		l.socks = append(l.socks, &socket{fd: fd, readable: true, writable: true, port: localPort(fd)})
		err = errors.Join(err, l.n.watch(fd, unix.EPOLLIN|unix.EPOLLOUT|unix.EPOLLRDHUP, l.peer, eventOf(i, number)))
	}
	if !l.opened {
		l.n.up.Add(1)
	}
	if err != nil {
		_ = l.fatal(err)
		return
	}
	if !again {
		return
	}
	l.resumes++
	l.awaits = true
	h := l.header(frameResume, 0, l.front, uint32(l.linesIn))
	h[1] = 0
	if ok, err := l.write(l.socks[0], h, nil); err == nil && !ok {
		l.lose(errors.New("a new socket takes nothing"))
	}
}

// leave closes the sockets that others have replaced.
func (l *tcpLink) leave() {
	for _, s := range l.former {
		unix.Close(s.fd)
	}
	l.former = nil
}

// eventOf names a socket and its set in an epoll event.
func eventOf(i int, number uint32) int { return i | int(number&0xffffff)<<4 }

// resumed takes in the peer's resume frame.
func (l *tcpLink) resumed(s *socket, at uint64, lines uint32) error {
	more := lines - uint32(l.linesAcked)
	if !l.awaits || s != l.socks[0] || int64(at-l.sent) >= lineSize || int64(l.acked-at) >= lineSize && at < l.acked || uint64(more) > l.linesSent-l.linesAcked {
		return fmt.Errorf("%w: the peer resumes at %d, line %d; here %d to %d, line %d to %d are kept", ErrCorrupt, at, lines, l.acked, l.sent, l.linesAcked, l.linesSent)
	}
	l.awaits, l.unsure, l.withdrawnAt = false, false, 0
	l.leave()
	l.mu.Lock()
	l.dropSkipped(l.number)
	l.settled = l.number == l.whole
	l.mu.Unlock()
	l.again = append(l.again[:0], span{min(max(at, l.acked), l.sent), l.sent - l.pad})
	l.resendLine = l.linesAcked + uint64(more)
	l.regained()
	l.catchUp()
	return nil
}

// catching reports whether the peer lacks something that was sent.
func (l *tcpLink) catching() bool {
	return l.awaits || len(l.again) > 0 || l.resendLine < l.linesSent
}

// catchUp sends again what the peer lacks; true when nothing is left of that.
func (l *tcpLink) catchUp() bool {
	if l.awaits || l.err != nil || len(l.socks) == 0 {
		return false
	}
	l.resendLine = max(l.resendLine, l.linesAcked)
	for l.resendLine < l.linesSent {
		s := l.socks[l.lineSocket]
		ln := &l.kept.lines[l.resendLine%lineSlots]
		if !s.usable() || !l.writeFrame(s, frameLine, ln.payload[:ln.n], l.resendLine, ln.tag, 0) {
			return false
		}
		l.resendLine++
		l.resent += lineSize
	}
	for ; len(l.again) > 0; l.again = slices.Delete(l.again, 0, 1) {
		for g := &l.again[0]; max(g.lo, l.acked) < g.hi; {
			b, at, pad := l.kept.piece(max(g.lo, l.acked), g.hi)
			if len(b) > 0 {
				s := l.free(len(b))
				if s == nil || !l.writeFrame(s, frameData, b, at, 0, pad) {
					return false
				}
				l.track(s, at-pad, at+uint64(len(b)))
			}
			g.lo = at + uint64(len(b))
			l.resent += uint64(len(b))
		}
	}
	l.tellResent()
	return true
}

// writeFrame sends one frame again.
func (l *tcpLink) writeFrame(s *socket, kind byte, b []byte, at uint64, tag uint32, pad uint64) bool {
	h := l.header(kind, len(b), at, tag)
	h[1] = byte(pad)
	ok, err := l.write(s, h, b)
	return ok && err == nil
}

func (s *socket) usable() bool { return s.writable && !s.broken && !s.ended && len(s.out) == 0 }

// tellResent tells how often the link went on over other sockets, and what was sent
// again for it and by the kernel.
func (l *tcpLink) tellResent() {
	if !l.meter.on {
		return
	}
	total := l.resent + l.retransmitted
	for _, s := range l.socks {
		total += s.retransmitted
	}
	if total != l.toldResent || l.resumes != l.toldResumes {
		l.toldResent, l.toldResumes = total, l.resumes
		l.meter.conn.Switched(l.resumes, total)
	}
}
