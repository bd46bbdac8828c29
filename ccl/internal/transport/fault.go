package transport

import (
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

// Fault is what is wrong with one connection; the zero value is nothing.
type Fault struct {
	// Stall takes bytes from the sender and does not deliver them while it lasts.
	Stall bool
	// BytesPerSecond is how fast the connection delivers, 0 for as fast as it can.
	BytesPerSecond int64
	// Delay is how much later each chunk arrives.
	Delay time.Duration
	// Drop cuts the pair's connection, for good and for both sides.
	Drop bool
}

// Faults says what goes wrong in this process. It is asked on each operation,
// so it must be quick; it must be safe for concurrent use. Package ccltest
// implements it.
type Faults interface {
	// Version changes when any other answer does.
	Version() uint64
	// Conn is the fault of the connection from rank src, which is in this
	// process, to rank dst of the named communicator.
	Conn(comm string, src, dst int) Fault
	// Entry is how much later than it would this process's rank enters each
	// collective of the named communicator. On device memory a kernel that keeps
	// the GPU busy sees to it.
	Entry(comm string) time.Duration
}

// wire is what a gate needs of the link that it guards.
type wire interface {
	push(b []byte) (int, error)
	pushLine(b []byte, tag uint32) (bool, error)
	alignSend()
	drop()
	// room is how many bytes the receiver's credit allows, were nothing held back.
	room() int
}

// gate is where faults happen: between the sender and its link, like a bad
// network. It takes bytes as long as the receiver has credit for them, so the
// sender finds a willing receiver and completions that do not come.
type gate struct {
	faults   Faults
	comm     string
	src, dst int
	wire     wire

	version uint64
	known   bool
	fault   Fault
	queue   []held
	bytes   int   // in queue
	free    int64 // when the throttled network has delivered what it took
}

// held is one chunk, line or alignment on its way.
type held struct {
	kind heldKind
	tag  uint32
	b    []byte
	at   int64 // when it may go on
}

type heldKind uint8

const (
	heldBytes heldKind = iota
	heldLine
	heldAlign
)

const (
	heldChunk = 64 << 10
	// lookAgain is how often a stalled connection looks whether it still is.
	lookAgain = int64(5 * time.Millisecond)
)

func (m *Mesh) newGate(w wire, peer int) *gate {
	if m.cfg.Faults == nil {
		return nil
	}
	return &gate{faults: m.cfg.Faults, comm: m.cfg.Name, src: m.cfg.Rank, dst: peer, wire: w}
}

// open reports whether nothing is wrong and nothing is held back.
func (g *gate) open() bool {
	if v := g.faults.Version(); !g.known || v != g.version {
		g.known, g.version, g.fault = true, v, g.faults.Conn(g.comm, g.src, g.dst)
		if g.fault.Drop {
			g.wire.drop()
		}
	}
	return len(g.queue) == 0 && (g.fault == Fault{} || g.fault.Drop)
}

func (g *gate) send(b []byte) (int, error) {
	if g.open() {
		return g.wire.push(b)
	}
	now := record.Now()
	g.pump(now)
	n := min(len(b), heldChunk, g.wire.room()-g.bytes)
	if n < len(b) {
		n &^= lineSize - 1
	}
	if n <= 0 {
		return 0, nil
	}
	g.hold(now, held{kind: heldBytes, b: append([]byte(nil), b[:n]...)})
	return n, nil
}

func (g *gate) sendLine(b []byte, tag uint32) (bool, error) {
	if g.open() {
		return g.wire.pushLine(b, tag)
	}
	now := record.Now()
	g.pump(now)
	if len(g.queue) >= lineSlots {
		return false, nil
	}
	g.hold(now, held{kind: heldLine, b: append([]byte(nil), b...), tag: tag})
	return true, nil
}

func (g *gate) align() {
	if g.open() {
		g.wire.alignSend()
		return
	}
	g.queue = append(g.queue, held{kind: heldAlign})
}

func (g *gate) hold(now int64, h held) {
	h.at = now + int64(g.fault.Delay)
	if rate := g.fault.BytesPerSecond; rate > 0 {
		g.free = max(g.free, now) + int64(len(h.b))*int64(time.Second)/rate
		h.at = max(h.at, g.free)
	}
	g.bytes += len(h.b)
	g.queue = append(g.queue, h)
}

// pump delivers what is due. It returns when to call it again, 0 when nothing waits for time.
func (g *gate) pump(now int64) int64 {
	for !g.open() && len(g.queue) > 0 {
		h := &g.queue[0]
		if g.fault.Stall {
			return now + lookAgain
		}
		if h.at > now && g.fault != (Fault{}) {
			return min(h.at, now+lookAgain)
		}
		var n int
		var err error
		done := true
		switch h.kind {
		case heldBytes:
			n, err = g.wire.push(h.b)
			done = n == len(h.b)
			h.b = h.b[n:]
		case heldLine:
			n = len(h.b)
			if done, err = g.wire.pushLine(h.b, h.tag); !done {
				n = 0
			}
		case heldAlign:
			g.wire.alignSend()
		}
		g.bytes -= n
		if err != nil {
			return 0 // the sender hears of it at its next call
		}
		if !done {
			return now + lookAgain
		}
		g.queue = g.queue[1:]
	}
	return 0
}

// held is how many bytes the gate has taken and not delivered; nil has none.
func (g *gate) held() int {
	if g == nil {
		return 0
	}
	return g.bytes
}

// Settled reports whether every byte taken from the caller has left this rank's hands,
// and what TrySendKept took may be changed. It is false while an injected fault holds bytes
// back, as nobody else would deliver them, and while a peer has not consumed bytes that are
// sent from where they lie; an operation ends when it is true.
func (m *Mesh) Settled() bool {
	m.ownAll()
	if m.rdma != nil {
		for _, l := range m.open {
			if r, ok := l.(*rdmaLink); ok && !r.settled() {
				return false
			}
		}
	}
	if m.cfg.Faults == nil {
		return true
	}
	for _, l := range m.open {
		if l.holds() {
			return false
		}
	}
	return true
}

// Abandon ends the links for which Settled is not true, where the operation has failed: the
// caller gets back what TrySendKept took.
func (m *Mesh) Abandon() {
	m.ownAll()
	for _, l := range m.open {
		if r, ok := l.(*rdmaLink); ok && r.connected() {
			r.conn.Abandon()
		}
	}
}

// holds reports whether anything waits behind the gate; nil holds nothing.
func (g *gate) holds() bool { return g != nil && len(g.queue) > 0 }
