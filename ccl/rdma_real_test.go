package ccl_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/record"
)

// onRails puts the first half of the ranks on host A and the others on host B of
// deploy/rdmavm, each with so many NICs. Elsewhere the test is skipped.
func onRails(t *testing.T, n, nics int) func(*ccl.Config) {
	t.Helper()
	if os.Getenv("LOCKSTEP_RDMAVM") == "" {
		t.Skip("not in the virtual machine with RDMA devices: make test-rdma")
	}
	return func(cfg *ccl.Config) {
		host := "ab"[cfg.Rank*2/n]
		cfg.Node = "host " + string(host)
		cfg.Net = ccl.NetRDMA
		var names []string
		for i := range nics {
			names = append(names, fmt.Sprintf("rx%c%d", host, i))
		}
		cfg.RDMA.HCA = "=" + strings.Join(names, ",")
	}
}

// TestRealRDMA: every collective with every type and operator on real queue
// pairs, and sizes from nothing to many times what a connection buffers.
func TestRealRDMA(t *testing.T) {
	for _, k := range []struct{ ranks, nics, lanes int }{{2, 1, 1}, {3, 1, 1}, {4, 1, 1}, {2, 2, 1}, {4, 2, 1}, {2, 2, 4}} {
		t.Run(fmt.Sprintf("%d ranks, %d NICs each, %d queue pairs", k.ranks, k.nics, k.lanes), func(t *testing.T) {
			rails := onRails(t, k.ranks, k.nics)
			ranks(t, k.ranks, func(cfg *ccl.Config) {
				rails(cfg)
				cfg.RDMA.QueuePairs = k.lanes
			}, runCalls(calls(k.ranks, []int{0, 1, 13, 1023, 4099}, k.ranks > 2 || k.nics > 1)))
		})
	}
	t.Run("large", func(t *testing.T) {
		ranks(t, 2, onRails(t, 2, 2), runCalls([]call{
			{record.AllReduce, ccl.Float32, ccl.Sum, 1 << 18, 0, true, 0},
			{record.AllReduce, ccl.Float16, ccl.Avg, 300_003, 0, false, 0},
			{record.ReduceScatter, ccl.BFloat16, ccl.Sum, 300_001, 0, false, 0},
			{record.AllGather, ccl.Int64, ccl.Sum, 100_001, 0, true, 0},
			{record.Broadcast, ccl.Uint8, ccl.Sum, 5_000_001, 1, false, 0},
			{record.Reduce, ccl.Float64, ccl.Max, 100_001, 1, true, 0},
			{record.AlltoAll, ccl.Int32, ccl.Sum, 200_001, 0, false, 0},
			{record.Gather, ccl.Float32, ccl.Sum, 200_001, 0, true, 0},
			{record.Scatter, ccl.Float32, ccl.Sum, 200_001, 1, true, 0},
		}))
	})
}
