package perf

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"

	"github.com/lockstep-ccl/lockstep/ccl"
)

var typeNames = map[string]ccl.DType{
	"int8": ccl.Int8, "char": ccl.Int8, "uint8": ccl.Uint8, "int32": ccl.Int32, "int": ccl.Int32, "uint32": ccl.Uint32,
	"int64": ccl.Int64, "uint64": ccl.Uint64, "half": ccl.Float16, "float16": ccl.Float16, "float": ccl.Float32,
	"float32": ccl.Float32, "double": ccl.Float64, "float64": ccl.Float64, "bfloat16": ccl.BFloat16,
	"fp8_e4m3": ccl.Float8E4M3, "fp8_e5m2": ccl.Float8E5M2,
}

func parseTypes(s string) ([]ccl.DType, error) {
	if s == "all" {
		var all []ccl.DType
		for dt := ccl.Int8; dt <= ccl.BFloat16; dt++ {
			all = append(all, dt)
		}
		return all, nil
	}
	dt, ok := typeNames[strings.ToLower(s)]
	if !ok {
		return nil, fmt.Errorf("-d %s: want int8, uint8, int32, uint32, int64, uint64, half, float, double, bfloat16, fp8_e4m3, fp8_e5m2 or all (which are those that CPUs have too)", s)
	}
	return []ccl.DType{dt}, nil
}

func parseOps(s string) ([]ccl.Op, error) {
	var all []ccl.Op
	for op := ccl.Sum; op <= ccl.Avg; op++ {
		if strings.EqualFold(s, op.String()) {
			return []ccl.Op{op}, nil
		}
		all = append(all, op)
	}
	if s == "all" {
		return all, nil
	}
	return nil, fmt.Errorf("-o %s: want sum, prod, max, min, avg or all", s)
}

// expect says what a result must be.
type expect struct {
	op            ccl.Op
	rank, n, root int
	count         int
}

// contribution is element i of a rank's send buffer: small whole numbers, so
// that every type holds sums of many ranks exactly, and hardly any product grows.
func (x expect) contribution(rank, i int) float64 {
	if x.op == ccl.Prod {
		if (i+rank)%max(x.n, 4) == 0 {
			return 2
		}
		return 1
	}
	return float64((i*7 + rank*3) % 4)
}

func (x expect) reduced(i int) float64 {
	v := x.contribution(0, i)
	for r := 1; r < x.n; r++ {
		c := x.contribution(r, i)
		switch x.op {
		case ccl.Prod:
			v *= c
		case ccl.Max:
			v = max(v, c)
		case ccl.Min:
			v = min(v, c)
		default:
			v += c
		}
	}
	if x.op == ccl.Avg {
		v /= float64(x.n)
	}
	return v
}

// fill writes rank's contribution to a buffer of type dt.
func (x expect) fill(dt ccl.DType, b []byte) {
	es := dt.Size()
	for i := 0; i < len(b)/es; i++ {
		store(dt, b[i*es:], x.contribution(x.rank, i))
	}
}

// wrong counts the elements of b that are not what want says.
func (x expect) wrong(dt ccl.DType, b []byte, want func(expect, int) (float64, bool)) int {
	es, wrong := dt.Size(), 0
	for i := 0; i < len(b)/es; i++ {
		v, ok := want(x, i)
		if !ok {
			return 0
		}
		if dt <= ccl.Uint64 && dt != ccl.Float16 {
			v = wrapped(dt, v)
		}
		if got := load(dt, b[i*es:]); !(math.Abs(got-v) <= precision[dt]*math.Abs(v)) { // also NaN
			wrong++
		}
	}
	return wrong
}

// wrapped is what an integer type makes of a sum of many ranks'.
func wrapped(dt ccl.DType, v float64) float64 {
	var b [8]byte
	store(dt, b[:], math.Trunc(v))
	return load(dt, b[:])
}

// precision is how far a type may round.
var precision = map[ccl.DType]float64{
	ccl.Float8E4M3: 1.0 / (1 << 4), ccl.Float8E5M2: 1.0 / (1 << 3), ccl.Float16: 1.0 / (1 << 10), ccl.BFloat16: 1.0 / (1 << 7), ccl.Float32: 1.0 / (1 << 22), ccl.Float64: 1.0 / (1 << 50),
}

func store(dt ccl.DType, b []byte, v float64) {
	switch dt {
	case ccl.Int8, ccl.Uint8:
		b[0] = byte(int(v))
	case ccl.Int32, ccl.Uint32:
		binary.LittleEndian.PutUint32(b, uint32(int64(v)))
	case ccl.Int64, ccl.Uint64:
		binary.LittleEndian.PutUint64(b, uint64(int64(v)))
	case ccl.Float8E4M3:
		b[0] = e4m3.encode(v)
	case ccl.Float8E5M2:
		b[0] = e5m2.encode(v)
	case ccl.Float16:
		binary.LittleEndian.PutUint16(b, uint16(ccl.ToF16(float32(v))))
	case ccl.BFloat16:
		binary.LittleEndian.PutUint16(b, uint16(ccl.ToBF16(float32(v))))
	case ccl.Float32:
		binary.LittleEndian.PutUint32(b, math.Float32bits(float32(v)))
	case ccl.Float64:
		binary.LittleEndian.PutUint64(b, math.Float64bits(v))
	default:
		panic(fmt.Sprintf("perf: nothing is known of type %v", dt))
	}
}

func load(dt ccl.DType, b []byte) float64 {
	switch dt {
	case ccl.Int8:
		return float64(int8(b[0]))
	case ccl.Uint8:
		return float64(b[0])
	case ccl.Int32:
		return float64(int32(binary.LittleEndian.Uint32(b)))
	case ccl.Uint32:
		return float64(binary.LittleEndian.Uint32(b))
	case ccl.Int64:
		return float64(int64(binary.LittleEndian.Uint64(b)))
	case ccl.Uint64:
		return float64(binary.LittleEndian.Uint64(b))
	case ccl.Float8E4M3:
		return e4m3.decode(b[0])
	case ccl.Float8E5M2:
		return e5m2.decode(b[0])
	case ccl.Float16:
		return float64(ccl.F16(binary.LittleEndian.Uint16(b)).Float32())
	case ccl.BFloat16:
		return float64(ccl.BF16(binary.LittleEndian.Uint16(b)).Float32())
	case ccl.Float32:
		return float64(math.Float32frombits(binary.LittleEndian.Uint32(b)))
	case ccl.Float64:
		return math.Float64frombits(binary.LittleEndian.Uint64(b))
	}
	panic(fmt.Sprintf("perf: nothing is known of type %v", dt))
}

// float8 is an 8-bit float: bits of its mantissa, its exponent's bias, and whether
// its largest exponent is Inf and NaN as in IEEE 754, or NaN is all ones alone.
type float8 struct {
	bits, bias int
	ieee       bool
}

var e4m3, e5m2 = float8{3, 7, false}, float8{2, 15, true}

// encode is for 0 and normal positive numbers that the type holds exactly.
func (f float8) encode(v float64) byte {
	if v == 0 {
		return 0
	}
	frac, exp := math.Frexp(v)
	return byte((exp-1+f.bias)<<f.bits | (int(frac*float64(int(2)<<f.bits)) - 1<<f.bits))
}

func (f float8) decode(b byte) float64 {
	exp, mantissa := int(b&0x7f)>>f.bits, int(b)&(1<<f.bits-1)
	var v float64
	switch {
	case f.ieee && exp == 0x7f>>f.bits && mantissa == 0:
		v = math.Inf(1)
	case f.ieee && exp == 0x7f>>f.bits, b&0x7f == 0x7f:
		return math.NaN()
	case exp == 0:
		v = math.Ldexp(float64(mantissa), 1-f.bias-f.bits)
	default:
		v = math.Ldexp(float64(int(1)<<f.bits+mantissa), exp-f.bias-f.bits)
	}
	if b&0x80 != 0 {
		return -v
	}
	return v
}
