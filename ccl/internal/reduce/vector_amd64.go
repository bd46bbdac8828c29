package reduce

import "unsafe"

// vectorBytes is how many bytes the vector kernels take at a time.
const vectorBytes = 16

var (
	vector      [numTypes][numOps]kernel
	vectorScale [numTypes]func(p unsafe.Pointer, n, divisor int)
)
