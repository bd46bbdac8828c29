package reduce

import (
	"testing"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/record"
)

//go:noinline
func deep(n int) int {
	var pad [64]byte
	if n == 0 {
		return 0
	}
	pad[n%64] = 1
	return deep(n-1) + int(pad[0])
}

// moves makes a kernel move the stack of its goroutine before it does anything, as the
// garbage collector, or a deeper call, may do at any call.
func moves[F func(dst, src unsafe.Pointer, n int) | kernel](t *testing.T, at *F, wrap func(F) F) {
	old := *at
	t.Cleanup(func() { *at = old })
	*at = wrap(old)
}

// TestStackMoves: buffers and blocks of floats that lie on a stack are found where they
// are after it has moved.
func TestStackMoves(t *testing.T) {
	const n = 5 // fewer than vector kernels take
	two := func(k func(dst, src unsafe.Pointer, n int)) func(dst, src unsafe.Pointer, n int) {
		return func(dst, src unsafe.Pointer, n int) { deep(1000); k(dst, src, n) }
	}
	three := func(k kernel) kernel {
		return func(dst, a, b unsafe.Pointer, n int) { deep(1000); k(dst, a, b, n) }
	}
	moves(t, &float16.widen, two)
	moves(t, &float16.narrow, two)
	moves(t, &portable[record.Float32][record.Sum], three)

	type halves = [2 * n]byte
	const three16, five16, eight16 = 0x42, 0x45, 0x48 // upper bytes
	fill := func(b *halves, upper byte) {
		for i := range n {
			b[2*i+1] = upper
		}
	}
	bytesOf := func(f *[n]float32) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(f)), 4*n) }
	for _, c := range []struct {
		name string
		ok   func() bool
	}{
		{"AccumulateF32", func() bool {
			var src halves
			fill(&src, three16)
			acc := [n]float32{5, 5, 5, 5, 5}
			AccumulateF32(acc[:], src[:], record.Float16, record.Sum)
			return acc == [n]float32{8, 8, 8, 8, 8}
		}},
		{"Widen", func() bool {
			var src halves
			fill(&src, three16)
			var dst [n]float32
			Widen(dst[:], src[:], record.Float16)
			return dst == [n]float32{3, 3, 3, 3, 3}
		}},
		{"Narrow", func() bool {
			src := [n]float32{3, 3, 3, 3, 3}
			var dst, want halves
			fill(&want, three16)
			Narrow(dst[:], src[:], record.Float16)
			return dst == want
		}},
		{"Reduce of 16 bits", func() bool {
			var a, b, dst, want halves
			fill(&a, three16)
			fill(&b, five16)
			fill(&want, eight16)
			Reduce(record.Sum, record.Float16, dst[:], a[:], b[:])
			return dst == want
		}},
		{"Reduce", func() bool {
			a, b := [n]float32{1, 2, 3, 4, 5}, [n]float32{5, 4, 3, 2, 1}
			Reduce(record.Sum, record.Float32, bytesOf(&a)[:4*3], bytesOf(&a)[:4*3], bytesOf(&b)[:4*3])
			return a == [n]float32{6, 6, 6, 4, 5}
		}},
		{"Scale", func() bool {
			var b, want halves
			fill(&b, 0x46) // 6
			fill(&want, three16)
			Scale(record.Float16, b[:], 2)
			return b == want
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			ok := make(chan bool)
			go func() { ok <- c.ok() }() // a fresh stack is small
			if !<-ok {
				t.Error("wrong after the stack has moved")
			}
		})
	}
}
