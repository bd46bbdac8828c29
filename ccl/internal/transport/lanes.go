package transport

import (
	"math"
	"slices"

	"github.com/lockstep-ccl/lockstep/record"
	"golang.org/x/sys/unix"
)

// How bytes are split over the sockets of a link. A kernel takes what fits its buffer at
// once, however slow the path, so a socket that takes bytes says nothing of when they
// arrive. Where a frame takes long, each goes to the socket that will have delivered it first,
// by its rate and by what it still has, and frames get smaller towards the end of a message:
// so all sockets are done at about the same time, also where one path is slower.

const (
	// splitFrom is how long a large frame takes, ns, on the slowest socket of a link whose
	// messages are split by rate. Below that, asking the kernel costs more than it gains:
	// whichever socket takes bytes carries them.
	splitFrom = 100e3
	// splitLeast is the smallest part of a message that is worth a frame of its own, and
	// frameTime is how long, ns, a larger one may take: the receiver goes on with what has come
	// in order, so the sockets' parts should alternate.
	splitLeast = 8 << 10
	frameTime  = 1e6
	// backlog is from how many bytes on a socket is busy, not merely waiting for its last acknowledgement,
	// which the peer's kernel may delay.
	backlog = 4 << 10
	// laneMemory is the half-life of what is known of a socket's rate, ns.
	laneMemory = 500e6
	// lanePrior is for how long, ns, a socket is taken to have carried bytes at the mean rate of
	// all: one that has hardly been used of late is tried again.
	lanePrior = 10e6
)

// pace is what a socket has carried of late, and in which time. The kernel's own
// tcpi_delivery_rate will not do: it is a maximum over bursts, and a switch or a shaper lets a burst
// pass at a rate that it does not keep up.
type pace struct {
	bytes, busy float64 // acknowledged between looks that both found a backlog, and ns; fading
	acked       uint64  // as last asked
	shut        uint64  // µs in which the peer's window was, as last asked
	behind      bool    // there was a backlog, as last asked

	drained, time float64 // between frames, likewise; fading
	left          int     // backlog after the last frame
	since         int64   // when that was
	moving        bool    // some of that backlog has been acknowledged

	rate float64 // bytes a ns; 0 when it is not known
}

// note takes in what the kernel knows.
func (p *pace) note(info *unix.TCPInfo, passed int64) {
	fade := math.Exp2(-float64(passed) / laneMemory)
	p.bytes, p.busy, p.drained, p.time = p.bytes*fade, p.busy*fade, p.drained*fade, p.time*fade
	behind := int(info.Unacked)*int(info.Snd_mss)+int(info.Notsent_bytes) >= backlog
	shut := info.Rwnd_limited - min(info.Rwnd_limited, p.shut)
	switch {
	case 10*int64(shut)*1e3 > passed: // it was the receiver that took nothing
		p.drained, p.time, p.moving, behind = 0, 0, false, false
	case behind && p.behind:
		p.bytes += float64(info.Bytes_acked - p.acked)
		p.busy += float64(passed)
	}
	p.acked, p.shut, p.behind = info.Bytes_acked, info.Rwnd_limited, behind
}

// drain takes in what a socket has left. Where that is a backlog, it has had one ever since the last
// frame.
func (p *pace) drain(now int64, queued int) {
	switch {
	case queued < backlog:
		p.moving = false
	case p.moving:
		p.drained += float64(max(0, p.left-queued))
		p.time += float64(now - p.since)
	default:
		p.moving = p.left > queued // the first acknowledgement of a burst takes a round trip, whatever the rate
	}
	p.left, p.since = queued, now
}

// weigh knows the sockets' rates anew, and decides whether what this end sends is split by them.
func (l *tcpLink) weigh() {
	socks := l.mine()
	var bytes, busy, drained, time float64
	for _, s := range socks {
		bytes, busy = bytes+s.pace.bytes, busy+s.pace.busy
		drained, time = drained+s.drained, time+s.time
	}
	l.splits = false
	known := len(socks) > 1 && bytes > 0 && busy >= lanePrior
	for _, s := range socks {
		if s.rate = 0; known {
			s.rate = (s.pace.bytes + bytes/busy*lanePrior) / (s.pace.busy + lanePrior)
			l.splits = l.splits || maxChunk > splitFrom*s.rate
		}
	}
	mean := bytes / busy
	if time >= lanePrior {
		mean = drained / time
	}
	for _, s := range socks {
		if !l.splits {
			s.moving, s.left = false, 0 // nobody keeps them
		} else {
			s.rate = max(1e-9, (s.drained+mean*lanePrior)/(s.time+lanePrior))
		}
	}
}

// lane returns the socket for the next frame of a message, of which rest bytes are left and n
// may be sent now, and the frame's length; nil when the socket whose turn it is takes nothing yet.
func (l *tcpLink) lane(n, rest int) (*socket, int) {
	if !l.splits {
		return l.free(n), n
	}
	// Each change of sockets may leave a gap at the receiver, of which it takes so many in a window.
	least := max(splitLeast, l.m.cfg.Window/(maxGaps/4))
	socks := l.mine()
	if s := l.last; rest < least && l.run < least && slices.Contains(socks, s) && l.takes(s) && !s.stalled {
		return s, n
	}
	now := record.Now()
	var queued [maxSockets]int
	var rates [maxSockets]float64
	for i, s := range socks {
		if s.broken || s.ended || s.stalled || l.passes && s.late {
			continue
		}
		q, err := unix.IoctlGetInt(s.fd, unix.SIOCOUTQ)
		if err != nil {
			continue
		}
		q += len(s.out)
		s.drain(now, q)
		queued[i], rates[i] = q, s.rate
	}
	i, size := nextFrame(queued[:len(socks)], rates[:len(socks)], n, rest, least)
	if i < 0 {
		return l.free(n), n
	}
	if !socks[i].usable() {
		return nil, 0 // full, and sooner done than the others all the same
	}
	return socks[i], size
}

// carried notes that a socket has taken a frame.
func (l *tcpLink) carried(s *socket, n int) {
	if !l.splits {
		return
	}
	s.left += frameSize + n
	if l.last != s {
		l.last, l.run = s, 0
	}
	l.run += n
}

// nextFrame picks a socket, and how many of up to n bytes it gets of a message of which rest are
// left, by what sockets have and by their rates in bytes a ns, 0 of one that takes nothing; -1 when
// none does. A frame has at least so many bytes where the message does.
func nextFrame(queued []int, rates []float64, n, rest, least int) (best, size int) {
	best, size = -1, max(rest/len(queued), least)
	soonest := 0.0
	for i, rate := range rates {
		if rate == 0 {
			continue
		}
		if at := float64(queued[i]+min(n, size)) / rate; best < 0 || at < soonest {
			best, soonest = i, at
		}
	}
	if best < 0 {
		return best, 0
	}
	size = min(size, max(least, int(frameTime*rates[best]))) &^ (lineSize - 1)
	if rest-size < least/2 {
		size = rest
	}
	return best, min(n, size)
}
