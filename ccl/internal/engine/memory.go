package engine

import (
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/reduce"
	"github.com/lockstep-ccl/lockstep/record"
)

// memory is where a step's bytes are: the caller's buffers, and the engine's own.
type memory struct {
	op      *Op // nil between operations
	scratch []byte
	acc     []float32
}

// bytes returns the n bytes at r+pos. r is not in Acc.
func (m *memory) bytes(r algo.Ref, pos, n int) []byte {
	off := r.Off + pos
	switch r.Space {
	case algo.SendBuf:
		return m.op.Send[off : off+n]
	case algo.RecvBuf:
		return m.op.Recv[off : off+n]
	case algo.Scratch:
		return m.scratch[off : off+n]
	}
	return m.op.Parts[r.Space-GroupSpace].Buf[off : off+n]
}

// opaque reports whether the CPU cannot read r.
func (m *memory) opaque(r algo.Ref) bool {
	return r.Space >= GroupSpace && m.op.Parts[r.Space-GroupSpace].Opaque
}

// wide returns the float32 sums at r+pos in Acc, of elements that have n bytes in their own type.
func (m *memory) wide(r algo.Ref, pos, n int) []float32 {
	at := (r.Off + pos) / 2
	return m.acc[at : at+n/2]
}

// take stores or reduces the bytes that arrived for st at pos.
func (m *memory) take(st *algo.Step, pos int, in []byte) {
	n, dt, op := len(in), m.op.DType, m.op.Op
	toAcc := st.Dst.Space == algo.Acc
	if st.Act == algo.Recv {
		if toAcc {
			reduce.Widen(m.wide(st.Dst, pos, n), in, dt)
		} else {
			copy(m.bytes(st.Dst, pos, n), in)
		}
		return
	}
	switch fromAcc := st.Src.Space == algo.Acc; {
	case fromAcc:
		acc := m.wide(st.Src, pos, n)
		reduce.AccumulateF32(acc, in, dt, op)
		if !toAcc {
			m.narrow(m.bytes(st.Dst, pos, n), acc, st.Scale)
		}
	case toAcc:
		acc := m.wide(st.Dst, pos, n)
		reduce.Widen(acc, m.bytes(st.Src, pos, n), dt)
		reduce.AccumulateF32(acc, in, dt, op)
	default:
		dst := m.bytes(st.Dst, pos, n)
		reduce.Reduce(op, dt, dst, m.bytes(st.Src, pos, n), in)
		if st.Scale {
			reduce.Scale(dt, dst, m.op.Divisor)
		}
	}
}

// fold runs a Fold step.
func (m *memory) fold(st *algo.Step) {
	src := m.bytes(st.Src, 0, st.Len)
	if st.Dst.Space == algo.Acc {
		reduce.AccumulateF32(m.wide(st.Dst, 0, st.Len), src, m.op.DType, m.op.Op)
		return
	}
	dst := m.bytes(st.Dst, 0, st.Len)
	reduce.Reduce(m.op.Op, m.op.DType, dst, dst, src)
	if st.Scale {
		reduce.Scale(m.op.DType, dst, m.op.Divisor)
	}
}

// copy runs a Copy step.
func (m *memory) copy(st *algo.Step) {
	dst := m.bytes(st.Dst, 0, st.Len)
	if st.Src.Space == algo.Acc {
		m.narrow(dst, m.wide(st.Src, 0, st.Len), st.Scale)
		return
	}
	copy(dst, m.bytes(st.Src, 0, st.Len))
	if st.Scale {
		reduce.Scale(m.op.DType, dst, m.op.Divisor)
	}
}

// narrow rounds the sums in acc to the elements in dst. If scale is set it first divides them, so
// that the average is rounded once.
func (m *memory) narrow(dst []byte, acc []float32, scale bool) {
	if scale && len(acc) > 0 {
		b := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(acc))), 4*len(acc))
		reduce.Scale(record.Float32, b, m.op.Divisor)
	}
	reduce.Narrow(dst, acc, m.op.DType)
}
