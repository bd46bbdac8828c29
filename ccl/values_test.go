package ccl_test

import (
	"encoding/binary"
	"math"

	"github.com/lockstep-ccl/lockstep/ccl"
)

// rounding is the relative error of one division in a type; sums are exact.
var rounding = map[ccl.DType]float64{ccl.Float8E4M3: 1. / 8, ccl.Float8E5M2: 1. / 4, ccl.Float16: 1. / (1 << 10), ccl.BFloat16: 1. / (1 << 7), ccl.Float32: 1. / (1 << 22), ccl.Float64: 1. / (1 << 50)}

func put(dt ccl.DType, b []byte, v float64) {
	switch dt {
	case ccl.Float16:
		binary.LittleEndian.PutUint16(b, uint16(ccl.ToF16(float32(v))))
	case ccl.BFloat16:
		binary.LittleEndian.PutUint16(b, uint16(ccl.ToBF16(float32(v))))
	case ccl.Float32:
		binary.LittleEndian.PutUint32(b, math.Float32bits(float32(v)))
	case ccl.Float64:
		binary.LittleEndian.PutUint64(b, math.Float64bits(v))
	case ccl.Float8E4M3, ccl.Float8E5M2:
		// Half has all the values that tests put in; e5m2 is its upper byte.
		h := uint16(ccl.ToF16(float32(v)))
		if b[0] = byte(h >> 8); dt == ccl.Float8E4M3 {
			b[0] = byte(ccl.ToF16(float32(v)/256) >> 7) // the exponent's bias is 7, not 15
		}
	default:
		var w [8]byte
		binary.LittleEndian.PutUint64(w[:], uint64(int64(v)))
		copy(b[:dt.Size()], w[:])
	}
}

func get(dt ccl.DType, b []byte) float64 {
	switch dt {
	case ccl.Float16:
		return float64(ccl.F16(binary.LittleEndian.Uint16(b)).Float32())
	case ccl.BFloat16:
		return float64(ccl.BF16(binary.LittleEndian.Uint16(b)).Float32())
	case ccl.Float32:
		return float64(math.Float32frombits(binary.LittleEndian.Uint32(b)))
	case ccl.Float64:
		return math.Float64frombits(binary.LittleEndian.Uint64(b))
	case ccl.Float8E5M2:
		return float64(ccl.F16(uint16(b[0]) << 8).Float32())
	case ccl.Float8E4M3:
		return 256 * float64(ccl.F16(uint16(b[0]&0x7f)<<7).Float32()) * (1 - 2*float64(b[0]>>7))
	}
	var w [8]byte
	copy(w[:], b[:dt.Size()])
	v := int64(binary.LittleEndian.Uint64(w[:]))
	switch dt {
	case ccl.Int8:
		return float64(int8(v))
	case ccl.Int32:
		return float64(int32(v))
	}
	return float64(v)
}
