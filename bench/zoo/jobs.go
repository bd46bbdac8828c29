package zoo

import (
	"fmt"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
)

// Job is a program and how it is placed.
type Job struct {
	Name  string
	Text  string
	Ranks int
	Nodes int           // in blocks of ranks
	Step  time.Duration // what a step takes on an idle machine, roughly
	// Uneven ranks have roles or loads that differ, so that a small slowness of one has
	// only its own history to be compared with.
	Uneven bool
	Bugs   []string // that an Order can ask of it
	run    func(*Rank) error
}

// Node is where a rank is.
func (j *Job) Node(rank int) int { return rank / (j.Ranks / j.Nodes) }

// Jobs lists the zoo.
func Jobs() []*Job { return jobs }

// Named returns a job by its name.
func Named(name string) (*Job, error) {
	for _, j := range jobs {
		if j.Name == name {
			return j, nil
		}
	}
	return nil, fmt.Errorf("no job is called %q", name)
}

const ms = time.Millisecond

var (
	allBugs = []string{BugSkip, BugSwap, BugMismatch}
	noSwap  = []string{BugSkip, BugMismatch}
)

// jobs is the one table of them.
var jobs = []*Job{
	{Name: "dp", Text: "data parallel, buckets of gradients reduced while the backward pass goes on", Ranks: 4, Nodes: 2, Step: 80 * ms, Bugs: allBugs, run: dataParallel},
	{Name: "dptp", Text: "data × tensor parallel", Ranks: 8, Nodes: 2, Step: 100 * ms, Bugs: noSwap, run: dataTensor},
	{Name: "pipe6", Text: "data × pipeline with 1F1B, 2 replicas of 3 stages, one replica a node", Ranks: 6, Nodes: 2, Step: 110 * ms, Uneven: true, Bugs: []string{BugSkip}, run: func(r *Rank) error { return pipeline(r, 3, false) }},
	{Name: "pipe2", Text: "data × pipeline, one stage a node", Ranks: 4, Nodes: 2, Step: 100 * ms, Uneven: true, Bugs: []string{BugSkip}, run: func(r *Rank) error { return pipeline(r, 2, true) }},
	{Name: "zero", Text: "sharded: ReduceScatter of gradients, AllGather of parameters, layer by layer", Ranks: 4, Nodes: 2, Step: 90 * ms, Bugs: allBugs, run: sharded},
	{Name: "moe", Text: "mixture of experts: AlltoAllv, unevenly loaded", Ranks: 6, Nodes: 3, Step: 110 * ms, Uneven: true, Bugs: noSwap, run: experts},
	{Name: "ring", Text: "context parallel: blocks of keys and values go around a ring", Ranks: 4, Nodes: 4, Step: 100 * ms, Bugs: noSwap, run: contextRing},
	{Name: "ps", Text: "like a parameter server: Broadcast, Reduce and Gather at rank 0", Ranks: 5, Nodes: 5, Step: 90 * ms, Uneven: true, Bugs: nil, run: server},
	{Name: "small", Text: "many small communicators: all pairs of neighbours, rows, columns, and two of all", Ranks: 6, Nodes: 2, Step: 100 * ms, Bugs: allBugs, run: manySmall},
	{Name: "accum", Text: "gradient accumulation: one large AllReduce every half a second", Ranks: 4, Nodes: 2, Step: 480 * ms, Bugs: noSwap, run: accumulate},
	{Name: "ckpt0", Text: "data parallel, rank 0 writes checkpoints and evaluates while the others wait, without marks", Ranks: 4, Nodes: 2, Step: 80 * ms, Bugs: noSwap, run: rank0Checkpoints},
	{Name: "varlen", Text: "data parallel, sequences of varying length, checkpoints in the background", Ranks: 4, Nodes: 2, Step: 110 * ms, Uneven: true, Bugs: noSwap, run: variableLength},
	{Name: "serve", Text: "tensor-parallel inference: bursts of tokens, irregular pauses for lack of requests", Ranks: 4, Nodes: 2, Step: 120 * ms, Bugs: noSwap, run: serving},
}

// dataParallel reduces each bucket on a stream of its own while the next is computed. Its
// second communicator, over the same ranks, carries metrics.
func dataParallel(r *Rank) error {
	metrics, err := r.split("metrics", 0, r.rank())
	if err != nil {
		return err
	}
	const buckets = 3
	m := r.newModel(buckets*4096, 0)
	for {
		r.next()
		m.gradients(r.step, r.rank())
		r.compute(25 * ms) // forward
		var pending [buckets]*ccl.Stream
		for b := range buckets {
			r.compute(15 * ms) // backward of this bucket
			v := m.grads[b*4096:][:4096]
			pending[b] = r.world.NewStream()
			op := func(s *ccl.Stream) error { return r.world.AllReduce(s, ccl.Of(v), ccl.Of(v), ccl.Sum) }
			if b == 1 && r.ctl.takeBug(BugSkip) {
				continue
			}
			if b == 1 && r.ctl.takeBug(BugMismatch) {
				op = func(s *ccl.Stream) error { return r.world.AllReduce(s, ccl.Of(v[:2048]), ccl.Of(v[:2048]), ccl.Sum) }
			}
			if err := op(pending[b]); err != nil {
				return err
			}
		}
		for _, s := range pending {
			if err := s.Wait(bg); err != nil {
				return err
			}
		}
		m.update(m.grads, 0, r.size())
		norm, loss := []float32{value(m.grads)}, []float32{value(m.params) + float32(r.rank())}
		err := r.both(
			func(s *ccl.Stream) error { return metrics.AllReduce(s, ccl.Of(norm), ccl.Of(norm), ccl.Max) },
			func(s *ccl.Stream) error { return r.world.AllReduce(s, ccl.Of(loss), ccl.Of(loss), ccl.Sum) })
		if err != nil {
			return err
		}
		if err := r.write(loss[0] + norm[0]); err != nil {
			return err
		}
	}
}

// dataTensor sums activations within a node, layer by layer, and gradients across nodes.
func dataTensor(r *Rank) error {
	tp, err := r.split(fmt.Sprintf("tp%d", r.rank()/4), r.rank()/4, r.rank())
	if err != nil {
		return err
	}
	dp, err := r.split(fmt.Sprintf("dp%d", r.rank()%4), r.rank()%4, r.rank())
	if err != nil {
		return err
	}
	m := r.newModel(8192, r.rank()%4)
	act := make([]float32, 2048)
	for {
		r.next()
		m.gradients(r.step, r.rank()/4)
		for layer := range 4 { // two forward, two backward
			r.compute(18 * ms)
			copy(act, m.params[layer*2048:][:2048])
			if err := r.allReduce(tp, act); err != nil {
				return err
			}
		}
		if err := r.allReduce(dp, m.grads); err != nil {
			return err
		}
		m.update(m.grads, 0, 2)
		r.compute(10 * ms) // optimizer
		if err := r.loss(value(m.params) + value(act)); err != nil {
			return err
		}
	}
}

// sharded keeps a share of each layer's parameters, as ZeRO's third stage does.
func sharded(r *Rank) error {
	extra, err := r.split("scale", 0, r.rank())
	if err != nil {
		return err
	}
	const layers, n = 3, 8192
	var ms3 [layers]*model
	for l := range ms3 {
		ms3[l] = r.newModel(n, l)
	}
	part := n / r.size()
	shard := make([]float32, part)
	for {
		r.next()
		gather := func(m *model) error {
			mine := m.params[r.rank()*part:][:part]
			return r.do(func(s *ccl.Stream) error { return r.world.AllGather(s, ccl.Of(mine), ccl.Of(m.params)) })
		}
		for _, m := range ms3 {
			if err := gather(m); err != nil {
				return err
			}
			r.compute(9 * ms)
		}
		for l := range ms3 {
			m := ms3[layers-1-l]
			if err := gather(m); err != nil {
				return err
			}
			r.compute(17 * ms)
			m.gradients(r.step, r.rank())
			if r.ctl.takeBug(BugSkip) {
				continue
			}
			op := func(s *ccl.Stream) error { return r.world.ReduceScatter(s, ccl.Of(m.grads), ccl.Of(shard), ccl.Sum) }
			if r.ctl.takeBug(BugMismatch) {
				op = func(s *ccl.Stream) error { return r.world.AllReduce(s, ccl.Of(m.grads), ccl.Of(m.grads), ccl.Sum) }
			}
			if err := r.do(op); err != nil {
				return err
			}
			m.update(shard, r.rank()*part, r.size())
		}
		flag, loss := []float32{1}, []float32{0}
		for _, m := range ms3 {
			loss[0] += value(m.params[r.rank()*part:][:part])
		}
		err := r.both(
			func(s *ccl.Stream) error { return extra.AllReduce(s, ccl.Of(flag), ccl.Of(flag), ccl.Min) },
			func(s *ccl.Stream) error { return r.world.AllReduce(s, ccl.Of(loss), ccl.Of(loss), ccl.Sum) })
		if err != nil {
			return err
		}
		if err := r.write(loss[0]); err != nil {
			return err
		}
	}
}

// experts sends tokens to the ranks of their experts, some of which are more popular.
func experts(r *Rank) error {
	n := r.size()
	m := r.newModel(4096, 0)
	const most = 512
	counts, offsets := make([]int, n), make([]int, n)
	back, backOffsets := make([]int, n), make([]int, n)
	tokens, routed := make([]float32, n*most), make([]float32, n*most)
	routing := func(step, from, to int) int { // tokens of a pair
		popular := 1 + (to+step/20)%3
		return 64*popular + int(hash(uint32(step*64+from*8+to))%128)
	}
	for i := range n {
		offsets[i], backOffsets[i] = i*most, i*most
	}
	for {
		r.next()
		for layer := range 2 {
			r.compute(14 * ms) // attention
			here := 0
			for i := range n {
				counts[i], back[i] = routing(r.step+layer, r.rank(), i), routing(r.step+layer, i, r.rank())
				here += back[i]
			}
			for i := range tokens {
				tokens[i] = m.params[i%len(m.params)]
			}
			if layer == 1 && r.ctl.takeBug(BugSkip) {
				continue
			}
			if err := r.do(func(s *ccl.Stream) error {
				return r.world.AlltoAllv(s, ccl.Of(tokens), counts, offsets, ccl.Of(routed), back, backOffsets)
			}); err != nil {
				return err
			}
			r.compute(12*ms + time.Duration(here)*8*time.Microsecond) // the experts of this rank
			if err := r.do(func(s *ccl.Stream) error {
				return r.world.AlltoAllv(s, ccl.Of(routed), back, backOffsets, ccl.Of(tokens), counts, offsets)
			}); err != nil {
				return err
			}
		}
		m.gradients(r.step, r.rank())
		if err := r.allReduce(r.world, m.grads); err != nil {
			return err
		}
		m.update(m.grads, 0, n)
		r.compute(8 * ms)
		if err := r.loss(value(m.params) + value(tokens[:counts[0]])); err != nil {
			return err
		}
	}
}

// contextRing passes blocks around while it computes on the one that it has.
func contextRing(r *Rank) error {
	n := r.size()
	m := r.newModel(4096, 0)
	have, get := make([]float32, 8192), make([]float32, 8192)
	for {
		r.next()
		for i := range have {
			have[i] = m.params[i%4096] + float32(r.rank())
		}
		sum := float32(0)
		for range n - 1 {
			s := r.world.NewStream()
			err := r.world.Group(s, func(g *ccl.Group) error {
				if err := g.Send(ccl.Of(have), (r.rank()+1)%n); err != nil {
					return err
				}
				return g.Recv(ccl.Of(get), (r.rank()+n-1)%n)
			})
			if err != nil {
				return err
			}
			r.compute(25 * ms)
			if err := s.Wait(bg); err != nil {
				return err
			}
			have, get = get, have
			sum += value(have)
		}
		m.gradients(r.step, r.rank())
		if err := r.allReduce(r.world, m.grads); err != nil {
			return err
		}
		m.update(m.grads, 0, n)
		r.compute(15 * ms)
		if err := r.loss(value(m.params) + sum); err != nil {
			return err
		}
	}
}
