package gpu

import (
	"fmt"
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/kernels"
	"github.com/lockstep-ccl/lockstep/ccl/internal/symm"
	"github.com/lockstep-ccl/lockstep/record"
)

func chooser(size, major int) *Comm {
	table, err := ParseTable(nil)
	if err != nil {
		panic(err)
	}
	return &Comm{size: size, major: major, table: table, stage: &symm.Memory{Size: DefaultStage}}
}

// TestChooseFits: whatever the collective, size, ranks and force, the plan is an
// algorithm that there is, and its blocks' lines hold the bytes.
func TestChooseFits(t *testing.T) {
	for coll := range chooser(1, 9).table.rows {
		for size := 1; size <= MaxRanks; size++ {
			for _, major := range []int{8, 9} {
				for force := record.AlgoNone; force <= record.AlgoChain; force++ {
					for _, blocks := range []int{0, 1, 7, 100} {
						c := chooser(size, major)
						c.cfg.Force, c.cfg.Blocks = force, blocks
						for bytes := uint64(1); bytes < 8<<30; bytes = bytes*5/4 + 1 {
							for _, direct := range []bool{false, true} {
								for _, fixed := range []bool{false, true} {
									p := c.choose(call{coll: coll, bytes: bytes, direct: direct, fixed: fixed, plain: !direct})
									if why := unfit(c, coll, bytes, direct, fixed, p); why != "" {
										t.Fatalf("%v of %d bytes, %d ranks, %d.0, force %v, %d blocks, direct %v, fixed %v: %v/%d %s",
											coll, bytes, size, major, force, blocks, direct, fixed, p.algo, p.blocks, why)
									}
								}
							}
						}
					}
				}
			}
		}
	}
}

func unfit(c *Comm, coll record.CollKind, bytes uint64, direct, fixed bool, p plan) string {
	switch {
	case !c.has(coll, p.algo):
		return "is no algorithm of it"
	case p.algo == record.AlgoCopyEngine && (fixed || !direct):
		return "cannot be used"
	case p.algo == record.AlgoCopyEngine:
		return ""
	case collectives[coll].kernels[p.algo] == "":
		return "has no kernel"
	case p.algo == record.AlgoPushBulk && !direct:
		return "needs windows"
	case p.blocks < 1 || p.blocks > kernels.MaxBlocks:
		return "blocks"
	case lines(p.algo):
		if n := c.capacity(coll, p.algo, p.blocks); bytes > n {
			return fmt.Sprintf("hold %d bytes", n)
		}
	}
	return ""
}

// TestChoose: what the tables say, of 4 H200s but where it says otherwise.
func TestChoose(t *testing.T) {
	const kb, mb = 1 << 10, 1 << 20
	for _, w := range []struct {
		coll          record.CollKind
		size, major   int
		bytes         uint64
		direct, fixed bool
		want          plan
	}{
		{record.AllReduce, 4, 9, 8, true, true, plan{record.AlgoLL, 1}},
		{record.AllReduce, 4, 9, 64 * kb, true, true, plan{record.AlgoLL, 32}},
		{record.AllReduce, 4, 9, 128 * kb, true, true, plan{record.AlgoLL, 32}},
		{record.AllReduce, 4, 9, 512 * kb, true, true, plan{record.AlgoLL2, 32}},
		{record.AllReduce, 8, 9, 512 * kb, true, true, plan{record.AlgoLL2, 32}},
		{record.AllReduce, 2, 9, 512 * kb, true, true, plan{record.AlgoLL12, 32}},
		{record.AllReduce, 2, 9, 64*kb + 4, false, true, plan{record.AlgoLL12, 22}},
		{record.AllReduce, 2, 9, 2 * mb, true, true, plan{record.AlgoLL12, 32}},
		{record.AllReduce, 2, 9, 2*mb + 4, true, true, plan{record.AlgoBulk, 16}},
		{record.ReduceScatter, 4, 9, 512 * kb, true, true, plan{record.AlgoLL12, 32}},
		{record.ReduceScatter, 4, 9, mb, true, true, plan{record.AlgoBulk, 16}},
		{record.ReduceScatter, 3, 9, 512*kb + 4, true, true, plan{record.AlgoBulk, 16}},
		{record.AllReduce, 4, 9, 16 * mb, true, false, plan{record.AlgoBulk, 16}},
		{record.AllReduce, 4, 9, 32 * mb, true, false, plan{record.AlgoBulk, 16}},
		{record.AllReduce, 8, 9, 32 * mb, true, false, plan{record.AlgoPushBulk, 16}},
		{record.AllReduce, 8, 9, 32 * mb, false, false, plan{record.AlgoBulk, 16}},
		{record.AllReduce, 2, 9, 32 * mb, true, false, plan{record.AlgoBulk, 16}},
		{record.AllReduce, 4, 8, 32 * mb, true, false, plan{record.AlgoSym, 16}},
		{record.Broadcast, 2, 9, 192 * kb, true, true, plan{record.AlgoLL12, 32}},
		{record.Broadcast, 4, 9, 256 * kb, true, true, plan{record.AlgoLL12, 32}},
		{record.Broadcast, 6, 9, 768 * kb, true, true, plan{record.AlgoLL2, 20}},
		{record.Broadcast, 4, 9, 2 * mb, false, false, plan{record.AlgoChain, 32}},
		{record.Broadcast, 4, 9, 384*kb + 4, true, true, plan{record.AlgoChain, 32}},
		{record.Broadcast, 3, 9, 6 * mb, true, true, plan{record.AlgoChain, 32}},
		{record.Broadcast, 3, 8, 6 * mb, true, true, plan{record.AlgoSym, 32}},
		{record.Broadcast, 4, 9, 6*mb + 4, true, true, plan{record.AlgoChain, 16}},
		{record.Broadcast, 4, 9, 24 * mb, true, true, plan{record.AlgoChain, 16}},
		{record.Broadcast, 4, 9, 24*mb + 4, true, true, plan{record.AlgoBulk, 16}},
		{record.Broadcast, 8, 9, 1024 * mb, true, false, plan{record.AlgoCopyEngine, 0}},
		{record.Broadcast, 4, 9, 1024 * mb, true, true, plan{record.AlgoBulk, 16}},
		{record.AlltoAll, 4, 9, 4 * mb, true, true, plan{record.AlgoSym, 32}},
		{record.AlltoAll, 4, 9, 12 * mb, true, true, plan{record.AlgoBulk, 16}},
		{record.AlltoAll, 4, 9, 12*mb + 4, true, true, plan{record.AlgoSym, 32}},
		{record.AlltoAll, 4, 9, 64 * mb, true, false, plan{record.AlgoCopyEngine, 0}},
		{record.AllGather, 4, 9, 2 * mb, true, true, plan{record.AlgoSym, 32}},
		{record.AllGather, 4, 9, 32 * mb, true, false, plan{record.AlgoBulk, 16}},
		{record.AllGather, 4, 9, 64 * mb, true, false, plan{record.AlgoCopyEngine, 0}},
		{record.AllGather, 4, 9, 128 * mb, true, true, plan{record.AlgoBulk, 16}},
		{record.AllGather, 2, 9, 128 * mb, true, true, plan{record.AlgoBulk, 16}},
		{record.AllGather, 2, 9, 128*mb + 4, true, true, plan{record.AlgoSym, 32}},
		{record.AlltoAll, 2, 9, 64 * mb, true, false, plan{record.AlgoBulk, 16}},
		{record.AlltoAll, 2, 8, 64 * mb, true, false, plan{record.AlgoSym, 32}},
		{record.AlltoAll, 2, 9, 128 * mb, true, false, plan{record.AlgoCopyEngine, 0}},
		{record.Broadcast, 2, 9, 8 * mb, true, true, plan{record.AlgoSym, 32}},
		{record.Broadcast, 2, 9, 16 * mb, true, true, plan{record.AlgoBulk, 16}},
		{record.Broadcast, 2, 9, 128 * mb, true, false, plan{record.AlgoCopyEngine, 0}},
		{record.AllGather, 4, 8, 128 * mb, true, true, plan{record.AlgoSym, 32}},
		{record.Reduce, 4, 9, mb, true, true, plan{record.AlgoChain, 32}},
		{record.Reduce, 2, 9, 512 * kb, true, true, plan{record.AlgoLL12, 32}},
		{record.Reduce, 4, 9, 256 * kb, true, true, plan{record.AlgoLL12, 32}},
		{record.Reduce, 4, 9, 8 * mb, true, true, plan{record.AlgoChain, 32}},
		{record.Reduce, 4, 9, 8*mb + 4, true, true, plan{record.AlgoChain, 16}},
		{record.Reduce, 4, 8, 32 * mb, true, false, plan{record.AlgoSym, 16}},
		{record.Reduce, 4, 9, 48 * mb, true, false, plan{record.AlgoChain, 16}},
		{record.Reduce, 4, 9, 48*mb + 4, true, false, plan{record.AlgoRing, 16}},
	} {
		if got := chooser(w.size, w.major).choose(call{coll: w.coll, bytes: w.bytes, direct: w.direct, fixed: w.fixed}); got != w.want {
			t.Errorf("%v of %d bytes, %d ranks, %d.0, direct %v, fixed %v: %v/%d, want %v/%d",
				w.coll, w.bytes, w.size, w.major, w.direct, w.fixed, got.algo, got.blocks, w.want.algo, w.want.blocks)
		}
	}
}

// TestChooseRing: large operations on plain buffers go round a ring, but not sums that would
// have to be rounded at each rank, nor without memory for the ring.
func TestChooseRing(t *testing.T) {
	for _, w := range []struct {
		call
		stage uint64
		want  record.Algo
	}{
		{call{coll: record.AllReduce, bytes: 64 << 20, plain: true}, DefaultStage, record.AlgoRing},
		{call{coll: record.AllReduce, bytes: 64 << 20, plain: true, widened: true}, DefaultStage, record.AlgoBulk},
		{call{coll: record.AllReduce, bytes: 64 << 20, plain: true}, 8 << 20, record.AlgoBulk},
		{call{coll: record.AllReduce, bytes: 64 << 20, direct: true}, DefaultStage, record.AlgoBulk},
		{call{coll: record.Reduce, bytes: 1 << 30, direct: true, widened: true}, DefaultStage, record.AlgoBulk},
		{call{coll: record.Broadcast, bytes: 64 << 20, plain: true}, DefaultStage, record.AlgoRing},
		{call{coll: record.AllReduce, bytes: 4 << 20, plain: true}, DefaultStage, record.AlgoBulk},
		{call{coll: record.ReduceScatter, bytes: 64 << 20, plain: true}, DefaultStage, record.AlgoRing},
		{call{coll: record.ReduceScatter, bytes: 64<<20 + 4, plain: true}, DefaultStage, record.AlgoBulk},
	} {
		c := chooser(4, 9)
		c.stage = &symm.Memory{Size: w.stage}
		if got := c.choose(w.call); got.algo != w.want {
			t.Errorf("%+v with %d bytes of staging memory: %v, want %v", w.call, w.stage, got.algo, w.want)
		}
	}
	for dt, want := range map[record.DType]bool{record.Float32: false, record.Int8: false, record.Float64: false, record.BFloat16: true, record.Float16: true, record.Float8E4M3: true} {
		if widened(record.AllReduce, dt) != want || widened(record.Broadcast, dt) {
			t.Errorf("%v: widened %v, of a Broadcast %v", dt, widened(record.AllReduce, dt), widened(record.Broadcast, dt))
		}
	}
}

// TestChooseSkewed: long shares that are no multiple of 16 bytes go by copy engines, or in pieces that are
// one but for the last. Where neither can be, and of shorter shares, loads and stores go.
func TestChooseSkewed(t *testing.T) {
	const mb, sym, ce, bulk = 1 << 20, record.AlgoSym, record.AlgoCopyEngine, record.AlgoBulk
	for _, w := range []struct {
		coll        record.CollKind
		size, major int
		bytes       uint64
		// of windows, of windows in a capture, of plain buffers
		windows, captured, plain record.Algo
	}{
		{record.AllGather, 3, 9, 21*mb + 4, ce, sym, bulk},
		{record.AlltoAll, 3, 9, 21*mb + 4, ce, sym, bulk},
		{record.AlltoAll, 2, 9, 64*mb + 1, ce, sym, bulk},
		{record.AlltoAll, 3, 8, 21*mb + 4, ce, sym, sym},
		{record.AllGather, 3, 9, 12*mb - 4, sym, sym, sym},
		{record.AllGather, 3, 9, 12*mb + 16, bulk, bulk, record.AlgoRing},
		{record.ReduceScatter, 3, 9, 21*mb + 4, bulk, bulk, bulk},
	} {
		c := chooser(w.size, w.major)
		for _, k := range []struct {
			call
			want record.Algo
		}{
			{call{coll: w.coll, bytes: w.bytes, direct: true}, w.windows},
			{call{coll: w.coll, bytes: w.bytes, direct: true, fixed: true}, w.captured},
			{call{coll: w.coll, bytes: w.bytes, plain: true}, w.plain},
		} {
			if got := c.choose(k.call); got.algo != k.want {
				t.Errorf("%+v, %d ranks, %d.0: %v, want %v", k.call, w.size, w.major, got.algo, k.want)
			}
		}
	}
	c := chooser(3, 9)
	c.cfg.Force = record.AlgoBulk
	if got := c.choose(call{coll: record.AllGather, bytes: 21*mb + 4, direct: true}); got.algo != bulk {
		t.Errorf("where bulk is forced: %v", got.algo)
	}
}

// TestChooseChain: chains take what NVLink joins, and no sums in a wider type unless they are
// forced to. Where a chain cannot go, forced or not, another algorithm does.
func TestChooseChain(t *testing.T) {
	const mb, chain = 1 << 20, record.AlgoChain
	for _, w := range []struct {
		call
		size, major   int
		force         record.Algo
		want, without record.Algo // with and without NVLink
	}{
		{call{coll: record.Broadcast, bytes: 2 * mb, plain: true}, 4, 9, 0, chain, record.AlgoBulk},
		{call{coll: record.Broadcast, bytes: 2 * mb, direct: true}, 3, 9, 0, chain, record.AlgoBulk},
		{call{coll: record.Broadcast, bytes: 48 * mb, plain: true}, 4, 9, 0, chain, record.AlgoRing},
		{call{coll: record.Broadcast, bytes: 48*mb + 4, plain: true}, 4, 9, 0, record.AlgoRing, record.AlgoRing},
		{call{coll: record.Broadcast, bytes: 48 * mb, plain: true}, 4, 8, 0, record.AlgoRing, record.AlgoRing},
		{call{coll: record.Broadcast, bytes: 48 * mb, plain: true}, 4, 8, chain, chain, record.AlgoRing},
		{call{coll: record.Broadcast, bytes: 1000, plain: true}, 4, 9, chain, chain, record.AlgoLL12},
		{call{coll: record.Broadcast, bytes: 1000, plain: true}, 2, 8, chain, chain, record.AlgoLL},
		{call{coll: record.Reduce, bytes: 32 * mb, plain: true}, 4, 9, 0, chain, record.AlgoRing},
		{call{coll: record.Reduce, bytes: 32 * mb}, 4, 9, 0, chain, record.AlgoBulk},
		{call{coll: record.Reduce, bytes: 2 * mb, plain: true, widened: true}, 4, 9, 0, record.AlgoBulk, record.AlgoBulk},
		{call{coll: record.Reduce, bytes: 32 * mb, plain: true, widened: true}, 4, 9, 0, record.AlgoBulk, record.AlgoBulk},
		{call{coll: record.Reduce, bytes: 2 * mb, plain: true, widened: true}, 4, 9, chain, chain, record.AlgoBulk},
		{call{coll: record.Reduce, bytes: 2 * mb, plain: true}, 1, 9, chain, record.AlgoLL12, record.AlgoLL12},
		{call{coll: record.AllReduce, bytes: 2 * mb, plain: true}, 4, 9, chain, record.AlgoBulk, record.AlgoBulk},
	} {
		c := chooser(w.size, w.major)
		c.cfg.Force = w.force
		got, refused := c.choose(w.call), c.Refused()
		c.unlinked = "a link is missing"
		without, why := c.choose(w.call), c.Refused()
		if got.algo != w.want || without.algo != w.without || w.want == chain && w.bytes > mb && (got.blocks == 32) != (w.bytes <= 6*mb || w.force == chain) {
			t.Errorf("%+v, %d ranks, %d.0, force %v: %v/%d, want %v; without NVLink %v/%d, want %v",
				w.call, w.size, w.major, w.force, got.algo, got.blocks, w.want, without.algo, without.blocks, w.without)
		}
		if refused != "" || (why != "") != (w.force == chain && w.size > 1) {
			t.Errorf("%d ranks, force %v: with NVLink %q, without %q", w.size, w.force, refused, why)
		}
	}
	c := chooser(4, 8)
	c.cfg.Force = record.AlgoBulk
	if why := c.Refused(); why == "" {
		t.Error("nobody says why there is no bulk")
	}
}

// TestPace: bulk copies of GPUs of compute capability 9.0 go as fast as links carry
// them, others as fast as they can, and all as the program says.
func TestPace(t *testing.T) {
	const mb = 1 << 20
	for _, w := range []struct {
		coll         record.CollKind
		size, major  int
		bytes        uint64
		pace, blocks int
		want         uint32
	}{
		{record.Broadcast, 2, 9, mb, 0, 16, 1024 * 1000 * 16 / 370},
		{record.AllReduce, 2, 9, mb, 0, 8, 1024 * 1000 * 8 / 345},
		{record.AlltoAll, 2, 9, mb, 0, 16, 1024 * 1000 * 16 / 362},
		{record.Broadcast, 2, 10, mb, 0, 16, 0},
		{record.Broadcast, 4, 9, mb, 0, 16, 1024 * 1000 * 16 / 360},
		{record.AllReduce, 4, 9, 16 * mb, 0, 16, 0},
		{record.AllReduce, 4, 9, 32 * mb, 0, 16, 1024 * 1000 * 16 / 334},
		{record.Reduce, 4, 9, 32 * mb, 0, 16, 0},
		{record.Broadcast, 2, 9, mb, -1, 16, 0},
		{record.Broadcast, 4, 10, mb, 500, 16, 1024 * 1000 * 16 / 500},
	} {
		c := chooser(w.size, w.major)
		c.dev = &device{Device: &cuda.Device{Major: w.major}}
		c.cfg.Pace = w.pace
		if got := c.pace(collectives[w.coll].pace, w.bytes, w.blocks); got != w.want {
			t.Errorf("%+v: %d", w, got)
		}
	}
}
