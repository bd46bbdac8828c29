package reduce

import (
	"math"
	"math/bits"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/record"
)

// The portable kernels define what every other path must reproduce.

type integer interface {
	int8 | uint8 | int32 | uint32 | int64 | uint64
}

type float interface{ float32 | float64 }

var portable = [numTypes][numOps]kernel{
	record.Int8:     integers[int8](),
	record.Uint8:    integers[uint8](),
	record.Int32:    integers[int32](),
	record.Uint32:   integers[uint32](),
	record.Int64:    integers[int64](),
	record.Uint64:   integers[uint64](),
	record.Float16:  halves(&float16),
	record.Float32:  floatings[float32](),
	record.Float64:  floatings[float64](),
	record.BFloat16: halves(&bfloat16),
}

func integers[T integer]() [numOps]kernel {
	return [numOps]kernel{
		record.Sum: sumInt[T], record.Prod: prodInt[T], record.Max: maxInt[T], record.Min: minInt[T], record.Avg: sumInt[T],
	}
}

func floatings[T float]() [numOps]kernel {
	return [numOps]kernel{
		record.Sum: sumFloat[T], record.Prod: prodFloat[T], record.Max: maxFloat[T], record.Min: minFloat[T], record.Avg: sumFloat[T],
	}
}

// slices views three arrays such that the compiler drops the bounds checks of a
// loop over the first.
func slices[T any](dst, a, b unsafe.Pointer, n int) (d, x, y []T) {
	return unsafe.Slice((*T)(dst), n), unsafe.Slice((*T)(a), n), unsafe.Slice((*T)(b), n)
}

func sumInt[T integer](dst, a, b unsafe.Pointer, n int) {
	d, x, y := slices[T](dst, a, b, n)
	x, y = x[:len(d)], y[:len(d)]
	for i := range d {
		d[i] = x[i] + y[i]
	}
}

func prodInt[T integer](dst, a, b unsafe.Pointer, n int) {
	d, x, y := slices[T](dst, a, b, n)
	x, y = x[:len(d)], y[:len(d)]
	for i := range d {
		d[i] = x[i] * y[i]
	}
}

func maxInt[T integer](dst, a, b unsafe.Pointer, n int) {
	d, x, y := slices[T](dst, a, b, n)
	x, y = x[:len(d)], y[:len(d)]
	for i := range d {
		d[i] = max(x[i], y[i])
	}
}

func minInt[T integer](dst, a, b unsafe.Pointer, n int) {
	d, x, y := slices[T](dst, a, b, n)
	x, y = x[:len(d)], y[:len(d)]
	for i := range d {
		d[i] = min(x[i], y[i])
	}
}

// quietNaN converts to float32's 0x7fc00000, float16's 0x7e00 and bfloat16's 0x7fc0.
var quietNaN = math.Float64frombits(0x7ff8000000000000)

func sumFloat[T float](dst, a, b unsafe.Pointer, n int) {
	d, x, y := slices[T](dst, a, b, n)
	x, y = x[:len(d)], y[:len(d)]
	nan := T(quietNaN)
	for i := range d {
		r := x[i] + y[i]
		if r != r {
			r = nan
		}
		d[i] = r
	}
}

func prodFloat[T float](dst, a, b unsafe.Pointer, n int) {
	d, x, y := slices[T](dst, a, b, n)
	x, y = x[:len(d)], y[:len(d)]
	nan := T(quietNaN)
	for i := range d {
		r := x[i] * y[i]
		if r != r {
			r = nan
		}
		d[i] = r
	}
}

func maxFloat[T float](dst, a, b unsafe.Pointer, n int) {
	d, x, y := slices[T](dst, a, b, n)
	x, y = x[:len(d)], y[:len(d)]
	nan := T(quietNaN)
	for i := range d {
		p, q := x[i], y[i]
		if p != p {
			p = q
		}
		if q != q {
			q = p
		}
		if p != p {
			d[i] = nan
		} else {
			d[i] = max(p, q)
		}
	}
}

func minFloat[T float](dst, a, b unsafe.Pointer, n int) {
	d, x, y := slices[T](dst, a, b, n)
	x, y = x[:len(d)], y[:len(d)]
	nan := T(quietNaN)
	for i := range d {
		p, q := x[i], y[i]
		if p != p {
			p = q
		}
		if q != q {
			q = p
		}
		if p != p {
			d[i] = nan
		} else {
			d[i] = min(p, q)
		}
	}
}

// halfBlock is how many 16-bit elements are widened at a time: few enough for
// the first-level cache, so the conversion costs no traffic of its own.
const halfBlock = 32

func halves(f *halfFormat) [numOps]kernel {
	op := func(combine kernel) kernel {
		return func(dst, a, b unsafe.Pointer, n int) {
			var x, y [halfBlock]float32
			px, py := noescape(unsafe.Pointer(&x)), noescape(unsafe.Pointer(&y))
			for i := 0; i < n; i += halfBlock {
				m := min(n-i, halfBlock)
				f.widen(px, unsafe.Add(a, 2*i), m)
				f.widen(py, unsafe.Add(b, 2*i), m)
				combine(px, px, py, m)
				f.narrow(unsafe.Add(dst, 2*i), px, m)
			}
		}
	}
	k := floatings[float32]()
	for i := range k {
		k[i] = op(k[i])
	}
	return k
}

var portableScale = [numTypes]func(p unsafe.Pointer, n, divisor int){
	record.Int8:     scaleSigned[int8],
	record.Uint8:    scaleUnsigned[uint8],
	record.Int32:    scaleSigned[int32],
	record.Uint32:   scaleUnsigned[uint32],
	record.Int64:    scaleWide[int64],
	record.Uint64:   scaleWide[uint64],
	record.Float16:  scaleHalf(&float16),
	record.Float32:  scaleFloat[float32],
	record.Float64:  scaleFloat[float64],
	record.BFloat16: scaleHalf(&bfloat16),
}

// reciprocal returns m such that the upper word of m·x is x / divisor for every
// 32-bit x (Lemire, Kaser and Kurz 2019, theorem 1); divisor is not 1.
func reciprocal(divisor int) uint64 { return math.MaxUint64/uint64(divisor) + 1 }

func scaleUnsigned[T uint8 | uint32](p unsafe.Pointer, n, divisor int) {
	m := reciprocal(divisor)
	d := unsafe.Slice((*T)(p), n)
	for i, x := range d {
		q, _ := bits.Mul64(m, uint64(x))
		d[i] = T(q)
	}
}

func scaleSigned[T int8 | int32](p unsafe.Pointer, n, divisor int) {
	m := reciprocal(divisor)
	d := unsafe.Slice((*T)(p), n)
	for i, x := range d {
		sign := int64(x) >> 63
		q, _ := bits.Mul64(m, uint64((int64(x)^sign)-sign))
		d[i] = T((int64(q) ^ sign) - sign)
	}
}

func scaleWide[T int64 | uint64](p unsafe.Pointer, n, divisor int) {
	d := unsafe.Slice((*T)(p), n)
	for i := range d {
		d[i] /= T(divisor)
	}
}

func scaleFloat[T float](p unsafe.Pointer, n, divisor int) {
	d := unsafe.Slice((*T)(p), n)
	by := T(divisor)
	for i := range d {
		d[i] /= by
	}
}

func scaleHalf(f *halfFormat) func(p unsafe.Pointer, n, divisor int) {
	return func(p unsafe.Pointer, n, divisor int) {
		var x [halfBlock]float32
		px := noescape(unsafe.Pointer(&x))
		for i := 0; i < n; i += halfBlock {
			m := min(n-i, halfBlock)
			f.widen(px, unsafe.Add(p, 2*i), m)
			scaleFloat[float32](px, m, divisor)
			f.narrow(unsafe.Add(p, 2*i), px, m)
		}
	}
}
