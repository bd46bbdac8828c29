package engine

import (
	"fmt"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/transport"
	"github.com/lockstep-ccl/lockstep/record"
)

// headerSize is the bytes of a header in the byte stream: a signature, padded so that the data
// after it is aligned.
const headerSize = 64

// A message of up to so many bytes is copied behind its header and sent with it. The copy costs
// less than a second write: to shared memory that the peer polls, or by a system call.
const (
	stageMemory  = 1 << 10
	stageNetwork = 16 << 10
)

// Mesh provides the links.
type Mesh interface {
	// Link returns the link to a peer, connecting it on first use.
	Link(peer int) (transport.Link, error)
}

// Engine runs one communicator's operations, one at a time. It is not safe for concurrent use:
// one goroutine at a time may call it (package executor's role).
type Engine struct {
	mesh  Mesh
	links []transport.Link

	memory
	sched *algo.Schedule
	lanes []lane
	left  int    // number of lanes that are not finished
	tag   uint32 // of op's lines

	arrivedAt   int64
	arrivedPeer int32
	legs        legs

	header [headerSize]byte
	line   [64]byte // a received line; transports may copy a whole line
	stage  []byte   // a header to send, and the data behind it
}

// lane is the state of a track.
type lane struct {
	steps []algo.Step
	at    int32 // index of the current step
	begun bool  // the link has been aligned for the current step
	late  bool  // nothing could move since the current step began (Late)
	wants bool  // WantRecv has told the link that this rank waits
	since int64 // time of that call
	pos   int   // bytes of the current step that have moved
	hdr   int   // bytes of its header that have moved
}

// New returns an engine that uses mesh's links. size is the number of ranks.
func New(mesh Mesh, size int) *Engine {
	return &Engine{
		mesh: mesh, links: make([]transport.Link, size),
		lanes: make([]lane, 2, 2*size), stage: make([]byte, headerSize+stageNetwork),
	}
}

// Begin makes op the current operation. Step runs it by sched. The last operation must have ended.
// op is the engine's until End.
func (e *Engine) Begin(sched *algo.Schedule, op *Op) {
	e.op, e.sched, e.left = op, sched, 0
	e.tag = op.Signature.tag()
	e.arrivedAt, e.arrivedPeer = 0, -1
	e.legs.n = 0
	if cap(e.lanes) < len(sched.Tracks) {
		e.lanes = make([]lane, len(sched.Tracks))
	}
	e.lanes = e.lanes[:len(sched.Tracks)]
	for i := range e.lanes {
		l := &e.lanes[i]
		*l = lane{}
		if l.steps = sched.Tracks[i]; len(l.steps) > 0 {
			e.left++
			if first := &l.steps[0]; op.Legs && first.First {
				e.legs.begin(first, 0)
			}
		}
	}
	if len(e.scratch) < sched.Scratch {
		e.scratch = make([]byte, sched.Scratch)
	}
	if n := sched.Acc / 2; len(e.acc) < n {
		e.acc = make([]float32, n)
	}
}

// End ends the operation, complete or not. The engine keeps no reference to its buffers.
func (e *Engine) End() {
	e.op, e.sched = nil, nil
	for i := range e.lanes {
		e.lanes[i].steps = nil
	}
}

// Done reports whether all steps are complete.
func (e *Engine) Done() bool { return e.left == 0 }

// Arrived returns the last peer whose first bytes this rank had to wait for, and when they came, in
// ns of CLOCK_MONOTONIC. peer is -1 if there was none, or if the operation has no Arrivals.
func (e *Engine) Arrived() (peer int32, at int64) { return e.arrivedPeer, e.arrivedAt }

// Legs returns the legs of an operation with Op.Legs, in the order in which they began. The slice
// is valid until the next Begin.
func (e *Engine) Legs() []Leg { return e.legs.all[:e.legs.n] }

// burst is how many bytes a lane moves before the next lane's turn. It is small, so that what one
// lane has reduced is still in the cache when another sends it.
const burst = 16 << 10

// Launch is the beginning of the first Step. It makes the sends at the head of each track, which
// need nothing from peers, and prefetches the lines that peers may have sent. The caller does other
// work before it calls Step, while these bytes travel.
func (e *Engine) Launch() error {
	for i := range e.lanes {
		l := &e.lanes[i]
		for int(l.at) < len(l.steps) && l.steps[l.at].Act == algo.Send {
			if n, err := e.advance(l, i); err != nil || n < 0 {
				return err
			}
		}
		if int(l.at) < len(l.steps) && l.steps[l.at].LL {
			if link := e.links[l.steps[l.at].Peer]; link != nil {
				link.PrefetchLine()
			}
		}
	}
	return nil
}

// Step moves what can be moved now, and reports whether anything moved. An error is final: a
// *PeerError, a *MismatchError, the mesh's error if it has no link to a peer, or one for a step of unknown kind.
func (e *Engine) Step() (moved bool, err error) {
	for again := true; again && e.left > 0; {
		again = false
		for i := range e.lanes {
			l := &e.lanes[i]
			for budget := burst; budget > 0 && int(l.at) < len(l.steps); {
				n, err := e.advance(l, i)
				if err != nil {
					return true, err
				}
				if n < 0 {
					break
				}
				moved, again = true, true
				budget -= n + 64 // a step costs time however few its bytes
			}
		}
	}
	return moved, nil
}

// blocked is what advance returns if the lane cannot move now.
const blocked = -1

// advance advances lane l's current step a little. It returns how many bytes moved, or blocked.
func (e *Engine) advance(l *lane, index int) (n int, err error) {
	st := &l.steps[l.at]
	if st.Need > 0 && e.lanes[1-index].at < st.Need {
		return blocked, nil
	}
	if st.Peer < 0 {
		switch st.Act {
		case algo.Gate:
			if !e.op.Gate(st.Len) {
				return blocked, nil
			}
			e.next(l)
			return 0, nil
		case algo.Join:
			if e.left > 1 {
				return blocked, nil
			}
			e.next(l)
			return 0, nil
		case algo.Copy:
			e.copy(st)
		case algo.Fold:
			e.fold(st)
		default:
			return 0, unknownStep(st)
		}
		e.next(l)
		return st.Len, nil
	}
	link := e.links[st.Peer]
	if link == nil {
		if link, err = e.connect(int(st.Peer)); err != nil {
			return 0, err
		}
	}
	switch st.Act {
	case algo.Send:
		if st.LL {
			return e.writeLine(link, l, st)
		}
		return e.send(link, l, st)
	case algo.Recv, algo.RecvReduce:
		if st.LL {
			return e.readLine(link, l, st)
		}
		return e.recv(link, l, st)
	}
	return 0, unknownStep(st)
}

// connect gets the link to a peer from the mesh, on its first use.
func (e *Engine) connect(peer int) (transport.Link, error) {
	link, err := e.mesh.Link(peer)
	if err != nil {
		return nil, err // no PeerError: this rank failed to make the link
	}
	e.links[peer] = link
	return link, nil
}

// PeerError says that the link to Peer failed.
type PeerError struct {
	Peer int
	Err  error
}

func (e *PeerError) Error() string { return fmt.Sprintf("link to rank %d: %v", e.Peer, e.Err) }
func (e *PeerError) Unwrap() error { return e.Err }

// unknownStep returns the error for a step that the engine cannot run. Nothing of it has moved.
func unknownStep(st *algo.Step) error {
	return fmt.Errorf("the schedule has a step of unknown kind %d for peer %d", st.Act, st.Peer)
}

// next ends the lane's current step and begins the next one.
func (e *Engine) next(l *lane) {
	done := &l.steps[l.at]
	l.at++
	l.pos, l.hdr, l.begun, l.late = 0, 0, false, false
	if int(l.at) == len(l.steps) {
		e.left--
	}
	if e.op.Legs {
		if done.Last {
			e.legs.end(done)
		}
		if int(l.at) < len(l.steps) && l.steps[l.at].First {
			e.legs.begin(&l.steps[l.at], record.Now())
		}
	}
}

// moved counts n bytes of the step's data, and ends the step if they were the last. It returns n.
func (e *Engine) moved(l *lane, st *algo.Step, n int) int {
	l.pos += n
	if l.pos == st.Len {
		e.next(l)
	}
	return n
}

// writeLine sends one line of the step's data.
func (e *Engine) writeLine(link transport.Link, l *lane, st *algo.Step) (int, error) {
	n := min(st.Len-l.pos, transport.LinePayload)
	ok, err := link.TryWriteLine(e.bytes(st.Src, l.pos, n), e.tag)
	if err != nil {
		return 0, &PeerError{int(st.Peer), err}
	}
	if !ok {
		return blocked, nil
	}
	return e.moved(l, st, n), nil
}

// readLine receives one line of the step's data, and checks its tag and length.
func (e *Engine) readLine(link transport.Link, l *lane, st *algo.Step) (int, error) {
	n, tag, ok, err := link.TryReadLine(e.line[:transport.LinePayload])
	if err != nil {
		return 0, &PeerError{int(st.Peer), err}
	}
	if !ok {
		return blocked, nil
	}
	if tag != e.tag || n != min(st.Len-l.pos, transport.LinePayload) {
		return 0, &MismatchError{Peer: int(st.Peer), Mine: e.op.of(st)}
	}
	e.arrived(link, l, st)
	if n > 0 {
		e.take(st, l.pos, e.line[:n])
	}
	return e.moved(l, st, n), nil
}

// arrived notes that bytes for the current step have come, if this rank had to wait for them. A
// peer's first bytes, or the first line of a message, count for Arrived: they show when the peer
// entered the operation.
func (e *Engine) arrived(link transport.Link, l *lane, st *algo.Step) {
	if l.late {
		l.late = false
		if e.op.Arrivals && l.pos == 0 && (st.Header || st.LL) {
			e.arrivedAt, e.arrivedPeer = record.Now(), st.Peer
		}
		if e.op.Legs && l.pos == 0 && st.First {
			e.legs.came(st)
		}
	}
	if l.wants {
		if e.op.Legs && !(st.First && l.pos == 0) {
			e.legs.stalled(st, record.Now()-l.since)
		}
		l.wants = false
		link.WantRecv(0)
	}
}

// send sends through the byte stream.
func (e *Engine) send(link transport.Link, l *lane, st *algo.Step) (int, error) {
	if !l.begun {
		link.AlignSend()
		l.begun = true
	}
	if st.Header {
		if n, err := e.sendHeader(link, l, st); n != 0 || err != nil {
			return n, err
		}
		// The step is complete if the data was sent with the header, or has no bytes.
		if l.pos == st.Len {
			e.next(l)
			return st.Len, nil
		}
	}
	b := e.bytes(st.Src, l.pos, st.Len-l.pos)
	var n int
	var err error
	if st.Kept {
		n, err = link.TrySendKept(b)
	} else {
		n, err = link.TrySend(b)
	}
	if err != nil {
		return 0, &PeerError{int(st.Peer), err}
	}
	if n == 0 {
		return blocked, nil
	}
	return e.moved(l, st, n), nil
}

// sendHeader sends the rest of the header, and short data with it. It returns 0 when the header is
// sent. l.pos then says how much of the data is.
func (e *Engine) sendHeader(link transport.Link, l *lane, st *algo.Step) (int, error) {
	data, limit := st.Len, stageMemory
	if !link.Kind().InMemory() {
		limit = stageNetwork
	}
	if data > limit || e.opaque(st.Src) {
		data = 0
	}
	total := headerSize + data
	if l.hdr >= headerSize {
		return 0, nil
	}
	s := e.op.of(st)
	s.Encode(e.stage)
	clear(e.stage[SignatureSize:headerSize])
	if data > 0 {
		copy(e.stage[headerSize:], e.bytes(st.Src, 0, data))
	}
	n, err := link.TrySend(e.stage[l.hdr:total])
	if err != nil {
		return 0, &PeerError{int(st.Peer), err}
	}
	if n == 0 {
		return blocked, nil
	}
	l.hdr += n
	if l.hdr < headerSize {
		return n, nil
	}
	l.pos = l.hdr - headerSize
	return 0, nil
}

// recv receives from the byte stream. It reduces from the link's memory.
func (e *Engine) recv(link transport.Link, l *lane, st *algo.Step) (int, error) {
	if !l.begun {
		link.AlignRecv()
		l.begun = true
	}
	if st.Header && l.hdr < headerSize {
		if n, err := e.recvHeader(link, l, st); n != 0 || err != nil {
			return n, err
		}
		if st.Len == 0 {
			e.next(l)
			return 0, nil
		}
	}
	var n int
	if st.Act == algo.Recv && st.Dst.Space != algo.Acc {
		var err error
		n, err = link.TryRecv(e.bytes(st.Dst, l.pos, st.Len-l.pos))
		if err != nil {
			return 0, &PeerError{int(st.Peer), err}
		}
		if n == 0 {
			return blocked, nil
		}
	} else {
		b, err := link.Peek()
		if err != nil {
			return 0, &PeerError{int(st.Peer), err}
		}
		n = min(len(b), st.Len-l.pos, burst)
		n -= n % e.op.DType.Size()
		if n == 0 {
			return blocked, nil
		}
		e.take(st, l.pos, b[:n])
		link.Advance(n)
	}
	if l.wants || l.late {
		e.arrived(link, l, st)
	}
	return e.moved(l, st, n), nil
}

// recvHeader receives the rest of the header. It returns 0 when the header is complete, and a
// *MismatchError if it is not the one expected.
func (e *Engine) recvHeader(link transport.Link, l *lane, st *algo.Step) (int, error) {
	n, err := link.TryRecv(e.header[l.hdr:headerSize])
	if err != nil {
		return 0, &PeerError{int(st.Peer), err}
	}
	if n == 0 {
		return blocked, nil
	}
	if l.hdr += n; l.hdr < headerSize {
		return n, nil
	}
	mine := e.op.of(st)
	var theirs Signature
	if ok := theirs.Decode(e.header[:]); !ok || theirs != mine {
		return 0, mismatch(st, mine, theirs, ok)
	}
	e.arrived(link, l, st)
	return 0, nil
}

// mismatch returns the error for a step whose header has another signature. known says that theirs
// could be decoded.
func mismatch(st *algo.Step, mine, theirs Signature, known bool) error {
	m := &MismatchError{Peer: int(st.Peer), Mine: mine}
	if known {
		m.Theirs = &theirs
	}
	return m
}
