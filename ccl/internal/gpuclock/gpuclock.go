// Package gpuclock relates a GPU's clock (%globaltimer) to CLOCK_MONOTONIC,
// with a bound on the error that holds, rather than one that is likely.
//
// In flow instants of which the order is certain: a handshake's stamp lies
// between two readings of the host's clock; an operation begins after it was
// enqueued, and ends before it is seen to have ended. Each bounds the clocks'
// offset at that instant from one side or both. The bounds grow apart with time
// as fast as clocks may drift, and are cut by those that come. Out flows, for
// any stamp, the host's time and its error, and an anchor for the flight
// recorder.
//
// The package reads no clock, starts nothing, and averages nothing: a thousand
// slow handshakes are worth less than one quick one.
package gpuclock

import (
	"math"

	"github.com/lockstep-ccl/lockstep/record"
)

// Options of a Clock. Zero fields take the defaults.
type Options struct {
	// DriftPPB bounds the difference of the clocks' rates at any time, in parts
	// of 10⁹. The default holds for any two crystals while NTP slews the host's clock:
	// bounds that are older than a burst of handshakes then count for nothing.
	DriftPPB int64
	// Tick is the step of the GPU's clock, ns; 32 (H200). A stamp is the last
	// tick before its instant.
	Tick int64
}

// Clock is one GPU's. It is for one goroutine at a time.
type Clock struct {
	drift, tick int64

	// Of the offset, host minus GPU: the lower and the upper bound that reach
	// furthest, each of one instant.
	lower, upper bound
	conflicts    uint64

	// The rate is measured from an earlier instant to the newest.
	old, mid span
}

// bound is a bound of the offset at one instant of the GPU's clock.
type bound struct {
	gpu, offset int64
	known       bool
}

// span is the bounds of the offset at one instant of the GPU's clock.
type span struct {
	gpu, lo, hi int64
	known       bool
}

// New returns a clock that knows nothing yet.
func New(o Options) *Clock {
	if o.DriftPPB <= 0 {
		o.DriftPPB = record.RatePPB + record.SlewPPB
	}
	if o.Tick <= 0 {
		o.Tick = 32
	}
	return &Clock{drift: o.DriftPPB, tick: o.Tick}
}

// Handshake tells that the stamp gpu was made between two readings of
// CLOCK_MONOTONIC.
func (c *Clock) Handshake(before, gpu, after int64) {
	if after < before {
		return
	}
	// Bounds that contradict a handshake are wrong, which is told by itself.
	if lo, hi, ok := c.offset(gpu); ok && (before-gpu-c.tick > hi || after-gpu < lo) {
		c.conflicts++
		c.lower, c.upper, c.old, c.mid = bound{}, bound{}, span{}, span{}
	}
	c.After(before, gpu)
	c.Before(gpu, after)
}

// After tells that the stamp gpu was made at mono or later: an operation began
// after it was enqueued.
func (c *Clock) After(mono, gpu int64) {
	b := bound{gpu: gpu, offset: mono - gpu - c.tick, known: true}
	if c.upper.known {
		if hi := c.upper.offset + c.apart(gpu-c.upper.gpu); b.offset > hi {
			width := c.doubt(gpu)
			c.lower, c.upper = b, bound{gpu, b.offset + width, width > 0}
		}
	}
	if !c.lower.known || b.offset+c.signed(c.lower.gpu-gpu) >= c.lower.offset {
		c.lower = b
	}
	c.measure(gpu)
}

// Before tells that the stamp gpu was made at mono or earlier: an operation
// ended before it was seen to have ended.
func (c *Clock) Before(gpu, mono int64) {
	b := bound{gpu: gpu, offset: mono - gpu, known: true}
	if c.lower.known {
		if lo := c.lower.offset - c.apart(gpu-c.lower.gpu); b.offset < lo {
			width := c.doubt(gpu)
			c.lower, c.upper = bound{gpu, b.offset - width, width > 0}, b
		}
	}
	if !c.upper.known || b.offset-c.signed(c.upper.gpu-gpu) <= c.upper.offset {
		c.upper = b
	}
	c.measure(gpu)
}

// doubt counts an instant that contradicts what was known: the host's clock was
// slewed, or the clocks drift by more than they may. The newest word counts, and
// on its other side the error stays what it was until a handshake tells better:
// doubt returns that width, 0 when there was none.
func (c *Clock) doubt(gpu int64) (width int64) {
	c.conflicts++
	c.old, c.mid = span{}, span{}
	lo, hi, _ := c.offset(gpu)
	return hi - lo
}

// Conflicts counts the instants that contradicted what was known, so that either
// DriftPPB is too low or CLOCK_MONOTONIC was slewed.
func (c *Clock) Conflicts() uint64 { return c.conflicts }

// offset bounds host minus GPU at an instant of the GPU's clock.
func (c *Clock) offset(gpu int64) (lo, hi int64, ok bool) {
	if !c.lower.known || !c.upper.known {
		return 0, 0, false
	}
	return c.lower.offset - c.apart(gpu-c.lower.gpu), c.upper.offset + c.apart(gpu-c.upper.gpu), true
}

// apart is how far the clocks may run apart in so many ns, rounded up.
func (c *Clock) apart(ns int64) int64 {
	if ns < 0 {
		ns = -ns
	}
	return ns/1e9*c.drift + (ns%1e9*c.drift+1e9-1)/1e9
}

// signed is by how much a bound of ns ago (of ns ahead, when negative) has
// weakened more than one of now has.
func (c *Clock) signed(ns int64) int64 {
	if ns < 0 {
		return c.apart(ns)
	}
	return -c.apart(ns)
}

// Mono maps a stamp: it was made at mono ± err, ns. ok is false until both
// sides are bounded.
func (c *Clock) Mono(gpu int64) (mono, err int64, ok bool) {
	lo, hi, ok := c.offset(gpu)
	if !ok {
		return 0, 0, false
	}
	width := hi + c.tick - lo
	return gpu + lo + width/2, width/2 + 1, true
}

// Anchor is the pair of instants with the least error now, for
// record.Device.Anchor.
func (c *Clock) Anchor() (gpu, mono, err int64, ok bool) {
	gpu = max(c.lower.gpu, c.upper.gpu)
	mono, err, ok = c.Mono(gpu)
	return gpu, mono, err, ok
}

// window is how long the rate is measured for, at least; ns.
const window = 8e9

// measure keeps the instants that the rate is measured from.
func (c *Clock) measure(gpu int64) {
	if c.mid.known && gpu-c.mid.gpu < window {
		return
	}
	if lo, hi, ok := c.offset(gpu); ok {
		c.old, c.mid = c.mid, span{gpu, lo, hi, true}
	}
}

// Rate is how much faster the host's clock has run than the GPU's over the last
// seconds, in parts of 10⁹, and the bound on that. ok is false before it is known
// better than by DriftPPB.
func (c *Clock) Rate() (ppb, err float64, ok bool) {
	from := c.old
	if !from.known {
		from = c.mid
	}
	gpu := max(c.lower.gpu, c.upper.gpu)
	lo, hi, ok := c.offset(gpu)
	d := float64(gpu - from.gpu)
	if !ok || !from.known || d <= 0 {
		return 0, 0, false
	}
	least := max(float64(lo-from.hi)/d*1e9, -float64(c.drift))
	most := min(float64(hi-from.lo)/d*1e9, float64(c.drift))
	ppb, err = (least+most)/2, math.Abs(most-least)/2
	return ppb, err, err < float64(c.drift)
}
