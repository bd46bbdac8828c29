package reduce_test

import (
	"bytes"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/reduce"
	"github.com/lockstep-ccl/lockstep/record"
)

var dtypes = []record.DType{
	record.Int8, record.Uint8, record.Int32, record.Uint32, record.Int64, record.Uint64,
	record.Float16, record.Float32, record.Float64, record.BFloat16,
}

var ops = []record.RedOp{record.Sum, record.Prod, record.Max, record.Min, record.Avg}

// paths runs a test on every code path.
func paths(t *testing.T, test func(t *testing.T)) {
	for name, on := range reduce.Paths {
		t.Run(name, func(t *testing.T) { on(func() { test(t) }) })
	}
}

// Reference: one element at a time, through float64 and math/big, sharing no
// code with the package.

func check(t *testing.T, op record.RedOp, dt record.DType, dst, a, b []byte) {
	t.Helper()
	w := dt.Size()
	for i := 0; i < len(dst); i += w {
		x, y, got := get(dt, a[i:]), get(dt, b[i:]), get(dt, dst[i:])
		if want := reference(op, dt, x, y); got != want {
			t.Fatalf("%v %v of %d bytes, element %d: %#x, %#x gave %#x, want %#x", op, dt, len(dst), i/w, x, y, got, want)
		}
	}
}

func TestReduce(t *testing.T) {
	paths(t, func(t *testing.T) {
		r := rand.New(rand.NewPCG(1, 2))
		for _, dt := range dtypes {
			for _, op := range ops {
				for n := range 201 {
					size := n * dt.Size()
					offset := r.IntN(8)
					const guard = 0xa5
					buf := bytes.Repeat([]byte{guard}, size+80)
					dst := buf[offset+32 : offset+32+size : offset+32+size]
					a, b := make([]byte, size+1)[1:], make([]byte, size+3)[3:]
					values(r, dt, a)
					values(r, dt, b)
					reduce.Reduce(op, dt, dst, a, b)
					check(t, op, dt, dst, a, b)
					for i, x := range buf {
						if (i < offset+32 || i >= offset+32+size) && x != guard {
							t.Fatalf("%v %v of %d elements wrote outside of dst, at %d", op, dt, n, i-offset-32)
						}
					}

					swapped, left, right := make([]byte, size), bytes.Clone(a), bytes.Clone(b)
					reduce.Reduce(op, dt, swapped, b, a)
					reduce.Reduce(op, dt, left, left, b)
					reduce.Reduce(op, dt, right, a, right)
					if !bytes.Equal(swapped, dst) {
						t.Fatalf("%v %v of %d elements is not commutative", op, dt, n)
					}
					if !bytes.Equal(left, dst) || !bytes.Equal(right, dst) {
						t.Fatalf("%v %v of %d elements differs in place", op, dt, n)
					}
				}
			}
		}
	})
}

// Every pair of special values meets in every lane of a vector.
func TestReduceSpecials(t *testing.T) {
	paths(t, func(t *testing.T) {
		for _, dt := range dtypes {
			w := dt.Size()
			var a, b []byte
			for _, x := range specials(dt) {
				for _, y := range specials(dt) {
					for range 33 {
						a, b = append(a, make([]byte, w)...), append(b, make([]byte, w)...)
						put(dt, a[len(a)-w:], x)
						put(dt, b[len(b)-w:], y)
					}
				}
			}
			dst := make([]byte, len(a))
			for _, op := range ops {
				reduce.Reduce(op, dt, dst, a, b)
				check(t, op, dt, dst, a, b)
			}
		}
	})
}

func TestReduceInt8Exhaustive(t *testing.T) {
	a, b, dst := make([]byte, 1<<16), make([]byte, 1<<16), make([]byte, 1<<16)
	for i := range a {
		a[i], b[i] = byte(i), byte(i>>8)
	}
	for _, dt := range []record.DType{record.Int8, record.Uint8} {
		for _, op := range ops {
			reduce.Reduce(op, dt, dst, a, b)
			check(t, op, dt, dst, a, b)
		}
	}
}

func TestWiden(t *testing.T) {
	paths(t, func(t *testing.T) {
		for _, dt := range []record.DType{record.Float16, record.BFloat16} {
			src, dst := make([]byte, 2<<16), make([]float32, 1<<16)
			for i := range dst {
				put(dt, src[2*i:], uint64(i))
			}
			reduce.Widen(dst, src, dt)
			for i, got := range dst {
				want := toFloat64(dt, uint64(i))
				if want != want {
					// Sign and payload stay; float16's signalling NaNs become quiet.
					bits := uint32(i) << 16
					if dt == record.Float16 {
						bits = uint32(i&0x8000)<<16 | 0x7fc00000 | uint32(i&0x3ff)<<13
					}
					if math.Float32bits(got) != bits {
						t.Fatalf("%v %#x widens to %#x, want %#x", dt, i, math.Float32bits(got), bits)
					}
				} else if math.Float64bits(float64(got)) != math.Float64bits(want) {
					t.Fatalf("%v %#x widens to %v, want %v", dt, i, got, want)
				}
			}
			back := make([]byte, len(src))
			reduce.Narrow(back, dst, dt)
			for i := range dst {
				want := uint64(i)
				if toFloat64(dt, want) != toFloat64(dt, want) {
					want |= canonical(dt)
				}
				if got := get(dt, back[2*i:]); got != want {
					t.Fatalf("%v %#x comes back as %#x", dt, i, got)
				}
			}
		}
	})
}

// Narrow is probed at every value of the 16-bit type, halfway to the next one,
// and one float32 to each side of both.
func TestNarrow(t *testing.T) {
	paths(t, func(t *testing.T) {
		for _, dt := range []record.DType{record.Float16, record.BFloat16} {
			var src []float32
			for v := range uint64(1 << 16) {
				f, next := toFloat64(dt, v), toFloat64(dt, v+1)
				if f != f {
					continue
				}
				mid := float32(f)
				if next == next && !math.IsInf(next, 0) {
					mid = float32((f + next) / 2)
				} else if !math.IsInf(f, 0) {
					mid = float32(f + (f-toFloat64(dt, v-1))/2)
				}
				for _, x := range []float32{float32(f), mid} {
					up, down := math.Nextafter32(x, float32(math.Inf(1))), math.Nextafter32(x, float32(math.Inf(-1)))
					src = append(src, x, up, down)
				}
			}
			dst := make([]byte, 2*len(src))
			reduce.Narrow(dst, src, dt)
			for i, x := range src {
				if got, want := get(dt, dst[2*i:]), fromFloat64(dt, float64(x)); got != want {
					t.Fatalf("%v (%#x) narrows to %v %#x, want %#x", x, math.Float32bits(x), dt, got, want)
				}
			}

			for _, bits := range []uint32{0x7f800001, 0x7fffffff, 0xff800001, 0xffffffff, 0x7fc12345, 0xffbfffff} {
				for n := range 20 {
					src, dst := make([]float32, n), make([]byte, 2*n)
					for i := range src {
						src[i] = math.Float32frombits(bits)
					}
					reduce.Narrow(dst, src, dt)
					want := uint64(bits>>16) | 0x40
					if dt == record.Float16 {
						want = uint64(bits>>16&0x8000|0x7e00) | uint64(bits>>13&0x3ff)
					}
					for i := range src {
						if got := get(dt, dst[2*i:]); got != want {
							t.Fatalf("NaN %#x narrows to %v %#x, want %#x", bits, dt, got, want)
						}
					}
				}
			}
		}
	})
}

func TestAccumulateF32(t *testing.T) {
	paths(t, func(t *testing.T) {
		r := rand.New(rand.NewPCG(3, 4))
		for _, dt := range []record.DType{record.Float16, record.BFloat16} {
			for _, op := range ops {
				for n := range 201 {
					src := make([]byte, 2*n+1)[1:]
					values(r, dt, src)
					raw := make([]byte, 4*n)
					values(r, record.Float32, raw)
					acc, want := make([]float32, n), make([]float32, n)
					wide := make([]float32, n)
					reduce.Widen(wide, src, dt)
					for i := range acc {
						acc[i] = math.Float32frombits(uint32(get(record.Float32, raw[4*i:])))
						want[i] = math.Float32frombits(uint32(reference(op, record.Float32,
							uint64(math.Float32bits(acc[i])), uint64(math.Float32bits(wide[i])))))
					}
					reduce.AccumulateF32(acc, src, dt, op)
					for i := range acc {
						if math.Float32bits(acc[i]) != math.Float32bits(want[i]) {
							t.Fatalf("%v %v element %d of %d: %v, want %v", op, dt, i, n, acc[i], want[i])
						}
					}
				}
			}
		}
	})
}

func TestScale(t *testing.T) {
	paths(t, func(t *testing.T) {
		r := rand.New(rand.NewPCG(5, 6))
		for _, dt := range dtypes {
			for _, divisor := range []int{1, 2, 3, 5, 7, 8, 127, 128, 255, 256, 1000, 65537, math.MaxInt32} {
				for n := range 100 {
					buf := make([]byte, n*dt.Size()+1)[1:]
					values(r, dt, buf)
					was := bytes.Clone(buf)
					reduce.Scale(dt, buf, divisor)
					for i := 0; i < len(buf); i += dt.Size() {
						x, got := get(dt, was[i:]), get(dt, buf[i:])
						var want uint64
						switch f := toFloat64(dt, x); {
						case !isFloat(dt):
							q := signed(dt, x)
							want = wrap(dt, q.Quo(q, big.NewInt(int64(divisor))))
						case f != f && divisor == 1:
							want = x
						case f != f: // stays what it was, but quiet
							want = x | canonical(dt)
						case dt == record.Float64:
							want = fromFloat64(dt, f/float64(divisor))
						default:
							want = fromFloat64(dt, float64(float32(f)/float32(divisor)))
						}
						if got != want {
							t.Fatalf("%v %#x / %d = %#x, want %#x", dt, x, divisor, got, want)
						}
					}
				}
			}
		}
	})
}

func TestAllocatesNothing(t *testing.T) {
	n := testing.AllocsPerRun(100, func() {
		var x [99]byte
		var w [20]float32
		reduce.Reduce(record.Max, record.Float16, x[1:41], x[1:41], x[41:81])
		reduce.AccumulateF32(w[:], x[1:41], record.Float16, record.Max)
		reduce.Narrow(x[1:41], w[:], record.Float16)
		reduce.Widen(w[:], x[1:41], record.Float16)
		reduce.Scale(record.Float16, x[1:41], 3)
	})
	if n != 0 {
		t.Errorf("%v allocations, want none", n)
	}
}

func TestMisuse(t *testing.T) {
	b := make([]byte, 64)
	for name, f := range map[string]func(){
		"fraction of an element": func() { reduce.Reduce(record.Sum, record.Float32, b[:6], b[:6], b[:6]) },
		"a too short":            func() { reduce.Reduce(record.Sum, record.Float32, b[:8], b[:4], b[:8]) },
		"b too long":             func() { reduce.Reduce(record.Sum, record.Float32, b[:8], b[:8], b[:12]) },
		"unknown type":           func() { reduce.Reduce(record.Sum, record.DType(99), b, b, b) },
		"no CPU type":            func() { reduce.Reduce(record.Sum, record.Float8E4M3, b, b, b) },
		"no CPU type to scale":   func() { reduce.Scale(record.Float8E5M2, b, 2) },
		"unknown operator":       func() { reduce.Reduce(record.RedOp(99), record.Int8, b, b, b) },
		"widen integers":         func() { reduce.Widen(make([]float32, 32), b, record.Int32) },
		"widen too few":          func() { reduce.Widen(make([]float32, 33), b, record.Float16) },
		"narrow too few":         func() { reduce.Narrow(b, make([]float32, 31), record.Float16) },
		"accumulate operator":    func() { reduce.AccumulateF32(make([]float32, 32), b, record.Float16, record.RedOp(99)) },
		"divide by zero":         func() { reduce.Scale(record.Float32, b, 0) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("did not panic")
				}
			}()
			f()
		})
	}
}

func FuzzReduce(f *testing.F) {
	f.Add(byte(record.Float16), byte(record.Max), byte(1), []byte("\x00\x7e\x01\xfc\x00\x80\x00\x00 a longer piece of data, for a vector"))
	f.Add(byte(record.Int64), byte(record.Prod), byte(3), bytes.Repeat([]byte{0xff, 0x7f, 0}, 40))
	f.Fuzz(func(t *testing.T, d, o, offset byte, data []byte) {
		dt, op := dtypes[int(d)%len(dtypes)], ops[int(o)%len(ops)]
		data = data[min(len(data), int(offset)%8):]
		size := len(data) / 2 &^ (dt.Size() - 1)
		a, b, dst := data[:size], data[size:2*size], make([]byte, size)
		for _, on := range reduce.Paths {
			on(func() { reduce.Reduce(op, dt, dst, a, b) })
			check(t, op, dt, dst, a, b)
		}
	})
}

// BenchmarkReduce prints, besides the bandwidth of one array, the time relative
// to copying one, measured in the same run on buffers of the same size.
func BenchmarkReduce(b *testing.B) {
	for _, size := range []int{48, 4 << 10, 256 << 10, 8 << 20} {
		dst, x, y := make([]byte, size), make([]byte, size), make([]byte, size)
		perCopy := copyTime(dst, x)
		for _, dt := range dtypes {
			for _, op := range ops[:4] {
				b.Run(fmt.Sprintf("%v/%v/%d", dt, op, size), func(b *testing.B) {
					b.ReportAllocs()
					b.SetBytes(int64(size))
					for b.Loop() {
						reduce.Reduce(op, dt, dst, x, y)
					}
					b.ReportMetric(float64(b.Elapsed())/float64(b.N)/perCopy, "×copy")
				})
			}
		}
	}
}

// copyTime returns the nanoseconds of a copy: the best of some blocks, since
// everything that disturbs it makes it longer.
func copyTime(dst, src []byte) float64 {
	best := time.Duration(math.MaxInt64)
	n := 1 + 1<<20/len(dst)
	for range 50 {
		start := time.Now()
		for range n {
			copy(dst, src)
		}
		best = min(best, time.Since(start))
	}
	return float64(best) / float64(n)
}
