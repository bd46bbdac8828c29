package record_test

import (
	"os"
	"testing"

	"github.com/lockstep-ccl/lockstep/record"
	"pgregory.net/rapid"
)

// However far apart the clocks' rates are within RatePPB, while they stay within DriftPPB of
// themselves, and however anchors err within their bounds, the true time is within the
// bound that goes with a stamp.
func TestClockBound(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		w, err := record.Create(record.Options{Dir: dir, RingSlots: 4, ConnSlots: 1, CommSlots: 1, StampSlots: 64})
		if err != nil {
			t.Fatal(err)
		}
		defer os.Remove(w.Path())
		r, err := record.Open(w.Path())
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		mono, at := int64(1e12), int64(1.7e18) // one instant
		base := rapid.Int64Range(-record.RatePPB+record.DriftPPB, record.RatePPB-record.DriftPPB).Draw(t, "base, ppb")
		step := func() {
			d := rapid.Int64Range(1, 20e9).Draw(t, "ns")
			mono += d
			at += d + d*(base+rapid.Int64Range(-record.DriftPPB/2, record.DriftPPB/2).Draw(t, "ppb"))/1e9
		}
		anchor := func() record.DeviceAnchor {
			err := rapid.Int64Range(0, 5000).Draw(t, "err")
			return record.DeviceAnchor{GPU: at, Mono: mono + rapid.Int64Range(-err, err).Draw(t, "off"), Err: err}
		}
		dev, _ := w.AddDevice(record.DeviceEntry{}, anchor())
		c, _ := w.AddComm(record.CommEntry{Stamps: 16})
		g := gpu{w.Memory(), c}
		buf := make([]record.Stamp, 4)
		for seq := uint64(1); seq < 10; seq++ {
			step()
			truth := mono
			g.begin(seq, 0, uint64(at))
			g.end(seq, 0, 0xff, uint64(at+10))
			for range rapid.IntRange(0, 3).Draw(t, "anchors") {
				step()
				a := anchor()
				dev.Anchor(a.GPU, a.Mono, a.Err)
			}
			if n := r.Stamps(buf); n != 1 || max(buf[0].Start-truth, truth-buf[0].Start) > buf[0].Err+2 {
				t.Fatalf("true %d, got %+v", truth, buf[0])
			}
		}
	})
}

// What the process has mapped just before the last anchor came has the error of then.
func TestMappedError(t *testing.T) {
	w, err := record.Create(record.Options{Dir: t.TempDir(), RingSlots: 4, ConnSlots: 1, CommSlots: 1, StampSlots: 64})
	if err != nil {
		t.Fatal(err)
	}
	r, err := record.Open(w.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	now := record.Now()
	at := func(s int64) record.DeviceAnchor {
		return record.DeviceAnchor{GPU: era + s*1e9, Mono: now + s*1e9, Err: 1000}
	}
	dev, _ := w.AddDevice(record.DeviceEntry{}, at(-2))
	for s := int64(-1); s <= 0; s++ {
		a := at(s)
		_, before := dev.Mono(a.GPU - 1)
		dev.Anchor(a.GPU, a.Mono, a.Err)
		if d := r.Devices(nil)[0]; d.Mapped < before || d.Mapped < d.Err {
			t.Errorf("%d s: %+v, and what was mapped before had an error of %d", s, d, before)
		}
		if _, err := dev.Mono(a.GPU); err > 1010 {
			t.Errorf("%d s: %d at the anchor", s, err)
		}
	}
}
