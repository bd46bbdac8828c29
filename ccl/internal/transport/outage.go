package transport

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// When a path is away, and when it is back. The kernel of a living host acknowledges
// what is sent, also where the process is stopped; one that does not, for as long as it
// takes to be sent again twice, is out of reach, or has another path.

const (
	// lookPath is how often a rank that waits asks its kernel how its sockets fare.
	lookPath = int64(200 * time.Millisecond)
	// askAfter is the silence of an idle connection after which its peer's host is
	// asked by a frame: the kernel has asked once by then, a second after the last answer.
	askAfter = 1300 // ms
	// halfFor is how long some sockets may have ended and others not.
	halfFor = int64(time.Second)
	// resendMost is the kernel's longest pause between two attempts to send again, so
	// that old sockets soon find that their path is back.
	resendMost = 1000 // ms
)

var (
	errSilent = errors.New("nothing is acknowledged")
	errClosed = errors.New("the kernel has closed the connection")

	errWithdrawn = errors.New("the peer has withdrawn the sockets that the connection moved to")
	errHalf      = fmt.Errorf("one of its sockets ended, and others did not: %w", io.EOF)
)

const tcpClosed = 7 // TCP_CLOSE

// path is what this end knows of a socket's.
type path struct {
	acked         uint64 // bytes, by the peer's kernel
	owed          int64  // since when more has been under way, 0 when it is not
	silent        bool
	retransmitted uint64 // bytes, by this kernel, that were lost as far as it knows
	segments      uint32 // that it has sent
	lost          uint32 // of them, as far as it knows
	again         bool   // the kernel is retransmitting
}

// watch finds out, now and then, whether the peer's host is there. It is for a rank that
// waits: that bytes move tells a busy one.
func (l *tcpLink) watch(now int64) {
	if l.err != nil || l.n.again == nil {
		return
	}
	l.overdue(now)
	if l.lost != nil {
		if e := l.broken.Load(); e != nil {
			_ = l.fatal(fmt.Errorf("%w; then %w", l.lost, *e))
			return
		}
	}
	if now-l.looked < l.lookEvery() || l.lost == nil && l.wants == 0 && l.completed() >= l.posted() {
		return
	}
	late := now-l.looked > int64(l.m.cfg.Bounds.Silent) // nobody has looked: let there be time for an answer
	passed := now - l.looked
	l.looked = now
	silent, heard, over := false, false, len(l.socks) == 0
	for i, s := range l.socks {
		info, err := unix.GetsockoptTCPInfo(s.fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		if err == nil && info.State == tcpClosed && !s.broken {
			l.failed(s, s.fate())
		}
		if err != nil || s.over || s.broken {
			over = true
			continue
		}
		l.rtt.add(info, s.path.acked)
		if l.judge(s, info, now, late) {
			heard = true
		} else if i == 0 && !s.silent && info.Unacked == 0 && s.usable() {
			l.ask(s)
		}
		s.stalls(info, now)
		if s.lags(info, now); !s.late {
			s.retold = false
		}
		s.pace.note(info, passed)
		silent = silent || s.silent
	}
	switch {
	case silent:
		l.lose(errSilent)
	case l.lost == nil && l.half > 0 && now-l.half >= halfFor:
		l.lose(errHalf) // what the ended one carried may not have come
	case l.lost != nil && !l.awaits && !over:
		l.n.forget(l) // the old path is back
		l.regained()
	}
	l.weigh()
	l.passOver()
	l.tellResent()
	if ns, news := l.rtt.next(now); news {
		l.meter.rtt(ns)
	}
	l.survey()
	l.giveUp(heard)
}

// rttMean is the round-trip time of a link's sockets, the mean by what each has carried.
type rttMean struct {
	sum, bytes float64
	since      int64
}

// rttBytes is how much a link has to carry within rttFor, ns, for its round-trip time to be known: the
// peer's kernel delays the acknowledgement of a segment that comes alone.
const (
	rttBytes = 4 << 10
	rttFor   = 1e9
)

// add takes in what the kernel knows of a socket that had so many bytes acknowledged at the last look.
func (r *rttMean) add(info *unix.TCPInfo, acked uint64) {
	n := float64(info.Bytes_acked - min(acked, info.Bytes_acked))
	r.sum, r.bytes = r.sum+n*float64(info.Rtt)*1e3, r.bytes+n
}

// next returns the mean since the last one, ns, when there is news: 0 when too little was carried for rttFor,
// so that what was told before is old.
func (r *rttMean) next(now int64) (ns int64, news bool) {
	switch {
	case r.bytes >= rttBytes:
		ns = int64(r.sum / r.bytes)
	case now-r.since < rttFor:
		return 0, false
	}
	*r = rttMean{since: now}
	return ns, true
}

// unanswered reports whether the kernel retransmits: the path may be down.
func (l *tcpLink) unanswered() bool {
	return slices.ContainsFunc(l.socks, func(s *socket) bool { return s.path.again })
}

// fate is why the kernel has closed a connection.
func (s *socket) fate() error {
	if e, err := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_ERROR); err == nil && e != 0 {
		return unix.Errno(e)
	}
	return errClosed
}

// judge takes in what the kernel knows of a socket; true when the peer's host has answered.
func (l *tcpLink) judge(s *socket, info *unix.TCPInfo, now int64, late bool) bool {
	silence := min(info.Last_ack_recv, info.Last_data_recv)
	progress := info.Bytes_acked != s.path.acked
	s.path.acked, s.retransmitted = info.Bytes_acked, max(s.retransmitted, lostBytes(info))
	s.path.segments, s.path.lost = info.Data_segs_out, lostSegments(info)
	s.path.again = info.Unacked > 0 && info.Retransmits > 0
	switch {
	case progress:
		s.owed, s.silent = 0, false
		if info.Unacked > 0 {
			s.owed = now
		}
		return true
	case info.Unacked == 0 && info.Notsent_bytes > 0: // the peer's window is shut, and probed
		s.owed = 0
		s.silent = info.Probes >= 2 && silence >= 2*uint32(l.m.cfg.Bounds.Silent.Milliseconds())
		return !s.silent
	case info.Unacked == 0:
		s.owed = 0
		if silence < askAfter {
			s.silent = false
			return true
		}
		return false
	case s.owed == 0 || late:
		s.owed = now
	case now-s.owed >= int64(l.m.cfg.Bounds.Silent) && info.Retransmits >= 2:
		s.silent = true
	}
	return false
}

// lostSegments is how many segments a kernel has retransmitted, less those that the peer had twice (DSACK): a
// receiver that does not run acknowledges late, and is sent its last segment again.
func lostSegments(info *unix.TCPInfo) uint32 {
	return info.Total_retrans - min(info.Total_retrans, info.Dsack_dups)
}

// lostBytes is how many bytes those had, about.
func lostBytes(info *unix.TCPInfo) uint64 {
	return uint64(float64(info.Bytes_retrans) * float64(lostSegments(info)) / float64(max(info.Total_retrans, 1)))
}

// ask sends a frame that the peer's kernel has to acknowledge.
func (l *tcpLink) ask(s *socket) {
	pad := l.pad
	l.pad = 0
	h := l.header(frameCredit, 0, 0, 0)
	l.pad = pad
	if _, err := l.write(s, h, nil); err == nil {
		s.owed = 0
	}
}

// giveUp ends a link whose peer's host has been silent for too long.
func (l *tcpLink) giveUp(heard bool) {
	if l.lost == nil {
		return
	}
	if heard {
		l.hear()
		return
	}
	if tries, quiet, last := l.dialled(); quiet >= l.m.cfg.Outage {
		_ = l.fatal(fmt.Errorf("%w; then %w", l.lost, l.n.unheard(l.peer, tries, quiet, last)))
	}
}

// hear notes that the peer's host has answered.
func (l *tcpLink) hear() {
	l.mu.Lock()
	l.hears()
	l.mu.Unlock()
}

// keepPath sets how the kernel asks for the peer's host, and how often it sends again.
func keepPath(fd int) {
	for _, o := range []struct{ level, name, value int }{
		{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
		{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 1},
		{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, 1},
		{unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 10},
		// Linux 6.15; what is older sends again later.
		{unix.IPPROTO_TCP, unix.TCP_RTO_MAX_MS, resendMost},
	} {
		_ = unix.SetsockoptInt(fd, o.level, o.name, o.value)
	}
}
