package proxy

import (
	"fmt"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/gpu"
	"github.com/lockstep-ccl/lockstep/record"
)

// splits has the function that cuts a collective into chunks, by kind. A kind without a row is an
// error. AlltoAll is sent as messages (allToAll).
var splits = map[record.CollKind]func(*pipeline){
	record.AllReduce:     (*pipeline).allReduce,
	record.ReduceScatter: (*pipeline).reduceScatter,
	record.AllGather:     (*pipeline).allGather,
	record.Broadcast:     (*pipeline).broadcast,
	record.Reduce:        (*pipeline).reduce,
	record.Barrier:       (*pipeline).barrier,
}

// Run puts a collective on a caller's stream.
func (n *Proxy) Run(s gpu.Stream, o *Call, send, recv cuda.Ptr, put func(*Op) error) error {
	if o.Coll == record.AlltoAll {
		return n.allToAll(s, o, send, recv, put)
	}
	split, ok := splits[o.Coll]
	if !ok {
		return fmt.Errorf("no %v between nodes with GPUs", o.Coll)
	}
	m := pipeline{n: n, o: o, send: send, recv: recv, size: o.DType.Size()}
	split(&m)
	return n.start(s, o, put, len(m.chunks), m.opening(), m.prepare, func(x *Op) error { return n.launch(s, x, m.chunks) })
}

// pipeline cuts one collective into chunks.
type pipeline struct {
	n          *Proxy
	o          *Call
	send, recv cuda.Ptr
	size       int // of an element
	via        *route
	chunks     []chunk
	first      gpu.Op // the node's collective at the beginning of the first chunk's stage; see begins
}

// partial returns the operator within the node. An average is divided once, at the end.
func (m *pipeline) partial() record.RedOp {
	if m.o.Op == record.Avg {
		return record.Sum
	}
	return m.o.Op
}

// step returns how many of count elements a chunk has, if a bounce buffer must hold shares times as
// many.
func (m *pipeline) step(count, shares int) int {
	room := m.n.bounceSize / shares &^ 511
	bytes := min(max(count*m.size/8, chunkLeast/shares), room)
	return max((bytes+511)&^511/m.size, 512/m.size)
}

// each cuts count elements into parts of step elements, and calls f for each part.
func each(count, step int, f func(off, n int)) {
	for off := 0; off < count; off += step {
		f(off, min(step, count-off))
	}
}

// at returns the address of element i.
func (m *pipeline) at(p cuda.Ptr, i int) cuda.Ptr { return p + cuda.Ptr(i*m.size) }

// within returns a collective within the node, and in runs one.
func (m *pipeline) within(coll record.CollKind, send, recv cuda.Ptr, count, stride, root int) gpu.Op {
	return gpu.Op{Coll: coll, DType: m.o.DType, RedOp: m.partial(), Root: root, Count: uint64(count), Stride: uint64(stride), Send: send, Recv: recv}
}

func (m *pipeline) in(s gpu.Stream, coll record.CollKind, send, recv cuda.Ptr, count, stride, root int) error {
	op := m.within(coll, send, recv, count, stride, root)
	return m.n.gpu.Run(s, &op)
}

// begins notes the collective within the node with which the stage of the first chunk begins.
func (m *pipeline) begins(coll record.CollKind, send, recv cuda.Ptr, count, stride, root int) {
	if m.n.local > 1 && len(m.chunks) == 0 {
		m.first = m.within(coll, send, recv, count, stride, root)
	}
}

// opening returns the collective that begins has noted, or nil.
func (m *pipeline) opening() *gpu.Op {
	if m.first.Coll == record.CollNone {
		return nil
	}
	return &m.first
}

// call returns the network's part of a chunk.
func (m *pipeline) call(coll record.CollKind, count int, root int32) algo.Call {
	return algo.Call{Coll: coll, DType: m.o.DType, Op: m.o.Op, Root: root, Count: count, InPlace: true}
}

func (m *pipeline) copy(s gpu.Stream, dst, src cuda.Ptr, elements int) error {
	if elements == 0 {
		return nil
	}
	return s.Copy(dst, src, uint64(elements*m.size))
}

// folds reports whether the network gathers the nodes' contributions for the GPU to reduce. Otherwise
// the CPU reduces them on the way. Between two nodes, both send the same number of bytes. The CPU
// cannot reduce 8-bit floats.
func (m *pipeline) folds() bool {
	return len(m.via.members) == 2 || m.o.DType == record.Float8E4M3 || m.o.DType == record.Float8E5M2
}

// fold reduces k elements of each member into dst. Members' elements are k apart in scratch. This
// rank's are at own instead, if own is not 0.
func (m *pipeline) fold(s gpu.Stream, dst, own cuda.Ptr, k int) error {
	srcs := make([]cuda.Ptr, len(m.via.members))
	for i := range srcs {
		srcs[i] = m.at(m.n.scratch, i*k)
	}
	if own != 0 {
		srcs[m.via.place.Rank] = own
	}
	for {
		n, op := min(len(srcs), gpu.MaxRanks), m.o.Op
		if n < len(srcs) {
			op = m.partial()
		}
		if err := m.n.gpu.Fold(s.Stream, m.o.DType, op, dst, srcs[:n], uint64(k), m.n.cfg.Size); err != nil {
			return err
		}
		if n == len(srcs) {
			return nil
		}
		srcs = srcs[n-1:]
		srcs[0] = dst
	}
}

// take copies k elements of the network's result to dst, and reduces them if folds. own is this rank's
// part in device memory, 0 if it is only in the bounce buffer.
func (m *pipeline) take(s gpu.Stream, bounce, dst, own cuda.Ptr, k int) error {
	if !m.folds() {
		return m.copy(s, dst, bounce, k)
	}
	if err := m.fetch(s, bounce, own != 0, k); err != nil {
		return err
	}
	return m.fold(s, dst, own, k)
}

// fetch copies k elements of each member from the bounce buffer to scratch. With others it omits this
// rank's.
func (m *pipeline) fetch(s gpu.Stream, bounce cuda.Ptr, others bool, k int) error {
	all, self := len(m.via.members), m.via.place.Rank
	if !others {
		return m.copy(s, m.n.scratch, bounce, all*k)
	}
	for _, part := range [][2]int{{0, self}, {self + 1, all}} {
		if err := m.copy(s, m.at(m.n.scratch, part[0]*k), m.at(bounce, part[0]*k), (part[1]-part[0])*k); err != nil {
			return err
		}
	}
	return nil
}

// kept returns the address of element i of what this rank staged in the GPU's memory, 0 if it staged
// in pinned memory.
func (m *pipeline) kept(bounce, staged cuda.Ptr, i int) cuda.Ptr {
	if staged == bounce {
		return 0
	}
	return m.at(staged, i)
}

// reducing returns a chunk of k elements that are reduced between nodes. own is the index of this rank's
// elements in the bounce buffer.
func (m *pipeline) reducing(coll record.CollKind, k int, root int32) (c chunk, own int) {
	c.call = m.call(coll, k, root)
	if !m.folds() {
		return c, 0
	}
	if c.call.Coll = record.AllGather; coll == record.Reduce {
		c.call.Coll = record.Gather
	}
	own = m.via.place.Rank * k
	c.send = own * m.size
	return c, own
}

// allReduce: a ReduceScatter within each node, an AllReduce of each share between nodes, and an
// AllGather within each node. The whole chunk is reduced within the node if it is small.
func (m *pipeline) allReduce() {
	n := m.n
	m.via = &n.rail
	m.shared(m.o.Count, func(off, k, own, mine int, gather bool) {
		send, recv, part := m.at(m.send, off), m.at(m.recv, off), m.at(m.recv, own)
		c, self := m.reducing(record.AllReduce, mine, -1)
		from := part
		if n.local == 1 {
			from = send
		}
		if gather {
			m.begins(record.ReduceScatter, send, part, mine, 0, -1)
		} else {
			m.begins(record.AllReduce, send, recv, k, 0, -1)
		}
		c.stage = func(s gpu.Stream, bounce cuda.Ptr) (err error) {
			switch {
			case n.local == 1:
			case gather:
				err = m.in(s, record.ReduceScatter, send, part, mine, 0, -1)
			default:
				err = m.in(s, record.AllReduce, send, recv, k, 0, -1)
			}
			if err != nil {
				return err
			}
			return m.copy(s, m.at(bounce, self), from, mine)
		}
		c.land = func(s gpu.Stream, bounce, _ cuda.Ptr) error {
			if err := m.take(s, bounce, part, from, mine); err != nil || !gather {
				return err
			}
			return m.in(s, record.AllGather, part, recv, mine, 0, -1)
		}
		m.chunks = append(m.chunks, c)
	})
}

// barrier: a barrier within each node, then one between nodes.
func (m *pipeline) barrier() {
	n := m.n
	m.via = &n.rail
	m.begins(record.Barrier, 0, 0, 0, 0, -1)
	m.chunks = append(m.chunks, chunk{
		call: m.call(record.Barrier, 0, -1),
		stage: func(s gpu.Stream, _ cuda.Ptr) error {
			if n.local == 1 {
				return nil
			}
			return m.in(s, record.Barrier, 0, 0, 0, 0, -1)
		},
		land: func(gpu.Stream, cuda.Ptr, cuda.Ptr) error { return nil },
	})
}

// reduceScatter: a ReduceScatter within this node for each node's result, then one between the ranks
// of each index.
func (m *pipeline) reduceScatter() {
	n, count := m.n, m.o.Count
	if m.via = &n.all; n.major {
		m.via = &n.rail
	}
	others, self, width := len(m.via.members), m.via.place.Rank, len(m.via.members)
	if m.folds() {
		width *= 2
	}
	each(count, m.step(count, width), func(off, k int) {
		call, got := m.call(record.ReduceScatter, k, -1), self*k
		if m.folds() {
			call.Coll, call.InPlace, got = record.AlltoAll, false, others*k
		}
		if n.major {
			m.begins(record.ReduceScatter, m.at(m.send, off), n.scratch, k, count, -1)
		}
		m.chunks = append(m.chunks, chunk{
			call: call, recv: got * m.size,
			stage: func(s gpu.Stream, bounce cuda.Ptr) error {
				for i := range others {
					if !n.major {
						if err := m.copy(s, m.at(bounce, i*k), m.at(m.send, i*count+off), k); err != nil {
							return err
						}
						continue
					}
					from := m.at(m.send, i*n.local*count+off)
					if err := m.in(s, record.ReduceScatter, from, m.at(n.scratch, i*k), k, count, -1); err != nil {
						return err
					}
				}
				if !n.major {
					return nil
				}
				return m.copy(s, bounce, n.scratch, others*k)
			},
			land: func(s gpu.Stream, bounce, staged cuda.Ptr) error {
				return m.take(s, m.at(bounce, got), m.at(m.recv, off), m.kept(bounce, staged, self*k), k)
			},
		})
	})
}

// allGather: an AllGather between the ranks of each index, then one within the node for each node's
// contributions.
func (m *pipeline) allGather() {
	n, count := m.n, m.o.Count
	if m.via = &n.all; n.major {
		m.via = &n.rail
	}
	others, self := len(m.via.members), m.via.place.Rank
	each(count, m.step(count, others), func(off, k int) {
		m.chunks = append(m.chunks, chunk{
			call: m.call(record.AllGather, k, -1), send: self * k * m.size,
			stage: func(s gpu.Stream, bounce cuda.Ptr) error {
				return m.copy(s, m.at(bounce, self*k), m.at(m.send, off), k)
			},
			land: func(s gpu.Stream, bounce, staged cuda.Ptr) error {
				own := m.kept(bounce, staged, self*k)
				part := func(of cuda.Ptr, i int) cuda.Ptr {
					if i == self && own != 0 {
						return own
					}
					return m.at(of, i*k)
				}
				if n.major {
					if err := m.fetch(s, bounce, own != 0, k); err != nil {
						return err
					}
				}
				for i := range others {
					if !n.major {
						if err := m.copy(s, m.at(m.recv, i*count+off), part(bounce, i), k); err != nil {
							return err
						}
						continue
					}
					to := m.at(m.recv, i*n.local*count+off)
					if err := m.in(s, record.AllGather, part(n.scratch, i), to, k, count, -1); err != nil {
						return err
					}
				}
				return nil
			},
		})
	})
}

// locate returns a rank's position on the route, and its index on its node.
func (m *pipeline) locate(rank int) (node, index int) {
	n, p := m.n, &m.n.place
	if n.local == 1 {
		return rank, 0
	}
	for _, r := range p.Ring {
		if p.Node[r] == p.Node[rank] {
			if r == rank {
				break
			}
			index++
		}
	}
	for i, r := range n.rail.members {
		if p.Node[r] == p.Node[rank] {
			node = i
		}
	}
	return node, index
}

// broadcast: a Broadcast within the root's node, a Broadcast of each share to the ranks of the same
// index, and an AllGather within each other node.
func (m *pipeline) broadcast() {
	n, count := m.n, m.o.Count
	m.via = &n.rail
	node, index := m.locate(int(m.o.Root))
	first := m.via.place.Rank == node // this rank's node is root's
	add := func(off, k, own, mine int, gather bool) {
		if first {
			m.begins(record.Broadcast, 0, m.at(m.recv, off), k, 0, index)
		}
		m.chunks = append(m.chunks, chunk{
			call: m.call(record.Broadcast, mine, int32(node)),
			stage: func(s gpu.Stream, bounce cuda.Ptr) error {
				if !first {
					return nil
				}
				from := m.at(m.send, own)
				if n.local > 1 {
					send := cuda.Ptr(0)
					if n.index == index {
						send = m.at(m.send, off)
					}
					if err := m.in(s, record.Broadcast, send, m.at(m.recv, off), k, 0, index); err != nil {
						return err
					}
					from = m.at(m.recv, own)
				}
				return m.copy(s, bounce, from, mine)
			},
			land: func(s gpu.Stream, bounce, _ cuda.Ptr) error {
				if first {
					if n.local == 1 && m.recv != m.send {
						return m.copy(s, m.at(m.recv, off), m.at(m.send, off), k)
					}
					return nil
				}
				if err := m.copy(s, m.at(m.recv, own), bounce, mine); err != nil || !gather {
					return err
				}
				return m.in(s, record.AllGather, m.at(m.recv, own), m.at(m.recv, off), mine, 0, -1)
			},
		})
	}
	m.shared(count, add)
}

// shared cuts count elements into chunks. add gets the offset and length of each chunk (off, k), and
// those of this rank's part (own, mine). With gather, the node's ranks have a share each. Otherwise each
// rank sends the whole chunk.
func (m *pipeline) shared(count int, add func(off, k, own, mine int, gather bool)) {
	n := m.n
	width := 1
	if m.o.Coll != record.Broadcast && m.folds() {
		width = len(m.via.members)
	}
	if n.local == 1 || count*m.size <= wholeMost {
		each(count, m.step(count, width), func(off, k int) { add(off, k, off, k, false) })
		return
	}
	shares := count / n.local
	each(shares, m.step(shares, width), func(done, k int) {
		off := done * n.local
		add(off, k*n.local, off+n.index*k, k, true)
	})
	if rest := count % n.local; rest > 0 {
		add(count-rest, rest, count-rest, rest, false)
	}
}

// reduce: a ReduceScatter within each node, a Reduce of each share to the root's node, whose ranks
// then send their shares to the root.
func (m *pipeline) reduce() {
	n, count := m.n, m.o.Count
	m.via = &n.rail
	node, index := m.locate(int(m.o.Root))
	last := m.via.place.Rank == node
	root := last && n.index == index
	add := func(off, k, own, mine int, gather bool) {
		c, self := m.reducing(record.Reduce, mine, int32(node))
		if gather {
			m.begins(record.ReduceScatter, m.at(m.send, off), n.scratch, mine, 0, -1)
		} else {
			m.begins(record.AllReduce, m.at(m.send, off), n.scratch, k, 0, -1)
		}
		c.stage = func(s gpu.Stream, bounce cuda.Ptr) (err error) {
			from := m.at(m.send, off)
			switch {
			case n.local == 1:
			case gather:
				err = m.in(s, record.ReduceScatter, from, n.scratch, mine, 0, -1)
				from = n.scratch
			default:
				err = m.in(s, record.AllReduce, from, n.scratch, k, 0, -1)
				from = n.scratch
			}
			if err != nil {
				return err
			}
			return m.copy(s, m.at(bounce, self), from, mine)
		}
		c.land = func(s gpu.Stream, bounce, staged cuda.Ptr) error {
			if !last || !root && !gather {
				return nil
			}
			dst := n.scratch
			if root {
				dst = m.at(m.recv, own)
			}
			if err := m.take(s, bounce, dst, m.kept(bounce, staged, self), mine); err != nil || !gather {
				return err
			}
			bytes := uint64(mine * m.size)
			msgs := []gpu.Message{{Peer: index, Send: true, Buf: dst, Bytes: bytes}}
			if root {
				msgs = msgs[:0]
				for i := range n.local {
					if i != index {
						msgs = append(msgs, gpu.Message{Peer: i, Buf: m.at(m.recv, off+i*mine), Bytes: bytes})
					}
				}
			}
			return n.gpu.Exchange(s, record.Reduce, msgs, 0)
		}
		m.chunks = append(m.chunks, c)
	}
	m.shared(count, add)
}
