package gpu

import (
	"fmt"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/record"
)

// collective is what a GPU has for one kind of collective: its row here, its kernels
// and a row of tuned.json are all that a new one needs in this package. What is true of
// the kind itself is in record.Traits.
type collective struct {
	// kernels by algorithm.
	kernels map[record.Algo]string
	// copies runs it by copy engines, nil where they cannot.
	copies func(e *copyEngine, s *cuda.Stream, op *Op, b buffers) error
	// Pulled: peers read the send buffer. Pushed: peers write the receive buffer. A buffer that
	// is neither stays with its own rank, or root tells its peers where it is (toRoot).
	pulls, pushes bool
	// messages is among how many ranks at most it may go as messages where peers cannot reach
	// the buffers (asMessages): 0 where it reduces; of a Broadcast among more than two the
	// others pass on what comes.
	messages int
	pace     pace
}

var collectives = map[record.CollKind]collective{
	record.AllReduce: {
		kernels: map[record.Algo]string{
			record.AlgoLL: "ls_allreduce_ll", record.AlgoLL2: "ls_allreduce_ll2", record.AlgoLL12: "ls_allreduce_ll12",
			record.AlgoSym: "ls_allreduce_sym", record.AlgoBulk: "ls_allreduce_bulk", record.AlgoPushBulk: "ls_allreduce_pushbulk",
			record.AlgoRing: "ls_allreduce_ring",
		},
		copies: (*copyEngine).allReduce, pulls: true, pushes: true,
		pace: pace{345, 334, 24 << 20}, // loads from peers pass the links as well
	},
	record.ReduceScatter: {
		kernels: map[record.Algo]string{
			record.AlgoLL: "ls_reducescatter_ll", record.AlgoLL12: "ls_reducescatter_ll12",
			record.AlgoSym: "ls_reducescatter_sym", record.AlgoBulk: "ls_reducescatter_bulk", record.AlgoRing: "ls_reducescatter_ring",
		},
		copies: (*copyEngine).reduceScatter, pulls: true,
		pace: pace{0, 330, 16 << 20}, // likewise
	},
	record.Reduce: {
		kernels: map[record.Algo]string{
			record.AlgoLL: "ls_reduce_ll", record.AlgoLL12: "ls_reduce_ll12", record.AlgoSym: "ls_reduce_sym", record.AlgoBulk: "ls_reduce_bulk",
			record.AlgoRing: "ls_reduce_ring", record.AlgoChain: "ls_reduce_chain",
		},
		copies: (*copyEngine).reduceToRoot,
	},
	record.AllGather: {
		kernels: map[record.Algo]string{
			record.AlgoLL: "ls_allgather_ll", record.AlgoLL12: "ls_allgather_ll12", record.AlgoSym: "ls_allgather_push", record.AlgoBulk: "ls_allgather_bulk",
			record.AlgoRing: "ls_allgather_ring",
		},
		copies: (*copyEngine).allGather, pushes: true, messages: MaxRanks,
		pace: pace{370, 355, 0},
	},
	record.AlltoAll: {
		kernels: map[record.Algo]string{
			record.AlgoLL: "ls_alltoall_ll", record.AlgoLL12: "ls_alltoall_ll12", record.AlgoSym: "ls_alltoall_push", record.AlgoBulk: "ls_alltoall_bulk",
		},
		copies: (*copyEngine).allToAll, pushes: true, messages: MaxRanks,
		pace: pace{362, 355, 0}, // beside copies of what stays
	},
	record.Broadcast: {
		kernels: map[record.Algo]string{
			record.AlgoLL: "ls_broadcast_ll", record.AlgoLL2: "ls_broadcast_ll2", record.AlgoLL12: "ls_broadcast_ll12",
			record.AlgoSym: "ls_broadcast_push", record.AlgoBulk: "ls_broadcast_bulk", record.AlgoRing: "ls_broadcast_ring",
			record.AlgoChain: "ls_broadcast_chain",
		},
		copies: (*copyEngine).broadcast, pushes: true, messages: 2,
		pace: pace{370, 360, 0},
	},
	record.Barrier: {kernels: map[record.Algo]string{record.AlgoLL: "ls_barrier"}},
}

// rings is the pace of what rings push to the next rank.
var rings = pace{370, 360, 0}

// messages is the pace of direct messages.
var messages = pace{370, 370, 0}

// missing is the error for a collective that has no such algorithm here.
func (c *Comm) missing(coll record.CollKind, a record.Algo) error {
	return fmt.Errorf("no %v by %v on GPUs of compute capability %d.%d", coll, a, c.dev.Major, c.dev.Minor)
}

// reached is how many shares of each buffer peers reach by themselves, 0 for none.
func (c *Comm) reached(coll record.CollKind) (send, recv int) {
	row, t := collectives[coll], coll.Traits()
	if row.pulls {
		send = t.Send.Of(c.size)
	}
	if row.pushes {
		recv = t.Recv.Of(c.size)
	}
	return send, recv
}
