package gpu

import (
	"fmt"
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/kernels"
	"github.com/lockstep-ccl/lockstep/record"
)

// TestPushingFits: whatever the number of ranks and blocks and the size, tiles fit
// the rings and shared memory, and there are slots enough to go on.
func TestPushingFits(t *testing.T) {
	for _, coll := range []record.CollKind{record.AllReduce, record.ReduceScatter, record.Reduce} {
		for _, p := range []pushing{pushes, bulkPushes, {turn: 1 << 20, least: 128, turns: 1, slots: 4, stages: 4}} {
			for ranks := 2; ranks <= MaxRanks; ranks++ {
				for _, blocks := range []int{1, 7, symBlocks, llBlocks} {
					for _, bytes := range []uint64{1, 100_000, 16 << 20, 8 << 30} {
						a := p.args(coll, bytes, ranks, blocks)
						name := fmt.Sprintf("%v of %d bytes, %d ranks, %d blocks", coll, bytes, ranks, blocks)
						if a.Tile == 0 || a.Tile%128 != 0 || a.Slots < 2 {
							t.Errorf("%s: %d slots of %d bytes", name, a.Slots, a.Tile)
						}
						if n := ranks * blocks * int(a.Slots*a.Tile); n > ringSize {
							t.Errorf("%s: rings of %d bytes in %d", name, n, ringSize)
						}
						if n := ((ranks-1)*int(a.Stages) + 2*ranks) * int(a.Tile); a.Stages > 0 && n > kernels.PushReduceTiles {
							t.Errorf("%s: %d bytes of shared memory", name, n)
						}
					}
				}
			}
		}
	}
}
