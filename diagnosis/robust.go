package diagnosis

import "math"

// quantile returns the k-th smallest of n values where k = q·(n-1), rounded
// down, so that of two values the median is the lower: a single bad value never
// is the norm. It reorders v; the result is 0 for no values.
func quantile(v []float64, q float64) float64 {
	if len(v) == 0 {
		return 0
	}
	k := int(q * float64(len(v)-1))
	lo, hi := 0, len(v)-1
	for lo < hi {
		pivot := v[lo+(hi-lo)/2]
		i, j := lo, hi
		for i <= j {
			for v[i] < pivot {
				i++
			}
			for v[j] > pivot {
				j--
			}
			if i <= j {
				v[i], v[j] = v[j], v[i]
				i++
				j--
			}
		}
		switch {
		case k <= j:
			hi = j
		case k >= i:
			lo = i
		default:
			return v[k]
		}
	}
	return v[k]
}

func median(v []float64) float64 { return quantile(v, 0.5) }

// medianBelow reports whether the median is at most some bound.
func medianBelow(v []float64, bound float64) bool {
	n := 0
	for _, x := range v {
		if x <= bound {
			n++
		}
	}
	return 2*n > len(v)-1 && n > 0
}

// deviation returns the median absolute deviation from center, scaled to a
// normal distribution's standard deviation. It overwrites v.
func deviation(v []float64, center float64) float64 {
	for i := range v {
		v[i] = math.Abs(v[i] - center)
	}
	return 1.4826 * median(v)
}
