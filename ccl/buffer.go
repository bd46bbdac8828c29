package ccl

import (
	"fmt"
	"math"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/record"
)

// DType is an element type; Op a reduction operator.
type (
	DType = record.DType
	Op    = record.RedOp
)

// The element types, as NCCL has them.
const (
	Int8     = record.Int8
	Uint8    = record.Uint8
	Int32    = record.Int32
	Uint32   = record.Uint32
	Int64    = record.Int64
	Uint64   = record.Uint64
	Float16  = record.Float16
	Float32  = record.Float32
	Float64  = record.Float64
	BFloat16 = record.BFloat16
	// On GPUs only.
	Float8E4M3 = record.Float8E4M3
	Float8E5M2 = record.Float8E5M2
)

// The reduction operators. Avg is the sum divided by the number of ranks;
// integers truncate toward zero.
const (
	Sum  = record.Sum
	Prod = record.Prod
	Max  = record.Max
	Min  = record.Min
	Avg  = record.Avg
)

// F16 and BF16 hold the bits of a 16-bit float: elements of Float16 and BFloat16.
type (
	F16  uint16
	BF16 uint16
)

// Element are the Go types that a Buffer may hold.
type Element interface {
	int8 | uint8 | int32 | uint32 | int64 | uint64 | F16 | float32 | float64 | BF16
}

// Buffer is a piece of the caller's memory as collectives see it: where it is,
// its element type, and how many elements it has. It is a small value that
// refers to memory and does not own it; the memory must not be touched between
// the call that takes the Buffer and the end of its operation. The zero Buffer
// stands for none, where a rank has nothing to send or receive.
type Buffer struct {
	p   unsafe.Pointer // host memory
	dev uintptr        // or device memory
	n   int
	dt  DType
}

// Of is the Buffer of a slice's elements.
func Of[T Element](s []T) Buffer {
	var zero T
	var dt DType
	switch any(zero).(type) {
	case int8:
		dt = Int8
	case uint8:
		dt = Uint8
	case int32:
		dt = Int32
	case uint32:
		dt = Uint32
	case int64:
		dt = Int64
	case uint64:
		dt = Uint64
	case F16:
		dt = Float16
	case float32:
		dt = Float32
	case float64:
		dt = Float64
	case BF16:
		dt = BFloat16
	}
	return Buffer{p: unsafe.Pointer(unsafe.SliceData(s)), n: len(s), dt: dt}
}

// Bytes is the Buffer of raw bytes that hold little-endian elements of type dt.
// It panics when they are not whole elements.
func Bytes(dt DType, b []byte) Buffer {
	size := dt.Size()
	if size == 0 || len(b)%size != 0 {
		panic(fmt.Sprintf("ccl: %d bytes are not whole elements of %v", len(b), dt))
	}
	return Buffer{p: unsafe.Pointer(unsafe.SliceData(b)), n: len(b) / size, dt: dt}
}

// OnDevice is the Buffer of n elements of type dt in the memory of the rank's GPU,
// at a CUDA device pointer.
func OnDevice(dt DType, ptr uintptr, n int) Buffer {
	if dt.Size() == 0 || n < 0 || ptr == 0 && n > 0 {
		panic(fmt.Sprintf("ccl: %d elements of %v at device address %#x", n, dt, ptr))
	}
	return Buffer{dev: ptr, n: n, dt: dt}
}

// Slice is elements i to j of b. It panics when they are not in it.
func (b Buffer) Slice(i, j int) Buffer {
	if i < 0 || j < i || j > b.n {
		panic(fmt.Sprintf("ccl: Buffer.Slice(%d, %d) of %d elements", i, j, b.n))
	}
	if b.dev != 0 {
		return Buffer{dev: b.dev + uintptr(i*b.dt.Size()), n: j - i, dt: b.dt}
	}
	return Buffer{p: unsafe.Add(b.p, i*b.dt.Size()), n: j - i, dt: b.dt}
}

// Count is how many elements b has.
func (b Buffer) Count() int { return b.n }

// DType is the type of its elements.
func (b Buffer) DType() DType { return b.dt }

// Raw is the host memory of b, nil when it is device memory.
func (b Buffer) Raw() []byte {
	if b.onDevice() {
		return nil
	}
	return b.raw()
}

// Device is the device address of b, 0 when it is host memory.
func (b Buffer) Device() uintptr { return b.dev }

func (b Buffer) none() bool     { return b.p == nil && b.dev == 0 && b.n == 0 }
func (b Buffer) onDevice() bool { return b.dev != 0 }
func (b Buffer) size() int      { return b.n * b.dt.Size() }
func (b Buffer) raw() []byte    { return unsafe.Slice((*byte)(b.p), b.size()) }

// address is where b begins, in its own memory.
func (b Buffer) address() uintptr {
	if b.dev != 0 {
		return b.dev
	}
	return uintptr(b.p)
}

// ToF16 and ToBF16 round a float32 to 16 bits, to nearest even.
func ToF16(f float32) F16 {
	b := math.Float32bits(f)
	sign, mag := uint16(b>>16)&0x8000, b&0x7fffffff
	switch {
	case mag > 0x7f800000:
		return F16(sign | 0x7e00)
	case mag >= 0x477ff000:
		return F16(sign | 0x7c00)
	case mag < 0x38800000: // denormal: the addition rounds where it must
		return F16(sign | uint16(math.Float32bits(math.Float32frombits(mag)+0.5)-math.Float32bits(0.5)))
	}
	mag += 0xfff + mag>>13&1
	return F16(sign | uint16((mag-(127-15)<<23)>>13))
}

func ToBF16(f float32) BF16 {
	b := math.Float32bits(f)
	if b&0x7fffffff > 0x7f800000 {
		return BF16(b>>16 | 0x40)
	}
	return BF16((b + 0x7fff + b>>16&1) >> 16)
}

// Float32 is the exact value of f.
func (f F16) Float32() float32 {
	sign, exp, man := uint32(f&0x8000)<<16, uint32(f>>10)&0x1f, uint32(f)&0x3ff
	switch exp {
	case 0:
		v := float32(man) * 0x1p-24
		if sign != 0 {
			v = -v
		}
		return v
	case 0x1f:
		return math.Float32frombits(sign | 0x7f800000 | man<<13)
	}
	return math.Float32frombits(sign | (exp+127-15)<<23 | man<<13)
}

// Float32 is the exact value of f.
func (f BF16) Float32() float32 { return math.Float32frombits(uint32(f) << 16) }
