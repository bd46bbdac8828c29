package transport

import (
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// What is under way on a lane whose path has died is sent again over the connection's other lanes,
// before the kernel's timeout (MPTCP calls this reinjection): the stream goes on while the lane finds another
// path, or its kernel the end of the trouble. The receiver takes whichever copy comes first.

// lateLeast is the shortest silence that makes a lane late. The peer's kernel delays acknowledgements by 40 ms.
const lateLeast = 60 * time.Millisecond

// flight is a piece of the stream that a socket has taken.
type flight struct {
	span        // with the padding before it
	end  uint64 // up to which byte of the socket's own
}

// track notes that a socket has taken the stream from lo to hi, where others could carry it again.
func (l *tcpLink) track(s *socket, lo, hi uint64) {
	if l.hi-l.lo < 2 {
		return
	}
	if k := len(s.flights); k > s.landed {
		if f := &s.flights[k-1]; f.hi == lo && hi-f.lo <= maxChunk {
			f.hi, f.end = hi, s.wrote
			return
		}
	}
	for s.landed < len(s.flights) && s.flights[s.landed].hi <= l.acked {
		s.landed++
	}
	s.flights, s.landed = drop(s.flights, s.landed)
	s.flights = append(s.flights, flight{span{lo, hi}, s.wrote})
}

// lags notes whether a lane's bytes have been unacknowledged for longer than its round trips explain, or
// half its kernel's timeout.
func (s *socket) lags(info *unix.TCPInfo, now int64) {
	trips := max(time.Duration(info.Rtt+2*info.Rttvar)*time.Microsecond, lateLeast)
	wait := max(time.Duration(info.Rto/2)*time.Microsecond, trips)
	// Silence is told to the millisecond, but what the peer sends ends it, too. Progress is known from one look on.
	silent, owed := time.Duration(info.Last_ack_recv)*time.Millisecond, time.Duration(now-s.owed)
	s.late = s.stalled || info.Unacked > 0 && s.owed > 0 && (owed >= wait || silent >= wait && owed >= max(wait-lookLanes, trips))
}

func (s *socket) works() bool { return !s.broken && !s.ended && !s.over }

// takes reports whether a socket may be given a frame: a late one is not while another lane is not late.
func (l *tcpLink) takes(s *socket) bool { return s.usable() && !(l.passes && s.late) }

// passOver has other lanes carry what is under way on late ones. When all are late, nothing is to be gained.
func (l *tcpLink) passOver() {
	socks := l.mine()
	spare := slices.IndexFunc(socks, func(s *socket) bool { return s.works() && !s.late })
	late := slices.ContainsFunc(l.socks, func(s *socket) bool { return s.late })
	if l.passes = late && spare >= 0; !l.passes {
		for _, s := range l.socks {
			s.retold = false // credit goes over any of them, this one, too
		}
		return
	}
	if l.awaits {
		return
	}
	for i, s := range l.socks {
		if !s.late {
			continue
		}
		if !s.retold {
			s.retold, l.creditDue = true, true // it may have what was told last
		}
		if i == l.lineSocket {
			l.lineSocket, l.resendLine = l.lo+spare, l.linesAcked
		}
		if len(s.flights) == s.landed {
			continue
		}
		queued, err := unix.IoctlGetInt(s.fd, unix.SIOCOUTQ)
		if err != nil {
			continue
		}
		has := s.wrote - min(s.wrote, uint64(queued+len(s.out))) // the peer's kernel
		for _, f := range s.flights[s.landed:] {
			if f.end > has && f.hi > l.acked {
				l.again = append(l.again, f.span)
			}
		}
		s.flights, s.landed = s.flights[:0], 0
	}
	if l.catching() {
		l.catchUp()
	}
}

// skip reads over bytes that have come over another socket.
func (l *tcpLink) skip(s *socket, n int) (more bool, err error) {
	k := min(n, s.inHi-s.inLo)
	if k > 0 {
		s.inLo += k
	} else {
		if l.waste == nil {
			l.waste = make([]byte, maxChunk)
		}
		s.inLo, s.inHi = 0, 0
		if k, err = s.read(l.waste[:min(n, len(l.waste))], nil); err != nil || k == 0 {
			return false, err
		}
	}
	s.pos += uint64(k)
	return true, nil
}
