package reduce_test

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl/internal/reduce"
	"github.com/lockstep-ccl/lockstep/record"
)

func TestSmoke(t *testing.T) {
	for dt := record.Int8; dt <= record.Bfloat16; dt++ {
		for op := record.Sum; op <= record.Avg; op++ {
			a := make([]byte, 64*dt.Size())
			reduce.Reduce(op, dt, a, a, a)
			reduce.Scale(dt, a, 3)
		}
	}
	n := testing.AllocsPerRun(100, func() {
		var x [99]byte
		var w [20]float32
		reduce.Reduce(record.Max, record.Float16, x[1:41], x[1:41], x[41:81])
		reduce.AccumulateF32(w[:], x[1:41], record.Float16, record.Max)
		reduce.Narrow(x[1:41], w[:], record.Float16)
		reduce.Widen(w[:], x[1:41], record.Float16)
		reduce.Scale(record.Float16, x[1:41], 3)
	})
	if n != 0 {
		t.Errorf("%v allocations", n)
	}
}
