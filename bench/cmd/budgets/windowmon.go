package main

import (
	"fmt"
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

// monitorAtLineRate is what monitor and recorder cost of one core while a port of 400 Gbit/s
// carries messages of one size: the transport's own benchmark, with the clock that it always has.
// ICCL's monitor costs 11.8 points: that is allowed from 4 KiB on, and a point from 128 KiB on.
func monitorAtLineRate() ([]row, error) {
	var rows []row
	for _, size := range []int{4 << 10, 8 << 10, 16 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20} {
		m, err := packageBenchmark("./ccl/internal/transport", fmt.Sprintf("^BenchmarkRDMAMonitorAtLineRate$/^%dB$", size))
		if err != nil {
			return nil, err
		}
		budget := 12.
		if size >= 128<<10 {
			budget = 1
		}
		rows = append(rows, row{fmt.Sprintf("rdma_monitor_400g_%d_bytes", size), m["points-of-a-core"], "points", budget})
	}
	return rows, nil
}
