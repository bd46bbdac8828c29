package gpu

import (
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/kernels"
	"github.com/lockstep-ccl/lockstep/record"
)

// plan is how one operation runs.
type plan struct {
	way    Way
	blocks int
}

const (
	// llStep is half of what 512 threads move in one turn: more blocks before longer
	// turns.
	llStep   = 2 << 10
	llBlocks = 32
	// ll12Step is the data of two warps' lines of 12 bytes.
	ll12Step = 3 << 10
	// symBlocks is how many SMs the bandwidth kernels use at most: NVLink needs no
	// more, and the rest is the program's.
	symBlocks = 16
	// symStep is the least data for which a block of a bandwidth kernel pays.
	symStep = 16 << 10
)

// has reports whether a collective can take a way at all.
func (c *Comm) has(coll record.CollKind, w Way) bool {
	switch w {
	case WayLL, WayLL12, WaySym:
		return true
	case WayBulk:
		return c.major >= 9
	case WayPushBulk:
		return coll == record.AllReduce && c.size > 2 && c.major >= 9 && c.stage.Size >= kernels.RingBytes
	case WayLL2:
		return coll == record.AllReduce || coll == record.Broadcast && c.size > 2
	case WayCopy:
		return coll != record.Barrier
	}
	return false
}

// capacity is the most bytes (as a step counts them) that a way's buffers hold with
// so many blocks.
func (c *Comm) capacity(coll record.CollKind, w Way, blocks int) uint64 {
	switch w {
	case WayLL, WayLL2:
		return kernels.LLCapacity(coll, w == WayLL2, c.size, blocks)
	case WayLL12:
		return kernels.LL12Capacity(c.size, blocks)
	}
	return never
}

// part is what one source has of bytes: all of them, or one rank's in a collective of
// two stages.
func (c *Comm) part(coll record.CollKind, w Way, bytes uint64) uint64 {
	if w != WayLL2 {
		return bytes
	}
	n := uint64(c.size)
	if coll != record.AllReduce {
		n-- // root has none
	}
	return (bytes + n - 1) / n
}

// choose is the plan for bytes of a collective. direct says that the buffers
// that peers need are in windows; fixed that the operation is being captured,
// where the copy engines' flags, which the host counts, cannot be used.
func (c *Comm) choose(coll record.CollKind, bytes uint64, direct, fixed bool) plan {
	p, most := plan{way: WaySym}, symBlocks
	for _, t := range c.table.steps(coll, c.size) {
		if bytes <= min(t.upTo, c.capacity(coll, t.way, llBlocks)) {
			p.way, most = t.way, t.blocks
			break
		}
	}
	if f := c.cfg.Force; f != WayAuto && c.has(coll, f) && bytes <= c.capacity(coll, f, llBlocks) {
		p.way, most = f, symBlocks
		if f.lines() {
			most = llBlocks
		}
	} else if p.way == WayBulk {
		if way, blocks := c.bandwidth(coll, bytes); way != WayBulk {
			p.way, most = way, blocks
		}
	}
	if p.way == WayCopy && (!direct || fixed) || p.way == WayPushBulk && !direct || !c.has(coll, p.way) {
		p.way, most = c.bandwidth(coll, bytes)
	}
	switch p.way {
	case WayLL, WayLL2:
		p.blocks = blocksFor(c.part(coll, p.way, bytes), llStep, most)
	case WayLL12:
		p.blocks = blocksFor(c.part(coll, p.way, bytes), ll12Step, most)
	case WayCopy:
		if reduces(coll) {
			p.blocks = foldBlocks
		}
	default:
		p.blocks = blocksFor(bytes, symStep, most)
	}
	if b := c.cfg.Blocks; b > 0 && p.way != WayCopy {
		p.blocks = min(b, llBlocks)
	}
	// Lines for all there is: a block's hold as much as a block's share of what all hold.
	if p.way.lines() {
		p.blocks = max(p.blocks, blocksFor(bytes, c.capacity(coll, p.way, 1), llBlocks))
	}
	return p
}

// bandwidth is the kernel for large messages where copy engines are not used, and
// on how many blocks at most. The bulk copy engine beats loads and stores for
// reductions, and is as quick on half the blocks for what only moves bytes (but not for
// shares that make the buffers' alignments differ).
func (c *Comm) bandwidth(coll record.CollKind, bytes uint64) (Way, int) {
	switch bulk := c.major >= 9; {
	case bulk && (reduces(coll) || c.size > 1 && (coll == record.Broadcast || bytes%16 == 0)):
		return WayBulk, symBlocks
	case reduces(coll):
		return WaySym, symBlocks
	}
	return WaySym, llBlocks
}

func reduces(coll record.CollKind) bool {
	return coll == record.AllReduce || coll == record.ReduceScatter || coll == record.Reduce
}

// blocksFor is how many blocks bytes need at step each, at most most.
func blocksFor(bytes, step uint64, most int) int {
	return int(min(max((bytes+step-1)/step, 1), uint64(most)))
}

// The pace of what passes a GPU's links by bulk copies, in GB/s. Those of an H200 carry 372,
// and less when blocks ask them for more (docs/design/cuda.md, "Pace").
type pace struct {
	two, more int    // of two ranks, and of more; 0: as fast as they go
	from      uint64 // of more ranks, from so many bytes on, as a step counts them
}

var paces = map[record.CollKind]pace{
	record.AllReduce:     {345, 334, 24 << 20}, // loads from peers pass the links as well
	record.ReduceScatter: {0, 330, 16 << 20},   // likewise
	record.AllGather:     {370, 355, 0},
	record.AlltoAll:      {362, 355, 0}, // beside copies of what stays
	record.Broadcast:     {370, 360, 0},
	record.Send:          {370, 370, 0},
}

// pace is that of a collective's bulk copies on so many blocks: for each block, in ps a
// KiB; 0: as fast as they go.
func (c *Comm) pace(coll record.CollKind, bytes uint64, blocks int) uint32 {
	rate := c.cfg.Pace
	if p := paces[coll]; rate == 0 && c.dev.Major == 9 {
		if c.size == 2 {
			rate = p.two
		} else if bytes >= p.from {
			rate = p.more
		}
	}
	if rate <= 0 {
		return 0
	}
	return uint32(1024 * 1000 * blocks / rate)
}
