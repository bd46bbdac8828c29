package transport

import (
	"encoding/binary"
	"fmt"
	"net"
	"os"

	"github.com/lockstep-ccl/lockstep/ccl/internal/rdma"
	"github.com/lockstep-ccl/lockstep/record"
)

// rdmaLink is a Link over RDMA.
type rdmaLink struct {
	m    *Mesh
	n    *network
	peer int
	gate *gate // nil without fault injection
	connector
	paths []rdma.Path
	lanes int

	conn       *rdma.Conn // set before up
	planned    Path       // the plan's, nil for none; set before up
	err        error
	line       [rdma.LineSize]byte
	unreleased bool // released was false

	surveyed int64 // when the plan was last told
	progress []progress
	ports    []uint16
	states   []LaneState

	// What the connection's lock guards.
	meters  []pathMeter // by lane and path
	wants   int64
	starved bool
}

// pathMeter watches one path of one lane. A queue pair counts from 0, so each
// adds to what those before it have moved.
type pathMeter struct {
	meter
	posted, completed, base uint64
	received                uint64
	switches, resent        uint64
	carries                 bool
	down                    bool // it has told that it is
}

func newRDMALink(n *network, peer int) *rdmaLink {
	return &rdmaLink{m: n.m, n: n, peer: peer, paths: n.m.rdma.paths[peer]}
}

func (l *rdmaLink) guard() { l.gate = l.m.newGate(l, l.peer) }

// open makes the connection over its control socket.
func (l *rdmaLink) open(fds []int) error {
	f := os.NewFile(uintptr(fds[0]), "control socket")
	control, err := net.FileConn(f)
	f.Close()
	if err != nil {
		return err
	}
	mine, theirs := l.m.infos[l.m.cfg.Rank].RDMA, l.m.infos[l.peer].RDMA
	l.lanes = min(mine.Lanes, theirs.Lanes)
	l.meters = make([]pathMeter, l.lanes*rdma.MaxPaths)
	l.progress = make([]progress, l.lanes)
	l.conn, err = l.m.rdma.worker.Connect(rdma.Config{
		Moves: l.m.moves(l.peer), Ports: l.plan(l.lanes),
		Control: control, Paths: l.paths, Lower: l.m.cfg.Rank < l.peer,
		Lanes: l.lanes, Window: min(mine.Window, theirs.Window), Watch: l,
	})
	if err != nil {
		control.Close()
	}
	return err
}

// ready reports whether the link can be used; an error when it never will.
func (l *rdmaLink) ready() (bool, error) {
	if l.err != nil {
		return false, l.err
	}
	if e := l.broken.Load(); e != nil {
		return false, l.fatal(*e)
	}
	return l.up.Load(), nil
}

// fatal notes why the link is over. What had arrived by then can still be received.
func (l *rdmaLink) fatal(err error) error {
	if err != nil && l.err == nil {
		l.err = fmt.Errorf("RDMA with rank %d: %w", l.peer, err)
	}
	return l.err
}

func (l *rdmaLink) event(int, uint32) {}
func (l *rdmaLink) finish() bool      { return !l.connected() || l.conn.Finish() }

// connected reports whether there is a connection, broken or not.
func (l *rdmaLink) connected() bool { return l.up.Load() && l.conn != nil }

func (l *rdmaLink) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.discard()
	l.up.Store(false)
}

// ---- what the connection tells, under its lock ----

func (l *rdmaLink) at(lane, path int) *pathMeter { return &l.meters[lane*rdma.MaxPaths+path] }

func (l *rdmaLink) Posted(lane, path, n int, total uint64) {
	p := l.at(lane, path)
	p.posted = p.base + total
	p.postPaced(n, p.posted, 0)
}

func (l *rdmaLink) Completed(lane, path int, total uint64) {
	p := l.at(lane, path)
	p.completed = p.base + total
	p.completeNext(p.completed)
}

func (l *rdmaLink) Received(lane, path, n int) { l.at(lane, path).received += uint64(n) }

func (l *rdmaLink) Path(lane, path int, s rdma.State, qp, peer uint32) {
	p := l.at(lane, path)
	switch s {
	case rdma.PathNew:
		p.base = p.completed
		if p.on {
			p.conn.Renamed(uint64(qp), peer)
		} else {
			own := &l.paths[path].Own
			p.open(l.m, record.ConnEntry{
				Peer: int32(l.peer), Transport: l.Kind(), Channel: uint16(lane*rdma.MaxPaths + path), ID: uint64(qp), PeerID: peer,
				Address: own.GID, Rail: l.m.railOf(own), Name: l.paths[path].String(),
			})
		}
	case rdma.PathUp:
		if p.down {
			p.down = false
			p.link(record.LinkUp)
		}
	case rdma.PathDown:
		p.down = true
		p.rest(record.LinkDown)
	case rdma.PathLeft:
		p.rest(record.LinkUp)
	case rdma.PathCarries:
		for i := range rdma.MaxPaths {
			l.at(lane, i).carries = false
		}
		p.carries = true
		l.tellState()
	}
}

// rest tells of a path that carries nothing any more: what it owed is posted again
// on another.
func (p *pathMeter) rest(state record.LinkState) {
	now := record.Now()
	p.posted, p.carries = p.completed, false
	p.flush(now, p.posted, p.completed, p.received)
	p.abandon(now)
	p.want(0)
	p.link(state)
}

func (l *rdmaLink) Switched(lane, path int, messages, bytes uint64) {
	p := l.at(lane, path)
	p.switches++
	p.resent += bytes
	if !p.on {
		return
	}
	p.down = false
	p.conn.Switched(p.switches, p.resent)
	state := record.LinkUp // the primary is merely itself again
	if p.tell(record.LinkSwitched); path > 0 {
		state = record.LinkSwitched
	}
	p.conn.Link(state, record.Now())
	if messages > 0 {
		p.tell(record.LinkRetreat)
	}
}

// tellState tells each path in use whether this rank waits for the peer's bytes,
// or for its credit.
func (l *rdmaLink) tellState() {
	for i := range l.meters {
		p := &l.meters[i]
		if !p.carries {
			continue
		}
		p.want(l.wants)
		if l.starved {
			p.block()
		} else {
			p.unblock()
		}
	}
}

// ---- sending ----

func (l *rdmaLink) Peer() int              { return l.peer }
func (l *rdmaLink) Kind() record.Transport { return record.TransportRDMA }

func (l *rdmaLink) TrySend(b []byte) (int, error) {
	if l.gate != nil {
		return l.gate.send(b)
	}
	return l.push(b)
}

// TrySendKept copies what goes through a gate.
func (l *rdmaLink) TrySendKept(b []byte) (int, error) {
	if l.gate != nil {
		return l.gate.send(b)
	}
	if ok, err := l.ready(); !ok {
		return 0, err
	}
	return l.took(l.conn.SendKept(b))
}

// settled reports whether what TrySendKept took may be changed.
func (l *rdmaLink) settled() bool { return l.released(!l.connected() || l.conn.Settled()) }

// released notes whether the peer has consumed what was sent without a copy. To wait for that is to
// wait for credit. It is told, as is any wait, when it lasts.
func (l *rdmaLink) released(ok bool) bool {
	if ok && l.unreleased {
		l.credit(false)
	}
	l.unreleased = !ok
	return ok
}

func (l *rdmaLink) push(b []byte) (int, error) {
	if ok, err := l.ready(); !ok {
		return 0, err
	}
	return l.took(l.conn.Send(b))
}

// took notes what became of an attempt to send.
func (l *rdmaLink) took(n int, starved bool, err error) (int, error) {
	if err != nil {
		return n, l.fatal(err)
	}
	l.credit(starved && n == 0)
	if n > 0 {
		l.m.progressed = true
	}
	return n, nil
}

// credit notes whether the receiver is why nothing can be sent.
func (l *rdmaLink) credit(starved bool) {
	if starved != l.starved {
		l.conn.Lock()
		l.starved = starved
		l.tellState()
		l.conn.Unlock()
	}
}

func (l *rdmaLink) TryWriteLine(b []byte, tag uint32) (bool, error) {
	if l.gate != nil {
		return l.gate.sendLine(b, tag)
	}
	return l.pushLine(b, tag)
}

// A line is its payload's length, its tag and its payload.
const lineHeader = 8

func (l *rdmaLink) pushLine(b []byte, tag uint32) (bool, error) {
	if ok, err := l.ready(); !ok {
		return false, err
	}
	binary.LittleEndian.PutUint32(l.line[:], uint32(copy(l.line[lineHeader:lineHeader+LinePayload], b)))
	binary.LittleEndian.PutUint32(l.line[4:], tag)
	ok, starved, err := l.conn.WriteLine(&l.line)
	if err != nil {
		return false, l.fatal(err)
	}
	l.credit(starved)
	if ok {
		l.m.progressed = true
	}
	return ok, nil
}

func (l *rdmaLink) AlignSend() {
	if l.gate != nil {
		l.gate.align()
		return
	}
	l.alignSend()
}

func (l *rdmaLink) alignSend() {
	if ok, _ := l.ready(); ok {
		l.conn.AlignSend()
	}
}

// ---- receiving ----

func (l *rdmaLink) TryRecv(b []byte) (int, error) {
	if !l.usable() {
		return 0, l.err
	}
	n, err := l.conn.Recv(b)
	if err != nil {
		return n, l.fatal(err)
	}
	if n > 0 {
		l.m.progressed = true
	}
	return n, nil
}

// usable reports whether there is a connection to receive from, broken or not.
func (l *rdmaLink) usable() bool {
	_, _ = l.ready()
	return l.connected()
}

func (l *rdmaLink) Peek() ([]byte, error) {
	if !l.usable() {
		return nil, l.err
	}
	b, err := l.conn.Peek(peekEnough)
	if err != nil {
		return nil, l.fatal(err)
	}
	return b, nil
}

func (l *rdmaLink) Advance(n int) {
	if n > 0 {
		l.conn.Advance(n)
		l.m.progressed = true
	}
}

func (l *rdmaLink) AlignRecv() {
	if l.usable() {
		l.conn.AlignRecv()
	}
}

func (l *rdmaLink) TryReadLine(b []byte) (int, uint32, bool, error) {
	if !l.usable() {
		return 0, 0, false, l.err
	}
	ok, err := l.conn.ReadLine(&l.line)
	if err != nil || !ok {
		return 0, 0, false, l.fatal(err)
	}
	n, tag := binary.LittleEndian.Uint32(l.line[:]), binary.LittleEndian.Uint32(l.line[4:])
	if n > LinePayload {
		err := fmt.Errorf("%w: a line of %d bytes", ErrCorrupt, n)
		l.conn.Drop(err)
		return 0, 0, false, l.fatal(err)
	}
	l.m.progressed = true
	return copy(b, l.line[lineHeader:lineHeader+n]), tag, true, nil
}

// PrefetchLine has nothing to do: that a line is there is known by its completion.
func (l *rdmaLink) PrefetchLine() {}

// ---- what the mesh asks ----

func (l *rdmaLink) WantRecv(since int64) {
	if !l.connected() {
		return
	}
	l.conn.Lock()
	defer l.conn.Unlock()
	l.wants = since
	l.tellState()
}

func (l *rdmaLink) Flush(now int64) {
	if l.usable() {
		l.publish(now, false)
	}
}

// publish tells the counters of all paths; idle also closes windows that are due.
func (l *rdmaLink) publish(now int64, idle bool) {
	l.conn.Lock()
	defer l.conn.Unlock()
	for i := range l.meters {
		p := &l.meters[i]
		posted := p.posted
		if p.carries && i/rdma.MaxPaths == 0 {
			posted += uint64(l.gate.held())
		}
		if idle {
			p.idle(now, posted, p.completed, p.received)
		} else {
			p.flush(now, posted, p.completed, p.received)
		}
	}
}

func (l *rdmaLink) refresh(now int64) bool {
	if !l.usable() || l.err != nil {
		return l.gate.held() > 0
	}
	l.conn.Refresh()
	if l.unreleased {
		l.credit(true)
	}
	l.publish(now, true)
	l.survey(now)
	p := l.conn.Progress()
	return p.Consumed < p.Sent
}

// look has nothing to do: the worker is polled for all its connections.
func (l *rdmaLink) look() {}

// overdue asks the paths' monitors whether what has not completed is late; the worker was polled since now.
func (l *rdmaLink) overdue(now int64) {
	if !l.usable() {
		return
	}
	l.conn.Lock()
	defer l.conn.Unlock()
	for i := range l.meters {
		l.meters[i].overdue(now)
	}
}

func (l *rdmaLink) due() bool {
	if l.err != nil || !l.usable() {
		return false
	}
	p := l.conn.Progress()
	return p.News || p.Consumed < p.Sent
}

func (l *rdmaLink) holds() bool { return l.gate.holds() }

func (l *rdmaLink) pump(now int64) int64 {
	if l.gate == nil {
		return 0
	}
	return l.gate.pump(now)
}

func (l *rdmaLink) room() int {
	if ok, _ := l.ready(); !ok {
		return 0
	}
	return l.conn.Room()
}

// drop cuts the connection for both ends, as a network that lost all paths would.
func (l *rdmaLink) drop() {
	if l.connected() {
		l.conn.Drop(ErrDropped)
		_ = l.fatal(ErrDropped)
	}
}

// mark implements zeroCopy, as far as there is a connection.
func (l *rdmaLink) mark() uint64 {
	if !l.connected() {
		return 0
	}
	return l.conn.Kept()
}

func (l *rdmaLink) markConsumed(mark uint64) bool {
	return !l.connected() || mark == 0 || l.released(l.conn.Returned(mark))
}

func (l *rdmaLink) acknowledge() {
	if l.connected() {
		l.conn.Acknowledge()
	}
}
