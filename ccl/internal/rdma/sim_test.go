package rdma

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
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

	switches, resent, willing int
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
	qp       [][MaxPaths]*simQP
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

type simQP struct {
	num       int
	end       *simEnd
	lane, way int
	state     pathState // of the hardware
	told      bool      // the machine has stopped it
	peer      int       // number of the peer's, -1 unconnected
	recvs     int
	wrs       []simWR
	delivered int
	completed int
	gone      bool // destroyed
}

type simWR struct {
	e     entry
	s     uint64
	block block
	data  []byte // what is on its way, once the sender's NIC reads no more
}

type simCompletion struct {
	qp     *simQP
	recv   bool
	failed bool
	imm, n uint32
	s      uint64
}

func newSim(draw func(int) int) *sim {
	s := &sim{draw: draw, shape: shape{
		ring: 512, maxChunk: 128, depth: 8 << draw(2), table: 16, lanes: 1 + draw(3),
	}}
	for p := range s.up {
		s.up[p] = [2]bool{true, true}
	}
	for i := range s.ends {
		e := &simEnd{s: s, side: i, out: make([]byte, s.shape.ring), in: make([]byte, s.shape.ring), sealed: make([]bool, s.shape.ring),
			blocks: make([]block, s.shape.lanes), kept: map[uint64][]byte{}, qp: make([][MaxPaths]*simQP, s.shape.lanes)}
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
		e.s.switches++
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

// breaks moves a queue pair to the error state; what it has sent may still arrive.
func (q *simQP) breaks() {
	if q.state != pathStopped {
		q.state = pathStopped
		for i := q.delivered; i < len(q.wrs); i++ {
			q.wrs[i].data = q.end.bytesOf(&q.wrs[i])
		}
	}
}

// target is the queue pair at the other end, nil when it takes nothing.
func (q *simQP) target() *simQP {
	if q.peer < 0 {
		return nil
	}
	if t := q.end.s.qps[q.peer]; t.state == pathLive && !t.gone && t.peer == q.num {
		return t
	}
	return nil
}

// deliver moves the next write to the peer's memory, or a piece of it.
func (q *simQP) deliver(all bool) error {
	s := q.end.s
	if q.delivered == len(q.wrs) || !s.up[q.way][q.end.side] {
		return nil
	}
	t := q.target()
	if t == nil {
		return nil
	}
	w := &q.wrs[q.delivered]
	data := w.data
	if data == nil {
		data = q.end.bytesOf(w)
	}
	r := t.end
	switch w.e.kind {
	case kindData:
		at := w.e.pos % s.shape.ring
		if !all {
			data = data[:s.draw(len(data)+1)]
		}
		for i := range data {
			if r.sealed[at+uint64(i)] {
				return fmt.Errorf("end %d: byte %d of the stream overwritten after it was counted", r.side, w.e.pos+uint64(i))
			}
		}
		copy(r.in[at:], data)
		if all {
			for i := range data {
				r.sealed[at+uint64(i)] = true
			}
		}
	case kindLine:
		if !all {
			data = data[:s.draw(len(data)+1)]
		}
		copy(r.linesIn[w.e.pos%LineSlots][:], data)
	case kindNote:
		if all {
			r.blocks[q.lane] = w.block
		}
	}
	if !all {
		return nil
	}
	q.delivered++
	if w.e.kind == kindNote && w.e.num == 1 {
		return nil // silent
	}
	if t.recvs--; t.recvs < 0 {
		return fmt.Errorf("end %d: no receive posted on lane %d", r.side, q.lane)
	}
	s.note("%d: delivered lane %d path %d message %d", r.side, q.lane, q.way, w.s)
	r.cq = append(r.cq, simCompletion{qp: t, recv: true, imm: immediate(&w.e), n: w.e.n})
	return nil
}

// acknowledge brings the peer's word that writes were executed, if it arrives.
func (q *simQP) acknowledge() {
	if q.state != pathLive || q.completed == q.delivered || !q.end.s.up[q.way][1-q.end.side] {
		return
	}
	for q.completed < q.delivered {
		w := &q.wrs[q.completed]
		q.completed++
		if w.e.kind != kindNote || w.e.num == 0 {
			q.end.cq = append(q.end.cq, simCompletion{qp: q, s: w.s + 1})
		}
	}
}

// exhaust ends a queue pair that gets no acknowledgement.
func (q *simQP) exhaust() {
	if q.state != pathLive || q.completed == len(q.wrs) {
		return
	}
	if s := q.end.s; q.target() == nil || !s.up[q.way][0] || !s.up[q.way][1] {
		s.note("%d: retries exceeded on lane %d path %d", q.end.side, q.lane, q.way)
		q.breaks()
		q.end.cq = append(q.end.cq, simCompletion{qp: q, failed: true})
	}
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

func (e *simEnd) offer(i, p int) {
	if wanted, _ := e.m.wants(i, p); !wanted {
		return
	}
	q := &simQP{num: len(e.s.qps), end: e, lane: i, way: p, state: pathOffered, peer: -1, recvs: int(e.s.shape.depth)}
	e.s.qps = append(e.s.qps, q)
	e.qp[i][p] = q
	e.m.offer(i, p, endpoint{qp: uint32(q.num), mtu: 5})
}

// ---- application ----

// pattern is byte i that an end sends.
func (e *simEnd) pattern(i int) byte { return byte(uint32(i+1) * 2654435761 >> 24 * uint32(3+e.side)) }

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
	i, p := s.draw(s.shape.lanes), s.draw(MaxPaths)
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
		if s.draw(4) == 0 {
			s.up[p][e.side] = !s.up[p][e.side]
			s.note("path %d from %d: %v", p, e.side, s.up[p][e.side])
		}
	case 22:
		if s.draw(4) == 0 { // the port's event, or δ
			s.note("%d: event on path %d", e.side, p)
			for l := range e.qp {
				e.m.fault(l, p)
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
					if s.up[p][0] && s.up[p][1] {
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

func (s *sim) String() string {
	out := ""
	for _, e := range s.ends {
		out += fmt.Sprintf("\nend %d: sent %d, left %d, peer got %d; lines %d, %d; tx %+v rx got %d front %d; ctl %d cq %d\n", e.side, e.sent, e.left, e.peer().got, e.linesSent, e.peer().linesGot, e.m.tx, e.m.rx.got, e.m.rx.front, len(e.ctl), len(e.cq))
		for i := range e.m.lanes {
			l := &e.m.lanes[i]
			out += fmt.Sprintf("  lane %d phase %d epoch %d active %d posted %d transmitted %d acked %d received %d told %d paths", i, l.phase, l.epoch, l.active, l.posted, l.transmitted, l.acked, l.received, l.told)
			for p := range l.paths {
				out += fmt.Sprintf(" %d/%d(%d)", l.paths[p].state, l.paths[p].gen, l.paths[p].toldGen)
			}
			out += "\n"
		}
	}
	return out
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

func seeded(seed uint64) func(int) int {
	r := rand.New(rand.NewPCG(seed, 1))
	return r.IntN
}
