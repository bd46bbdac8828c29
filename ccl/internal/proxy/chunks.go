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

// chunk is the part of an operation that one bounce buffer holds. stage copies the chunk's input to
// a bounce buffer, and land copies its result from one. The two differ if the input is staged in the
// GPU's memory.
type chunk struct {
	call       algo.Call
	send, recv int // offsets in the bounce buffer, in bytes
	stage      func(s gpu.Stream, bounce cuda.Ptr) error
	land       func(s gpu.Stream, bounce, staged cuda.Ptr) error
}

func (k *chunk) bytes() int { return k.call.Count * k.call.DType.Size() }

// plan is the network's part of an operation. With direct, large chunks are staged in the GPU's
// memory.
type plan struct {
	sched  *algo.Schedule
	direct bool
}

// onGPU reports whether a chunk is staged in the GPU's memory. For a small chunk, the wait until
// peers have it would cost more than the copy to pinned memory.
func (p *plan) onGPU(k *chunk) bool { return p.direct && k.bytes() >= rdma.KeptFrom }

// prepare makes everything ready that an operation needs before any of it is on the stream.
func (m *pipeline) prepare(x *Op) (err error) {
	n := m.n
	// Every rank loads the kernels, also one that will launch none of them: a rank on the same GPU would
	// load them behind the waits of this one's stream, which are for that rank.
	if m.o.Coll.Reduces() && (n.local > 1 || m.folds()) {
		if err := n.gpu.Load(m.o.DType); err != nil {
			return err
		}
	}
	x.gate, x.returns = x.chunkGate, x.returned
	if n.zeroCopy(m.chunks) {
		x.peers = m.via.peers
	}
	x.plan, err = n.schedule(m.o, m.via, m.chunks)
	return err
}

// launch puts the stream's part of an operation on the stream.
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

// zeroCopy reports whether a NIC may send some of the chunks from their bounce buffers.
func (n *Proxy) zeroCopy(chunks []chunk) bool {
	return slices.ContainsFunc(chunks, func(k chunk) bool { return k.bytes() >= rdma.KeptFrom })
}

// schedule returns the plan of an operation, from a cache by the operation's shape. Input is staged
// in the GPU's memory only if no one but NICs reads it. If the CPU would read it, or send it through
// shared memory to a rank of this node, schedule builds the plan with pinned memory instead.
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

// chain returns the schedule of chunks, which are staged as p says.
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

// schedulesMost bounds the cache of schedule.
const schedulesMost = 256
