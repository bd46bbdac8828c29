package agent

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/collector"
)

// A master hears of each port once, then of what has changed, every two seconds at most; after
// a new stream everything again.
func TestReportNICs(t *testing.T) {
	j := &job{}
	now := int64(1e9)
	port := collector.NICPort{Device: "mlx5_0", Port: 1, Retransmissions: []collector.NICCounter{{Name: "packet_seq_err"}, {Name: "local_ack_timeout_err", Value: 3}}}
	report := func(step int64) int {
		now += step
		n := 0
		for _, w := range j.reportNICs(&collector.NICs{ProbedAt: now, Ports: []collector.NICPort{port}}, now) {
			n += 1 + len(w.Counters)
		}
		return n
	}
	for i, c := range []struct {
		step   int64
		change func()
		want   int
	}{
		{0, func() {}, 2},
		{3e9, func() {}, 0},
		{3e9, func() { port.Retransmissions[0].Value = 5 }, 2},
		{1e9, func() { port.Retransmissions[0].Value = 6 }, 0}, // too soon
		{2e9, func() {}, 2},
		{3e9, func() { port.Flaps++ }, 1},
		{3e9, func() { port.DownAt = now }, 1},
		{3e9, func() { j.forget() }, 3},
	} {
		if c.change(); report(c.step) != c.want {
			t.Errorf("step %d: want %d entries", i, c.want)
		}
	}
}
