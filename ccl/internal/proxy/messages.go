package proxy

import (
	"fmt"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/kernels"
	"github.com/lockstep-ccl/lockstep/ccl/internal/engine"
	"github.com/lockstep-ccl/lockstep/ccl/internal/gpu"
	"github.com/lockstep-ccl/lockstep/record"
)

// transfers is the network's part of messages between nodes. No message may wait for another one,
// because a peer may be late, or wait for what this rank sends to a third rank. A stream runs one
// operation at a time, so one kernel copies all messages: whichever piece is ready, between the GPU
// and pinned memory. The executor does not copy, because it must not call the driver: a thread that
// waits for the GPU may hold the driver's lock, for example while it frees memory.
type transfers struct {
	n        *Proxy
	x        *Op
	flows    []flow
	of       map[int]int // flows by index
	half     int         // bytes of a piece, except for a message's last one
	gates    []transferGate
	inFlight int // pieces that peers have yet to consume
}

// flow holds the messages from one peer, or to one peer, in order. Their pieces alternate between two
// bounce buffers.
type flow struct {
	peer     int
	send     bool
	at       int    // offset of its bounce buffers
	base     uint32 // pieces of the flow in earlier operations
	pieces   []piece
	words    *flowWords
	large    bool          // it has a message over keptFrom
	inFlight [2]unconsumed // one per bounce buffer
	open     int           // number of inFlight in use
}

// unconsumed stands for zero-copy pieces before count. The peer has consumed them when it has consumed
// the bytes up to mark.
type unconsumed struct {
	mark  uint64
	count uint32
}

// flowWords counts a flow's pieces over the communicator's lifetime, in pinned memory: those that the
// GPU has copied, and those that the network has sent or received.
type flowWords struct {
	gpu, net uint32
	_        [14]uint32
}

// piece is part of a message.
type piece struct{ skew, bytes int }

// transferGate is the meaning of a gate. With a flow: the piece's bounce buffer is ready for the
// network, or, with done, the network has finished with it. Without a flow (-1): the stream has gone on,
// or, with done, all messages are through.
type transferGate struct {
	flow, piece int32
	done        bool
}

const (
	pieceLeast = 128 << 10
	pieceMost  = 2 << 20
	// A larger message may be sent zero-copy, and then ends only when its receiver has it. Smaller
	// messages end without their receiver, as within a node.
	keptFrom = 256 << 10
	// messagesMost is how many messages may wait for the GPU at a time.
	messagesMost = 1024
)

// control is the pinned memory of a communicator's messages: the words of each peer's flows, and a
// ring of descriptors for the kernel, one per message.
type control struct {
	words   []flowWords // 2p for messages from rank p, 2p+1 for messages to it
	wordsAt cuda.Ptr
	given   []uint32 // pieces of each flow so far
	ring    []kernels.StagedMessage
	ringAt  cuda.Ptr
	// Positions in the ring only grow: head is the next one, tail the oldest that an operation
	// uses.
	head, tail int
	taken      []ringUse
}

// ringUse says that positions before end are in use until operation seq has ended.
type ringUse struct {
	end int
	seq uint64
}

func ringLen(ranks int) int { return max(messagesMost, 4*ranks) }

func controlSize(ranks int) int {
	return 2*ranks*int(unsafe.Sizeof(flowWords{})) + ringLen(ranks)*int(unsafe.Sizeof(kernels.StagedMessage{}))
}

func newControl(ranks int, mem []byte, at cuda.Ptr) control {
	clear(mem)
	words := 2 * ranks * int(unsafe.Sizeof(flowWords{}))
	return control{
		words: unsafe.Slice((*flowWords)(unsafe.Pointer(&mem[0])), 2*ranks), wordsAt: at, given: make([]uint32, 2*ranks),
		ring: unsafe.Slice((*kernels.StagedMessage)(unsafe.Pointer(&mem[words])), ringLen(ranks)), ringAt: at + cuda.Ptr(words),
	}
}

// places reserves count adjacent descriptors of the ring. It waits for operations that still use
// them.
func (n *Proxy) places(count int) ([]kernels.StagedMessage, cuda.Ptr, error) {
	m := &n.control
	size := len(m.ring)
	if rest := size - m.head%size; rest < count {
		m.head += rest
	}
	for m.head+count > m.tail+size {
		if len(m.taken) == 0 {
			m.tail = m.head
			break
		}
		use := m.taken[0]
		if err := n.run.Drive(use.seq); err != nil {
			return nil, 0, err
		}
		m.taken, m.tail = m.taken[1:], use.end
	}
	first := m.head % size
	m.head += count
	return m.ring[first : first+count], m.ringAt + cuda.Ptr(first*int(unsafe.Sizeof(kernels.StagedMessage{}))), nil
}

// index returns the index of a message's flow in control.
func index(msg gpu.Message) int {
	if msg.Send {
		return 2*msg.Peer + 1
	}
	return 2 * msg.Peer
}

// Exchange puts messages on a stream. Messages within the node run in parallel to those between nodes,
// because a peer may need either before it takes part in the other.
func (n *Proxy) Exchange(on gpu.Stream, o *Call, msgs []gpu.Message, put func(*Op) error) error {
	return n.exchange(on, o, msgs, nil, put)
}

// exchange is Exchange. If local is not nil, it runs the part within the node, and all msgs go over the
// network.
func (n *Proxy) exchange(on gpu.Stream, o *Call, msgs []gpu.Message, local func(gpu.Stream) error, put func(*Op) error) error {
	var near, far []gpu.Message
	for _, m := range msgs {
		if i := slices.Index(n.place.Local, m.Peer); i >= 0 && local == nil {
			m.Peer = i
			near = append(near, m)
		} else {
			far = append(far, m)
		}
	}
	if local == nil && len(near) > 0 {
		local = func(on gpu.Stream) error { return n.gpu.Exchange(on, o.Coll, near, o.Stream) }
	}
	if most := len(n.control.ring); len(far) > most {
		return &TooManyError{len(far), most}
	}
	var list cuda.Ptr
	prepare := func(x *Op) error {
		ring, at, err := n.places(len(far))
		if err != nil {
			return err
		}
		m := newTransfers(n, x, far, ring, o.InPlace)
		x.gate, x.returns, x.sched, list = m.gate, m.returned, m.schedule(far), at
		return nil
	}
	return n.start(on, o, put, 1, nil, prepare, func(x *Op) error {
		copies := func(s *cuda.Stream) error {
			n.control.taken = append(n.control.taken, ringUse{n.control.head, n.run.Last()})
			return n.gpu.CopyStaged(s, list, len(far))
		}
		var err error
		switch {
		case local == nil && len(far) > 0:
			err = copies(on.Stream)
		case local != nil && len(far) == 0:
			err = local(on)
		case local != nil:
			err = n.parallel(on, copies, local)
		}
		if err != nil {
			return err
		}
		return on.Wait32(n.passedAt, x.passed+1)
	})
}

// TooManyError says that a group has more messages between nodes than there is room for.
type TooManyError struct{ Messages, Most int }

func (e *TooManyError) Error() string {
	return fmt.Sprintf("%d messages between nodes, at most %d in one group", e.Messages, e.Most)
}

// allToAll sends messages to all ranks. If the node's ranks have adjacent numbers, one kernel does the
// part within the node.
func (n *Proxy) allToAll(s gpu.Stream, o *Call, send, recv cuda.Ptr, put func(*Op) error) error {
	rank, size, share := n.cfg.Rank, n.cfg.Size, o.Count*o.DType.Size()
	var msgs []gpu.Message
	for k := 1; k < size; k++ {
		to, from := (rank+k)%size, (rank-k+size)%size
		for _, m := range []gpu.Message{
			{Peer: to, Send: true, Buf: send + cuda.Ptr(to*share), Bytes: uint64(share)},
			{Peer: from, Buf: recv + cuda.Ptr(from*share), Bytes: uint64(share)},
		} {
			if !n.major || n.place.Node[m.Peer] != n.place.Node[rank] {
				msgs = append(msgs, m)
			}
		}
	}
	return n.exchange(s, o, msgs, func(on gpu.Stream) error {
		if n.major {
			first := cuda.Ptr((rank - n.index) * share)
			return n.gpu.Run(on, &gpu.Op{Coll: record.AlltoAll, DType: o.DType, Root: -1, Count: uint64(o.Count), Send: send + first, Recv: recv + first})
		}
		if own := cuda.Ptr(rank * share); send != recv {
			return on.Copy(recv+own, send+own, uint64(share))
		}
		return nil
	}, put)
}

// newTransfers prepares messages, and writes the kernel's descriptors to ring.
func newTransfers(n *Proxy, x *Op, msgs []gpu.Message, ring []kernels.StagedMessage, inPlace bool) *transfers {
	m := &transfers{n: n, x: x, of: make(map[int]int)}
	largest := uint64(0)
	for _, msg := range msgs {
		i := index(msg)
		if _, ok := m.of[i]; !ok {
			m.of[i] = len(m.flows)
			m.flows = append(m.flows, flow{peer: msg.Peer, send: msg.Send, words: &n.control.words[i], base: n.control.given[i]})
		}
		largest = max(largest, msg.Bytes)
		f := &m.flows[m.of[i]]
		f.large = f.large || msg.Bytes > keptFrom
	}
	if len(m.flows) == 0 {
		return m
	}
	room := (len(n.parts[partAll].Buf)/(2*len(m.flows)) - kernels.StagedPad) &^ 511
	m.half = max(min(int(largest/4+511)&^511, pieceMost, room), min(pieceLeast, room))
	for i := range m.flows {
		m.flows[i].at = 2 * (m.half + kernels.StagedPad) * i
	}
	at := func(i int) uint64 { return uint64(n.control.wordsAt) + uint64(i)*uint64(unsafe.Sizeof(flowWords{})) }
	for j, msg := range msgs {
		i := index(msg)
		f := &m.flows[m.of[i]]
		k := kernels.StagedMessage{
			Buffer: uint64(msg.Buf), Bytes: msg.Bytes, Slot: uint64(n.bounceAt[0]) + uint64(f.at),
			Mine: at(i), Theirs: at(i) + 4, Half: uint32(m.half), First: f.base + uint32(len(f.pieces)),
		}
		if msg.Send {
			if k.Send = 1; n.onGPU(&msg) {
				k.Slot = uint64(n.directAt(0)) + uint64(f.at)
			}
		} else if inPlace {
			k.After, k.AfterFirst = at(i+1), n.control.given[i+1] // the flow to this peer
		}
		ring[j] = k
		for off := 0; off < int(msg.Bytes); off += m.half {
			f.pieces = append(f.pieces, piece{int(msg.Buf) & 15, min(m.half, int(msg.Bytes)-off)})
		}
	}
	for i, j := range m.of {
		n.control.given[i] += uint32(len(m.flows[j].pieces))
	}
	return m
}

// onGPU reports whether a message is sent from the GPU's memory. Messages within the node are not
// (allToAll has such messages). Small ones are not, because they would then end only when their
// receiver has them.
func (n *Proxy) onGPU(msg *gpu.Message) bool {
	return msg.Send && msg.Bytes > keptFrom && n.direct.has() && !slices.Contains(n.place.Local, msg.Peer)
}

// schedule returns a schedule with one track per flow, and one that ends the operation.
func (m *transfers) schedule(msgs []gpu.Message) *algo.Schedule {
	s := &algo.Schedule{Algo: record.AlgoDirect, Proto: record.ProtoSimple}
	gate := func(f, p int, done bool) algo.Step {
		m.gates = append(m.gates, transferGate{int32(f), int32(p), done})
		return algo.Step{Act: algo.Gate, Peer: -1, Len: len(m.gates) - 1}
	}
	space := engine.GroupSpace + partAll
	s.Tracks = make([]algo.Track, len(m.flows))
	next := make([]int, len(m.flows)) // next piece of each flow
	for _, msg := range msgs {
		i := m.of[index(msg)]
		f, t := &m.flows[i], &s.Tracks[i]
		st := algo.Step{Act: algo.Recv, Peer: int32(f.peer)}
		if f.send {
			st.Act = algo.Send
		}
		head := st
		head.Header, head.Whole = true, int(msg.Bytes)
		head.Src.Space, head.Dst.Space = space, space
		*t = append(*t, head)
		for left := int(msg.Bytes); left > 0; next[i]++ {
			p := next[i]
			body := st
			body.Len, body.Kept = f.pieces[p].bytes, f.send && msg.Bytes > keptFrom
			body.Src = algo.Ref{Space: space, Off: f.at + int(f.base+uint32(p))&1*(m.half+kernels.StagedPad) + f.pieces[p].skew}
			if body.Dst = body.Src; m.n.onGPU(&msg) {
				body.Src.Space = engine.GroupSpace + partDirectAll
			}
			*t = append(*t, gate(i, p, false), body, gate(i, p, true))
			left -= body.Len
		}
	}
	s.Tracks = append(s.Tracks, algo.Track{{Act: algo.Join, Peer: -1}, gate(-1, 0, true), gate(-1, 1, false)})
	return s
}

// gate is engine.Op.Gate.
func (m *transfers) gate(number int) bool {
	g := m.gates[number]
	if g.flow < 0 {
		if g.done { // all messages are through
			if m.inFlight > 0 {
				if !m.n.mesh.Settled() {
					return false
				}
				m.returned()
			}
			m.n.pass(m.x.passed + 1)
			return true
		}
		return m.n.has(m.x.reached + 1) // the stream has gone on
	}
	f := &m.flows[g.flow]
	count := f.base + uint32(g.piece) // before this piece
	switch {
	case g.done:
		m.done(f, count+1)
		return true
	case f.send:
		return f.copied(count + 1)
	}
	return g.piece < 2 || f.copied(count-1)
}

// done tells the GPU that the network has finished a flow's pieces before count. For zero-copy sends,
// returned tells it later.
func (m *transfers) done(f *flow, count uint32) {
	mesh := m.n.mesh
	if f.send && f.large {
		if mark := mesh.Mark(f.peer); f.open > 0 || !mesh.Consumed(f.peer, mark) {
			f.inFlight[f.open] = unconsumed{mark, count}
			f.open++
			m.inFlight++
			return
		}
	} else if f.large {
		mesh.Acknowledge(f.peer)
	}
	atomic.StoreUint32(&f.words.net, count)
}

// returned tells the GPU what peers have consumed, and reports whether that is anything new.
func (m *transfers) returned() bool {
	before := m.inFlight
	for i := 0; i < len(m.flows) && m.inFlight > 0; i++ {
		for f := &m.flows[i]; f.open > 0 && m.n.mesh.Consumed(f.peer, f.inFlight[0].mark); {
			atomic.StoreUint32(&f.words.net, f.inFlight[0].count)
			f.inFlight[0] = f.inFlight[1]
			f.open--
			m.inFlight--
		}
	}
	return m.inFlight < before
}

// copied reports whether the GPU has copied count of the flow's pieces.
func (f *flow) copied(count uint32) bool { return int32(atomic.LoadUint32(&f.words.gpu)-count) >= 0 }
