package record

import (
	"math"
	"sync/atomic"
	"unsafe"
)

// DeviceStatus is one GPU's entry, and its clock.
type DeviceStatus struct {
	DeviceEntry
	Anchor DeviceAnchor // the latest
	Err    int64        // bound on the error of a stamp that is made now, ns
	Mapped int64        // the same for times that the process has mapped since the last anchor but one; at least Err
}

// Devices appends the status of every GPU to dst, by index.
func (r *Reader) Devices(dst []DeviceStatus) []DeviceStatus {
	r.guard(func() {
		for i := range min(atomic.LoadUint64(&r.hdr.deviceUsed), uint64(r.geo.devices)) {
			d := (*diskDevice)(unsafe.Pointer(&r.mem[r.geo.deviceAt()+i*DeviceEntrySize]))
			c := r.clock(uint16(i))
			a := c.anchors[0]
			_, err := c.mono(uint64(a.GPU + Now() - a.Mono))
			dst = append(dst, DeviceStatus{
				DeviceEntry: DeviceEntry{UUID: d.uuid, Ordinal: d.ordinal, Name: getName(&d.name)},
				Anchor:      a, Err: err, Mapped: max(err, c.mapped()),
			})
		}
	})
	return dst
}

// deviceClock maps a GPU's time to the host's by the device's last anchors.
type deviceClock struct {
	anchors [3]DeviceAnchor // the last one first
	n       int
	// What the host's clock gains for each ns of the GPU's, at the least and at the most.
	slow, fast float64
}

func (r *Reader) clock(device uint16) (c deviceClock) {
	if uint64(device) >= min(atomic.LoadUint64(&r.hdr.deviceUsed), uint64(r.geo.devices)) {
		return c
	}
	return (*diskDevice)(unsafe.Pointer(&r.mem[r.geo.deviceAt()+uint64(device)*DeviceEntrySize])).clock()
}

func (d *diskDevice) clock() (c deviceClock) {
	for range 3 { // anchors are written seconds apart
		count := atomic.LoadUint64(&d.anchorCount)
		c.n = int(min(count, 3))
		for i := range c.n {
			a := &d.anchors[(count-uint64(i))&3]
			c.anchors[i] = DeviceAnchor{GPU: atomic.LoadInt64(&a.gpu), Mono: atomic.LoadInt64(&a.mono), Err: max(atomic.LoadInt64(&a.err), 0)}
		}
		if atomic.LoadUint64(&d.anchorCount) == count { // none of them has been written anew
			break
		}
	}
	c.measure()
	return c
}

// measure bounds the rate at any time by the mean rate between the last two anchors, from which
// it departs by DriftPPB at most. It departs by more while the host's clock is slewed, which
// shows as two means that differ by more than that. One anchor alone tells no rate.
func (c *deviceClock) measure() {
	a := &c.anchors
	slow, fast, ok := meanRate(&a[0], &a[1])
	if c.n < 2 || !ok {
		c.n, c.slow, c.fast = min(c.n, 1), -RatePPB*1e-9, RatePPB*1e-9
		return
	}
	departs := DriftPPB * 1e-9
	if c.n > 2 {
		if s, f, ok := meanRate(&a[1], &a[2]); ok && max(slow-f, s-fast) > departs {
			departs = SlewPPB * 1e-9
		}
	}
	c.slow, c.fast = slow-departs, fast+departs
}

// meanRate bounds what the host's clock gained between two anchors, for each ns of the GPU's.
// Anchors that are close together tell less than what two crystals and a clock that is being slewed
// may differ by. RatePPB alone will not do: of a rate of -114 ppm that is known to within 20 it
// would leave what is near -100.
func meanRate(a, b *DeviceAnchor) (slow, fast float64, ok bool) {
	d := float64(a.GPU - b.GPU)
	if d <= 0 {
		return 0, 0, false
	}
	gained, err := float64(a.Mono-b.Mono)-d, float64(a.Err)+float64(b.Err)+2 // of whole ns
	slow, fast = (gained-err)/d, (gained+err)/d
	const most = (RatePPB + SlewPPB) * 1e-9
	if s, f := max(slow, -most), min(fast, most); s <= f {
		slow, fast = s, f
	}
	return slow, fast, true
}

// mono maps a GPU time, and bounds the error. From each of the last two anchors the clocks run
// apart by the bounds of the rate; what both allow is told by its middle. The rate's bounds
// hold the mean between the anchors, so both always allow something, and what they allow does
// not get narrow where the rate is not what was expected.
func (c deviceClock) mono(gpu uint64) (t, err int64) {
	a := &c.anchors[0]
	since := int64(gpu) - a.GPU
	lo, hi := c.gain(since, a.Err)
	if c.n > 1 {
		b := &c.anchors[1]
		base := float64(b.Mono - a.Mono + a.GPU - b.GPU)
		l, h := c.gain(int64(gpu)-b.GPU, b.Err)
		lo, hi = max(lo, base+l), min(hi, base+h)
	}
	return a.Mono + since + int64((lo+hi)/2), int64(min(math.Abs(hi-lo)/2, math.MaxInt64/4)) + 2
}

// mapped is the error just before the last anchor came.
func (c deviceClock) mapped() int64 {
	if c.n < 2 {
		return 0
	}
	before := deviceClock{anchors: [3]DeviceAnchor{c.anchors[1], c.anchors[2]}, n: c.n - 1}
	before.measure()
	_, err := before.mono(uint64(c.anchors[0].GPU))
	return err
}

// gain bounds what the host's clock has gained at a time since an anchor (before it, when
// negative) that is known to within err.
func (c *deviceClock) gain(since, err int64) (lo, hi float64) {
	x, e := float64(since), float64(err)
	return min(x*c.slow, x*c.fast) - e, max(x*c.slow, x*c.fast) + e
}
