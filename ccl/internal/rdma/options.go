package rdma

import (
	"cmp"
	"fmt"
	"log/slog"
	"time"
)

// Options of connections. The zero value of each field is its default.
type Options struct {
	// Lanes a connection has, 1 to 16; 1 by default. Both ends' fewer counts.
	Lanes int
	// Window is how many bytes the receiver takes unread, a power of two from
	// 64 KiB to 256 MiB; 2 MiB by default. Both ends' smaller counts.
	Window int
	// Timeout is how long a NIC waits for an acknowledgement: 4.096 µs × 2^Timeout,
	// 1 to 31; 14 (67 ms) by default. It retries Retries times, 1 to 6; 6 by default.
	Timeout, Retries int
	TrafficClass     int // 0 to 255
	ServiceLevel     int // 0 to 15
	// Stuck is how long a write may stay without a completion, twice the NIC's own
	// patience and at least 500 ms by default.
	Stuck time.Duration
	// FailbackAfter is how long a port has to be healthy before it is used again,
	// 10 s by default. It doubles with each relapse, to 10 minutes at most.
	FailbackAfter time.Duration
	// GiveUpAfter is how long a connection looks for a path when it has none, 10 s
	// by default.
	GiveUpAfter time.Duration
	// ControlTimeout is how long the management network may carry nothing before a
	// connection ends whose rails work, from 1 ms; 60 s by default.
	ControlTimeout time.Duration
	// Log is told what stays behind and what cannot be used; slog.Default() by default. Of a
	// device that workers share it is the log of the one that opened it.
	Log *slog.Logger
}

const (
	maxLanes    = 16
	maxFailback = 10 * time.Minute
)

// SetDefaults checks the options and fills in what is zero.
func (o *Options) SetDefaults() error {
	o.Log = cmp.Or(o.Log, slog.Default())
	for _, f := range []struct {
		what          string
		v             *int
		def, min, max int
	}{
		{"lanes", &o.Lanes, 1, 1, maxLanes},
		{"window", &o.Window, 2 << 20, 64 << 10, 256 << 20},
		{"timeout", &o.Timeout, 14, 1, 31},
		// 7 means for ever to some devices.
		{"retries", &o.Retries, 6, 1, 6},
		{"traffic class", &o.TrafficClass, 0, 0, 255},
		{"service level", &o.ServiceLevel, 0, 0, 15},
	} {
		*f.v = cmp.Or(*f.v, f.def)
		if *f.v < f.min || *f.v > f.max {
			return fmt.Errorf("RDMA %s is %d, want %d to %d", f.what, *f.v, f.min, f.max)
		}
	}
	if o.Window&(o.Window-1) != 0 {
		return fmt.Errorf("RDMA window is %d bytes, want a power of two", o.Window)
	}
	patience := time.Duration(o.Retries+1) * (4096 * time.Nanosecond << o.Timeout)
	o.Stuck = cmp.Or(o.Stuck, max(2*patience, 500*time.Millisecond))
	o.FailbackAfter = cmp.Or(o.FailbackAfter, 10*time.Second)
	o.GiveUpAfter = cmp.Or(o.GiveUpAfter, 10*time.Second)
	o.ControlTimeout = cmp.Or(o.ControlTimeout, time.Minute)
	if o.Stuck < 0 || o.FailbackAfter < 0 || o.GiveUpAfter < 0 || o.ControlTimeout < time.Millisecond {
		return fmt.Errorf("RDMA durations %v, %v, %v, %v: want none below 0, the last from 1ms", o.Stuck, o.FailbackAfter, o.GiveUpAfter, o.ControlTimeout)
	}
	return nil
}
