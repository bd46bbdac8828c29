package algo

import (
	"fmt"
	"math"

	"github.com/lockstep-ccl/lockstep/record"
)

// entry is one algorithm of one collective: how to build it, where it can run, and its cost by
// the model.
type entry struct {
	algo  record.Algo
	build func(*builder)
	fits  func(*Call, *Place) bool
	cost  func(*Model, *Call, *Place) estimate
}

func always(*Call, *Place) bool { return true }

// staged reports whether allReduceStaged can run: several nodes must have equally many ranks.
func staged(_ *Call, p *Place) bool { return p.Nodes == 1 || p.Across != nil }

// catalogue lists every collective's algorithms.
var catalogue map[record.CollKind][]entry

func init() {
	catalogue = map[record.CollKind][]entry{
		record.AllReduce: {
			{record.AlgoDirect, (*builder).allReduceOneShot, always, (*Model).oneShot},
			{record.AlgoDoubling, (*builder).allReduceDoubling, always, (*Model).doubling},
			{record.AlgoHierarchical, (*builder).allReduceStaged, staged, (*Model).staged},
			{record.AlgoRing, (*builder).allReduceRing, always, (*Model).ring},
		},
		record.ReduceScatter: {
			{record.AlgoDirect, (*builder).reduceScatterDirect, always, (*Model).exchange},
			{record.AlgoRing, (*builder).reduceScatterRing, always, (*Model).halfRing},
		},
		record.AllGather: {
			{record.AlgoDirect, (*builder).allGatherDirect, always, (*Model).exchange},
			{record.AlgoRing, (*builder).allGatherRing, always, (*Model).halfRing},
		},
		record.Broadcast: {
			{record.AlgoDirect, (*builder).broadcastDirect, always, (*Model).star},
			{record.AlgoTree, (*builder).broadcastTree, always, (*Model).tree},
			{record.AlgoRing, (*builder).broadcastChain, always, (*Model).chain},
		},
		record.Reduce: {
			{record.AlgoDirect, (*builder).reduceDirect, always, (*Model).star},
			{record.AlgoTree, (*builder).reduceTree, always, (*Model).tree},
			{record.AlgoRing, (*builder).reduceChain, always, (*Model).chain},
		},
		record.AlltoAll: {{record.AlgoDirect, (*builder).allToAll, always, (*Model).exchange}},
		record.Gather:   {{record.AlgoDirect, (*builder).gather, always, (*Model).star}},
		record.Scatter:  {{record.AlgoDirect, (*builder).scatter, always, (*Model).star}},
		record.Barrier: {
			{record.AlgoDirect, (*builder).barrierDirect, always, (*Model).exchange},
			{record.AlgoDoubling, (*builder).barrierDissemination, always, (*Model).doubling},
		},
	}
}

// Overrides replace parts of the model's choice. Zero values replace nothing. Choose ignores Algo
// if the collective does not have it.
type Overrides struct {
	Algo  record.Algo
	Proto record.Proto
	Block int
}

// Choose returns the choice that the model expects to be fastest for call at place, with o
// applied.
func (m *Model) Choose(call Call, place *Place, o Overrides) Choice {
	best, found := estimate{ns: math.Inf(1)}, false
	var choice Choice
	for pass := 0; pass < 2 && !found; pass++ {
		for _, e := range catalogue[call.Coll] {
			if !e.fits(&call, place) || pass == 0 && o.Algo != record.AlgoNone && e.algo != o.Algo {
				continue
			}
			if est := e.cost(m, &call, place); est.ns < best.ns {
				best, found = est, true
				choice = Choice{Algo: e.algo, Proto: est.proto, Block: est.block}
			}
		}
	}
	if o.Proto != record.ProtoNone {
		choice.Proto = o.Proto
	}
	if o.Block > 0 {
		choice.Block = o.Block
	}
	return choice
}

// Build returns the schedule of call at place. It fails if the collective does not have
// choice.Algo, or cannot run it at place.
func Build(call Call, place Place, choice Choice) (*Schedule, error) {
	b := newBuilder(call, place, choice)
	if b.choice.Block < 64 {
		b.choice.Block = 64
	}
	b.choice.Block &^= 63
	if place.Size == 1 {
		b.choice.Algo, b.choice.Proto = record.AlgoDirect, record.ProtoSimple
		b.alone()
		return b.schedule(), nil
	}
	for _, c := range catalogue[call.Coll] {
		if c.algo == choice.Algo && c.fits(&call, &place) {
			c.build(b)
			return b.schedule(), nil
		}
	}
	return nil, fmt.Errorf("%v has no %v algorithm for %d ranks on %d nodes", call.Coll, choice.Algo, place.Size, place.Nodes)
}
