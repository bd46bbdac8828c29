package preflight

import (
	"runtime"
	"time"
)

// best repeats do, which does work so many times, for about least, five times at least, and
// returns the best rate: what disturbs a host for a moment is not its fault.
func best(least time.Duration, work float64, do func() error, times int) (rate float64, err error) {
	begun := time.Now()
	for i := 0; i < 5 || time.Since(begun) < least; i++ {
		start := time.Now()
		if err := do(); err != nil {
			return 0, err
		}
		rate = max(rate, work*float64(times)/max(time.Since(start), 1).Seconds())
	}
	return rate, nil
}

// hostMemory is how many bytes per second one core copies from memory to memory.
func hostMemory(least time.Duration) float64 {
	const size = 32 << 20 // beyond most caches' share of a core
	dst, src := make([]byte, size), make([]byte, size)
	for i := 0; i < size; i += 4096 {
		dst[i], src[i] = 1, 2
	}
	rate, _ := best(least, size, func() error { copy(dst, src); return nil }, 1) // cannot fail
	return rate
}

// hostCompute is how many multiplications and additions per second one core does
// on floats in registers; a core that is throttled or shared does fewer.
func hostCompute(least time.Duration) float64 {
	const loops = 1 << 20
	var sum [8]float64
	rate, _ := best(least, 2*loops*float64(len(sum)), func() error {
		a, b, c, d, e, f, g, h := 1., 2., 3., 4., 5., 6., 7., 8.
		for range loops {
			a, b, c, d = a*0.999+0.5, b*0.999+0.5, c*0.999+0.5, d*0.999+0.5
			e, f, g, h = e*0.999+0.5, f*0.999+0.5, g*0.999+0.5, h*0.999+0.5
		}
		sum = [8]float64{a, b, c, d, e, f, g, h}
		return nil
	}, 1)
	runtime.KeepAlive(&sum)
	return rate
}
