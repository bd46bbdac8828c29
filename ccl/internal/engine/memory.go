package engine

import (
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/reduce"
	"github.com/lockstep-ccl/lockstep/record"
)

// bytes returns the n bytes at r+pos. r is not in Acc.
func (e *Engine) bytes(r algo.Ref, pos, n int) []byte {
	off := r.Off + pos
	switch r.Space {
	case algo.SendBuf:
		return e.op.Send[off : off+n]
	case algo.RecvBuf:
		return e.op.Recv[off : off+n]
	case algo.Scratch:
		return e.scratch[off : off+n]
	}
	return e.op.Parts[r.Space-GroupSpace].Buf[off : off+n]
}

// opaque reports whether the CPU cannot read r.
func (e *Engine) opaque(r algo.Ref) bool {
	return r.Space >= GroupSpace && e.op.Parts[r.Space-GroupSpace].Opaque
}

// wide returns the float32 sums at r+pos in Acc, of elements that have n bytes in their own type.
func (e *Engine) wide(r algo.Ref, pos, n int) []float32 {
	at := (r.Off + pos) / 2
	return e.acc[at : at+n/2]
}

// take stores or reduces the bytes that arrived for st at pos.
func (e *Engine) take(st *algo.Step, pos int, in []byte) {
	n, dt, op := len(in), e.op.DType, e.op.Op
	toAcc := st.Dst.Space == algo.Acc
	if st.Act == algo.Recv {
		if toAcc {
			reduce.Widen(e.wide(st.Dst, pos, n), in, dt)
		} else {
			copy(e.bytes(st.Dst, pos, n), in)
		}
		return
	}
	switch fromAcc := st.Src.Space == algo.Acc; {
	case fromAcc:
		acc := e.wide(st.Src, pos, n)
		reduce.AccumulateF32(acc, in, dt, op)
		if !toAcc {
			e.narrow(e.bytes(st.Dst, pos, n), acc, st.Scale)
		}
	case toAcc:
		acc := e.wide(st.Dst, pos, n)
		reduce.Widen(acc, e.bytes(st.Src, pos, n), dt)
		reduce.AccumulateF32(acc, in, dt, op)
	default:
		dst := e.bytes(st.Dst, pos, n)
		reduce.Reduce(op, dt, dst, e.bytes(st.Src, pos, n), in)
		if st.Scale {
			reduce.Scale(dt, dst, e.op.Divisor)
		}
	}
}

// fold runs a Fold step.
func (e *Engine) fold(st *algo.Step) {
	src := e.bytes(st.Src, 0, st.Len)
	if st.Dst.Space == algo.Acc {
		reduce.AccumulateF32(e.wide(st.Dst, 0, st.Len), src, e.op.DType, e.op.Op)
		return
	}
	dst := e.bytes(st.Dst, 0, st.Len)
	reduce.Reduce(e.op.Op, e.op.DType, dst, dst, src)
	if st.Scale {
		reduce.Scale(e.op.DType, dst, e.op.Divisor)
	}
}

// copy runs a Copy step.
func (e *Engine) copy(st *algo.Step) {
	dst := e.bytes(st.Dst, 0, st.Len)
	if st.Src.Space == algo.Acc {
		e.narrow(dst, e.wide(st.Src, 0, st.Len), st.Scale)
		return
	}
	copy(dst, e.bytes(st.Src, 0, st.Len))
	if st.Scale {
		reduce.Scale(e.op.DType, dst, e.op.Divisor)
	}
}

// narrow rounds the sums in acc to the elements in dst. If scale is set it first divides them, so
// that the average is rounded once.
func (e *Engine) narrow(dst []byte, acc []float32, scale bool) {
	if scale && len(acc) > 0 {
		b := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(acc))), 4*len(acc))
		reduce.Scale(record.Float32, b, e.op.Divisor)
	}
	reduce.Narrow(dst, acc, e.op.DType)
}
