package gpuclock_test

import (
	"math"
	"os"
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl/internal/gpuclock"
	"github.com/lockstep-ccl/lockstep/record"
	"pgregory.net/rapid"
)

// world has a host's clock and a GPU's, each with a rate of its own against true time.
type world struct {
	host, gpu       float64 // ns since each one's epoch
	hostPPM, gpuPPM float64
	tick            int64
}

const hostEpoch = 13e12

func (w *world) advance(ns float64) {
	w.host += ns * (1 + w.hostPPM*1e-6)
	w.gpu += ns * (1 + w.gpuPPM*1e-6)
}

func (w *world) now() int64   { return hostEpoch + int64(w.host) }
func (w *world) stamp() int64 { return gpuEpoch + int64(w.gpu)/w.tick*w.tick }

// mapping is the way of a stamp: handshakes bound the offset, anchors go to the flight
// recorder, and readers map by these.
type mapping struct {
	cal *gpuclock.Clock
	rec *record.Writer
	dev *record.Device
}

func newMapping(t interface {
	Fatal(...any)
	Cleanup(func())
}, dir string, tick int64) *mapping {
	rec, err := record.Create(record.Options{Dir: dir, RingSlots: 4, ConnSlots: 1, CommSlots: 1, StampSlots: 64})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(rec.Path()) })
	return &mapping{cal: gpuclock.New(gpuclock.Options{Tick: tick}), rec: rec}
}

// handshake has eight rounds, as the GPU's side makes them, and tells the recorder. delays
// gives the ns before and after the stamp of each.
func (m *mapping) handshake(w *world, delays func() (there, back float64)) {
	for range 8 {
		there, back := delays()
		before := w.now()
		w.advance(there)
		gpu := w.stamp()
		w.advance(back)
		m.cal.Handshake(before, gpu, w.now())
	}
	gpu, mono, err, _ := m.cal.Anchor()
	if m.dev == nil {
		m.dev, _ = m.rec.AddDevice(record.DeviceEntry{}, record.DeviceAnchor{GPU: gpu, Mono: mono, Err: err})
		return
	}
	m.dev.Anchor(gpu, mono, err)
}

// beyond is by how much a stamp of a time is off by more than the error that is stated of it.
func (m *mapping) beyond(gpu, truth int64) (ns, stated int64) {
	mono, err := m.dev.Mono(gpu)
	return max(mono-truth, truth-mono) - err, err
}

// TestStatedError: two free clocks, whose crystals are off by up to 50 ppm each, whose rates
// wander by some ppm at any time, and whose handshakes are lopsided and interrupted: each stamp
// is within the error that readers of the recorder are told, whenever they read it.
func TestStatedError(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		ns := func(what string, least, most float64) float64 { return rapid.Float64Range(least, most).Draw(t, what) }
		host, gpu := ns("host, ppm", -49, 49), ns("gpu, ppm", -49, 49)
		w := world{hostPPM: host, gpuPPM: gpu, tick: rapid.SampledFrom([]int64{1, tick, 1024}).Draw(t, "tick")}
		m := newMapping(t, dir, w.tick)
		delays := func() (there, back float64) {
			there, back = ns("there", 400, 3000), ns("back", 400, 3000)
			switch rapid.IntRange(0, 20).Draw(t, "interrupted") {
			case 0:
				there += 1e6
			case 1:
				back += 1e6
			}
			return there, back
		}
		type stamped struct{ gpu, mono int64 }
		var past []stamped
		m.handshake(&w, delays)
		t.Repeat(map[string]func(*rapid.T){
			"second": func(t *rapid.T) {
				for range 4 {
					// Both together: the rate is within 10 ppm of itself at any other time.
					w.hostPPM, w.gpuPPM = host+ns("host wanders", -2.4, 2.4), gpu+ns("gpu wanders", -2.4, 2.4)
					w.advance(ns("for", 0, 0.25e9))
					past = append(past, stamped{w.stamp(), w.now()})
				}
				m.handshake(&w, delays)
			},
			"operation": func(t *rapid.T) {
				w.advance(ns("for", 0, 1e9))
				past = append(past, stamped{w.stamp(), w.now()})
			},
			"": func(t *rapid.T) {
				for _, s := range past {
					if ns, stated := m.beyond(s.gpu, s.mono); ns > 0 {
						t.Fatalf("a stamp is %d ns beyond its error of %d (host %+.1f ppm, GPU %+.1f)", ns, stated, w.hostPPM, w.gpuPPM)
					}
				}
			},
		})
	})
}

// TestStatedErrorBySlews: the host's clock is slewed by up to 500 ppm from any time to any other.
// From the second handshake after each change on, stamps are within their stated errors.
func TestStatedErrorBySlews(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		ns := func(what string, least, most float64) float64 { return rapid.Float64Range(least, most).Draw(t, what) }
		host := ns("host, ppm", -49, 49)
		w := world{hostPPM: host, gpuPPM: ns("gpu, ppm", -49, 49), tick: tick}
		m := newMapping(t, dir, w.tick)
		delays := func() (there, back float64) { return ns("there", 400, 3000), ns("back", 400, 3000) }
		for range 3 {
			m.handshake(&w, delays)
			w.advance(1e9)
		}
		type stamped struct{ gpu, mono int64 }
		var last []stamped
		for unsettled := 0; len(last) < 40; unsettled = max(unsettled-1, 0) {
			m.handshake(&w, delays)
			for range 4 {
				w.advance(ns("for", 0, 0.25e9))
				if rapid.IntRange(0, 15).Draw(t, "changes") == 0 {
					unsettled, w.hostPPM = 3, host+ns("slew, ppm", -250, 250)
				}
				if s := (stamped{w.stamp(), w.now()}); unsettled == 0 {
					last = append(last, s)
					if ns, stated := m.beyond(s.gpu, s.mono); ns > 0 {
						t.Fatalf("a stamp is %d ns beyond its error of %d (host %+.1f ppm, GPU %+.1f)", ns, stated, w.hostPPM, w.gpuPPM)
					}
				}
			}
			w.advance(0.1e9)
		}
	})
}

// TestStatedErrorByRate has handshakes of ±0.9 µs once a second, and prints for some rates how
// far beyond the stated error a stamp is at worst.
func TestStatedErrorByRate(t *testing.T) {
	dir := t.TempDir()
	for _, ppm := range []float64{0, 3.6, 9, 11, 12, 13, 15, 17, 20, 30, 50, 95, -15, -50} {
		w := world{hostPPM: ppm, tick: tick}
		m := newMapping(t, dir, w.tick)
		even := func() (there, back float64) { return 900, 900 }
		worst, at, stated, most := int64(math.MinInt64), 0.0, int64(0), int64(0)
		for second := range 8 {
			m.handshake(&w, even)
			for i := range 1000 {
				w.advance(1e6)
				ns, err := m.beyond(w.stamp(), w.now())
				if ns > worst {
					worst, at, stated = ns, float64(i+1)/1000, err
				}
				if second > 1 {
					most = max(most, err)
				}
			}
		}
		t.Logf("%+5.1f ppm: %6d ns beyond the stated error of %6d ns at worst, %.3f s after an anchor; the worst error stated is %d ns", ppm, worst, stated, at, most)
		if worst > 0 {
			t.Errorf("%+.1f ppm: a stamp is %d ns beyond its error of %d ns", ppm, worst, stated)
		}
	}
}
