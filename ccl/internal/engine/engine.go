package engine

import (
	"fmt"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/transport"
	"github.com/lockstep-ccl/lockstep/record"
)

// Op is one operation to run. The engine keeps the slices until End.
type Op struct {
	Signature
	Send, Recv []byte
	// Arrivals records what Arrived returns.
	Arrivals bool
	// Legs records what Engine.Legs returns.
	Legs bool
	// Parts are a group's messages, by Space - GroupSpace.
	Parts   []Part
	Divisor int // of Avg
	// Gate reports whether a gate of the schedule may be passed, and acts on its
	// being passed; nil if the schedule has none.
	Gate func(number int) bool
}

// Part is one message of a group.
type Part struct {
	Buf   []byte
	DType record.DType
	// Opaque: Buf only stands for the bytes, which links can send but the CPU cannot read.
	Opaque bool
}

// GroupSpace is the Space of Op.Parts[0].
const GroupSpace = algo.PartSpace

// headerSize is the room a signature takes in the byte stream: what follows
// stays aligned.
const headerSize = 64

// Data of up to so many bytes is sent in one piece with its header: a copy costs less
// than a second store to shared memory that the peer reads, or system call.
const (
	stageMemory  = 1 << 10
	stageNetwork = 16 << 10
)

// Mesh provides the links.
type Mesh interface {
	// Link returns the link to a peer, connecting it on first use.
	Link(peer int) (transport.Link, error)
}

// Engine runs one communicator's operations, one at a time. Whoever holds the
// communicator owns it; it is not safe for concurrent use.
type Engine struct {
	mesh  Mesh
	links []transport.Link

	op      Op
	sched   *algo.Schedule
	lanes   []lane
	left    int // lanes not finished
	tag     uint32
	scratch []byte
	acc     []float32

	arrivedAt   int64
	arrivedPeer int32
	legs        legs

	header [headerSize]byte
	line   [64]byte // a line's payload; room for transports that copy whole lines
	stage  []byte
}

// lane is a track being run.
type lane struct {
	steps []algo.Step
	at    int32
	begun bool  // the current message has been aligned, and its header handled
	late  bool  // nothing could move while this step was current (Late)
	wants bool  // its link has been told of the wait
	since int64 // when
	pos   int   // bytes of the current step that have moved
	hdr   int   // bytes of its header that have moved
}

// New returns an engine for the rank whose links mesh has. size is the
// communicator's.
func New(mesh Mesh, size int) *Engine {
	return &Engine{
		mesh: mesh, links: make([]transport.Link, size),
		lanes: make([]lane, 2, 2*size), stage: make([]byte, headerSize+stageNetwork),
	}
}

// Begin sets up op to be run by sched.
func (e *Engine) Begin(sched *algo.Schedule, op *Op) {
	e.op, e.sched, e.left = *op, sched, 0
	e.tag = op.Signature.tag()
	e.arrivedAt, e.arrivedPeer = 0, -1
	e.legs.n = 0
	if cap(e.lanes) < len(sched.Tracks) {
		e.lanes = make([]lane, len(sched.Tracks))
	}
	e.lanes = e.lanes[:len(sched.Tracks)]
	for i := range e.lanes {
		e.lanes[i] = lane{steps: sched.Tracks[i]}
		if len(sched.Tracks[i]) > 0 {
			e.left++
			if first := &sched.Tracks[i][0]; op.Legs && first.First {
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

// End forgets the operation's buffers.
func (e *Engine) End() {
	e.op, e.sched = Op{}, nil
	for i := range e.lanes {
		e.lanes[i].steps = nil
	}
}

// Done reports whether everything has been moved.
func (e *Engine) Done() bool { return e.left == 0 }

// Arrived returns, of an operation with Arrivals, the peer that this rank last had to wait for (see
// arrived), and when its bytes came, in ns of CLOCK_MONOTONIC; peer is -1 if there was none.
func (e *Engine) Arrived() (peer int32, at int64) { return e.arrivedPeer, e.arrivedAt }

// burst is how many bytes a lane moves before the next has its turn: what one
// lane has just reduced is still in the cache when another sends it on.
const burst = 16 << 10

// Launch is the beginning of a first Step: it sends what needs nothing from others
// yet, and prefetches the lines that they may have sent.
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

// Step moves what can be moved now. moved is false when nothing could.
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
				budget -= n + 64
			}
		}
	}
	return moved, nil
}

// blocked is what advance returns when a lane can not move.
const blocked = -1

// advance moves lane l's current step a little and returns how many bytes went.
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
		default:
			e.fold(st)
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
	switch {
	case st.LL && st.Act == algo.Send:
		n, err = e.writeLine(link, l, st)
	case st.LL:
		n, err = e.readLine(link, l, st)
	case st.Act == algo.Send:
		n, err = e.send(link, l, st)
	default:
		n, err = e.recv(link, l, st)
	}
	return n, err
}

func (e *Engine) connect(peer int) (transport.Link, error) {
	link, err := e.mesh.Link(peer)
	if err != nil {
		return nil, err // this rank's own failure: a peer's shows in the link
	}
	e.links[peer] = link
	return link, nil
}

// PeerError names the peer whose link failed.
type PeerError struct {
	Peer int
	Err  error
}

func (e *PeerError) Error() string { return fmt.Sprintf("link to rank %d: %v", e.Peer, e.Err) }
func (e *PeerError) Unwrap() error { return e.Err }

// next ends the lane's current step.
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

// moved accounts for n bytes of the step's data.
func (e *Engine) moved(l *lane, st *algo.Step, n int) int {
	l.pos += n
	if l.pos == st.Len {
		e.next(l)
	}
	return n
}

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

// arrived notes a peer's first bytes, or any message of lines, that this rank had to wait for.
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

func (e *Engine) send(link transport.Link, l *lane, st *algo.Step) (int, error) {
	if !l.begun {
		link.AlignSend()
		l.begun = true
	}
	if st.Header {
		if n, err := e.sendHeader(link, l, st); n != 0 || err != nil {
			return n, err
		}
		// Nothing of this step remains when header and data went in one piece.
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

// sendHeader sends what is left of the header, with the data when that is
// short, and returns 0 once the header is out.
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

// recvHeader receives what is left of the header and returns 0 once it is
// there and is the one expected.
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

func mismatch(st *algo.Step, mine, theirs Signature, known bool) error {
	m := &MismatchError{Peer: int(st.Peer), Mine: mine}
	if known {
		m.Theirs = &theirs
	}
	return m
}
