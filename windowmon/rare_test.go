package windowmon_test

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/windowmon"
)

// lossy makes a request of so many take so much longer, as one that is sent again does.
func (s *sim) lossy(rng *rand.Rand, one int, longer time.Duration, bytes int) {
	s.jitter = func() float64 {
		if one > 0 && rng.IntN(one) == 0 {
			return 1 + float64(longer)/(float64(bytes)*s.perByte)
		}
		return math.Exp(rng.NormFloat64() * 0.2)
	}
}

// sendFor sends for so long, 4 requests at a time, with some computing in between, until done; it returns for how long.
func (s *sim) sendFor(d time.Duration, bytes int, done func() bool) time.Duration {
	begin := s.now
	for s.now < begin+int64(d) && !done() {
		s.send(8, bytes, 4)
		s.advance(s.now + 20_000)
	}
	return time.Duration(s.now - begin)
}

// A network that loses a packet of hundreds is slow for a moment now and then: that is told within seconds, as long as
// it lasts, and is over soon.
func TestSlowNowAndThen(t *testing.T) {
	for _, tt := range []struct {
		one    int // of so many requests is sent again
		longer time.Duration
		within time.Duration
	}{
		{60, 4 * time.Millisecond, 2 * time.Second},
		{600, 20 * time.Millisecond, 4 * time.Second},
		{2500, 100 * time.Millisecond, 8 * time.Second},
	} {
		for seed := range uint64(2) {
			const bytes = 512 << 10
			rng := rand.New(rand.NewPCG(seed, 3))
			s := newSim(windowmon.Config{Rare: true})
			slow := func() bool { return s.m.State() == windowmon.Network }
			s.lossy(rng, 0, 0, bytes)
			if after := s.sendFor(3*time.Second, bytes, slow); slow() {
				t.Fatalf("1 of %d, seed %d: slow after %v, before it loses anything", tt.one, seed, after)
			}
			for fault := range 2 {
				s.lossy(rng, tt.one, tt.longer, bytes)
				if after := s.sendFor(20*time.Second, bytes, slow); after > tt.within {
					t.Errorf("1 of %d, seed %d, fault %d: state %v after %v", tt.one, seed, fault, s.m.State(), after)
				}
				s.reset()
				began := s.now
				healthy := time.Duration(0)
				for s.now < began+10e9 {
					s.sendFor(time.Second, bytes, func() bool { return !slow() })
					healthy += s.sendFor(100*time.Millisecond, bytes, slow)
				}
				if healthy > 2*time.Second {
					t.Errorf("1 of %d, seed %d, fault %d: well for %v of 10 s", tt.one, seed, fault, healthy)
				}
				s.lossy(rng, 0, 0, bytes)
				if after := s.sendFor(20*time.Second, bytes, func() bool { return !slow() }); after > 8*tt.within {
					t.Errorf("1 of %d, seed %d, fault %d: state %v %v after it", tt.one, seed, fault, s.m.State(), after)
				}
				s.sendFor(2*time.Second, bytes, func() bool { return false })
			}
		}
	}
}

// What is slow now and then from the start is this network's way, and so is a long stop now and then.
func TestSlowNowAndThenAsARule(t *testing.T) {
	const bytes = 512 << 10
	for seed := range uint64(3) {
		rng := rand.New(rand.NewPCG(seed, 4))
		s := newSim(windowmon.Config{Rare: true})
		s.lossy(rng, 600, 20*time.Millisecond, bytes)
		s.sendFor(4*time.Second, bytes, func() bool { return false })
		s.reset()
		s.sendFor(30*time.Second, bytes, func() bool { return false })
		if s.anomalies > 0 {
			t.Errorf("seed %d: %d anomalies in %v", seed, s.anomalies, s.causes)
		}
	}
	s := newSim(windowmon.Config{Rare: true})
	s.sendFor(3*time.Second, bytes, func() bool { return false })
	s.reset()
	for range 5 {
		s.sendFor(10*time.Second, bytes, func() bool { return false })
		s.latency += 1e9
		s.send(1, bytes, 1)
		s.latency -= 1e9
	}
	s.sendFor(time.Second, bytes, func() bool { return false })
	if s.m.State() != windowmon.None {
		t.Errorf("state %v after a stop of a second every ten", s.m.State())
	}
}
