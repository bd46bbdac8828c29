package proxy

import (
	"slices"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/engine"
	"github.com/lockstep-ccl/lockstep/ccl/internal/gpu"
	"github.com/lockstep-ccl/lockstep/ccl/internal/rdma"
	"github.com/lockstep-ccl/lockstep/record"
)

// chunk is the part of an operation that one bounce buffer holds at a time. stage copies the
// chunk's input to the buffer, land copies its result from it. The two buffers differ where the
// input is staged in the GPU's memory.
type chunk struct {
	call       algo.Call
	send, recv int // where in the bounce buffer
	stage      func(s gpu.Stream, bounce cuda.Ptr) error
	land       func(s gpu.Stream, bounce, staged cuda.Ptr) error
}

func (k *chunk) bytes() int { return k.call.Count * k.call.DType.Size() }

// plan is how an operation goes over the network. With direct, its large chunks are staged in
// the GPU's memory.
type plan struct {
	sched  *algo.Schedule
	direct bool
}

// onGPU reports whether a chunk is staged in the GPU's memory. A small one is not: waiting
// until peers have it costs more than its copy to pinned memory.
func (p *plan) onGPU(k *chunk) bool { return p.direct && k.bytes() >= rdma.KeptFrom }

// launch puts the stream's part of an operation of chunks on it.
func (n *Proxy) launch(s gpu.Stream, x *Op, chunks []chunk) error {
	count := x.reached
	staged := func(i int) cuda.Ptr {
		if x.onGPU(&chunks[i]) {
			return n.directAt(i % bounces)
		}
		return n.bounceAt[i%bounces]
	}
	for i := range len(chunks) + lead {
		if i < len(chunks) {
			if err := chunks[i].stage(s, staged(i)); err != nil {
				return err
			}
			count++
			if err := s.Write32(n.reachedAt, count); err != nil {
				return err
			}
		}
		if done := i - lead; done >= 0 {
			if err := s.Wait32(n.passedAt, x.passed+uint32(done)+1); err != nil {
				return err
			}
			if err := chunks[done].land(s, n.bounceAt[done%bounces], staged(done)); err != nil {
				return err
			}
		}
	}
	return nil
}

// zeroCopy reports whether chunks are so large that a NIC may send them from their bounce buffers.
func (n *Proxy) zeroCopy(chunks []chunk) bool {
	return slices.ContainsFunc(chunks, func(k chunk) bool { return k.bytes() >= rdma.KeptFrom })
}

// schedule is the network's part of an operation, kept by the operation's shape. Input may be
// staged in the GPU's memory only where NICs alone read it. When a schedule has the CPU read
// it, or send it through shared memory to a rank of this node, it is built again with pinned
// memory.
func (n *Proxy) schedule(o *Call, r *route, chunks []chunk) (plan, error) {
	key := algo.Call{Coll: o.Coll, DType: o.DType, Op: o.Op, Root: o.Root, Count: o.Count}
	if p, ok := n.schedules[key]; ok {
		return p, nil
	}
	p := plan{direct: n.direct.has()}
	var err error
	if p.sched, err = n.chain(r, chunks, &p); err != nil {
		return plan{}, err
	}
	for i := 0; i < bounces && p.direct; i++ {
		if !p.sched.OnlySends(engine.GroupSpace+partDirect+algo.Space(i), n.place.Local) {
			p.direct = false
			if p.sched, err = n.chain(r, chunks, &p); err != nil {
				return plan{}, err
			}
		}
	}
	if n.local > 1 && r == &n.rail {
		p.sched.Algo = record.AlgoHierarchical
	}
	if len(n.schedules) >= schedulesMost {
		clear(n.schedules)
	}
	n.schedules[key] = p
	return p, nil
}

// chain is the schedule of chunks, staged as p says.
func (n *Proxy) chain(r *route, chunks []chunk, p *plan) (*algo.Schedule, error) {
	pieces := make([]algo.Piece, len(chunks))
	for i := range chunks {
		k := &chunks[i]
		call, recv := k.call, engine.GroupSpace+partBounce+algo.Space(i%bounces)
		send := recv
		if p.onGPU(k) {
			call.InPlace, call.Apart = false, true
			send += partDirect - partBounce
		}
		pieces[i] = algo.Piece{
			Call: call, Place: &r.place, Members: r.members,
			Choice: n.cfg.Choose(call, &r.place),
			Send:   algo.Ref{Space: send, Off: k.send}, Recv: algo.Ref{Space: recv, Off: k.recv},
		}
	}
	return algo.Chain(pieces)
}

// schedulesMost bounds how many schedules are kept.
const schedulesMost = 256
