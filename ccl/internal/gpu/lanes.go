package gpu

import (
	"context"
	"encoding/binary"
	"fmt"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/kernels"
	"github.com/lockstep-ccl/lockstep/ccl/internal/symm"
	"github.com/lockstep-ccl/lockstep/record"
)

// Up to how many bytes a message takes an algorithm. Both sides choose by size, and by nothing
// else.
const (
	// llMessage: LL sends twice the bytes but asks nobody; beyond, the answer (about
	// 4 µs) is cheaper than the flags.
	llMessage = 256 << 10
	// bulkMessage: bulk copies are faster, by 4 %, once their pipeline is full.
	bulkMessage = 4 << 20

	// llLane and directLane are the least data for which another lane pays: a few
	// turns of 512 threads.
	llLane     = 8 << 10
	directLane = 32 << 10
	// directBlocks is how many SMs push direct messages, of all peers together.
	directBlocks = 16
)

// messageAlgo is how a message goes: record.AlgoLL or record.AlgoDirect. Copy engines carry
// large ones 6 % faster, without a multiprocessor, but nobody else could tell a sender's where
// the receiver wants the bytes than CPU threads of both; they would begin some 20 µs late with
// each piece, and in no capture.
func (c *Comm) messageAlgo(bytes uint64) record.Algo {
	switch f := c.cfg.Force; {
	case f == record.AlgoLL && bytes <= kernels.MaxLanes*kernels.LaneBytes:
		return record.AlgoLL
	case bytes > llMessage, bytes > 0 && (f == record.AlgoSym || f == record.AlgoBulk):
		return record.AlgoDirect
	}
	return record.AlgoLL
}

// directLanes is how many lanes a direct message has at most: as many for each of the blocks that
// it gets where a rank sends to all of its peers. (Of sixteen lanes, the first of five blocks had
// four and the others three.)
func directLanes(ranks int) int {
	blocks := max(directBlocks/max(ranks-1, 1), 1)
	return kernels.MaxLanes / blocks * blocks
}

// lanesOf splits a message into at most so many lanes of piece bytes, one for step bytes each.
func lanesOf(bytes, step uint64, most int) (lanes uint32, piece uint64) {
	n := uint64(blocksFor(bytes, step, most))
	piece = ((bytes+n-1)/n + 127) &^ 127
	if bytes == 0 {
		return 1, piece
	}
	return uint32((bytes + piece - 1) / piece), piece
}

// theirs is where each rank has mapped this rank's part of m. It is collective.
func (c *Comm) theirs(ctx context.Context, m *symm.Memory) (at [MaxRanks]cuda.Ptr, err error) {
	bases, err := c.cfg.Exchange(ctx, binary.LittleEndian.AppendUint64(nil, uint64(m.Base)))
	if err != nil {
		return at, err
	}
	for r, b := range bases {
		if len(b) != 8 {
			return at, fmt.Errorf("rank %d told an address of %d bytes", r, len(b))
		}
		at[r] = cuda.Ptr(binary.LittleEndian.Uint64(b)) + cuda.Ptr(uint64(c.rank)*m.Stride)
	}
	return at, nil
}

// directRoom is a place of staging memory: of direct messages, each peer has two of each lane.
// They take half of the memory: what has come is copied out before it has left the L2 cache.
func (c *Comm) directRoom() uint64 {
	return c.stage.Size / 2 / uint64(c.size) / (2 * kernels.MaxLanes) &^ 127
}

// lanes is how both sides cut a message.
func (c *Comm) lanes(bytes uint64, algo record.Algo) (lanes uint32, piece uint64) {
	step, most := uint64(directLane), directLanes(c.size)
	if algo == record.AlgoLL {
		step, most = llLane, kernels.MaxLanes
		if b := uint64(c.cfg.Blocks); b > 0 {
			step = min(max((bytes+b-1)/b, 1), kernels.LaneBytes)
		}
	}
	return lanesOf(bytes, step, most)
}

// stagedAt is staging memory of direct messages from a peer: as mapped here, and as the
// peer has mapped it.
func (c *Comm) stagedAt(peer int) (here, there uint64) {
	off := uint64(peer) * 2 * kernels.MaxLanes * c.directRoom()
	return uint64(c.stage.Own()) + off, uint64(c.stageTheirs[peer]) + off
}

// round is one launch that carries at most one message of each kind to and from each peer.
// Blocks of LL come first, and each does a lane of a send and one of a receive.
type round struct {
	a            *kernels.P2PArgs
	sends, recvs int
	out, in      uint32 // blocks of LL sends and receives
	direct       int    // direct messages
	pushes       int    // sends of them
	staged       int    // receives of them through staging memory
	most         uint64 // the largest direct send
}

// single reports whether messages fit a round.
func single(c *Comm, msgs []Message) bool {
	var seen [2][2]uint32 // bit per peer
	var count [2]int
	for _, m := range msgs {
		i, direct := 0, 0
		if m.Send {
			i = 1
		}
		if c.messageAlgo(m.Bytes) != record.AlgoLL {
			direct = 1
		}
		if count[i]++; seen[i][direct]>>m.Peer&1 != 0 || count[i] > kernels.MaxMessages {
			return false
		}
		seen[i][direct] |= 1 << m.Peer
	}
	return true
}

func (r *round) add(c *Comm, m Message, algo record.Algo) {
	k := kernels.P2PMessage{Buf: uint64(m.Buf), Bytes: m.Bytes, Peer: uint32(m.Peer)}
	k.Lanes, k.Piece = c.lanes(m.Bytes, algo)
	if algo == record.AlgoLL {
		k.Blocks = k.Lanes
		first := &r.in
		if m.Send {
			first = &r.out
		}
		k.First = *first
		*first += k.Blocks
	} else {
		r.direct++
		k.Direct = 1
		if m.Send {
			r.pushes++
			r.most = max(r.most, m.Bytes)
		} else if w, off := c.find(m.Buf, m.Bytes); w != nil {
			k.Target = uint64(w.theirs[m.Peer]) + off
			k.Blocks = 1
		} else {
			r.staged++
			k.Stage, k.Target = c.stagedAt(m.Peer)
			k.Room = uint32(c.directRoom())
		}
	}
	if m.Send {
		r.a.Send[r.sends] = k
		r.sends++
	} else {
		r.a.Recv[r.recvs] = k
		r.recvs++
	}
}

// place gives direct messages their blocks, and returns how many blocks there are.
func (r *round) place(c *Comm) uint32 {
	next, most := max(r.out, r.in), directBlocks
	if b := c.cfg.Blocks; b > 0 {
		most = b
	}
	give := func(list []kernels.P2PMessage, among int) {
		for i := range list {
			m := &list[i]
			if m.Direct == 0 {
				continue
			}
			if m.Blocks == 0 {
				m.Blocks = min(m.Lanes, uint32(max(1, most/among)))
			}
			m.First = next
			next += m.Blocks
		}
	}
	give(r.a.Send[:r.sends], r.pushes)
	give(r.a.Recv[:r.recvs], r.staged)
	return max(next, 1)
}

// kernel is the round's kernel, and what it is recorded as.
func (r *round) kernel(c *Comm) (name string, algo record.Algo) {
	switch {
	case r.direct == 0:
		return "ls_p2p_ll", record.AlgoLL
	case max(r.out, r.in) == 0 && r.most >= bulkMessage && c.dev.Major >= 9:
		return "ls_p2p_bulk", record.AlgoBulk
	}
	return "ls_p2p_direct", record.AlgoDirect
}

// launch puts the round on s.
func (r *round) launch(c *Comm, s *cuda.Stream, blocks uint32) error {
	name, algo := r.kernel(c)
	if algo == record.AlgoBulk {
		pushing := 0
		for i := range r.a.Send[:r.sends] {
			pushing += int(r.a.Send[i].Blocks)
		}
		r.a.Pace = c.pace(messages, 0, pushing)
	}
	f := c.move[name]
	return s.Launch(f.Func, blocks, f.threads, f.shared, unsafe.Pointer(r.a), unsafe.Sizeof(*r.a))
}

// list is one launch of any number of messages. Those of one peer, direction and kind form a
// queue. Queues share no block, so each waits only for its other end.
type list struct {
	a    *kernels.P2PListArgs
	more []kernels.P2PItem // what a has no room for
	load *kernels.ItemsArgs
}

// listBlocks is how many SMs do LL messages of a list, of all queues together.
const listBlocks = 64

// queueShape is a queue while it is filled.
type queueShape struct {
	count, next, lanes uint32
	staged             bool
}

func (l *list) run(c *Comm, s *cuda.Stream, op *Op, msgs []Message) error {
	a := l.a
	here, _ := c.stagedAt(0)
	*a = kernels.P2PListArgs{
		Heaps: uint64(c.heap.Base), Stride: c.heap.Stride, Abort: c.args.Abort, Rank: c.args.Rank, Ranks: c.args.Ranks,
		Stage: here, Room: uint32(c.directRoom()),
	}
	if most := kernels.Items + kernels.MoreItems; len(msgs) > most {
		return fmt.Errorf("%d messages in one group, at most %d", len(msgs), most)
	}
	direct, most := l.fill(c, msgs)
	blocks, lines := l.place(c)
	name, algo := "ls_p2p_list", record.AlgoLL
	switch {
	case direct && !lines && most >= bulkMessage && c.dev.Major >= 9:
		name, algo = "ls_p2p_list_bulk", record.AlgoBulk
	case direct:
		algo = record.AlgoDirect
	}
	a.Slots, a.SlotMask = c.args.Slots, c.args.SlotMask
	a.Desc, a.Flags = c.stamps.describe(op, plan{algo, int(blocks)}), kernels.First|kernels.Last
	c.lastAlgo.Store(uint32(algo)<<16 | blocks)
	// The memory is free: operations of a communicator come one after the other.
	to := uint64(c.heap.Own()) + uint64(kernels.HeapItems)
	for rest := l.more; len(rest) > 0; {
		n := copy(l.load.Item[:], rest)
		l.load.To, l.load.Count = to, uint32(n)
		f := c.move["ls_p2p_items"]
		if err := s.Launch(f.Func, 1, f.threads, f.shared, unsafe.Pointer(l.load), unsafe.Sizeof(*l.load)); err != nil {
			return err
		}
		rest, to = rest[n:], to+uint64(n)*uint64(unsafe.Sizeof(kernels.P2PItem{}))
	}
	if algo == record.AlgoBulk {
		pushing := 0
		for i := range a.Queue {
			if q := &a.Queue[i]; q.Send == 1 {
				pushing += int(q.Blocks)
			}
		}
		a.Pace = c.pace(messages, 0, pushing)
	}
	f := c.move[name]
	return s.Launch(f.Func, blocks, f.threads, f.shared, unsafe.Pointer(a), unsafe.Sizeof(*a))
}

// fill sorts messages into queues. It returns whether any is direct, and the largest
// direct send.
func (l *list) fill(c *Comm, msgs []Message) (direct bool, most uint64) {
	a := l.a
	var shapes [4 * MaxRanks]queueShape
	shape := func(m Message) (*queueShape, record.Algo) {
		i, w := 4*m.Peer, c.messageAlgo(m.Bytes)
		if m.Send {
			i += 2
		}
		if w != record.AlgoLL {
			i++
		}
		return &shapes[i], w
	}
	for _, m := range msgs {
		q, w := shape(m)
		q.count++
		direct = direct || w != record.AlgoLL
	}
	for i := range shapes {
		shapes[i].next = a.Items
		a.Items += shapes[i].count
	}
	l.more = append(l.more[:0], make([]kernels.P2PItem, max(len(msgs), kernels.Items)-kernels.Items)...)
	for _, m := range msgs {
		q, w := shape(m)
		lanes, piece := c.lanes(m.Bytes, w)
		k := kernels.P2PItem{Buf: uint64(m.Buf), Bytes: m.Bytes, Piece: uint32(piece / kernels.PieceUnit), Lanes: lanes}
		if w != record.AlgoLL && m.Send {
			most = max(most, m.Bytes)
		} else if w != record.AlgoLL {
			if w, off := c.find(m.Buf, m.Bytes); w != nil {
				k.Target = uint64(w.theirs[m.Peer]) + off
			} else {
				q.staged = true
			}
		}
		if q.next < kernels.Items {
			a.Item[q.next] = k
		} else {
			l.more[q.next-kernels.Items] = k
		}
		q.next++
		q.lanes = max(q.lanes, lanes)
	}
	n := 0
	for i, q := range shapes {
		if q.count == 0 {
			continue
		}
		k := kernels.P2PQueue{
			Begin: q.next - q.count, Count: q.count, Peer: uint8(i / 4), Send: uint8(i / 2 & 1), Direct: uint8(i & 1),
			Blocks: uint16(q.lanes),
		}
		if k.Direct == 1 && k.Send == 0 {
			_, k.Target = c.stagedAt(i / 4)
			if !q.staged {
				k.Blocks = 1
			}
		}
		a.Queue[n] = k
		n++
	}
	return direct, most
}

// place gives queues their blocks, which must all be resident at once. It returns how many
// there are, and whether any do LL messages.
func (l *list) place(c *Comm) (blocks uint32, lines bool) {
	most := directBlocks
	if b := c.cfg.Blocks; b > 0 {
		most = b
	}
	kind := func(q *kernels.P2PQueue) uint8 { return q.Direct + q.Direct&q.Send } // LL, direct receives, direct sends
	room := [3]int{min(listBlocks, c.dev.SMs/2), min(most, c.dev.SMs/6), min(most, c.dev.SMs/6)}
	var among [3]int
	queues := l.a.Queue[:]
	for i := range queues {
		if queues[i].Count == 0 {
			queues = queues[:i]
			break
		}
		among[kind(&queues[i])]++
	}
	for i := range queues {
		q := &queues[i]
		k := kind(q)
		q.Blocks = min(q.Blocks, uint16(max(1, room[k]/among[k])))
		q.First = uint16(blocks)
		blocks += uint32(q.Blocks)
	}
	return blocks, among[0] > 0
}
