package rdma

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// ErrCorrupt is what a peer did that no correct one does.
var ErrCorrupt = errors.New("connection corrupt")

// MaxPaths is how many paths a lane can have: a primary and a backup.
const MaxPaths = 2

// maxPlaces is how many queue pairs a lane can have: two a path where they move.
const maxPlaces = 2 * MaxPaths

// messageVersion is of the control socket's messages, and of what lanes carry.
const messageVersion = 3

// maxMessage bounds a control message's body.
const maxMessage = 256

type messageKind uint8

const (
	// msgSwitch: the sender has left the lane's path for good, received is final,
	// and these generations of its paths are alive. Willing says that it left by
	// choice, so that the path is no broken one.
	msgSwitch messageKind = 1 + iota
	// msgOffer: a new queue pair of the sender waits for the peer's.
	msgOffer
	// msgDown: the sender's queue pair of that generation, which carried nothing, is gone.
	msgDown
	// msgExpired: the sender has looked for a path for the lane for as long as it will.
	msgExpired
	// msgFail: the sender has given the connection up, and why: path is 1 when it
	// has no path left.
	msgFail
)

// endpoint is what a peer needs to know to reach one queue pair, and the memory behind it.
type endpoint struct {
	qp, psn uint32
	gid     [16]byte
	lid     uint16
	mtu     uint8 // enum ibv_mtu
	inbox   uint64
	rkey    uint32
}

// valid reports whether there can be such a queue pair.
func (e *endpoint) valid() bool { return e.qp < 1<<24 && e.psn < 1<<24 && e.mtu >= 1 && e.mtu <= 5 }

// message is one control message. Which fields it has depends on its kind.
type message struct {
	kind       messageKind
	lane, path uint8
	epoch      uint32            // switch
	received   uint64            // switch
	willing    bool              // switch
	alive      [maxPlaces]uint32 // switch: generations, 0 where none
	spares     bool              // switch: alive has two places a path, else one
	gen        uint32            // offer, down
	at         endpoint          // offer
	text       string            // fail
}

// append encodes the message with its frame: length of the body, version, kind.
func (m *message) append(b []byte) []byte {
	le := binary.LittleEndian
	start := len(b)
	b = append(b, 0, 0, messageVersion, byte(m.kind))
	switch m.kind {
	case msgSwitch:
		b = append(b, m.lane)
		b = le.AppendUint32(b, m.epoch)
		b = le.AppendUint64(b, m.received)
		for _, g := range m.alive[:places(m.spares)] {
			b = le.AppendUint32(b, g)
		}
		b = append(b, 0)
		if m.willing {
			b[len(b)-1] = 1
		}
	case msgOffer:
		b = append(b, m.lane, m.path)
		b = le.AppendUint32(b, m.gen)
		b = le.AppendUint32(b, m.at.qp)
		b = le.AppendUint32(b, m.at.psn)
		b = append(b, m.at.gid[:]...)
		b = le.AppendUint16(b, m.at.lid)
		b = append(b, m.at.mtu)
		b = le.AppendUint64(b, m.at.inbox)
		b = le.AppendUint32(b, m.at.rkey)
	case msgDown:
		b = append(b, m.lane, m.path)
		b = le.AppendUint32(b, m.gen)
	case msgExpired:
		b = append(b, m.lane)
	case msgFail:
		b = append(b, m.path)
		b = append(b, m.text[:min(len(m.text), maxMessage-1)]...)
	}
	le.PutUint16(b[start:], uint16(len(b)-start-frameHeader))
	return b
}

const frameHeader = 4

// places is how many queue pairs a lane can have.
func places(spares bool) int {
	if spares {
		return maxPlaces
	}
	return MaxPaths
}

// switchSize is the size of a SWITCH's body.
func switchSize(spares bool) int { return 1 + 4 + 8 + 4*places(spares) + 1 }

// bodySize is the size of each kind's body, -1 where it varies.
func bodySize(k messageKind) (int, bool) {
	switch k {
	case msgSwitch:
		return switchSize(false), true
	case msgOffer:
		return 2 + 4 + 4 + 4 + 16 + 2 + 1 + 8 + 4, true
	case msgDown:
		return 2 + 4, true
	case msgExpired:
		return 1, true
	case msgFail:
		return -1, true
	}
	return 0, false
}

// parseFrame reads a frame's header: how long its body is.
func parseFrame(h []byte) (kind messageKind, n int, err error) {
	n, kind = int(binary.LittleEndian.Uint16(h)), messageKind(h[3])
	if h[2] != messageVersion {
		return 0, 0, fmt.Errorf("%w: control message of version %d, want %d", ErrCorrupt, h[2], messageVersion)
	}
	want, ok := bodySize(kind)
	if kind == msgSwitch && n == switchSize(true) {
		want = n
	}
	if !ok || want >= 0 && n != want || n > maxMessage || n == 0 {
		return 0, 0, fmt.Errorf("%w: control message of kind %d with %d bytes", ErrCorrupt, kind, n)
	}
	return kind, n, nil
}

// parseBody decodes a body whose frame parseFrame has accepted.
func parseBody(kind messageKind, b []byte) (message, error) {
	le := binary.LittleEndian
	m := message{kind: kind}
	switch kind {
	case msgSwitch:
		m.lane, m.epoch, m.received = b[0], le.Uint32(b[1:]), le.Uint64(b[5:])
		m.spares = len(b) == switchSize(true)
		for i := range m.alive[:places(m.spares)] {
			m.alive[i] = le.Uint32(b[13+4*i:])
		}
		last := b[len(b)-1]
		if m.willing = last == 1; last > 1 {
			return m, fmt.Errorf("%w: SWITCH of lane %d with reason %d", ErrCorrupt, m.lane, last)
		}
	case msgOffer:
		m.lane, m.path, m.gen = b[0], b[1], le.Uint32(b[2:])
		m.at.qp, m.at.psn = le.Uint32(b[6:]), le.Uint32(b[10:])
		m.at.gid = [16]byte(b[14:30])
		m.at.lid, m.at.mtu = le.Uint16(b[30:]), b[32]
		m.at.inbox, m.at.rkey = le.Uint64(b[33:]), le.Uint32(b[41:])
	case msgDown:
		m.lane, m.path, m.gen = b[0], b[1], le.Uint32(b[2:])
	case msgExpired:
		m.lane = b[0]
	case msgFail:
		m.path, m.text = b[0], string(b[1:])
	}
	return m, nil
}

func readMessage(r io.Reader, h, b []byte) (message, error) {
	if _, err := io.ReadFull(r, h); err != nil {
		return message{}, err
	}
	kind, n, err := parseFrame(h)
	if err != nil {
		return message{}, err
	}
	if _, err := io.ReadFull(r, b[:n]); err != nil {
		return message{}, err
	}
	return parseBody(kind, b[:n])
}
