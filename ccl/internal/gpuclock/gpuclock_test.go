package gpuclock_test

import (
	"math/rand/v2"
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl/internal/gpuclock"
	"pgregory.net/rapid"
)

const tick = 32

// clocks are a host's and a GPU's: the GPU's shows Unix time or so in ticks, and
// its rate wanders.
type clocks struct {
	mono int64
	gpu  float64 // beyond gpuEpoch
	ppb  float64 // that the GPU's clock runs ahead of the host's
}

const gpuEpoch = 1_763_700_000_000_000_000

func (c *clocks) advance(ns int64) {
	c.mono += ns
	c.gpu += float64(ns) * (1 + c.ppb*1e-9)
}

func (c *clocks) stamp() int64 { return (gpuEpoch + int64(c.gpu)) / tick * tick }

// handshake takes took ns, and the stamp is made at the given share of it.
func (c *clocks) handshake(clock *gpuclock.Clock, took int64, share float64) {
	before := c.mono
	first := int64(float64(took) * share)
	c.advance(first)
	gpu := c.stamp()
	c.advance(took - first)
	clock.Handshake(before, gpu, c.mono)
}

// H200: 3.6 ppm, 32 ns ticks, handshakes of 2.8 to 5 µs with the stamp anywhere
// within. After a second of them the error is bounded by 3 µs, and half a
// minute later, without any more, by what any two clocks may have drifted.
func TestH200(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	c := clocks{mono: 13e12, ppb: 3600}
	clock := gpuclock.New(gpuclock.Options{})
	if _, _, ok := clock.Mono(c.stamp()); ok {
		t.Error("a clock that nothing was told maps")
	}
	check := func(when string, limit int64) {
		t.Helper()
		mono, err, ok := clock.Mono(c.stamp())
		if !ok || max(mono-c.mono, c.mono-mono) > err || err > limit {
			t.Errorf("%s: %d off, error %d, limit %d, %v", when, mono-c.mono, err, limit, ok)
		}
	}
	second := func() {
		for end := c.mono + 1e9; c.mono < end; c.advance(1e6) {
			c.handshake(clock, 2800+rng.Int64N(2200), rng.Float64())
		}
	}
	second()
	check("after a second", 3000)
	_, err, _ := clock.Mono(c.stamp())
	t.Logf("after a second: within %d ns", err)
	for range 9 {
		second()
	}
	if ppb, err, ok := clock.Rate(); !ok || ppb+err < -3600 || ppb-err > -3600 {
		t.Errorf("rate %g ± %g ppb, %v; true -3600", ppb, err, ok)
	} else {
		t.Logf("rate %.0f ± %.0f ppb", ppb, err)
	}
	c.advance(30e9)
	check("half a minute later", 3000+18_000_000)
	gpu, mono, err, ok := clock.Anchor()
	if again, _, _ := clock.Mono(gpu); !ok || again != mono || err > 3000 {
		t.Errorf("anchor %d, %d, %d, %v", gpu, mono, err, ok)
	}
	if clock.Conflicts() != 0 {
		t.Errorf("%d conflicts", clock.Conflicts())
	}
}

// Whatever is told in whatever order, as long as it is true and the clocks keep
// within the drift, the true time of any stamp is within the bound.
func TestBoundHolds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const drift = 10_000
		c := clocks{mono: 13e12}
		clock := gpuclock.New(gpuclock.Options{DriftPPB: drift + 1, Tick: tick})
		type stamped struct{ gpu, mono int64 }
		var past []stamped
		ns := func(what string, most int64) int64 { return rapid.Int64Range(0, most).Draw(t, what) }
		pick := func() stamped { return past[rapid.IntRange(0, len(past)-1).Draw(t, "which")] }
		t.Repeat(map[string]func(*rapid.T){
			"time": func(t *rapid.T) {
				c.ppb = float64(rapid.IntRange(-drift, drift).Draw(t, "ppb"))
				c.advance(ns("for", 5e9))
			},
			"operation": func(*rapid.T) { past = append(past, stamped{c.stamp(), c.mono}) },
			"handshake": func(t *rapid.T) {
				c.handshake(clock, ns("took", 10_000), rapid.Float64Range(0, 1).Draw(t, "share"))
			},
			"begun": func(*rapid.T) {
				if len(past) > 0 {
					s := pick()
					clock.After(s.mono-ns("earlier", 1e6), s.gpu)
				}
			},
			"seen": func(*rapid.T) {
				if len(past) > 0 {
					s := pick()
					clock.Before(s.gpu, s.mono+ns("later", 1e6))
				}
			},
			"": func(t *rapid.T) {
				for _, s := range append(past, stamped{c.stamp(), c.mono}) {
					if mono, err, ok := clock.Mono(s.gpu); ok && max(mono-s.mono, s.mono-mono) > err+1 { // advance rounds
						t.Fatalf("true %d, got %d ± %d", s.mono, mono, err)
					}
				}
				if n := clock.Conflicts(); n != 0 {
					t.Fatalf("%d conflicts", n)
				}
			},
		})
	})
}

// A host's clock that is slewed beyond all drift is noticed, and followed again
// from the next handshake.
func TestSlew(t *testing.T) {
	for name, tell := range map[string]func(*gpuclock.Clock, *clocks){
		"handshake": func(clock *gpuclock.Clock, c *clocks) { c.handshake(clock, 3000, 0.5) },
		"ended":     func(clock *gpuclock.Clock, c *clocks) { clock.Before(c.stamp(), c.mono+100) },
		"begun":     func(clock *gpuclock.Clock, c *clocks) { clock.After(c.mono-100, c.stamp()) },
	} {
		for _, ppb := range []float64{1_000_000, -1_000_000} {
			c := clocks{mono: 13e12}
			clock := gpuclock.New(gpuclock.Options{})
			c.handshake(clock, 3000, 0.5)
			c.ppb = ppb
			c.advance(1e9)
			c.ppb = 0
			tell(clock, &c)
			if against := (name == "begun") == (ppb < 0); (clock.Conflicts() == 1) != (against || name == "handshake") {
				t.Errorf("%s, %g ppb: %d conflicts", name, ppb, clock.Conflicts())
			}
			c.handshake(clock, 3000, 0.5)
			if mono, err, ok := clock.Mono(c.stamp()); !ok || max(mono-c.mono, c.mono-mono) > err || err > 20_000 {
				t.Errorf("%s, %g ppb: %d off, error %d, %v", name, ppb, mono-c.mono, err, ok)
			}
		}
	}
	clock := gpuclock.New(gpuclock.Options{})
	clock.Handshake(10, 5, 9) // backwards: not believed
	if _, _, _, ok := clock.Anchor(); ok {
		t.Error("an anchor from nothing")
	}
	if _, _, ok := clock.Rate(); ok {
		t.Error("a rate from nothing")
	}
}

func BenchmarkHandshake(b *testing.B) {
	clock := gpuclock.New(gpuclock.Options{})
	b.ReportAllocs()
	for i := int64(0); b.Loop(); i += 1000 {
		clock.Handshake(i, i+gpuEpoch, i+3000)
	}
}
