package reduce

import (
	"fmt"
	"math"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/record"
)

const (
	numTypes = int(record.BFloat16) + 1
	numOps   = int(record.Avg) + 1
)

// kernel combines n elements: dst[i] = a[i] op b[i].
type kernel func(dst, a, b unsafe.Pointer, n int)

// Reduce stores a[i] op b[i] in dst[i] for every element of type dt. The three
// slices have the same length, a multiple of dt.Size(); dst may be a or b
// itself but may not overlap them in part. Avg sums: the caller ends with Scale
// once all ranks are in. Reduce panics when the lengths differ, hold a fraction
// of an element, or op or dt is unknown.
func Reduce(op record.RedOp, dt record.DType, dst, a, b []byte) {
	n := count(dt, len(dst))
	if len(a) != len(dst) || len(b) != len(dst) {
		panic(fmt.Sprintf("reduce: lengths differ: dst %d, a %d, b %d bytes", len(dst), len(a), len(b)))
	}
	if int(op) >= numOps {
		panic(fmt.Sprintf("reduce: unknown operator %v", op))
	}
	if n == 0 {
		return
	}
	pd, pa, pb := base(dst), base(a), base(b)
	if v := vector[dt][op]; v != nil {
		if done := n &^ (vectorBytes/dt.Size() - 1); done > 0 {
			v(pd, pa, pb, done)
			if n -= done; n == 0 {
				return
			}
			skip := done * dt.Size()
			pd, pa, pb = unsafe.Add(pd, skip), unsafe.Add(pa, skip), unsafe.Add(pb, skip)
		}
	}
	portable[dt][op](pd, pa, pb, n)
}

// AccumulateF32 stores dst[i] op widen(src[i]) in dst[i], so that many
// contributions of a 16-bit type are combined with one rounding at the end (see
// Narrow). dt is Float16 or BFloat16 and src has two bytes for each element of
// dst, or AccumulateF32 panics. The slices may not overlap.
func AccumulateF32(dst []float32, src []byte, dt record.DType, op record.RedOp) {
	f := pairOf(dt, len(dst), len(src))
	if int(op) >= numOps {
		panic(fmt.Sprintf("reduce: unknown operator %v", op))
	}
	n, i := len(dst), 0
	pd, ps := floats(dst), base(src)
	if v := f.vecAccumulate[op]; v != nil {
		if i = n &^ (vectorHalves - 1); i > 0 {
			v(pd, ps, i)
		}
	}
	var wide [halfBlock]float32
	pw := noescape(unsafe.Pointer(&wide))
	for ; i < n; i += halfBlock {
		m := min(n-i, halfBlock)
		f.widen(pw, unsafe.Add(ps, 2*i), m)
		portable[record.Float32][op](unsafe.Add(pd, 4*i), unsafe.Add(pd, 4*i), pw, m)
	}
}

// Widen converts every element of src, of type Float16 or BFloat16, to float32.
// src has two bytes for each element of dst, or Widen panics. It is exact; a
// float16 NaN becomes quiet and keeps sign and payload.
func Widen(dst []float32, src []byte, dt record.DType) {
	f := pairOf(dt, len(dst), len(src))
	convert(f.widen, f.vecWiden, floats(dst), base(src), len(dst), 4, 2)
}

// Narrow rounds every element of src to type dt (Float16 or BFloat16), to
// nearest with ties to even: too large becomes infinite, too small denormal or
// zero, and a NaN becomes quiet and keeps its sign and the payload's upper bits.
// dst has two bytes for each element of src, or Narrow panics.
func Narrow(dst []byte, src []float32, dt record.DType) {
	f := pairOf(dt, len(src), len(dst))
	convert(f.narrow, f.vecNarrow, base(dst), floats(src), len(src), 2, 4)
}

// Scale divides every element by divisor in place, as Avg ends: floats divide
// and round (16-bit floats through float32), integers truncate toward zero. It
// panics unless 1 ≤ divisor ≤ math.MaxInt32 and dst holds whole elements.
func Scale(dt record.DType, dst []byte, divisor int) {
	n := count(dt, len(dst))
	if divisor < 1 || divisor > math.MaxInt32 {
		panic(fmt.Sprintf("reduce: divisor %d is not in 1..%d", divisor, math.MaxInt32))
	}
	if divisor == 1 || n == 0 {
		return
	}
	p := base(dst)
	if v := vectorScale[dt]; v != nil {
		if done := n &^ (vectorBytes/dt.Size() - 1); done > 0 {
			v(p, done, divisor)
			if n -= done; n == 0 {
				return
			}
			p = unsafe.Add(p, done*dt.Size())
		}
	}
	portableScale[dt](p, n, divisor)
}

// count returns how many elements of type dt fill size bytes.
func count(dt record.DType, size int) int {
	w := dt.Size()
	if w != 0 && int(dt) >= numTypes {
		panic(fmt.Sprintf("reduce: %v is not reduced on the CPU", dt))
	}
	if w == 0 || size&(w-1) != 0 {
		panic(fmt.Sprintf("reduce: %d bytes are not whole elements of %v", size, dt))
	}
	return size / w
}

// halfFormat is how one 16-bit float type is converted.
type halfFormat struct {
	widen, narrow       func(dst, src unsafe.Pointer, n int)
	vecWiden, vecNarrow func(dst, src unsafe.Pointer, n int) // nil, or for multiples of vectorHalves
	vecAccumulate       [numOps]func(dst, src unsafe.Pointer, n int)
}

// vectorHalves is how many 16-bit elements the vector converters take at a time.
const vectorHalves = 8

func pairOf(dt record.DType, elems, size int) *halfFormat {
	if size != 2*elems {
		panic(fmt.Sprintf("reduce: %d bytes do not hold %d elements of %v", size, elems, dt))
	}
	switch dt {
	case record.Float16:
		return &float16
	case record.BFloat16:
		return &bfloat16
	}
	panic(fmt.Sprintf("reduce: %v is not a 16-bit float", dt))
}

func convert(scalar, vec func(dst, src unsafe.Pointer, n int), dst, src unsafe.Pointer, n, dw, sw int) {
	if vec != nil {
		if done := n &^ (vectorHalves - 1); done > 0 {
			vec(dst, src, done)
			if n -= done; n == 0 {
				return
			}
			dst, src = unsafe.Add(dst, dw*done), unsafe.Add(src, sw*done)
		}
	}
	if n > 0 {
		scalar(dst, src, n)
	}
}

// base returns the address of b's first byte, hidden from escape analysis: the
// kernels are called through tables but none of them keeps a pointer, so a
// caller's array may stay on its stack.
func base(b []byte) unsafe.Pointer { return noescape(unsafe.Pointer(unsafe.SliceData(b))) }

// noescape must stay a call. Inlined, its result is the integer to the compiler: a stack
// that moves while a kernel runs then leaves what is held of it pointing to where the
// array was.
//
//go:noinline
//go:nosplit
func noescape(p unsafe.Pointer) unsafe.Pointer {
	word := uintptr(p)
	return *(*unsafe.Pointer)(unsafe.Pointer(&word))
}

func floats(f []float32) unsafe.Pointer { return noescape(unsafe.Pointer(unsafe.SliceData(f))) }
