package rdma

import (
	"fmt"
)

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
	if q.delivered == len(q.wrs) || !s.up[s.shape.pathOf(q.way)][q.end.side] {
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
	if q.state != pathLive || q.completed == q.delivered || !q.end.s.up[q.end.s.shape.pathOf(q.way)][1-q.end.side] {
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
	s := q.end.s
	if up := s.up[s.shape.pathOf(q.way)]; q.target() == nil || !up[0] || !up[1] {
		s.note("%d: retries exceeded on lane %d path %d", q.end.side, q.lane, q.way)
		q.breaks()
		q.end.cq = append(q.end.cq, simCompletion{qp: q, failed: true})
	}
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

// pattern is byte i that an end sends.
func (e *simEnd) pattern(i int) byte { return byte(uint32(i+1) * 2654435761 >> 24 * uint32(3+e.side)) }

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
