package gpu

import (
	"errors"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/kernels"
	"github.com/lockstep-ccl/lockstep/record"
)

// Operations on buffers that peers cannot reach go in pieces through staging memory. While the
// kernel of one piece runs, the next is copied in and the one before is copied out, on streams
// of their own: on an H100 a copy within the GPU takes a quarter of the time that the same
// bytes take over NVLink.

// slots is how many pieces staging memory holds at once: one is filled, one is with the kernel,
// one is emptied. Where the kernel's input and output lie apart, or there is no one of them,
// two do.
const (
	slotsInPlace = 3
	slotsApart   = 2
)

// leastPiece is what a piece has at least, in bytes that are copied: launching its kernel, whose
// ranks have to meet, takes as long as copying that.
func (c *Comm) leastPiece() uint64 { return min(8<<20, c.stage.Size/8) }

// piped reports whether copies of so many bytes overlap with kernels. Of fewer the pieces would
// be too small: 32 MB took longer so, 256 MB less, than in one.
func (c *Comm) piped(bytes uint64) bool { return c.copies && bytes >= 8*c.leastPiece() }

// pipeline is the streams and events of copies into and out of staging memory.
type pipeline struct {
	in, out *cuda.Stream
	// kernels come before copies where both are ready: the driver copies within a GPU by a
	// kernel that takes all multiprocessors, one of whose blocks have to leave.
	kernels              *cuda.Stream
	begun, ended         *cuda.Event
	filled, run, emptied [slotsInPlace]*cuda.Event
	list                 []Message // of messages
}

func (l *pipeline) events() []**cuda.Event {
	list := []**cuda.Event{&l.begun, &l.ended}
	for i := range slotsInPlace {
		list = append(list, &l.filled[i], &l.run[i], &l.emptied[i])
	}
	return list
}

// init makes the streams before the first operation that needs them: they are scarce.
func (l *pipeline) init(c *Comm) error {
	if l.kernels != nil {
		return nil
	}
	var errs []error
	for _, v := range l.events() {
		errs = append(errs, c.newEvent(v))
	}
	errs = append(errs, c.newStream(&l.in), c.newStream(&l.out))
	first, err := c.dev.NewStream(first)
	l.kernels = first
	return errors.Join(append(errs, err)...)
}

// first is the priority of kernels: the highest that the driver has.
const first = -16

func (l *pipeline) close() error {
	var errs []error
	for _, s := range []*cuda.Stream{l.in, l.out, l.kernels} {
		if s != nil {
			errs = append(errs, s.Synchronize(), s.Close())
		}
	}
	for _, v := range l.events() {
		if *v != nil {
			errs = append(errs, (*v).Close())
		}
	}
	return errors.Join(errs...)
}

// after makes s wait for what was put on from until now; e marks the place. The two may be one.
func after(s, from *cuda.Stream, e *cuda.Event) error {
	if s == from {
		return nil
	}
	return errors.Join(from.Record(e), s.WaitEvent(e))
}

// piece is how many of the elements that are left the next piece has: of at most most, and in
// units of 256, so that pieces stay aligned. The first and the last are short, since nothing
// overlaps with the first one's way in and the last one's way out.
func piece(turn int, left, least, most uint64) uint64 {
	n := min(most, least<<min(2*turn, 20), max(left/4*3, least))
	if n >= left || left-n < least/2 && left <= most {
		return left
	}
	return max(n&^255, min(left, 256))
}

// ends is the flags of a piece of n elements, after done of count: whether it is the
// operation's first, and whether it is the last.
func ends(done, n, count uint64) (flags uint32) {
	if done == 0 {
		flags |= kernels.First
	}
	if done+n == count {
		flags |= kernels.Last
	}
	return flags
}

// staging is how an operation's pieces go through staging memory.
type staging struct {
	// shares: how many shares of a buffer a kernel sees. in, out: how many of them are copied
	// in and out. distance: from one share to the next in the caller's buffer, in bytes.
	shares, in, out int
	distance        uint64
	apart           bool // what comes out lies behind what goes in
	even            bool // all pieces but the last one have a multiple of 256 elements
	slots           int
	slot            uint64 // bytes
	most, least     uint64 // elements of a share that a piece has
	piped           bool
}

// next is how many of the elements that are left the next piece has. Where even is set, shares lie side
// by side in staging memory, and those of a piece begin aligned.
func (g *staging) next(turn int, left uint64) uint64 {
	n := piece(turn, left, g.least, g.most)
	if g.even && n >= 256 {
		n &^= 255
	}
	return n
}

// stagingOf says how. Of an AlltoAll in several pieces even what a rank reads by itself is
// copied: its kernel reads shares that lie side by side.
func (c *Comm) stagingOf(op *Op) staging {
	size, t := uint64(op.DType.Size()), op.Coll.Traits()
	g := staging{shares: t.Shares(c.size), distance: op.Count * size, slots: slotsApart}
	g.in, g.out = c.reached(op.Coll)
	if op.Stride > 0 {
		g.distance = op.Stride * size
	}
	whole := uint64(g.shares) * op.Count * size
	g.piped = c.piped(whole)
	alone := g.in == 0 && t.Send == record.ShareAll
	skewed := c.skewed(op.Coll, op.Count*size)
	if alone && (g.piped || skewed || op.Count > c.stage.Size/uint64(g.shares)/size&^255) {
		g.in, g.apart = g.shares, true
	}
	g.even = skewed || g.in > 1
	switch {
	case !g.piped:
		g.slots = 1
	case g.in > 0 && g.out > 0 && !g.apart:
		g.slots = slotsInPlace
	}
	g.slot = c.stage.Size / uint64(g.slots) &^ 511
	room := g.slot
	if g.apart {
		room /= 2
	}
	g.most = room / uint64(g.shares) / size &^ 255
	g.least = g.most
	if g.piped {
		g.least = min(max(c.leastPiece()/uint64(g.shares)/size&^255, 256), g.most)
	}
	return g
}

// staged runs a collective in pieces through staging memory: one whose buffers peers cannot
// reach, or whose shares are aligned unlike their destination (element by element those took 17
// times as long).
func (c *Comm) staged(s *cuda.Stream, op *Op, p plan) error {
	g, size := c.stagingOf(op), uint64(op.DType.Size())
	return c.pieces(s, op, &g, func(s *cuda.Stream, from, to, done, n uint64) error {
		var b buffers
		b.send[c.rank], b.recv[c.rank] = uint64(op.Send)+done*size, uint64(op.Recv)+done*size
		if g.in > 0 {
			c.inStage(&b.send, from)
		}
		if g.out > 0 {
			c.inStage(&b.recv, to)
		}
		return c.kernel(s, op, p, b, n, ends(done, n, op.Count))
	})
}

// pieces runs an operation in pieces: launch puts the kernel of n elements, after done, on a
// stream, with what goes in at from in staging memory and what comes out at to. The kernel of a
// piece ends only when all peers are done with this rank's slot, and peers write there only after
// this rank's kernel has begun, so the order of this rank's streams is all that a slot needs.
func (c *Comm) pieces(caller *cuda.Stream, op *Op, g *staging, launch func(s *cuda.Stream, from, to, done, n uint64) error) error {
	l, size, f := &c.pipeline, uint64(op.DType.Size()), flow{caller, caller, caller}
	if g.piped {
		if err := l.init(c); err != nil {
			return err
		}
		f = flow{l.kernels, l.in, l.out}
		if err := after(f.kernels, caller, l.begun); err != nil {
			return err
		}
		if g.in > 0 {
			if err := f.in.WaitEvent(l.begun); err != nil {
				return err
			}
		}
	}
	for turn, done, n := 0, uint64(0), uint64(0); done < op.Count || turn == 0; turn, done = turn+1, done+n {
		n = g.next(turn, op.Count-done)
		k := turn % g.slots
		from := uint64(k) * g.slot
		again := g.piped && turn >= g.slots // the slot was in use before
		to := from
		if g.apart {
			to += g.slot / 2
		}
		if g.in > 0 {
			if err := c.fill(f, g, k, again, from, op.Send+cuda.Ptr(done*size), n*size); err != nil {
				return err
			}
		}
		if g.out > 0 && again {
			if err := f.kernels.WaitEvent(l.emptied[k]); err != nil {
				return err
			}
		}
		if err := launch(f.kernels, from, to, done, n); err != nil {
			return err
		}
		if g.piped {
			if err := f.kernels.Record(l.run[k]); err != nil {
				return err
			}
		}
		if g.out > 0 {
			if err := c.empty(f, g, k, to, op.Recv+cuda.Ptr(done*size), n*size); err != nil {
				return err
			}
		}
	}
	if g.out > 0 {
		if err := after(f.kernels, f.out, l.begun); err != nil {
			return err
		}
	}
	return after(caller, f.kernels, l.ended)
}

// flow is the streams of a staged operation: all the caller's where it is not piped.
type flow struct{ kernels, in, out *cuda.Stream }

// fill copies a piece's shares, of so many bytes each, into slot k, at from in staging memory,
// when what the slot had before is no longer needed.
func (c *Comm) fill(f flow, g *staging, k int, again bool, from uint64, send cuda.Ptr, bytes uint64) error {
	l := &c.pipeline
	if again {
		if err := f.in.WaitEvent(l.run[k]); err != nil {
			return err
		}
		if g.out > 0 && !g.apart {
			if err := f.in.WaitEvent(l.emptied[k]); err != nil {
				return err
			}
		}
	}
	if err := c.copyShares(f.in, c.stage.Own()+cuda.Ptr(from), send, bytes, g.distance, bytes, g.in); err != nil {
		return err
	}
	return after(f.kernels, f.in, l.filled[k])
}

// empty copies what the kernel of a piece has left in slot k, at to, out of staging memory.
func (c *Comm) empty(f flow, g *staging, k int, to uint64, recv cuda.Ptr, bytes uint64) error {
	l := &c.pipeline
	if g.piped {
		if err := f.out.WaitEvent(l.run[k]); err != nil {
			return err
		}
	}
	if err := c.copyShares(f.out, recv, c.stage.Own()+cuda.Ptr(to), bytes, bytes, g.distance, g.out); err != nil || !g.piped {
		return err
	}
	return f.out.Record(l.emptied[k])
}

// inStage is where each rank's staging memory lies, from off on.
func (c *Comm) inStage(at *[MaxRanks]uint64, off uint64) {
	for r := range c.size {
		at[r] = uint64(c.stage.At(r)) + off
	}
}

// copyTurn is how much one copy within the GPU copies. A kernel that begins meanwhile gets its
// multiprocessors when the copy ends: within a graph streams' priorities are none.
const copyTurn = 8 << 20

// copyInTurns copies n bytes within the GPU.
func copyInTurns(s *cuda.Stream, to, from cuda.Ptr, n uint64) error {
	for done := uint64(0); done < n; done += copyTurn {
		if err := s.Copy(to+cuda.Ptr(done), from+cuda.Ptr(done), min(copyTurn, n-done)); err != nil {
			return err
		}
	}
	return nil
}

// copyShares copies n bytes of each of k shares; they begin at steps. Where they lie side by side
// they are one copy, since each is a launch.
func (c *Comm) copyShares(s *cuda.Stream, to, from cuda.Ptr, n, fromStep, toStep uint64, k int) error {
	if fromStep == n && toStep == n {
		n, k = n*uint64(k), min(k, 1)
	}
	for i := range uint64(k) {
		if err := copyInTurns(s, to+cuda.Ptr(i*toStep), from+cuda.Ptr(i*fromStep), n); err != nil {
			return err
		}
	}
	return nil
}

// resultRoom is the part of staging memory that Reduce keeps for results that peers cannot
// write in place.
func (c *Comm) resultRoom() uint64 { return min(kernels.RingBytes, c.stage.Size/2) }

// toRoot is Reduce by a kernel, in which root tells its peers where it receives. Input in
// windows goes in one launch, other input in pieces through staging memory; ranks agree on
// which. What peers cannot write where root wants it goes through staging memory as well: of
// pieces each to a place of its own, out of which it is copied while the next is under way.
// (Of two ranks root reduces by itself.)
func (c *Comm) toRoot(s *cuda.Stream, op *Op, p plan) error {
	size := uint64(op.DType.Size())
	var sends [MaxRanks]uint64
	if c.locate(&sends, op.Send, op.Count*size) {
		return c.pieceToRoot(s, op, p, sends, op.Recv, 0, op.Count)
	}
	g := staging{in: 1, slots: 1, piped: c.piped(op.Count * size), apart: c.size > 2}
	if g.piped {
		g.slots = slotsApart
	}
	g.slot = c.stage.Size / uint64(g.slots) &^ 511
	room := g.slot
	if g.apart {
		room /= 2
	}
	g.most = room / size &^ 255
	g.least = g.most
	if g.piped {
		g.least = min(c.leastPiece()/size, g.most)
	}
	if c.rank == op.Root && g.apart {
		if w, _ := c.find(op.Recv, op.Count*size); w == nil || op.Recv%16 != 0 {
			g.out = 1
		}
	}
	return c.pieces(s, op, &g, func(s *cuda.Stream, from, to, done, n uint64) error {
		c.inStage(&sends, from)
		recv := op.Recv + cuda.Ptr(done*size)
		if g.out > 0 {
			recv = c.stage.Own() + cuda.Ptr(to)
		}
		return c.pieceToRoot(s, op, p, sends, recv, done, n)
	})
}

// pieceToRoot is n elements of a Reduce, after done. sends is where ranks have them, recv where
// root receives them.
func (c *Comm) pieceToRoot(s *cuda.Stream, op *Op, p plan, sends [MaxRanks]uint64, recv cuda.Ptr, done, n uint64) error {
	b := buffers{send: sends}
	if c.rank == op.Root {
		b.recv = c.told(recv, n*uint64(op.DType.Size()), sends[c.rank])
	}
	return c.kernel(s, op, p, b, n, ends(done, n, op.Count))
}

// told is what root of a Reduce tells its peers of n bytes at recv: where each has mapped them.
// It is nothing where they are not mapped, or are aligned unlike send, which would move bytes
// one by one.
func (c *Comm) told(recv cuda.Ptr, n, send uint64) (at [MaxRanks]uint64) {
	theirs, off := &c.stageTheirs, uint64(recv-c.stage.Own())
	mapped := recv >= c.stage.Own() && off+n <= c.stage.Size
	if w, at := c.find(recv, n); w != nil {
		theirs, off, mapped = &w.theirs, at, true
	}
	if mapped && (uint64(recv)^send)%16 == 0 {
		for r := range c.size {
			at[r] = uint64(theirs[r]) + off
		}
	}
	at[c.rank] = uint64(recv)
	return at
}

// messageShare is from how many bytes of a share on a collective that only moves shares goes as
// messages of a kernel, where peers cannot reach the buffers: in such a kernel some blocks push
// while others copy out what has come, in pieces too small to be worth launches.
func (c *Comm) messageShare() uint64 { return max(c.leastPiece(), llMessage) + 1 }

// streamShare is up to how many bytes of a share such a collective goes as messages on a stream. They
// are two launches, a kernel and the copy of what a rank has for itself; in one piece it is copies
// to and from staging memory and a kernel, of some 5 µs of the host's each. When each share that came
// was a copy of its own (see copyShares), AllGather and AlltoAll of shares of 256 and 512 KiB, 1, 2
// and 4 MiB took 31, 30, 30, 39 and 62 µs in a piece on 4 H200s, and 16, 21, 27, 38 and 67 as
// messages: of longer shares the host is done before the GPUs are.
const streamShare = 1 << 20

// shortShare is that for op. In a graph launches cost little, so there messages gain where they are
// lines, which ask nobody: the same shares took 13, 16, 21, 34 and 56 µs, and 10, 18, 24, 37 and 65.
func shortShare(op *Op) uint64 {
	if op.Captured {
		return llMessage
	}
	return streamShare
}

// asMessages reports whether an operation, in no windows and too long for lines, goes as messages.
// It depends on nothing in which ranks may differ: all capture an operation, or none. (Between's
// stamps are not those of messages.)
func (c *Comm) asMessages(op *Op) bool {
	t, bytes := op.Coll.Traits(), op.bytes()
	short := t.Shares(c.size) > 1 && bytes <= shortShare(op)
	if c.cfg.Force != record.AlgoNone || c.cfg.HostTells || !short && bytes < c.messageShare() || bytes%16 != 0 {
		return false
	}
	overwrites := op.InPlace && t.Send == t.Recv && t.Send == record.ShareAll // what it has not sent yet
	return c.size > 1 && c.size <= collectives[op.Coll].messages && !overwrites
}

// messages runs an operation so. What a rank has for itself is copied meanwhile.
func (c *Comm) messages(s *cuda.Stream, op *Op) error {
	l, bytes, caller := &c.pipeline, op.bytes(), s
	if err := l.init(c); err != nil {
		return err
	}
	part := func(of cuda.Ptr, share record.Share, r int) cuda.Ptr {
		if share == record.ShareAll {
			of += cuda.Ptr(uint64(r) * bytes)
		}
		return of
	}
	t, list := op.Coll.Traits(), l.list[:0]
	sends := func(r int) bool { return t.Root == record.RootNone || op.Root == r }
	for _, p := range c.peers() {
		if sends(c.rank) {
			list = append(list, Message{Peer: p, Send: true, Buf: part(op.Send, t.Send, p), Bytes: bytes})
		}
		if sends(p) {
			list = append(list, Message{Peer: p, Buf: part(op.Recv, t.Recv, p), Bytes: bytes})
		}
	}
	l.list = list
	if err := after(l.kernels, caller, l.begun); err != nil {
		return err
	}
	if err := c.sends.kernels(l.kernels, op, list); err != nil {
		return err
	}
	if sends(c.rank) {
		if from, to := part(op.Send, t.Send, c.rank), part(op.Recv, t.Recv, c.rank); from != to && to != 0 {
			if err := errors.Join(l.in.WaitEvent(l.begun), copyInTurns(l.in, to, from, bytes), after(caller, l.in, l.filled[0])); err != nil {
				return err
			}
		}
	}
	return after(caller, l.kernels, l.ended)
}
