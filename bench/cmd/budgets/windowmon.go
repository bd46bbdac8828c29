package main

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/windowmon"
)

// windowMonitor times one work request, its post and its completion, with a
// window's closing shared by the requests in it. The clock is the caller's, and
// runs as on a saturated 400 Gb/s port: 128 KiB every 2.6 µs, eight under way.
func windowMonitor() ([]row, error) {
	const (
		size  = 128 << 10
		every = 2621 // ns
		depth = 8
	)
	var m windowmon.Monitor
	m.Init(windowmon.Config{})
	now := int64(1)
	for range depth {
		m.Post(now, size)
	}
	ns, allocs, err := fastest(func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			now += every
			m.Complete(now, size)
			m.Post(now, size)
		}
	})
	if err != nil {
		return nil, err
	}
	return []row{
		{"windowmon_work_request", ns, "ns", 25},
		{"windowmon_work_request_allocs", float64(allocs), "allocs", 0},
		// ICCL's monitor costs 11.8 points of a whole host; this is of one core.
		{"windowmon_cpu_per_400g_port", ns / every * 100, "points", 1},
	}, nil
}
