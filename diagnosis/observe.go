package diagnosis

import (
	"sync"
	"sync/atomic"
)

// observe takes over what the connections' monitors have added since the last
// window; false when there is nothing new.
func (d *slowLinks) observe() bool {
	elapsed := float64(d.now - d.start)
	all := &d.rtts
	if all.conns != nil {
		all.conns = resized(all.conns, len(d.ev.Conns))
	}
	var any, tells atomic.Bool
	var mu sync.Mutex // of the communicators that need a look
	inParts(len(d.ev.Conns), len(d.ev.Conns), func(lo, hi int) {
		fresh, rtts, looks := false, false, []int32(nil)
		for i := lo; i < hi; i++ {
			if d.observeOne(i, elapsed) {
				fresh = true
			}
			c, h := &d.ev.Conns[i], &d.conns[i]
			rtts = rtts || c.RTTNs > 0
			if h.fresh && h.often(c) {
				looks = append(looks, c.Comm)
			}
		}
		if fresh {
			any.Store(true)
		}
		if rtts {
			tells.Store(true)
		}
		if len(looks) > 0 {
			mu.Lock()
			defer mu.Unlock()
			for _, ci := range looks {
				d.inside[ci].look = true
			}
		}
	})
	if all.conns == nil && tells.Load() { // the first transport that tells RTTs
		all.conns = make([]rtt, len(d.ev.Conns))
		for i := range all.conns {
			if c := &d.ev.Conns[i]; c.Comm >= 0 && int(c.Comm) < len(d.comms) && d.watchRTT(i, false) {
				any.Store(true)
			}
		}
	}
	return any.Load()
}

// observeOne does so for one connection.
func (d *slowLinks) observeOne(i int, elapsed float64) (any bool) {
	c, h := &d.ev.Conns[i], &d.conns[i]
	h.fresh = false
	if c.Comm < 0 || int(c.Comm) >= len(d.comms) {
		d.forgetRTT(i)
		return false
	}
	flights := h.flights
	h.flights = 0
	id := d.comms[c.Comm].id
	if !h.known || h.comm != id || h.src != c.Src || h.dst != c.Dst || c.Windows < h.windows || c.SlowWindows < h.slow {
		*h = connHistory{known: true, comm: id, src: c.Src, dst: c.Dst, windows: c.Windows, slow: c.SlowWindows, resent: c.Resent}
		return d.watchRTT(i, true)
	}
	any = d.watchRTT(i, false)
	d.watchLooks(h, c.Comm, float32(flights)/float32(d.passes))
	n := c.Windows - h.windows
	h.delay = delay(c)
	if n == 0 || h.delay == 0 {
		return any
	}
	h.fresh = true
	h.share = float32(c.SlowWindows-h.slow) / float32(n)
	h.windows, h.slow = c.Windows, c.SlowWindows
	h.watchShare(c.Cause)
	h.watchAgain(c)
	h.flight = float32(flights) / float32(d.passes)
	h.held = 0
	if d.settled(&h.base) {
		h.held = float32((h.delay - h.base.mean) * float64(n) / elapsed)
	}
	return true
}
