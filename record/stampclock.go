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
}

// Devices appends the status of every GPU to dst, by index.
func (r *Reader) Devices(dst []DeviceStatus) []DeviceStatus {
	r.guard(func() {
		for i := range min(atomic.LoadUint64(&r.hdr.deviceUsed), uint64(r.geo.devices)) {
			d := (*diskDevice)(unsafe.Pointer(&r.mem[r.geo.deviceAt()+i*DeviceEntrySize]))
			a := r.clock(uint16(i)).anchors[0]
			dst = append(dst, DeviceStatus{
				DeviceEntry: DeviceEntry{UUID: d.uuid, Ordinal: d.ordinal, Name: getName(&d.name)},
				Anchor:      a, Err: a.Err + drift(Now()-a.Mono),
			})
		}
	})
	return dst
}

// deviceClock maps a GPU's time to the host's by the device's last two anchors.
type deviceClock struct {
	anchors [2]DeviceAnchor // the last, and the one before
	n       int
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
		c.n = int(min(count, 2))
		for i := range c.n {
			a := &d.anchors[(count-uint64(i))&3]
			c.anchors[i] = DeviceAnchor{GPU: atomic.LoadInt64(&a.gpu), Mono: atomic.LoadInt64(&a.mono), Err: max(atomic.LoadInt64(&a.err), 0)}
		}
		if atomic.LoadUint64(&d.anchorCount)-count < 2 { // none of the two has been written anew
			break
		}
	}
	return c
}

// mono maps a GPU time, and bounds the error. Each anchor by itself bounds it
// from both sides, as DriftPPB is what two clocks may run apart; the line
// through both anchors says where within those bounds to look.
func (c deviceClock) mono(gpu uint64) (t, err int64) {
	a, b := &c.anchors[0], &c.anchors[1]
	since := int64(gpu) - a.GPU
	t = a.Mono + since
	if c.n < 2 {
		return t, a.Err + drift(since)
	}
	if d := a.GPU - b.GPU; d != 0 {
		rate := (float64(a.Mono-b.Mono) - float64(d)) / float64(d)
		t += int64(float64(since) * min(max(rate, -DriftPPB*1e-9), DriftPPB*1e-9))
	}
	at, bt := a.Mono+since, b.Mono+int64(gpu)-b.GPU
	ae, be := a.Err+drift(since), b.Err+drift(int64(gpu)-b.GPU)
	lo, hi := max(at-ae, bt-be), min(at+ae, bt+be)
	if lo > hi { // the host's clock was slewed: the last anchor counts
		return at, max(ae+lo-hi, 0)
	}
	t = min(max(t, lo), hi)
	return t, max(hi-t, t-lo)
}

// drift is how far two clocks may run apart in so many ns.
func drift(ns int64) int64 { return int64(math.Abs(float64(ns)) * (DriftPPB * 1e-9)) }
