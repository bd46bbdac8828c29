package windowmon

import "time"

// Cause is why a window was slow. The values are those of record.Cause.
type Cause uint8

const (
	None             Cause = iota // not slow
	Network                       // work was outstanding, the receiver had given credit, and the bytes did not arrive
	SenderStarved                 // mostly nothing was outstanding: the sender's own program is late
	ReceiverNotReady              // mostly the receiver gave no credit
	CPUStarved                    // mostly the progress thread did not run
	numCauses
)

// Window is a stretch of a connection's life that ends with a number of
// completions, or with age, or before an idle time. Times are ns.
//
// First is the first post of the window, or the end of the window before it
// when work was outstanding across the boundary: windows never overlap, so a
// deep queue is not taken for a slow network. Last is the last completion, or
// the time of closing when the window ended by age with work outstanding.
type Window struct {
	First, Last int64
	Bytes       uint64 // completed
	WRs         uint32 // completed
	Backlog     uint32 // most work requests outstanding at once
	Latency     int64  // mean from post to completion of the completed ones, 0 when none

	// Last-First, by what the connection was doing. Network: work outstanding;
	// Starved: none; Blocked: no credit; Stalled: work outstanding and the
	// progress thread away.
	Network, Starved, Blocked, Stalled int64

	Cause Cause // of this window
	State Cause // of the connection after this window, past hysteresis
	// Anomaly: the connection has a slow network, and this window shows it.
	Anomaly bool
}

// Bandwidth is bytes per second over the whole window.
func (w *Window) Bandwidth() float64 {
	if w.Last <= w.First {
		return 0
	}
	return float64(w.Bytes) * 1e9 / float64(w.Last-w.First)
}

// Config tunes a Monitor; zero fields take the values of Defaults.
type Config struct {
	// WRs is how many completed work requests close a window.
	WRs int
	// Resolution is the shortest window: one with enough work requests goes on until it is that long.
	Resolution time.Duration
	// MaxAge closes a window that has work outstanding, however little it completed.
	MaxAge time.Duration
	// Idle closes a window after its last completion when nothing was posted for that long.
	Idle time.Duration
	// Gap between two calls while work is outstanding means that the progress
	// thread did not run. It must exceed the longest time for which that
	// thread sleeps on purpose.
	Gap time.Duration

	// SlowRatio is the share of its normal speed below which a work request is slow.
	SlowRatio float64
	// Warmup is how many work requests of a size class are learnt before any is judged.
	Warmup int
	// Adopt is how long a slow network may last before it becomes the normal one.
	Adopt time.Duration

	// Rare says that a network is told as well that is slow now and then only, as one is that loses a
	// packet of hundreds: for transports whose completions do not wait for the peer's program.
	Rare bool

	// Period is how often a connection that closes windows is told of though
	// nothing has changed; Quiet is the least time between two tellings.
	Period, Quiet time.Duration
}

// Defaults returns the values that stand for zero fields.
func Defaults() Config {
	return Config{
		WRs: 8, Resolution: 10 * time.Microsecond, MaxAge: 50 * time.Millisecond, Idle: time.Millisecond, Gap: 10 * time.Millisecond,
		SlowRatio: 0.5, Warmup: 64, Adopt: 10 * time.Minute,
		Period: time.Second, Quiet: 100 * time.Millisecond,
	}
}

func (c Config) withDefaults() Config {
	d := Defaults()
	or(&c.WRs, d.WRs)
	or(&c.Resolution, d.Resolution)
	or(&c.MaxAge, d.MaxAge)
	or(&c.Idle, d.Idle)
	or(&c.Gap, d.Gap)
	or(&c.SlowRatio, d.SlowRatio)
	or(&c.Warmup, d.Warmup)
	or(&c.Adopt, d.Adopt)
	or(&c.Period, d.Period)
	or(&c.Quiet, d.Quiet)
	return c
}

func or[T int | float64 | time.Duration](v *T, dflt T) {
	if *v <= 0 {
		*v = dflt
	}
}
