package reduce

import (
	"unsafe"

	"golang.org/x/sys/cpu"

	"github.com/lockstep-ccl/lockstep/record"
)

//go:generate go -C asmgen run . -out ../kernels_amd64.s -pkg reduce

// vectorBytes is how many bytes the vector kernels take at a time.
const vectorBytes = 16

var (
	vector      [numTypes][numOps]kernel
	vectorScale [numTypes]func(p unsafe.Pointer, n, divisor int)
)

func init() {
	if cpu.X86.HasAVX2 && cpu.X86.HasF16C {
		useAVX2()
		// Processors without VBMI2 have AVX-512 but slow down when it is used.
		if cpu.X86.HasAVX512BW && cpu.X86.HasAVX512VBMI2 {
			useAVX512()
		}
	}
}

// useAVX2 fills the tables. Integer division stays with the portable code:
// AVX2 has no 64-bit multiplication to do it by, and Avg of integers is rare.
func useAVX2() {
	ops := func(sum, prod, maximum, minimum kernel) [numOps]kernel {
		return [numOps]kernel{
			record.Sum: sum, record.Prod: prod, record.Max: maximum, record.Min: minimum, record.Avg: sum,
		}
	}
	vector = [numTypes][numOps]kernel{
		record.Int8:     ops(sumInt8AVX2, prodInt8AVX2, maxInt8AVX2, minInt8AVX2),
		record.Uint8:    ops(sumInt8AVX2, prodInt8AVX2, maxUint8AVX2, minUint8AVX2),
		record.Int32:    ops(sumInt32AVX2, prodInt32AVX2, maxInt32AVX2, minInt32AVX2),
		record.Uint32:   ops(sumInt32AVX2, prodInt32AVX2, maxUint32AVX2, minUint32AVX2),
		record.Int64:    ops(sumInt64AVX2, prodInt64AVX2, maxInt64AVX2, minInt64AVX2),
		record.Uint64:   ops(sumInt64AVX2, prodInt64AVX2, maxUint64AVX2, minUint64AVX2),
		record.Float16:  ops(sumFloat16AVX2, prodFloat16AVX2, maxFloat16AVX2, minFloat16AVX2),
		record.Float32:  ops(sumFloat32AVX2, prodFloat32AVX2, maxFloat32AVX2, minFloat32AVX2),
		record.Float64:  ops(sumFloat64AVX2, prodFloat64AVX2, maxFloat64AVX2, minFloat64AVX2),
		record.BFloat16: ops(sumBFloat16AVX2, prodBFloat16AVX2, maxBFloat16AVX2, minBFloat16AVX2),
	}
	vectorScale[record.Float16] = scaleFloat16AVX2
	vectorScale[record.Float32] = scaleFloat32AVX2
	vectorScale[record.Float64] = scaleFloat64AVX2
	vectorScale[record.BFloat16] = scaleBFloat16AVX2

	type accumulate = func(dst, src unsafe.Pointer, n int)
	float16.vecWiden, float16.vecNarrow = widenFloat16AVX2, narrowFloat16AVX2
	float16.vecAccumulate = [numOps]accumulate{
		record.Sum: sumFloat16Float32AVX2, record.Prod: prodFloat16Float32AVX2,
		record.Max: maxFloat16Float32AVX2, record.Min: minFloat16Float32AVX2, record.Avg: sumFloat16Float32AVX2,
	}
	bfloat16.vecWiden, bfloat16.vecNarrow = widenBFloat16AVX2, narrowBFloat16AVX2
	bfloat16.vecAccumulate = [numOps]accumulate{
		record.Sum: sumBFloat16Float32AVX2, record.Prod: prodBFloat16Float32AVX2,
		record.Max: maxBFloat16Float32AVX2, record.Min: minBFloat16Float32AVX2, record.Avg: sumBFloat16Float32AVX2,
	}
}

func useAVX512() {
	f := wide(16, sumFloat16AVX512, sumFloat16AVX2)
	vector[record.Float16][record.Sum], vector[record.Float16][record.Avg] = f, f
	b := wide(32, sumBFloat16AVX512, sumBFloat16AVX2)
	vector[record.BFloat16][record.Sum], vector[record.BFloat16][record.Avg] = b, b
}

// wide leaves what is not a multiple of step elements of two bytes to narrow.
func wide(step int, k, narrow kernel) kernel {
	return func(dst, a, b unsafe.Pointer, n int) {
		done := n &^ (step - 1)
		if done > 0 {
			k(dst, a, b, done)
		}
		if done < n {
			narrow(unsafe.Add(dst, 2*done), unsafe.Add(a, 2*done), unsafe.Add(b, 2*done), n-done)
		}
	}
}
