package reduce_test

import (
	"encoding/binary"
	"math"
	"math/big"
	"math/rand/v2"

	"github.com/lockstep-ccl/lockstep/record"
)

func canonical(dt record.DType) uint64 {
	return map[record.DType]uint64{
		record.Float16: 0x7e00, record.BFloat16: 0x7fc0, record.Float32: 0x7fc00000, record.Float64: 0x7ff8000000000000,
	}[dt]
}

func get(dt record.DType, b []byte) uint64 {
	switch dt.Size() {
	case 1:
		return uint64(b[0])
	case 2:
		return uint64(binary.LittleEndian.Uint16(b))
	case 4:
		return uint64(binary.LittleEndian.Uint32(b))
	}
	return binary.LittleEndian.Uint64(b)
}

func put(dt record.DType, b []byte, v uint64) {
	switch dt.Size() {
	case 1:
		b[0] = byte(v)
	case 2:
		binary.LittleEndian.PutUint16(b, uint16(v))
	case 4:
		binary.LittleEndian.PutUint32(b, uint32(v))
	case 8:
		binary.LittleEndian.PutUint64(b, v)
	}
}

func toFloat64(dt record.DType, v uint64) float64 {
	small := func(bias, manBits, expBits int) float64 {
		man, exp := float64(v&(1<<manBits-1)), int(v>>manBits)&(1<<expBits-1)
		sign := 1.0
		if v>>(manBits+expBits) != 0 {
			sign = -1
		}
		switch {
		case exp == 1<<expBits-1 && man != 0:
			return math.NaN()
		case exp == 1<<expBits-1:
			return math.Inf(int(sign))
		case exp == 0:
			return math.Copysign(math.Ldexp(man, 1-bias-manBits), sign)
		}
		return sign * math.Ldexp(1+math.Ldexp(man, -manBits), exp-bias)
	}
	switch dt {
	case record.Float16:
		return small(15, 10, 5)
	case record.BFloat16:
		return small(127, 7, 8)
	case record.Float32:
		return float64(math.Float32frombits(uint32(v)))
	}
	return math.Float64frombits(v)
}

// fromFloat64 rounds an exact value to nearest even by asking which of the
// neighbours of a truncated guess is nearest.
func fromFloat64(dt record.DType, f float64) uint64 {
	if f != f {
		return canonical(dt)
	}
	switch dt {
	case record.Float64:
		return math.Float64bits(f)
	case record.Float32:
		return uint64(math.Float32bits(float32(f)))
	}
	sign, inf := uint64(0), uint64(0x7c00)
	if math.Signbit(f) {
		sign = 0x8000
	}
	if dt == record.BFloat16 {
		inf = 0x7f80
	}
	mag := math.Abs(f)
	lo, hi := uint64(0), inf // values grow with their bits
	for hi-lo > 1 {
		mid := (lo + hi) / 2
		if toFloat64(dt, mid) <= mag {
			lo = mid
		} else {
			hi = mid
		}
	}
	if mag >= toFloat64(dt, hi) {
		return sign | hi
	}
	above := toFloat64(dt, hi)
	if hi == inf { // rounding sees the next power of two there
		above = 2*toFloat64(dt, lo) - toFloat64(dt, lo-1)
	}
	down, up := mag-toFloat64(dt, lo), above-mag
	if down < up || down == up && lo&1 == 0 {
		return sign | lo
	}
	return sign | hi
}

func isFloat(dt record.DType) bool { return dt >= record.Float16 }

func signed(dt record.DType, v uint64) *big.Int {
	bits := 8 * dt.Size()
	x := new(big.Int).SetUint64(v)
	if dt == record.Int8 || dt == record.Int32 || dt == record.Int64 {
		if x.Bit(bits-1) == 1 {
			x.Sub(x, new(big.Int).Lsh(big.NewInt(1), uint(bits)))
		}
	}
	return x
}

func wrap(dt record.DType, x *big.Int) uint64 {
	m := new(big.Int).Lsh(big.NewInt(1), uint(8*dt.Size()))
	return x.Mod(x, m).Uint64()
}

func reference(op record.RedOp, dt record.DType, a, b uint64) uint64 {
	if !isFloat(dt) {
		x, y, r := signed(dt, a), signed(dt, b), new(big.Int)
		switch op {
		case record.Sum, record.Avg:
			r.Add(x, y)
		case record.Prod:
			r.Mul(x, y)
		case record.Max:
			if r.Set(x); x.Cmp(y) < 0 {
				r.Set(y)
			}
		case record.Min:
			if r.Set(x); x.Cmp(y) > 0 {
				r.Set(y)
			}
		}
		return wrap(dt, r)
	}
	x, y := toFloat64(dt, a), toFloat64(dt, b)
	switch op {
	case record.Max, record.Min:
		switch {
		case x != x && y != y:
			return canonical(dt)
		case x != x:
			return b
		case y != y:
			return a
		case op == record.Max && (x > y || x == y && !math.Signbit(x)):
			return a
		case op == record.Min && (x < y || x == y && math.Signbit(x)):
			return a
		}
		return b
	case record.Prod:
		if dt == record.BFloat16 || dt == record.Float16 {
			return fromFloat64(dt, float64(float32(x*y))) // rounded in float32, then once more
		}
		return fromFloat64(dt, product(dt, x, y))
	}
	if dt == record.BFloat16 || dt == record.Float16 {
		return fromFloat64(dt, float64(float32(x+y)))
	}
	if dt == record.Float32 {
		return fromFloat64(dt, float64(float32(x)+float32(y)))
	}
	return fromFloat64(dt, x+y)
}

func product(dt record.DType, x, y float64) float64 {
	if dt == record.Float32 {
		return float64(float32(x) * float32(y))
	}
	return x * y
}

// specials are the bit patterns where arithmetic goes wrong first.
func specials(dt record.DType) []uint64 {
	switch dt {
	case record.Float16:
		return []uint64{0, 0x8000, 1, 0x8001, 0x3ff, 0x400, 0x3c00, 0xbc00, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7c01, 0xfe00, 0x7fff}
	case record.BFloat16:
		return []uint64{0, 0x8000, 1, 0x8001, 0x7f, 0x80, 0x3f80, 0xbf80, 0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7f81, 0xffc0, 0x7fff}
	case record.Float32:
		return []uint64{0, 0x80000000, 1, 0x80000001, 0x7fffff, 0x800000, 0x3f800000, 0xbf800000, 0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000, 0x7f800001, 0xffc00000, 0x7fffffff}
	case record.Float64:
		return []uint64{0, 1 << 63, 1, 1<<63 | 1, 1<<52 - 1, 1 << 52, 0x3ff << 52, 0xbff << 52, 0x7fefffffffffffff, 0xffefffffffffffff, 0x7ff << 52, 0xfff << 52, 0x7ff0000000000001, 0xfff8 << 48, 1<<63 - 1}
	}
	top := uint64(1) << (8*dt.Size() - 1)
	return []uint64{0, 1, top - 1, top, top + 1, 2*top - 1, 2, 3}
}

// values mixes random patterns, small numbers and specials.
func values(r *rand.Rand, dt record.DType, b []byte) {
	w, sp := dt.Size(), specials(dt)
	for i := 0; i < len(b); i += w {
		switch r.IntN(4) {
		case 0:
			put(dt, b[i:], sp[r.IntN(len(sp))])
		case 1:
			put(dt, b[i:], r.Uint64())
		default:
			if isFloat(dt) {
				put(dt, b[i:], fromFloat64(dt, r.NormFloat64()))
			} else {
				put(dt, b[i:], r.Uint64N(1000))
			}
		}
	}
}
