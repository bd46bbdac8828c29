package record

import (
	"time"
	_ "unsafe" // for go:linkname
)

// nanotime reads CLOCK_MONOTONIC through the vDSO. The runtime promises to
// keep this name linkable (go.dev/issue/67401). A time.Since on a base would
// cost as little but sit off the C side's clock by an unknown microsecond.
//
//go:linkname nanotime runtime.nanotime
func nanotime() int64

// Now is CLOCK_MONOTONIC in nanoseconds, the clock of every time in a recorder.
func Now() int64 { return nanotime() }

// Anchor is one instant on both clocks.
type Anchor struct {
	Mono int64 // CLOCK_MONOTONIC ns
	Real int64 // CLOCK_REALTIME, unix ns
}

// takeAnchor reads REALTIME between two reads of MONOTONIC, and keeps the
// tightest of a few tries: preemption between the reads is the only error.
func takeAnchor() Anchor {
	var best Anchor
	width := int64(1<<63 - 1)
	for range 4 {
		before := nanotime()
		now := time.Now().UnixNano()
		if d := nanotime() - before; d < width {
			best, width = Anchor{Mono: before + d/2, Real: now}, d
		}
	}
	return best
}
