package ebpf_test

import (
	"errors"
	"strconv"
	"testing"

	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/collector/source/ebpf"
)

// BenchmarkCall is what a call costs without probes and with them, in turn.
func BenchmarkCall(b *testing.B) {
	for b.Loop() {
		j := newJob(b, 1)
		r := j.start(0)
		r.do("init world")
		took := func() float64 {
			n, err := strconv.Atoi(r.do("time 20000"))
			if err != nil {
				b.Fatal(err)
			}
			return float64(n)
		}
		without := took()
		s := ebpf.New(ebpf.Options{Dir: j.dir})
		skipUnless(b, s.Update(&j.v))
		eventually(b, "probes", func() bool {
			if err := s.Update(&j.v); err != nil && !errors.Is(err, source.ErrPartly) {
				b.Fatal(err)
			}
			return j.v.Probes != nil && j.v.Probes.Processes > 0
		})
		with := took()
		if err := s.Close(); err != nil {
			b.Fatal(err)
		}
		after := took()
		b.ReportMetric(without, "ns/call-without")
		b.ReportMetric(with, "ns/call-with")
		b.ReportMetric(after, "ns/call-after")
	}
}
