package agent

import "github.com/lockstep-ccl/lockstep/record"

// gpuClock maps a GPU's clock to CLOCK_MONOTONIC by causality alone: an operation
// begins after it was launched, and has begun (and ended) before its process was told
// so. Each operation bounds the offset from both sides; the bounds of the quickest
// ones are kept, and loosen as the clocks drift apart.
type gpuClock struct {
	lo, hi  int64 // bounds of CLOCK_MONOTONIC − GPU clock
	at      int64 // CLOCK_MONOTONIC of the bounds
	use     int64 // offset in use
	useErr  int64 // and its error when it was taken
	bounded bool
}

// Where the time of the call is not known, the launch is taken to be shortly before the first
// record of it.
const launchSlack = int64(100e6)

// times fills an operation's times from its GPU stamps, the second of which end has.
// called says that its enqueue record has the time of the call, which comes before
// the launch.
func (g *gpuClock) times(o *op, end *record.Record, called bool) {
	start, stop := o.gpuStart, end.Stamp
	lo := max(o.enqueued, o.launched)
	if !called || o.replay || o.enqueued == 0 {
		lo = min(o.started, end.Mono) - launchSlack
	}
	dur := stop - start
	if dur < 0 || dur > 1<<50 {
		return // told by the process: better than nothing
	}
	// o.started is still when the process was told of the start.
	g.bound(lo-start, min(o.started-start, end.Mono-stop), end.Mono)
	o.started, o.ended = start+g.use, stop+g.use
	o.clock, o.clockErr = record.ClockGPU, g.err(end.Mono)
	if o.wait+o.transfer == 0 {
		o.transfer = dur
	}
}

// bound takes in that the offset is from lo to hi.
func (g *gpuClock) bound(lo, hi, now int64) {
	if hi < lo {
		return // a stamp of another operation: nothing can be learnt of it
	}
	if d := drifted(now - g.at); g.bounded && d > minDrift {
		g.lo, g.hi, g.at = g.lo-d, g.hi+d, now
	}
	if g.bounded {
		g.lo, g.hi = max(g.lo, lo), min(g.hi, hi)
	}
	if !g.bounded || g.lo > g.hi { // or the clock was set: it begins anew
		g.lo, g.hi, g.bounded, g.useErr = lo, hi, true, 0
		g.use, g.at = lo+(hi-lo)/2, now
	}
	// The offset in use changes when it is proved wrong, or when one twice as good is known, so
	// that differences of mapped times carry no jitter.
	if err := (g.hi - g.lo) / 2; g.use < g.lo || g.use > g.hi || g.useErr == 0 || err < g.useErr/2 {
		g.use, g.useErr = g.lo+(g.hi-g.lo)/2, max(err, 1)
	}
}

// err is how far off a mapped time may be.
func (g *gpuClock) err(now int64) int64 {
	return max(g.hi-g.use, g.use-g.lo) + drifted(now-g.at)
}

// minDrift is by how much bounds loosen at a time, ns.
const minDrift = 100

// drifted bounds how far the clocks have run apart in ns nanoseconds.
func drifted(ns int64) int64 { return max(ns, 0) / (1e9 / record.RatePPB) }
