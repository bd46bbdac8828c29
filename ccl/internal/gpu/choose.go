package gpu

import (
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/kernels"
	"github.com/lockstep-ccl/lockstep/record"
)

// plan is how one operation runs.
type plan struct {
	algo   record.Algo
	blocks int
}

const (
	// llStep is half of what 512 threads move in one turn: more blocks before longer
	// turns.
	llStep   = 2 << 10
	llBlocks = 32
	// ll12Step is the data of two warps' lines of 12 bytes, chainStep that of two warps' steps of a
	// chain: more blocks before longer turns here too (512 KiB by 32 of them 7.9 µs, by 16 9.1).
	ll12Step  = 3 << 10
	chainStep = 2 * 1920
	// ringPlain is from how many bytes on plain buffers go by ring, not in pieces, where a chain
	// would carry them and cannot.
	ringPlain = 24 << 20
	// symBlocks is how many SMs the bandwidth kernels use at most: NVLink needs no
	// more, and the rest is the program's.
	symBlocks = 16
	// symStep is the least data for which a block of a bandwidth kernel pays.
	symStep = 16 << 10
)

// has reports whether a collective can take an algorithm at all.
func (c *Comm) has(coll record.CollKind, a record.Algo) bool {
	row := collectives[coll]
	if a == record.AlgoCopyEngine {
		return row.copies != nil && !c.shared
	}
	if row.kernels[a] == "" {
		return false
	}
	switch a {
	case record.AlgoBulk:
		return c.major >= 9
	case record.AlgoPushBulk:
		return c.size > 2 && c.major >= 9 && c.stage.Size >= kernels.RingBytes
	case record.AlgoRing:
		return c.size > 1 && c.stage.Size >= kernels.RingBytes
	case record.AlgoChain:
		return c.size > 1 && c.unlinked == ""
	case record.AlgoLL2:
		return coll.Traits().Root == record.RootNone || c.size > 2 // root has no part
	}
	return true
}

// call is what the choice of an algorithm depends on, alike on all ranks.
type call struct {
	coll  record.CollKind
	bytes uint64 // as a step of a table counts them
	// direct: the buffers that peers need are in windows.
	direct bool
	// fixed: the operation is being captured, where the copy engines' flags, which the host
	// counts, cannot be used.
	fixed bool
	// plain: the rank's buffers are in no window.
	plain bool
	// widened: elements are accumulated in a wider type, which rings would have to send.
	widened bool
}

// may reports whether the call can take an algorithm that its collective has.
func (c *Comm) may(k call, a record.Algo) bool {
	switch {
	case !c.has(k.coll, a):
		return false
	case a == record.AlgoCopyEngine:
		return k.direct && !k.fixed
	case a == record.AlgoPushBulk:
		return k.direct
	case a == record.AlgoRing:
		// Shares that are no multiple of 16 bytes would go element by element.
		return !k.widened && (k.coll.Traits().Shares(c.size) == 1 || k.bytes%16 == 0)
	case a == record.AlgoChain:
		// Nobody has measured it elsewhere, and wider elements are two or four times as many bytes
		// for the links.
		return c.major >= 9 && !k.widened || c.cfg.Force == a
	}
	return true
}

// skewedShare is from how many bytes on skewed shares are worth something. Three ranks' AllGather of 21
// MiB each, by loads and stores of 4 bytes, took 276 µs. Copy engines take some 30 µs for each peer, and
// carry 380 GB/s (docs/benchmarks.md), so they are even at 8 MB or so. A piece more is a launch and
// copies of the host's, likewise some 25 µs.
const skewedShare = 12 << 20

// skewed reports whether a collective moves shares that are no multiple of 16 bytes, so that buffers are
// aligned differently at the two ends, and that are so long that it pays to do something about it.
func (c *Comm) skewed(coll record.CollKind, bytes uint64) bool {
	return !coll.Reduces() && coll.Traits().Shares(c.size) > 1 && bytes%16 != 0 && bytes >= skewedShare
}

// bandwidthFor is bandwidth for a call, or copy engines for skewed shares, whose copies know no
// alignment. Where these shares go in pieces through staging memory, only the last piece is skewed.
func (c *Comm) bandwidthFor(k call) (record.Algo, int) {
	bytes := k.bytes
	if c.skewed(k.coll, bytes) {
		if c.cfg.Force == record.AlgoNone && c.may(k, record.AlgoCopyEngine) {
			return record.AlgoCopyEngine, 0
		}
		if !k.direct {
			bytes &^= 15
		}
	}
	return c.bandwidth(k.coll, bytes)
}

// widened reports whether a reduction accumulates elements in a wider type.
func widened(coll record.CollKind, dt record.DType) bool {
	switch dt {
	case record.Float16, record.BFloat16, record.Float8E4M3, record.Float8E5M2:
		return coll.Reduces()
	}
	return false
}

// capacity is the most bytes (as a step counts them) that an algorithm's buffers hold
// with so many blocks.
func (c *Comm) capacity(coll record.CollKind, a record.Algo, blocks int) uint64 {
	switch a {
	case record.AlgoLL, record.AlgoLL2:
		return kernels.LLCapacity(coll, a == record.AlgoLL2, c.size, blocks)
	case record.AlgoLL12:
		return kernels.LL12Capacity(c.size, blocks)
	case record.AlgoChain:
		return kernels.ChainCapacity
	}
	return never
}

// part is the bytes of one source: all of them, or one rank's in a collective of two stages.
func (c *Comm) part(coll record.CollKind, a record.Algo, bytes uint64) uint64 {
	if a != record.AlgoLL2 {
		return bytes
	}
	n := uint64(c.size)
	if coll.Traits().Root != record.RootNone {
		n-- // root has none
	}
	return (bytes + n - 1) / n
}

// choose is the plan for a call.
func (c *Comm) choose(k call) plan {
	p, most, bytes := plan{algo: record.AlgoSym}, symBlocks, k.bytes
	for _, t := range c.table.steps(k.coll, c.size, k.plain) {
		if bytes <= min(t.upTo, c.capacity(k.coll, t.algo, llBlocks)) {
			p.algo, most = t.algo, t.blocks
			break
		}
	}
	if f := c.cfg.Force; f != record.AlgoNone && c.has(k.coll, f) && bytes <= c.capacity(k.coll, f, llBlocks) {
		p.algo, most = f, symBlocks
		if lines(f) {
			most = llBlocks
		}
	} else if p.algo == record.AlgoBulk {
		if algo, blocks := c.bandwidthFor(k); algo != record.AlgoBulk {
			p.algo, most = algo, blocks
		}
	}
	if !c.may(k, p.algo) {
		if p.algo == record.AlgoChain && k.plain && bytes > ringPlain && c.may(k, record.AlgoRing) {
			p.algo, most = record.AlgoRing, symBlocks
		} else {
			p.algo, most = c.bandwidthFor(k)
		}
	}
	switch p.algo {
	case record.AlgoLL, record.AlgoLL2:
		p.blocks = blocksFor(c.part(k.coll, p.algo, bytes), llStep, most)
	case record.AlgoLL12:
		p.blocks = blocksFor(bytes, ll12Step, most)
	case record.AlgoChain:
		p.blocks = blocksFor(bytes, chainStep, most)
	case record.AlgoCopyEngine:
		if k.coll.Reduces() {
			p.blocks = foldBlocks
		}
	default:
		p.blocks = blocksFor(bytes, symStep, most)
	}
	if b := c.cfg.Blocks; b > 0 && p.algo != record.AlgoCopyEngine {
		p.blocks = min(b, llBlocks)
	}
	// There are enough blocks for their lines to hold all of the data.
	if lines(p.algo) {
		p.blocks = max(p.blocks, blocksFor(bytes, c.capacity(k.coll, p.algo, 1), llBlocks))
	}
	return p
}

// bandwidth is the kernel for large operations where copy engines are not used, and on how many
// blocks at most. The bulk copy engine beats loads and stores for reductions. For what only
// moves bytes it is as quick on half the blocks, unless shares align the buffers differently.
func (c *Comm) bandwidth(coll record.CollKind, bytes uint64) (record.Algo, int) {
	switch bulk := c.major >= 9; {
	case bulk && (coll.Reduces() || c.size > 1 && (coll.Traits().Shares(c.size) == 1 || bytes%16 == 0)):
		return record.AlgoBulk, symBlocks
	case coll.Reduces():
		return record.AlgoSym, symBlocks
	}
	return record.AlgoSym, llBlocks
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

// pace is that of bulk copies on so many blocks: for each block, in ps a KiB; 0: as fast
// as they go.
func (c *Comm) pace(p pace, bytes uint64, blocks int) uint32 {
	rate := c.cfg.Pace
	if rate == 0 && c.dev.Major == 9 {
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
