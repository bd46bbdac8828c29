package gpu

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/kernels"
	"github.com/lockstep-ccl/lockstep/record"
)

// TestLanes: lanes are all of a message, no more than there may be, and of large ones as many for
// each block of a rank that sends to all of its peers.
func TestLanes(t *testing.T) {
	for size := 2; size <= MaxRanks; size++ {
		c := chooser(size, 9)
		for _, bytes := range []uint64{1, 4096, llMessage, llMessage + 1, 1 << 20, 16<<20 + 12, 1 << 30} {
			for _, algo := range []record.Algo{record.AlgoLL, record.AlgoDirect} {
				if algo == record.AlgoLL && bytes > llMessage {
					continue
				}
				lanes, piece := c.lanes(bytes, algo)
				if lanes == 0 || lanes > kernels.MaxLanes || uint64(lanes)*piece < bytes || uint64(lanes-1)*piece >= bytes || piece%kernels.PieceUnit != 0 {
					t.Errorf("%d ranks, %d bytes by %v: %d lanes of %d", size, bytes, algo, lanes, piece)
				}
			}
		}
		if lanes, _ := c.lanes(1<<30, record.AlgoDirect); int(lanes)%(directBlocks/(size-1)) != 0 || lanes < 14 {
			t.Errorf("%d ranks: %d lanes of a large message", size, lanes)
		}
	}
}
