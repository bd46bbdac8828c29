package rdma

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
)

// sim is two machines and what is between them: queue pairs that deliver in
// order, acknowledge or not, write late, and break; a control socket that is
// slow. Whatever happens next is drawn.
type sim struct {
	draw  func(n int) int
	ends  [2]*simEnd
	up    [MaxPaths][2]bool // the path carries what end 0, end 1 sends
	qps   []*simQP          // by number
	shape shape
	trace []string
	log   bool

	switches, resent, willing, moves int
}

// simEnd is one end: the machine, its memory, its application.
type simEnd struct {
	s        *sim
	side     int
	m        *machine
	out, in  []byte // outbox and ring
	sealed   []bool // ring: delivered and not consumed
	linesOut [LineSlots][lineSize]byte
	linesIn  [LineSlots][lineSize]byte
	blocks   []block
	qp       [][maxPlaces]*simQP
	cq       []simCompletion
	ctl      [][]byte          // to this end
	kept     map[uint64][]byte // memory of the application's that is being sent from
	settling bool
	choosing bool // what happens now is one end's choice, of which the other may have told
	surprise string

	// Application.
	msgs      []int // sizes of messages sent
	left      int   // of the last one
	sent      int   // bytes
	got       int
	gotMsgs   int
	gotLeft   int
	linesSent int
	linesGot  int
}

func newSim(draw func(int) int) *sim {
	s := &sim{draw: draw, shape: shape{
		ring: 512, maxChunk: 128, depth: 8 << draw(2), table: 16, lanes: 1 + draw(3), spares: draw(2) == 0,
	}}
	for p := range s.up {
		s.up[p] = [2]bool{true, true}
	}
	for i := range s.ends {
		e := &simEnd{s: s, side: i, out: make([]byte, s.shape.ring), in: make([]byte, s.shape.ring), sealed: make([]bool, s.shape.ring),
			blocks: make([]block, s.shape.lanes), kept: map[uint64][]byte{}, qp: make([][maxPlaces]*simQP, s.shape.lanes)}
		e.m = newMachine(s.shape, e)
		s.ends[i] = e
	}
	// The numbers of chunks and lines are about to wrap.
	for i, e := range s.ends {
		chunks, lines := uint64(1<<numBits-draw(40)), uint64(1<<numBits-draw(20))
		t, r := &e.m.tx, &s.ends[1-i].m.rx
		t.chunks, t.ahead, t.lines, t.lacked = chunks, chunks, lines, lines
		r.chunks, r.lines, r.told.chunks, r.told.lines = chunks, lines, chunks, lines
	}
	return s
}

func (s *sim) note(format string, args ...any) {
	if s.log {
		s.trace = append(s.trace, fmt.Sprintf(format, args...))
	}
}

func (e *simEnd) peer() *simEnd { return e.s.ends[1-e.side] }

// ---- actor ----

func (e *simEnd) post(lane, path int, s uint64, en *entry) {
	q := e.qp[lane][path]
	e.s.note("%d: post lane %d path %d message %d kind %d num %d", e.side, lane, path, s, en.kind, en.num)
	w := simWR{e: *en, s: s}
	if en.kind == kindNote {
		w.block = e.m.block(lane)
	}
	if q.state == pathStopped {
		w.data = e.bytesOf(&w) // its flush is on its way; nothing leaves
		return
	}
	q.wrs = append(q.wrs, w)
}

func (e *simEnd) credit(lane, path int, b block) {
	q := e.qp[lane][path]
	if q.state == pathLive {
		q.wrs = append(q.wrs, simWR{e: entry{kind: kindNote, num: 1}, block: b})
	}
}

func (e *simEnd) chosen(lane, path int) {
	e.s.note("%d: lane %d goes over to path %d", e.side, lane, path)
}

func (e *simEnd) stop(lane, path int, willing bool) {
	q := e.qp[lane][path]
	e.s.note("%d: stop lane %d path %d, willing %v", e.side, lane, path, willing)
	if willing != e.choosing {
		e.surprise = fmt.Sprintf("end %d: path %d of lane %d left willingly is %v, by choice is %v", e.side, path, lane, willing, e.choosing)
	}
	if willing {
		e.s.willing++
	}
	q.breaks()
	q.told = true
}

func (e *simEnd) drop(lane, path int) {
	e.s.note("%d: drop lane %d path %d", e.side, lane, path)
	e.qp[lane][path].gone = true
}

func (e *simEnd) connect(lane, path int, to endpoint) bool {
	if e.s.draw(20) == 0 && !e.settling {
		e.s.note("%d: connect lane %d path %d fails", e.side, lane, path)
		return false
	}
	q := e.qp[lane][path]
	e.s.note("%d: connect lane %d path %d, qp %d to %d", e.side, lane, path, q.num, to.qp)
	q.peer, q.state = int(to.qp), pathLive
	return true
}

func (e *simEnd) tell(g *message) {
	e.s.note("%d: tell %+v", e.side, *g)
	e.peer().ctl = append(e.peer().ctl, g.append(nil))
}

func (e *simEnd) switched(lane, from, to int, messages, bytes uint64) {
	e.s.note("%d: lane %d switched from %d to %d, %d again", e.side, lane, from, to, messages)
	if from >= 0 {
		if e.s.switches++; to == e.s.shape.sibling(from) {
			e.s.moves++
		}
		e.s.resent += int(messages)
	}
}

// ---- hardware ----

// bytesOf is what a write carries, read from the sender's memory now.
func (e *simEnd) bytesOf(w *simWR) []byte {
	switch w.e.kind {
	case kindData:
		if a := w.e.from.addr; a != 0 {
			return slices.Clone(e.kept[a])
		}
		at := w.e.pos % e.s.shape.ring
		return slices.Clone(e.out[at : at+uint64(w.e.n)])
	case kindLine:
		b := e.linesOut[w.e.pos%LineSlots]
		return b[:]
	}
	return nil
}

// poll delivers the next completion to the machine.
func (e *simEnd) poll() error {
	if len(e.cq) == 0 {
		return nil
	}
	c := e.cq[0]
	e.cq = e.cq[1:]
	q := c.qp
	if q.gone {
		return nil
	}
	switch {
	case c.failed:
		e.m.fault(q.lane, q.way)
	case c.recv:
		q.recvs++
		return e.m.arrive(q.lane, q.way, c.imm, c.n)
	default:
		e.m.sent(q.lane, q.way, c.s)
	}
	return nil
}

// drain finishes stopped queue pairs whose completions are all delivered.
func (e *simEnd) drain(i, p int) {
	q := e.qp[i][p]
	if q == nil || q.gone || !q.told || slices.ContainsFunc(e.cq, func(c simCompletion) bool { return c.qp == q }) {
		return
	}
	q.gone = true
	e.s.note("%d: stopped lane %d path %d", e.side, i, p)
	e.m.stopped(i, p)
}

func (e *simEnd) control() error {
	if len(e.ctl) == 0 {
		return nil
	}
	b := e.ctl[0]
	e.ctl = e.ctl[1:]
	k, n, err := parseFrame(b[:frameHeader])
	if err != nil || n != len(b)-frameHeader {
		return fmt.Errorf("control message of %d bytes: %w", n, err)
	}
	g, err := parseBody(k, b[frameHeader:])
	if err != nil {
		return err
	}
	return e.by(g.willing && e.m.lanes[g.lane].phase == running, func() error { return e.m.handle(&g) })
}

// by does what leaves a path by choice, or by fault.
func (e *simEnd) by(choice bool, f func() error) error {
	e.choosing = choice
	err := f()
	e.choosing = false
	if err == nil && e.surprise != "" {
		err = errors.New(e.surprise)
	}
	return err
}

// ---- application ----

func (e *simEnd) send() {
	if e.left == 0 {
		e.m.alignSend()
		e.left = 1 + e.s.draw(400)
		e.msgs = append(e.msgs, e.left)
	}
	n, lane, _ := e.m.chunk(uint64(e.left))
	if n == 0 {
		return
	}
	at := e.m.tx.sent % e.s.shape.ring
	b, from := e.out[at:at+n], source{}
	if e.s.draw(2) == 0 {
		from.addr = e.m.tx.sent + 1
		b = make([]byte, n)
		e.kept[from.addr] = b
	}
	for i := range b {
		b[i] = e.pattern(e.sent + i)
	}
	e.m.send(lane, n, from)
	e.sent += int(n)
	e.left -= int(n)
}

// reuse changes what was sent from where it lies, as soon as it may.
func (e *simEnd) reuse() {
	if e.m.release(); e.m.settled() {
		for _, b := range e.kept {
			clear(b)
		}
	}
}

func (e *simEnd) recv() error {
	p := e.peer()
	if e.gotLeft == 0 {
		if e.gotMsgs == len(p.msgs) {
			return nil
		}
		e.m.alignRecv()
		e.gotLeft = p.msgs[e.gotMsgs]
		e.gotMsgs++
	}
	n := min(int(e.m.arrived()), e.gotLeft)
	if n == 0 {
		return nil
	}
	n = 1 + e.s.draw(n)
	for i := range n {
		at := (e.m.rx.got + uint64(i)) % e.s.shape.ring
		if e.in[at] != p.pattern(e.got+i) {
			return fmt.Errorf("end %d: byte %d is wrong", e.side, e.got+i)
		}
		e.sealed[at] = false
	}
	e.m.consume(uint64(n))
	e.got += n
	e.gotLeft -= n
	return nil
}

func (e *simEnd) line() {
	if lane, _ := e.m.line(); lane >= 0 {
		b := &e.linesOut[e.m.tx.lines%LineSlots]
		for i := range b {
			b[i] = e.pattern(e.linesSent + i)
		}
		e.linesSent++
		e.m.sendLine(lane)
	}
}

func (e *simEnd) readLine() error {
	if !e.m.lineHere() {
		return nil
	}
	var want [lineSize]byte
	for i := range want {
		want[i] = e.peer().pattern(e.linesGot + i)
	}
	if got := e.linesIn[e.m.rx.lines%LineSlots]; !bytes.Equal(got[:], want[:]) {
		return fmt.Errorf("end %d: line %d is wrong", e.side, e.linesGot)
	}
	e.linesGot++
	e.m.consumeLine()
	return nil
}

func (e *simEnd) readCredit() error {
	for i, b := range e.blocks {
		if err := e.m.credited(i, b); err != nil {
			return err
		}
	}
	return nil
}

// ---- the schedule ----

// step does one thing, which may turn out to be nothing.
func (s *sim) step() error {
	e := s.ends[s.draw(2)]
	i, p := s.draw(s.shape.lanes), s.draw(places(s.shape.spares))
	q := e.qp[i][p]
	switch a := s.draw(32); a {
	case 0, 1, 2, 3:
		e.send()
	case 4, 5:
		return e.recv()
	case 6:
		e.line()
	case 7:
		return e.readLine()
	case 8:
		e.m.grant(s.draw(2) == 0)
	case 9:
		e.reuse()
		return e.readCredit()
	case 10, 11, 12:
		return e.poll()
	case 13, 14, 15, 16:
		return e.control()
	case 17, 18:
		e.drain(i, p)
	case 19, 20:
		e.offer(i, p)
	case 21:
		if p := s.shape.pathOf(p); s.draw(4) == 0 {
			s.up[p][e.side] = !s.up[p][e.side]
			s.note("path %d from %d: %v", p, e.side, s.up[p][e.side])
		}
	case 22:
		if s.draw(4) == 0 { // the port's event, or δ
			s.note("%d: event on the path of place %d", e.side, p)
			for l := range e.qp {
				if e.m.fault(l, p); s.shape.spares && s.draw(2) == 0 {
					e.m.fault(l, s.shape.sibling(p))
				}
			}
		}
	case 23:
		if s.draw(8) == 0 {
			return e.by(true, func() error { e.m.failback(i); return nil })
		}
	default:
		if q == nil || q.gone && q.state != pathStopped {
			break
		}
		switch a {
		case 24, 25, 26:
			return q.deliver(true)
		case 27:
			return q.deliver(false)
		case 28, 29:
			q.acknowledge()
		default:
			q.exhaust()
		}
		return nil
	}
	// What a dead queue pair has sent may arrive at any time.
	if len(s.qps) > 0 {
		return s.qps[s.draw(len(s.qps))].deliver(s.draw(2) == 0)
	}
	return nil
}

// finish lets everything happen that can, with the paths that are up, and
// reports whether all arrived.
func (s *sim) finish() error {
	for _, e := range s.ends {
		e.settling = true
	}
	for round := 0; round < 3000; round++ {
		done := true
		for _, e := range s.ends {
			for e.left > 0 {
				before := e.left
				if e.send(); e.left == before {
					break
				}
			}
			for range 8 {
				if err := e.recv(); err != nil {
					return err
				}
				if err := e.readLine(); err != nil {
					return err
				}
				if err := e.control(); err != nil {
					return err
				}
			}
			e.m.grant(false)
			if err := e.readCredit(); err != nil {
				return err
			}
			for len(e.cq) > 0 {
				if err := e.poll(); err != nil {
					return err
				}
			}
			for i := range e.qp {
				for p := range e.qp[i] {
					e.drain(i, p)
					if up := s.up[s.shape.pathOf(p)%MaxPaths]; up[0] && up[1] && p < places(s.shape.spares) {
						e.offer(i, p)
					}
					if q := e.qp[i][p]; q != nil && !q.gone {
						q.exhaust()
						for range 4 {
							if err := q.deliver(true); err != nil {
								return err
							}
						}
						q.acknowledge()
					}
				}
			}
			p := e.peer()
			done = done && e.left == 0 && e.got == p.sent && e.linesGot == p.linesSent && e.gotLeft == 0
		}
		if done {
			for _, e := range s.ends {
				if e.reuse(); !e.m.settled() {
					done = false
				}
			}
		}
		if done {
			return nil
		}
	}
	return fmt.Errorf("stuck: %v", s)
}

// run is one schedule of n steps; afterwards the paths in keep are up for good.
func run(draw func(int) int, n int, log bool) (*sim, error) {
	s := newSim(draw)
	s.log = log
	for range n {
		if err := s.step(); err != nil {
			return s, err
		}
	}
	keep := 1 + draw(3)
	for p := range s.up {
		s.up[p] = [2]bool{keep&(1<<p) != 0, keep&(1<<p) != 0}
	}
	s.note("only paths %b from here on", keep)
	err := s.finish()
	for _, e := range s.ends {
		if err == nil {
			err = e.m.err
		}
	}
	return s, err
}
