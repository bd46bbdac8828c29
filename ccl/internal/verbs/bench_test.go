package verbs_test

import (
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs/verbstest"
)

// TestNoAllocations: posting, polling and arming.
func TestNoAllocations(t *testing.T) {
	_, a, b := fakePair(t, verbstest.Options{})
	w := []verbs.Write{a.write(b, 1, 0, 8), a.write(b, 2, 64, 4096)}
	w[0].Inline = true
	c := make([]verbs.Completion, 16)
	ok := true
	if n := testing.AllocsPerRun(100, func() {
		n1, err1 := b.qp.PostReceives(0, 2)
		n2, err2 := a.qp.PostWrites(w)
		n3, err3 := a.cq.Poll(c)
		n4, err4 := b.cq.Poll(c)
		n5, err5 := a.cq.Poll(c)
		err6 := a.cq.Arm()
		ok = ok && n1 == 2 && n2 == 2 && n3 == 2 && n4 == 2 && n5 == 0 && err1 == nil && err2 == nil && err3 == nil && err4 == nil && err5 == nil && err6 == nil
	}); n != 0 || !ok {
		t.Errorf("%v allocations, ok %v", n, ok)
	}
}

// over reports what an operation takes more than the provider alone.
func over(b *testing.B, alone func(n int) time.Duration) {
	const n = 100_000
	provider := float64(alone(n).Nanoseconds()) / n
	mine := float64(b.Elapsed().Nanoseconds()) / float64(b.N)
	b.ReportMetric(mine-provider, "ns-over-provider")
	b.ReportMetric(mine/provider, "x-provider")
}

// BenchmarkPoll polls an empty queue; the fake answers without its lock.
func BenchmarkPoll(b *testing.B) {
	f, s, _ := fakePair(b, verbstest.Options{})
	c := make([]verbs.Completion, 16)
	for b.Loop() {
		if n, err := s.cq.Poll(c); n != 0 || err != nil {
			b.Fatal(n, err)
		}
	}
	over(b, func(n int) time.Duration { return f.PollTime("mlx5_0", s.qp.Num(), n) })
}

// BenchmarkPost posts an inline write of no bytes and polls its completion.
func BenchmarkPost(b *testing.B) {
	f, s, _ := fakePair(b, verbstest.Options{})
	w := []verbs.Write{{Inline: true, Signalled: true}}
	c := make([]verbs.Completion, 16)
	for b.Loop() {
		if _, err := s.qp.PostWrites(w); err != nil {
			b.Fatal(err)
		}
		if k, err := s.cq.Poll(c); k != 1 || err != nil {
			b.Fatal(k, err)
		}
	}
	over(b, func(n int) time.Duration { return f.PostTime("mlx5_0", s.qp.Num(), n) })
}

// BenchmarkStream writes chunks of 256 KiB with immediate, as the transport does.
func BenchmarkStream(b *testing.B) {
	_, s, to := fakePair(b, verbstest.Options{})
	w := []verbs.Write{s.write(to, 0, 0, 256<<10)}
	c := make([]verbs.Completion, 16)
	b.SetBytes(256 << 10)
	for b.Loop() {
		if _, err := to.qp.PostReceives(0, 1); err != nil {
			b.Fatal(err)
		}
		if _, err := s.qp.PostWrites(w); err != nil {
			b.Fatal(err)
		}
		if n, err := s.cq.Poll(c); n != 1 || err != nil {
			b.Fatal(n, err)
		}
		if n, err := to.cq.Poll(c); n != 1 || err != nil {
			b.Fatal(n, err)
		}
	}
}
