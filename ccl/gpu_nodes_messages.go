package ccl

import (
	"slices"
	"sync/atomic"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/engine"
	"github.com/lockstep-ccl/lockstep/ccl/internal/gpu"
	"github.com/lockstep-ccl/lockstep/record"
)

// copier is a stream of copies between the GPU and pinned memory that the executor
// puts there, and a word that counts those that are done.
type copier struct {
	s     *cuda.Stream
	word  *uint32
	at    cuda.Ptr
	given uint32
}

func (t *copier) copy(dst, src cuda.Ptr, n int) (number uint32, err error) {
	if err := t.s.Copy(dst, src, uint64(n)); err != nil {
		return 0, err
	}
	t.given++
	return t.given, t.s.Write32(t.at, t.given)
}

func (t *copier) done(number uint32) bool { return int32(atomic.LoadUint32(t.word)-number) >= 0 }

// The two copiers.
const (
	outward = iota
	inward
)

// mailing is the network's part of messages between nodes. They must not wait for
// each other: a peer may be late, or wait for what this rank sends to a third one.
// A stream, which does one thing after the other, cannot do that; so here it stands
// still while the executor copies pieces of all messages at once.
type mailing struct {
	n     *gpuNodes
	x     *crossing
	flows []flow
	gates []mailGate
	left  int // flows that go on
}

// flow is the messages from or to a peer, in their order, as pieces in turn through
// two halves of a part of the pinned memory.
type flow struct {
	peer   int
	send   bool
	at     int // of its part
	half   int
	pieces []piece
	// after is the flow that must have copied a piece out before this one copies the
	// same one in, -1 when there is none.
	after  int
	copied []uint32 // numbers of pieces' copies
}

// piece is part of a message in the GPU's memory.
type piece struct {
	gpu   cuda.Ptr
	bytes int
}

// mailGate is what a gate's number stands for: that a piece's half is ready for the
// network, and that the network is done with it. A gate of no flow is the end.
type mailGate struct {
	flow, piece int32
	done        bool
}

const (
	pieceLeast = 128 << 10
	pieceMost  = 2 << 20
)

// exchange puts messages on s. Those within the node go as they do on a single one.
// local puts them on s where they are no messages.
func (n *gpuNodes) exchange(s *Stream, cs *cuda.Stream, o *operation, msgs []gpu.Message, local func(gpu.Stream) error) error {
	c := n.c
	var near, far []gpu.Message
	for _, m := range msgs {
		if i := slices.Index(c.place.Local, m.Peer); i >= 0 && local == nil {
			m.Peer = i
			near = append(near, m)
		} else {
			far = append(far, m)
		}
	}
	if local == nil && len(near) > 0 {
		local = func(on gpu.Stream) error { return n.gpu.Exchange(on, o.coll, near, o.stream) }
	}
	prepare := func(x *crossing) error {
		m := newMailing(n, x, far, o.inPlace)
		x.gate, x.sched = m.gate, m.schedule(far)
		return nil
	}
	return n.cross(s, cs, o, 1, prepare, func(on gpu.Stream, x *crossing) error {
		if local != nil {
			if err := local(on); err != nil {
				return err
			}
		}
		return on.Wait32(n.passedAt, x.passed+1)
	})
}

// allToAll is messages to everyone; those of a node go by one kernel where they lie
// side by side.
func (n *gpuNodes) allToAll(s *Stream, cs *cuda.Stream, o *operation, send, recv cuda.Ptr) error {
	c, share := n.c, o.count*o.dtype.Size()
	var msgs []gpu.Message
	for k := 1; k < c.size; k++ {
		to, from := (c.rank+k)%c.size, (c.rank-k+c.size)%c.size
		for _, m := range []gpu.Message{
			{Peer: to, Send: true, Buf: send + cuda.Ptr(to*share), Bytes: uint64(share)},
			{Peer: from, Buf: recv + cuda.Ptr(from*share), Bytes: uint64(share)},
		} {
			if !n.major || c.place.Node[m.Peer] != c.place.Node[c.rank] {
				msgs = append(msgs, m)
			}
		}
	}
	return n.exchange(s, cs, o, msgs, func(on gpu.Stream) error {
		if n.major {
			first := cuda.Ptr((c.rank - n.index) * share)
			return n.gpu.Run(on, &gpu.Op{Coll: record.AlltoAll, DType: o.dtype, Root: -1, Count: uint64(o.count), Send: send + first, Recv: recv + first})
		}
		if own := cuda.Ptr(c.rank * share); send != recv {
			return on.Copy(recv+own, send+own, uint64(share))
		}
		return nil
	})
}

func newMailing(n *gpuNodes, x *crossing, msgs []gpu.Message, inPlace bool) *mailing {
	m := &mailing{n: n, x: x}
	index := map[[2]int]int{}
	largest := uint64(0)
	for _, msg := range msgs {
		if _, ok := index[key(msg)]; !ok {
			index[key(msg)] = len(m.flows)
			m.flows = append(m.flows, flow{peer: msg.Peer, send: msg.Send, after: -1})
		}
		largest = max(largest, msg.Bytes)
	}
	m.left = len(m.flows)
	if m.left == 0 {
		return m
	}
	room := len(n.parts[slots].Buf) / (2 * len(m.flows)) &^ 511
	half := max(min(int(largest/4+511)&^511, pieceMost, room), min(pieceLeast, room))
	for i := range m.flows {
		m.flows[i].at, m.flows[i].half = 2*half*i, half
	}
	for _, msg := range msgs {
		f := &m.flows[index[key(msg)]]
		for off := 0; off < int(msg.Bytes); off += half {
			f.pieces = append(f.pieces, piece{msg.Buf + cuda.Ptr(off), min(half, int(msg.Bytes)-off)})
		}
	}
	for i := range m.flows {
		f := &m.flows[i]
		f.copied = make([]uint32, 0, len(f.pieces))
		if j, ok := index[[2]int{f.peer, 1}]; ok && inPlace && !f.send {
			f.after = j
		}
	}
	return m
}

// key tells flows apart.
func key(m gpu.Message) [2]int {
	if m.Send {
		return [2]int{m.Peer, 1}
	}
	return [2]int{m.Peer, 0}
}

// schedule has a track for each flow, and one that ends the operation.
func (m *mailing) schedule(msgs []gpu.Message) *algo.Schedule {
	s := &algo.Schedule{Algo: record.AlgoDirect, Proto: record.ProtoSimple}
	gate := func(f, p int, done bool) algo.Step {
		m.gates = append(m.gates, mailGate{int32(f), int32(p), done})
		return algo.Step{Act: algo.Gate, Peer: -1, Len: len(m.gates) - 1}
	}
	space := engine.GroupSpace + slots
	for i := range m.flows {
		f := &m.flows[i]
		st := algo.Step{Act: algo.Recv, Peer: int32(f.peer)}
		if f.send {
			st.Act = algo.Send
		}
		var t algo.Track
		p := 0
		for _, msg := range msgs {
			if msg.Peer != f.peer || msg.Send != f.send {
				continue
			}
			head := st
			head.Header, head.Whole = true, int(msg.Bytes)
			head.Src.Space, head.Dst.Space = space, space
			t = append(t, head)
			for left := int(msg.Bytes); left > 0; p++ {
				body := st
				body.Len = f.pieces[p].bytes
				body.Src = algo.Ref{Space: space, Off: f.place(p)}
				body.Dst = body.Src
				t = append(t, gate(i, p, false), body, gate(i, p, true))
				left -= body.Len
			}
		}
		t = append(t, gate(i, len(f.pieces), true))
		s.Tracks = append(s.Tracks, t)
	}
	s.Tracks = append(s.Tracks, algo.Track{gate(-1, 0, true), gate(-1, 1, true)})
	return s
}

// place is where in the pinned memory a piece of the flow goes.
func (f *flow) place(p int) int { return f.at + p&1*f.half }

// gate is engine.Op.Gate.
func (m *mailing) gate(number int) bool {
	g := m.gates[number]
	ok, err := m.pass(int(g.flow), int(g.piece), g.done)
	if err != nil {
		m.n.c.gpuBroke(err)
		return false
	}
	return ok
}

func (m *mailing) pass(i, p int, done bool) (bool, error) {
	n := m.n
	if i < 0 {
		in := &n.copies[inward]
		if p > 0 {
			return n.has(m.x.reached + 1), nil // the stream has gone on
		}
		if m.left > 0 || !in.done(in.given) {
			return false, nil
		}
		n.pass(m.x.passed + 1)
		return true, nil
	}
	f := &m.flows[i]
	switch {
	case p == len(f.pieces):
		m.left--
		return true, nil
	case f.send && !done: // is the piece in pinned memory?
		if err := m.fetch(f, min(p+2, len(f.pieces))); err != nil {
			return false, err
		}
		return n.copies[outward].done(f.copied[p]), nil
	case f.send:
		return true, nil // the next gate fetches what this half is for
	case !done: // is its half free?
		return p < 2 || n.copies[inward].done(f.copied[p-2]), nil
	}
	if f.after >= 0 {
		if out := &m.flows[f.after]; p >= len(out.copied) || !n.copies[outward].done(out.copied[p]) {
			return false, nil
		}
	}
	number, err := n.copies[inward].copy(f.pieces[p].gpu, n.slotAt[0]+cuda.Ptr(f.place(p)), f.pieces[p].bytes)
	f.copied = append(f.copied, number)
	return true, err
}

// fetch copies the flow's pieces before end out of the GPU, as far as they are not
// yet; halves are free for them.
func (m *mailing) fetch(f *flow, end int) error {
	for p := len(f.copied); p < end; p++ {
		number, err := m.n.copies[outward].copy(m.n.slotAt[0]+cuda.Ptr(f.place(p)), f.pieces[p].gpu, f.pieces[p].bytes)
		if err != nil {
			return err
		}
		f.copied = append(f.copied, number)
	}
	return nil
}
