package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// wideKernels emits the sums of 16-bit floats with AVX-512: converting makes
// them the only ones that compute, not memory, holds back.
func wideKernels() {
	begin("sumFloat16AVX512", "adds n elements, a multiple of 16.", "dst, a, b", "")
	streams := []stream{{param("dst"), 32}, {param("a"), 32}, {param("b"), 32}}
	n := param("n")
	add := sumWide()
	SHRQ(Imm(4), n)
	walk(n, streams, func(k int) {
		x, y := ZMM(), ZMM()
		VCVTPH2PS(streams[1].at(k), x)
		VCVTPH2PS(streams[2].at(k), y)
		add(x, y)
		VCVTPS2PH(Imm(0), x, streams[0].at(k))
	})
	end()

	// As bfloat16Pairs.
	begin("sumBFloat16AVX512", "adds n elements, a multiple of 32.", "dst, a, b", "")
	streams = []stream{{param("dst"), 64}, {param("a"), 64}, {param("b"), 64}}
	n = param("n")
	add = sumWide()
	one, most, upper := replicate(1), replicate(0x7fff), replicate(0xffff0000)
	SHRQ(Imm(5), n)
	walk(n, streams, func(k int) {
		a, b, evenA, evenB := ZMM(), ZMM(), ZMM(), ZMM()
		VMOVDQU32(streams[1].at(k), a)
		VMOVDQU32(streams[2].at(k), b)
		VPSLLD(Imm(16), a, evenA)
		VPSLLD(Imm(16), b, evenB)
		VPANDD(upper, a, a)
		VPANDD(upper, b, b)
		add(evenA, evenB)
		add(a, b)
		for _, x := range []reg.VecVirtual{evenA, a} {
			last := ZMM()
			VPSRLD(Imm(16), x, last)
			VPANDD(one, last, last)
			VPADDD(most, x, x)
			VPADDD(last, x, x)
		}
		VPSRLD(Imm(16), evenA, evenA)
		VPTERNLOGD(Imm(0xf8), upper, a, evenA) // evenA | a & upper
		VMOVDQU32(evenA, streams[0].at(k))
	})
	end()
}

// sumWide returns x += y with canonical NaNs, in float32.
func sumWide() func(x, y reg.VecVirtual) {
	nan := replicate(0x7fc00000)
	return func(x, y reg.VecVirtual) {
		bad := K()
		VADDPS(y, x, x)
		VCMPPS(unordered, x, x, bad)
		VMOVDQU32(nan, bad, x)
	}
}

func replicate(v uint32) reg.VecVirtual {
	g, z := GP32(), ZMM()
	MOVL(U32(v), g)
	VPBROADCASTD(g, z)
	return z
}
