package gpu

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl/internal/symm"
	"github.com/lockstep-ccl/lockstep/record"
	"pgregory.net/rapid"
)

// TestPieces: whatever an operation and however large staging memory, its pieces are all of it,
// fit their slots, and begin aligned; there are not many more than it takes.
func TestPieces(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		c := &Comm{
			size: rapid.IntRange(2, MaxRanks).Draw(rt, "ranks"), copies: rapid.Bool().Draw(rt, "copies"),
			stage: &symm.Memory{Size: uint64(rapid.IntRange(1, 128).Draw(rt, "stage")) << 21},
		}
		op := &Op{
			Coll:  rapid.SampledFrom([]record.CollKind{record.AllReduce, record.ReduceScatter, record.AllGather, record.AlltoAll, record.Broadcast}).Draw(rt, "collective"),
			DType: rapid.SampledFrom([]record.DType{record.Int8, record.BFloat16, record.Float64}).Draw(rt, "type"),
			Count: rapid.Uint64Range(0, 1<<30).Draw(rt, "count"),
		}
		g, size := c.stagingOf(op), uint64(op.DType.Size())
		room := g.slot
		if g.apart {
			room /= 2
		}
		if uint64(g.slots)*g.slot > c.stage.Size {
			rt.Fatalf("%+v do not fit %d bytes", g, c.stage.Size)
		}
		pieces := uint64(0)
		for turn, done := 0, uint64(0); done < op.Count; turn++ {
			n := g.next(turn, op.Count-done)
			if skewed := n*size%16 != 0 && n < op.Count-done || n > 256 && c.skewed(op.Coll, op.Count*size) && n*size%16 != 0; skewed {
				rt.Fatalf("piece %d after %d of %d is skewed: %d; %+v", turn, done, op.Count, n, g)
			}
			if n == 0 || n > op.Count-done || done%256 != 0 || uint64(g.shares)*n*size > room {
				rt.Fatalf("piece %d after %d of %d: %d; %+v", turn, done, op.Count, n, g)
			}
			done += n
			pieces++
		}
		if most := op.Count/g.most + 24; pieces > most {
			rt.Fatalf("%d pieces of %d, at most %d each: %+v", pieces, op.Count, g.most, g)
		}
	})
}

// TestShortShares: shares that lines do not hold go as messages, as long as launches cost more than
// messages do; what overwrites, reduces or has odd ends does not.
func TestShortShares(t *testing.T) {
	const kb = 1 << 10
	c := &Comm{size: 4, copies: true, stage: &symm.Memory{Size: DefaultStage}}
	for _, w := range []struct {
		coll             record.CollKind
		bytes            uint64
		inPlace          bool
		stream, captured bool
	}{
		{record.AllGather, 256 * kb, false, true, true},
		{record.AllGather, 256*kb + 16, true, true, false},
		{record.AlltoAll, 1024 * kb, false, true, false},
		{record.AlltoAll, 1024 * kb, true, false, false},
		{record.AlltoAll, 1024*kb + 16, false, false, false},
		{record.AllGather, 512*kb + 4, false, false, false},
		{record.AllGather, 8192 * kb, false, false, false},
		{record.AllGather, 8192*kb + 16, false, true, true},
		{record.AllReduce, 512 * kb, false, false, false},
		{record.ReduceScatter, 256 * kb, false, false, false},
		{record.Broadcast, 256 * kb, false, false, false},
	} {
		op := &Op{Coll: w.coll, DType: record.Uint8, Count: w.bytes, InPlace: w.inPlace, Root: -1}
		stream := c.asMessages(op)
		op.Captured = true
		if captured := c.asMessages(op); stream != w.stream || captured != w.captured {
			t.Errorf("%v of %d bytes, in place %v: as messages on a stream %v, captured %v", w.coll, w.bytes, w.inPlace, stream, captured)
		}
	}
	c.cfg.Force = record.AlgoSym
	if c.asMessages(&Op{Coll: record.AllGather, DType: record.Uint8, Count: 256 * kb}) {
		t.Error("what is forced goes as messages")
	}
}
