package gpu

import "github.com/lockstep-ccl/lockstep/record"

// plan is how one operation runs.
type plan struct {
	way    Way
	blocks int
}

const (
	// llBlock is how much data of one source a block's LL lines hold.
	llBlock = 8 << 10
	// llStep is what 512 threads move in one turn: more blocks before more turns.
	llStep   = 4 << 10
	llBlocks = 32
	// symBlocks is how many SMs the bandwidth kernels use at most: NVLink needs no
	// more, and the rest is the program's.
	symBlocks = 16
	// symStep is the least data for which a block of a bandwidth kernel pays.
	symStep = 16 << 10
)

// limits is up to how many bytes (of the whole for AllReduce, Reduce and
// Broadcast, of one share for the others) a way is best, by ranks: 2, 3–4, 5–8.
// Measured on H200s; see docs/design/cuda.md, "Choice".
type limits struct {
	ll, ll2, kernel [3]uint64 // beyond kernel: copy engines
}

const never = ^uint64(0)

var tuned = map[record.CollKind]limits{
	record.AllReduce:     {ll: [3]uint64{256 << 10, 64 << 10, 32 << 10}, ll2: [3]uint64{256 << 10, 512 << 10, 1 << 20}, kernel: [3]uint64{64 << 20, 64 << 20, 64 << 20}},
	record.ReduceScatter: {ll: [3]uint64{128 << 10, 64 << 10, 32 << 10}, kernel: [3]uint64{32 << 20, 16 << 20, 8 << 20}},
	record.Reduce:        {ll: [3]uint64{128 << 10, 64 << 10, 64 << 10}, kernel: [3]uint64{never, never, never}},
	record.AllGather:     {ll: [3]uint64{128 << 10, 64 << 10, 32 << 10}, kernel: [3]uint64{8 << 20, 4 << 20, 2 << 20}},
	record.AlltoAll:      {ll: [3]uint64{128 << 10, 64 << 10, 32 << 10}, kernel: [3]uint64{8 << 20, 4 << 20, 2 << 20}},
	record.Broadcast:     {ll: [3]uint64{128 << 10, 128 << 10, 64 << 10}, kernel: [3]uint64{16 << 20, 16 << 20, 16 << 20}},
}

// has reports whether a collective can take a way at all.
func has(coll record.CollKind, w Way) bool {
	switch w {
	case WayLL, WaySym:
		return true
	case WayLL2:
		return coll == record.AllReduce
	case WayBulk:
		return coll != record.Broadcast
	case WayCopy:
		return coll != record.Barrier
	}
	return false
}

// capacity is the most bytes (in the sense of limits) that a way's buffers hold.
func (c *Comm) capacity(w Way) uint64 {
	switch w {
	case WayLL:
		return llBlock * llBlocks
	case WayLL2:
		return llBlock * llBlocks * uint64(c.size)
	}
	return never
}

// choose is the plan for bytes of a collective. direct says that the buffers
// that peers need are in windows; fixed that the operation is being captured,
// where the copy engines' flags, which the host counts, cannot be used.
func (c *Comm) choose(coll record.CollKind, bytes uint64, direct, fixed bool) plan {
	n := 0
	switch {
	case c.size > 4:
		n = 2
	case c.size > 2:
		n = 1
	}
	l := tuned[coll]
	p := plan{way: WaySym}
	switch {
	case bytes <= l.ll[n]:
		p.way = WayLL
	case bytes <= l.ll2[n]:
		p.way = WayLL2
	case bytes > l.kernel[n]:
		p.way = WayCopy
	default:
		p.way = c.bandwidth(coll)
	}
	if f := c.cfg.Force; f != WayAuto && has(coll, f) && bytes <= c.capacity(f) && (f != WayBulk || c.dev.Major >= 9) {
		p.way = f
	}
	if p.way == WayCopy && (!direct || fixed || !has(coll, WayCopy)) {
		p.way = c.bandwidth(coll)
	}
	switch p.way {
	case WayLL:
		p.blocks = blocksFor(bytes, llStep, llBlocks)
	case WayLL2:
		p.blocks = blocksFor(bytes/uint64(c.size), llStep, llBlocks)
	default:
		p.blocks = blocksFor(bytes, symStep, symBlocks)
	}
	if b := c.cfg.Blocks; b > 0 && p.way != WayCopy {
		p.blocks = min(b, llBlocks)
		if p.way == WayLL || p.way == WayLL2 {
			p.blocks = max(p.blocks, blocksFor(bytes, llBlock, llBlocks))
		}
	}
	return p
}

// bandwidth is the kernel for large messages.
func (c *Comm) bandwidth(coll record.CollKind) Way {
	if has(coll, WayBulk) && c.dev.Major >= 9 {
		return WayBulk
	}
	return WaySym
}

// blocksFor is how many blocks bytes need at step each, at most most.
func blocksFor(bytes, step uint64, most int) int {
	return int(min(max((bytes+step-1)/step, 1), uint64(most)))
}
