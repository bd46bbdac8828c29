package gpu

import (
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/kernels"
	"github.com/lockstep-ccl/lockstep/record"
)

// ringSize is a rank's memory for tiles that peers have pushed and that are not
// reduced yet. What is in use at one time should stay in the L2 cache.
const ringSize = 16 << 20

// pushing is how WayPush or WayPushBulk cut their work.
type pushing struct {
	turn   uint64 // bytes of a turn: a tile of each rank
	least  uint64 // bytes of a tile at least, unless there is less to do
	turns  uint64 // turns that a block shall have, for its parts to overlap
	slots  uint64 // tiles of a pair of ranks that are under way
	stages uint32 // of those, in shared memory; for bulk copies
}

var (
	pushes     = pushing{turn: 128 << 10, least: 4 << 10, turns: 8, slots: 4}
	bulkPushes = pushing{turn: 32 << 10, least: 2 << 10, turns: 8, slots: 16, stages: 3}
)

// alltoallChunk is how many KiB ls_alltoall_bulk pushes to one peer before it turns
// to the next.
var alltoallChunk = uint32(1 << 10)

// args is the parameter of ls_pushreduce for a reduction of bytes (of one share
// where there are shares).
func (t pushing) args(coll record.CollKind, bytes uint64, ranks, blocks int) kernels.PushArgs {
	a := kernels.PushArgs{Stages: t.stages}
	n, b := uint64(ranks), uint64(blocks)
	owners := n // of what bytes are
	switch coll {
	case record.AllReduce:
		a.Kind = kernels.PushAll
	case record.ReduceScatter:
		a.Kind, owners = kernels.PushShares, 1
	case record.Reduce:
		a.Kind, owners = kernels.PushRoot, n-1
	}
	tile := min(t.turn/n, max(bytes/(owners*b*t.turns), t.least)) &^ 127
	// Besides those on their way to peers, two tiles of each rank are combined.
	for t.stages > 0 && ((n-1)*uint64(t.stages)+2*n)*tile > kernels.PushReduceTiles {
		tile = tile / 2 &^ 127
	}
	a.Tile, a.Slots = uint32(tile), uint32(min(t.slots, ringSize/(b*n*tile)))
	return a
}

// push launches ls_pushreduce, or ls_pushreduce_bulk. count is in elements.
func (c *Comm) push(s *cuda.Stream, op *Op, p plan, b buffers, count uint64, flags uint32) error {
	fs, err := c.dev.reducers(op.DType)
	if err != nil {
		return err
	}
	f, t := fs["ls_pushreduce"], pushes
	if p.way == WayPushBulk {
		f, t = fs["ls_pushreduce_bulk"], bulkPushes
	}
	a := c.pushed
	*a = t.args(op.Coll, count*uint64(op.DType.Size()), c.size, p.blocks)
	a.Args = *c.args
	a.Send, a.Recv, a.Count = b.send, b.recv, count
	a.Root, a.Op, a.Flags = uint32(op.Root), uint32(op.RedOp), flags
	a.Desc = c.stamps.describe(op, p)
	for r := range c.size {
		a.Ring[r] = uint64(c.ring.At(r))
	}
	threads := f.threads
	if n := c.cfg.Threads; n > 0 && p.way == WayPush {
		threads = min(threads, uint32(n))
	}
	return s.Launch(f.Func, uint32(p.blocks), threads, f.shared, unsafe.Pointer(a), unsafe.Sizeof(*a))
}
