package jobsim

import "math"

// rng is splitmix64: eight bytes of state, so every rank has its own, and what
// one draws does not depend on the order in which ranks are run.
type rng uint64

func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

func (r *rng) next() uint64 {
	*r += 0x9e3779b97f4a7c15
	return mix(uint64(*r))
}

// hash draws a number that depends on its arguments only.
func hash(a, b, c uint64) uint64 {
	return mix(mix(mix(a+0x9e3779b97f4a7c15)+b*0xd1342543de82ef95) + c*0x2545f4914f6cdd1d)
}

func unit(x uint64) float64 { return float64(x>>11) / (1 << 53) }

func (r *rng) float() float64 { return unit(r.next()) }

func (r *rng) intn(n int) int {
	if n <= 0 {
		return 0
	}
	return int(r.next() % uint64(n))
}

func (r *rng) int63n(n int64) int64 {
	if n <= 0 {
		return 0
	}
	return int64(r.next() % uint64(n))
}

// between draws from lo to hi.
func (r *rng) between(lo, hi float64) float64 { return lo + (hi-lo)*r.float() }

// bells is a table of the normal distribution: its quantiles, evenly spaced.
var bells = func() (t [4096]float64) {
	for i := range t {
		t[i] = math.Sqrt2 * math.Erfinv(2*(float64(i)+0.5)/float64(len(t))-1)
	}
	return t
}()

// normal maps 64 random bits to a normally distributed number.
func normal(x uint64) float64 { return bells[x>>52] }

// spread is a factor whose logarithm has this sigma and a mean of 0.
func spread(x uint64, sigma float64) float64 {
	if sigma <= 0 {
		return 1
	}
	return math.Exp(sigma * normal(x))
}
