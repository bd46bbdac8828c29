package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// halfKind converts eight elements of a 16-bit float type.
type halfKind struct {
	name string
	// constants emits what narrow needs.
	constants func() []reg.VecVirtual
	widen     func(src Op, r reg.VecVirtual)
	narrow    func(x reg.VecVirtual, dst Op, constants []reg.VecVirtual)
}

var halfKinds = []halfKind{
	{
		name:      "Float16",
		constants: func() []reg.VecVirtual { return nil },
		widen:     func(src Op, r reg.VecVirtual) { VCVTPH2PS(src, r) },
		narrow:    func(x reg.VecVirtual, dst Op, _ []reg.VecVirtual) { VCVTPS2PH(Imm(0), x, dst) },
	},
	{
		name: "BFloat16",
		constants: func() []reg.VecVirtual {
			return []reg.VecVirtual{broadcast32(1), broadcast32(0x7fff), broadcast32(0x40)}
		},
		widen: func(src Op, r reg.VecVirtual) {
			VPMOVZXWD(src, r)
			VPSLLD(Imm(16), r, r)
		},
		// As in bfloat16Pairs, but NaNs may have payloads that would carry into
		// the exponent, so they are cut off and made quiet.
		narrow: func(x reg.VecVirtual, dst Op, c []reg.VecVirtual) {
			r, upper, quiet, bad := YMM(), XMM(), YMM(), YMM()
			VPSRLD(Imm(16), x, r)
			VPOR(c[2], r, quiet)
			VCMPPS(unordered, x, x, bad)
			VPAND(c[0], r, r)
			VPADDD(c[1], r, r)
			VPADDD(x, r, r)
			VPSRLD(Imm(16), r, r)
			VBLENDVPS(bad, quiet, r, r)
			VEXTRACTI128(Imm(1), r, upper)
			VPACKUSDW(upper, r.AsX(), upper)
			VMOVDQU(upper, dst)
		},
	},
}

// halfKernels emits what computes on 16-bit floats in eight float32 lanes (all
// but Reduce on bfloat16, see bfloat16Pairs).
func halfKernels() {
	operators := []struct {
		name  string
		setup func() operator
	}{
		{"sum", float32s.arithmetic(VADDPS)},
		{"prod", float32s.arithmetic(VMULPS)},
		{"max", float32s.extreme(VMAXPS, VANDPS)},
		{"min", float32s.extreme(VMINPS, VORPS)},
	}
	for _, h := range halfKinds {
		for _, o := range operators {
			if h.name == "BFloat16" {
				break
			}
			begin(o.name+h.name+"AVX2", "combines n elements, a multiple of 8.", "dst, a, b", "")
			streams := []stream{{param("dst"), 16}, {param("a"), 16}, {param("b"), 16}}
			n := param("n")
			op, c := o.setup(), h.constants()
			SHRQ(Imm(3), n)
			walk(n, streams, func(k int) {
				x, y, r := YMM(), YMM(), YMM()
				h.widen(streams[1].at(k), x)
				h.widen(streams[2].at(k), y)
				op(lanes{}, x, y, r)
				h.narrow(r, streams[0].at(k), c)
			})
			end()
		}
		for _, o := range operators {
			begin(o.name+h.name+"Float32AVX2", "combines n elements of src, a multiple of 8, into float32 accumulators.", "dst, src", "")
			dst, src := stream{param("dst"), 32}, stream{param("src"), 16}
			n := param("n")
			op := o.setup()
			SHRQ(Imm(3), n)
			walk(n, []stream{dst, src}, func(k int) {
				x, y, r := YMM(), YMM(), YMM()
				VMOVDQU(dst.at(k), x)
				h.widen(src.at(k), y)
				op(lanes{}, x, y, r)
				VMOVDQU(r, dst.at(k))
			})
			end()
		}

		begin("widen"+h.name+"AVX2", "converts n elements, a multiple of 8, to float32.", "dst, src", "")
		wide, thin, n := stream{param("dst"), 32}, stream{param("src"), 16}, param("n")
		SHRQ(Imm(3), n)
		walk(n, []stream{wide, thin}, func(k int) {
			x := YMM()
			h.widen(thin.at(k), x)
			VMOVDQU(x, wide.at(k))
		})
		end()

		begin("narrow"+h.name+"AVX2", "converts n elements, a multiple of 8, from float32.", "dst, src", "")
		thin, wide, n = stream{param("dst"), 16}, stream{param("src"), 32}, param("n")
		c := h.constants()
		SHRQ(Imm(3), n)
		walk(n, []stream{thin, wide}, func(k int) {
			x := YMM()
			VMOVDQU(wide.at(k), x)
			h.narrow(x, thin.at(k), c)
		})
		end()

		begin("scale"+h.name+"AVX2", "divides n elements, a multiple of 8.", "p", ", divisor int")
		s := stream{param("p"), 16}
		n = param("n")
		by, c := float32s.divisor(), h.constants()
		SHRQ(Imm(3), n)
		walk(n, []stream{s}, func(k int) {
			x := YMM()
			h.widen(s.at(k), x)
			VDIVPS(by, x, x)
			h.narrow(x, s.at(k), c)
		})
		end()
	}
}
