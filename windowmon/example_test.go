package windowmon_test

import (
	"fmt"
	"time"

	"github.com/lockstep-ccl/lockstep/windowmon"
)

// A transport embeds a Monitor in its sending half, and tells the flight
// recorder of a window when a call says so.
func Example() {
	var m windowmon.Monitor
	m.Init(windowmon.Config{})

	now := int64(time.Hour) // CLOCK_MONOTONIC ns
	for range 8 {
		m.Post(now, 64<<10)
		now += 10_000
		if m.Complete(now, 64<<10) {
			w := m.Last()
			fmt.Printf("%d requests, %.2f GB/s, %d ns each, cause %d\n", w.WRs, w.Bandwidth()/1e9, w.Latency, w.Cause)
		}
	}
	// Output: 8 requests, 6.55 GB/s, 10000 ns each, cause 0
}
