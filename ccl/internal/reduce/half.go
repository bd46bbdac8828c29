package reduce

import (
	"math"
	"unsafe"
)

var (
	float16  = halfFormat{widen: widenFloat16, narrow: narrowFloat16}
	bfloat16 = halfFormat{widen: widenBFloat16, narrow: narrowBFloat16}
)

func widenFloat16(dst, src unsafe.Pointer, n int) {
	d, s := unsafe.Slice((*uint32)(dst), n), unsafe.Slice((*uint16)(src), n)
	s = s[:len(d)]
	for i := range d {
		d[i] = float16ToFloat32(s[i])
	}
}

func narrowFloat16(dst, src unsafe.Pointer, n int) {
	d, s := unsafe.Slice((*uint16)(dst), n), unsafe.Slice((*uint32)(src), n)
	s = s[:len(d)]
	for i := range d {
		d[i] = float32ToFloat16(s[i])
	}
}

func widenBFloat16(dst, src unsafe.Pointer, n int) {
	d, s := unsafe.Slice((*uint32)(dst), n), unsafe.Slice((*uint16)(src), n)
	s = s[:len(d)]
	for i := range d {
		d[i] = uint32(s[i]) << 16
	}
}

func narrowBFloat16(dst, src unsafe.Pointer, n int) {
	d, s := unsafe.Slice((*uint16)(dst), n), unsafe.Slice((*uint32)(src), n)
	s = s[:len(d)]
	for i := range d {
		d[i] = float32ToBFloat16(s[i])
	}
}

// float16ToFloat32 converts bits to bits, as VCVTPH2PS does.
func float16ToFloat32(h uint16) uint32 {
	sign, exp, man := uint32(h&0x8000)<<16, uint32(h>>10)&0x1f, uint32(h)&0x3ff
	switch {
	case exp == 0x1f && man != 0:
		return sign | 0x7fc00000 | man<<13
	case exp == 0x1f:
		return sign | 0x7f800000
	case exp == 0:
		return sign | math.Float32bits(float32(man)*0x1p-24)
	}
	return sign | (exp+127-15)<<23 | man<<13
}

// float32ToFloat16 converts bits to bits, as VCVTPS2PH does when it rounds to
// nearest even.
func float32ToFloat16(f uint32) uint16 {
	sign, mag := uint16(f>>16)&0x8000, f&0x7fffffff
	switch {
	case mag > 0x7f800000:
		return sign | 0x7e00 | uint16(mag>>13)&0x3ff
	case mag >= 0x477ff000: // 65520, halfway between the largest float16 and the next
		return sign | 0x7c00
	case mag < 0x38800000: // below the smallest normal float16
		// The last bit of 0.5 weighs as much as a denormal's last bit, so the
		// addition rounds where the denormal must.
		return sign | uint16(math.Float32bits(math.Float32frombits(mag)+0.5)-math.Float32bits(0.5))
	}
	mag += 0xfff + mag>>13&1
	return sign | uint16((mag-(127-15)<<23)>>13)
}

// float32ToBFloat16 converts bits to bits, rounding to nearest even.
func float32ToBFloat16(f uint32) uint16 {
	if f&0x7fffffff > 0x7f800000 {
		return uint16(f>>16) | 0x40
	}
	return uint16((f + 0x7fff + f>>16&1) >> 16)
}
