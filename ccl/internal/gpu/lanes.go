package gpu

import (
	"context"
	"encoding/binary"
	"fmt"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/kernels"
	"github.com/lockstep-ccl/lockstep/ccl/internal/symm"
)

// Up to how many bytes a message takes a way. Both sides choose by size, and by
// whether they are being captured, and by nothing else.
const (
	// llMessage: LL sends twice the bytes but asks nobody; beyond, the answer (about
	// 4 µs) is cheaper than the flags.
	llMessage = 256 << 10
	// directMessage: the copy engines use no SM but 14–20 µs before the first byte,
	// which is a third of what a kernel takes for so much.
	directMessage = 16 << 20
	// bulkMessage: bulk copies are faster, by 4 %, once their pipeline is full.
	bulkMessage = 4 << 20

	// llLane and directLane are the least data for which another lane pays: a few
	// turns of 512 threads.
	llLane     = 8 << 10
	directLane = 32 << 10
	// directBlocks is how many SMs push direct messages, of all peers together.
	directBlocks = 16
)

// sendWay is how a message goes: WayLL, WaySym or WayCopy. fixed says that the copy
// engines cannot be used: their flags are counted by the host, which a graph's
// replay is not.
func (c *Comm) sendWay(bytes uint64, fixed bool) Way {
	w := WayCopy
	switch {
	case bytes <= llMessage:
		w = WayLL
	case bytes <= directMessage:
		w = WaySym
	}
	if bytes > 0 {
		switch c.cfg.Force {
		case WayLL:
			if bytes <= kernels.MaxLanes*kernels.LaneBytes {
				w = WayLL
			}
		case WaySym, WayBulk:
			w = WaySym
		case WayCopy:
			w = WayCopy
		}
	}
	if w == WayCopy && fixed {
		w = WaySym
	}
	return w
}

// lanesOf splits a message into lanes of piece bytes, one for step bytes each.
func lanesOf(bytes, step uint64) (lanes uint32, piece uint64) {
	n := uint64(blocksFor(bytes, step, kernels.MaxLanes))
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

// Staging memory is shared by copy engines, which have the first three quarters,
// and direct messages of kernels: for each peer two places of each lane.
func (c *Comm) directStage() uint64 { return c.stage.Size / 4 * 3 &^ 511 }

func (c *Comm) directRoom() uint64 {
	return (c.stage.Size - c.directStage()) / uint64(c.size) / (2 * kernels.MaxLanes) &^ 127
}

// round is one launch: at most one message each way with each peer. Blocks of LL
// are the first ones, and do a lane of a send and one of a receive each.
type round struct {
	a            *kernels.P2PArgs
	sends, recvs int
	out, in      uint32 // blocks of LL sends and receives
	direct       int    // direct messages
	pushes       int    // sends of them
	staged       int    // receives of them through staging memory
	most         uint64 // the largest direct send
}

func (r *round) add(c *Comm, m Message, way Way) {
	k := kernels.P2PMessage{Buf: uint64(m.Buf), Bytes: m.Bytes, Peer: uint32(m.Peer)}
	if way == WayLL {
		step := uint64(llLane)
		if b := uint64(c.cfg.Blocks); b > 0 {
			step = min(max((m.Bytes+b-1)/b, 1), kernels.LaneBytes)
		}
		k.Lanes, k.Piece = lanesOf(m.Bytes, step)
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
		k.Lanes, k.Piece = lanesOf(m.Bytes, directLane)
		if m.Send {
			r.pushes++
			r.most = max(r.most, m.Bytes)
		} else if w, off := c.find(m.Buf, m.Bytes); w != nil {
			k.Target = uint64(w.theirs[m.Peer]) + off
			k.Blocks = 1
		} else {
			r.staged++
			off := c.directStage() + uint64(m.Peer)*2*kernels.MaxLanes*c.directRoom()
			k.Target = uint64(c.stageTheirs[m.Peer]) + off
			k.Stage = uint64(c.stage.Own()) + off
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

// launch puts the round on s.
func (r *round) launch(c *Comm, s *cuda.Stream, blocks uint32) error {
	name := "ls_p2p_ll"
	if ll := max(r.out, r.in); r.direct > 0 {
		name = "ls_p2p_direct"
		if ll == 0 && r.most >= bulkMessage && c.dev.Major >= 9 {
			name = "ls_p2p_bulk"
		}
	}
	f := c.move[name]
	return s.Launch(f.Func, blocks, f.threads, f.shared, unsafe.Pointer(r.a), unsafe.Sizeof(*r.a))
}
