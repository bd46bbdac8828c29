package preflight

import (
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
)

// Options is what to measure, the same on all ranks but for the device. Nothing has a default.
type Options struct {
	Device   ccl.Device    // where the buffers are; between nodes they are in host memory all the same
	Size     int           // bytes of the largest message
	Time     time.Duration // of the bandwidth of each direction of a pair
	Trips    int           // round trips of a latency
	Together bool          // measure also while all exchange with all
	Limits   Limits        // rank 0's count

	JoinTimeout time.Duration // for all ranks to come
	PairTimeout time.Duration // for a pair, which is blocked after it

	// Progress is told on rank 0 what it is at, and how far: done of total steps. It may be nil.
	Progress func(what string, done, total int)
}

// Limits is when a measurement is bad.
type Limits struct {
	Tolerance    float64       // so many times slower than what is typical of its kind; of latencies twice that
	MinBandwidth float64       // bytes per second, 0 for no such limit
	MaxLatency   time.Duration // 0 for no such limit
}

// Slack is what setting up and closing may take beyond a measurement.
const Slack = 6 * time.Second

// Statuses that all ranks agree on, and end their processes with.
const (
	statusIncomplete = 1
	StatusBad        = 3 // something bad was found
)
