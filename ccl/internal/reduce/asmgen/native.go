package main

import (
	"math/bits"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// lanes is the width that a piece of code is emitted for: the same operation
// runs on 32 bytes in the loops and once on 16 bytes at the end.
type lanes struct{ half bool }

func (l lanes) reg() reg.VecVirtual {
	if l.half {
		return XMM()
	}
	return YMM()
}

// of narrows a constant to the width.
func (l lanes) of(c reg.VecVirtual) reg.Register {
	if l.half {
		return c.AsX()
	}
	return c.AsY()
}

// operator emits r = a op b.
type operator func(l lanes, a, b, r reg.VecVirtual)

type instruction func(...Op)

// single is an operator that is one instruction.
func single(f instruction) func() operator {
	return func() operator {
		return func(_ lanes, a, b, r reg.VecVirtual) { f(b, a, r) }
	}
}

// nativeKernels emits the operators on types that the machine computes in
// directly. Sums and products of integers are the same whether signed or not.
func nativeKernels() {
	for _, k := range []struct {
		name string
		elem int
		// setup emits constants and returns the operator that uses them.
		setup func() operator
	}{
		{"sumInt8", 1, single(VPADDB)},
		{"prodInt8", 1, prodInt8},
		{"maxInt8", 1, single(VPMAXSB)},
		{"minInt8", 1, single(VPMINSB)},
		{"maxUint8", 1, single(VPMAXUB)},
		{"minUint8", 1, single(VPMINUB)},
		{"sumInt32", 4, single(VPADDD)},
		{"prodInt32", 4, single(VPMULLD)},
		{"maxInt32", 4, single(VPMAXSD)},
		{"minInt32", 4, single(VPMINSD)},
		{"maxUint32", 4, single(VPMAXUD)},
		{"minUint32", 4, single(VPMINUD)},
		{"sumInt64", 8, single(VPADDQ)},
		{"prodInt64", 8, prodInt64},
		{"maxInt64", 8, extremeInt64(true, true)},
		{"minInt64", 8, extremeInt64(true, false)},
		{"maxUint64", 8, extremeInt64(false, true)},
		{"minUint64", 8, extremeInt64(false, false)},
		{"sumFloat32", 4, float32s.arithmetic(VADDPS)},
		{"prodFloat32", 4, float32s.arithmetic(VMULPS)},
		{"maxFloat32", 4, float32s.extreme(VMAXPS, VANDPS)},
		{"minFloat32", 4, float32s.extreme(VMINPS, VORPS)},
		{"sumFloat64", 8, float64s.arithmetic(VADDPD)},
		{"prodFloat64", 8, float64s.arithmetic(VMULPD)},
		{"maxFloat64", 8, float64s.extreme(VMAXPD, VANDPD)},
		{"minFloat64", 8, float64s.extreme(VMINPD, VORPD)},
		{"sumBFloat16", 2, bfloat16Pairs(float32s.arithmetic(VADDPS))},
		{"prodBFloat16", 2, bfloat16Pairs(float32s.arithmetic(VMULPS))},
		{"maxBFloat16", 2, bfloat16Pairs(float32s.extreme(VMAXPS, VANDPS))},
		{"minBFloat16", 2, bfloat16Pairs(float32s.extreme(VMINPS, VORPS))},
	} {
		begin(k.name+"AVX2", "combines n elements, a multiple of 16 bytes.", "dst, a, b", "")
		dst, a, b, n := param("dst"), param("a"), param("b"), param("n")
		op := k.setup()
		streams := []stream{{dst, 32}, {a, 32}, {b, 32}}
		step := func(l lanes, i int) {
			x, y, r := l.reg(), l.reg(), l.reg()
			VMOVDQU(streams[1].at(i), x)
			VMOVDQU(streams[2].at(i), y)
			op(l, x, y, r)
			VMOVDQU(r, streams[0].at(i))
		}
		SHLQ(Imm(uint64(bits.TrailingZeros(uint(k.elem)))), n)
		odd := GP64()
		MOVQ(n, odd)
		SHRQ(Imm(5), n)
		walk(n, streams, func(i int) { step(lanes{}, i) })
		ANDQ(Imm(16), odd)
		JZ(LabelRef("end"))
		step(lanes{half: true}, 0)
		Label("end")
		end()
	}

	for _, f := range []struct {
		name string
		elem int
		kind floatKind
	}{{"scaleFloat32", 4, float32s}, {"scaleFloat64", 8, float64s}} {
		begin(f.name+"AVX2", "divides n elements, a multiple of 16 bytes.", "p", ", divisor int")
		p, n := param("p"), param("n")
		by := f.kind.divisor()
		s := stream{p, 16}
		SHRQ(Imm(uint64(4-bits.TrailingZeros(uint(f.elem)))), n)
		walk(n, []stream{s}, func(i int) {
			x := XMM()
			VMOVDQU(s.at(i), x)
			f.kind.div(by.AsX(), x, x)
			VMOVDQU(x, s.at(i))
		})
		end()
	}
}

// prodInt8 multiplies even and odd bytes apart, as 16-bit words.
func prodInt8() operator {
	low := broadcast32(0x00ff00ff)
	return func(l lanes, a, b, r reg.VecVirtual) {
		odd := l.reg()
		VPMULLW(b, a, r)
		VPAND(l.of(low), r, r)
		VPSRLW(Imm(8), a, a)
		VPSRLW(Imm(8), b, b)
		VPMULLW(b, a, odd)
		VPSLLW(Imm(8), odd, odd)
		VPOR(odd, r, r)
	}
}

// prodInt64 adds the crossed 32-bit products to the upper half of the low one.
func prodInt64() operator {
	return func(l lanes, a, b, r reg.VecVirtual) {
		cross, sum := l.reg(), l.reg()
		VPSHUFD(Imm(0xb1), b, cross)
		VPMULLD(a, cross, cross)
		VPSRLQ(Imm(32), cross, sum)
		VPADDD(sum, cross, cross)
		VPSLLQ(Imm(32), cross, cross)
		VPMULUDQ(b, a, r)
		VPADDQ(cross, r, r)
	}
}

// extremeInt64 compares and selects; unsigned numbers compare as signed ones
// once their sign bits are flipped.
func extremeInt64(signed, maximum bool) func() operator {
	return func() operator {
		var flip reg.VecVirtual
		if !signed {
			flip = broadcast64(1 << 63)
		}
		return func(l lanes, a, b, r reg.VecVirtual) {
			p, q := a, b
			if !signed {
				p, q = l.reg(), l.reg()
				VPXOR(l.of(flip), a, p)
				VPXOR(l.of(flip), b, q)
			}
			greater := l.reg()
			VPCMPGTQ(q, p, greater)
			if maximum {
				VPBLENDVB(greater, a, b, r)
			} else {
				VPBLENDVB(greater, b, a, r)
			}
		}
	}
}

// floatKind holds the instructions of one float type.
type floatKind struct {
	nan        func() reg.VecVirtual
	cmp        func(imm, a, b, r Op)
	blend      func(mask, yes, no, r Op)
	div        instruction
	fromInt    func(src, merge, r Op)
	replicated instruction
}

var (
	float32s = floatKind{
		nan:   func() reg.VecVirtual { return broadcast32(0x7fc00000) },
		cmp:   func(imm, a, b, r Op) { VCMPPS(imm, a, b, r) },
		blend: func(mask, yes, no, r Op) { VBLENDVPS(mask, yes, no, r) },
		div:   VDIVPS, fromInt: VCVTSI2SSQ, replicated: VBROADCASTSS,
	}
	float64s = floatKind{
		nan:   func() reg.VecVirtual { return broadcast64(0x7ff8000000000000) },
		cmp:   func(imm, a, b, r Op) { VCMPPD(imm, a, b, r) },
		blend: func(mask, yes, no, r Op) { VBLENDVPD(mask, yes, no, r) },
		div:   VDIVPD, fromInt: VCVTSI2SDQ, replicated: VBROADCASTSD,
	}
)

// unordered is the predicate of VCMPPS and VCMPPD that holds for NaN.
var unordered = Imm(3)

// arithmetic is one instruction whose NaN results become canonical.
func (f floatKind) arithmetic(op instruction) func() operator {
	return func() operator {
		nan := f.nan()
		return func(l lanes, a, b, r reg.VecVirtual) {
			bad := l.reg()
			op(b, a, r)
			f.cmp(unordered, r, r, bad)
			f.blend(bad, l.of(nan), r, r)
		}
	}
}

// extreme makes the machine's max and min commutative. They return their second
// operand when one is NaN or both are zeros, so each side's NaN is replaced by
// the other side first, and both orders are taken: joined (and for max, or for
// min) they differ in the sign of zero only.
func (f floatKind) extreme(op, join instruction) func() operator {
	return func() operator {
		nan := f.nan()
		return func(l lanes, a, b, r reg.VecVirtual) {
			bad, other := l.reg(), l.reg()
			f.cmp(unordered, a, a, bad)
			f.blend(bad, b, a, a)
			f.cmp(unordered, b, b, bad)
			f.blend(bad, a, b, b)
			op(b, a, r)
			op(a, b, other)
			join(other, r, r)
			f.cmp(unordered, r, r, bad)
			f.blend(bad, l.of(nan), r, r)
		}
	}
}

// bfloat16Pairs applies a float32 operator to the even and the odd elements
// apart: a bfloat16 is the upper half of a float32, so both unpack and pack
// within their 32-bit words. Adding the kept half's last bit and 0x7fff rounds
// to nearest even; the operators' canonical NaN has nothing to round away.
func bfloat16Pairs(float func() operator) func() operator {
	return func() operator {
		op := float()
		one, most, upper := broadcast32(1), broadcast32(0x7fff), broadcast32(0xffff0000)
		return func(l lanes, a, b, r reg.VecVirtual) {
			evenA, evenB, even, odd := l.reg(), l.reg(), l.reg(), l.reg()
			VPSLLD(Imm(16), a, evenA)
			VPSLLD(Imm(16), b, evenB)
			VPAND(l.of(upper), a, a)
			VPAND(l.of(upper), b, b)
			op(l, evenA, evenB, even)
			op(l, a, b, odd)
			for _, x := range []reg.VecVirtual{even, odd} {
				last := l.reg()
				VPSRLD(Imm(16), x, last)
				VPAND(l.of(one), last, last)
				VPADDD(l.of(most), x, x)
				VPADDD(last, x, x)
			}
			VPSRLD(Imm(16), even, even)
			VPBLENDW(Imm(0xaa), odd, even, r)
		}
	}
}

// divisor converts the parameter of that name and replicates it.
func (f floatKind) divisor() reg.VecVirtual {
	x, y := XMM(), YMM()
	d := param("divisor")
	VXORPS(x, x, x)
	f.fromInt(d, x, x)
	f.replicated(x, y)
	return y
}
