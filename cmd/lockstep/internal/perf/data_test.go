package perf

import (
	"fmt"
	"math"
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/record"
)

// TestEveryCollectiveIsMeasured: there is a row for each kind whose parts are of one size.
func TestEveryCollectiveIsMeasured(t *testing.T) {
	for k := record.CollNone + 1; k.Known(); k++ {
		if k.Traits().Varies() {
			continue
		}
		if coll, err := find(k.String()); err != nil || coll.kind != k {
			t.Errorf("%v: %v, %v", k, coll.kind, err)
		}
	}
}

// TestEveryTypeIsMeasured: there is a name for each element type, and a value comes back.
func TestEveryTypeIsMeasured(t *testing.T) {
	known := map[ccl.DType]bool{}
	for _, dt := range typeNames {
		known[dt] = true
	}
	b := make([]byte, 8)
	for dt := ccl.DType(0); dt.Size() > 0; dt++ {
		if !known[dt] {
			t.Errorf("%v has no name", dt)
			continue
		}
		if store(dt, b, 3); load(dt, b) != 3 {
			t.Errorf("%v: 3 comes back as %v", dt, load(dt, b))
		}
	}
}

// TestWrong: of every type, a buffer of an odd count is filled and read to its last
// byte and not beyond, holds what it should, and what it should not is counted.
func TestWrong(t *testing.T) {
	want := func(x expect, i int) (float64, bool) { return x.contribution(x.rank, i), true }
	for name, dt := range typeNames {
		for op := ccl.Sum; op <= ccl.Avg; op++ {
			for _, count := range []int{1, 3, 7, 1001} {
				x := expect{op: op, rank: 1, n: 3, count: count}
				b := make([]byte, count*dt.Size())
				for i := range b {
					b[i] = 0xa5
				}
				x.fill(dt, b)
				if n := x.wrong(dt, b, want); n != 0 {
					t.Errorf("%s, %v: %d of %d elements wrong", name, op, n, count)
				}
				b[len(b)-1] ^= 0x7f // of the last element: its sign's neighbours, or all of it
				if n := x.wrong(dt, b, want); n != 1 {
					t.Errorf("%s, %v: %d of %d elements wrong, want the last one", name, op, n, count)
				}
			}
		}
	}
	x := expect{op: ccl.Sum, n: 2, count: 1}
	b := make([]byte, 4)
	store(ccl.Float32, b, math.NaN())
	if x.wrong(ccl.Float32, b, want) != 1 {
		t.Error("NaN is taken for right")
	}
}

// TestWrapped: sums of many ranks in small integers wrap around, and are right.
func TestWrapped(t *testing.T) {
	for _, dt := range []ccl.DType{ccl.Int8, ccl.Uint8} {
		x := expect{op: ccl.Sum, n: 90, count: 8}
		b := make([]byte, x.count)
		for i := range b {
			sum := 0
			for r := range x.n {
				sum += int(x.contribution(r, i))
			}
			b[i] = byte(sum)
		}
		if n := x.wrong(dt, b, whole); n != 0 {
			t.Errorf("%v: %d of %d elements wrong", dt, n, x.count)
		}
	}
}

func TestFloat8(t *testing.T) {
	for _, c := range []struct {
		f    float8
		b    byte
		want float64
	}{
		{e4m3, 0x38, 1}, {e4m3, 0x3c, 1.5}, {e4m3, 0xc0, -2}, {e4m3, 0x7e, 448}, {e4m3, 0x01, 1. / 512}, {e4m3, 0x78, 256},
		{e5m2, 0x3c, 1}, {e5m2, 0x3e, 1.5}, {e5m2, 0xc0, -2}, {e5m2, 0x7b, 57344}, {e5m2, 0x01, 1. / 65536}, {e5m2, 0xfc, math.Inf(-1)},
		{e4m3, 0x7f, math.NaN()}, {e5m2, 0x7d, math.NaN()},
	} {
		if got := c.f.decode(c.b); fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("%+v: %#x is %v, want %v", c.f, c.b, got, c.want)
		}
	}
	for _, f := range []float8{e4m3, e5m2} {
		for v := range 8 {
			if got := f.decode(f.encode(float64(v))); got != float64(v) {
				t.Errorf("%+v: %d comes back as %v", f, v, got)
			}
		}
	}
}
