package diagnosis

import "testing"

// TestRTTThatExcuses: a round-trip time that has not grown says that a connection's delay is not the network's, but
// not where delayed acknowledgements are most of it.
func TestRTTThatExcuses(t *testing.T) {
	for name, c := range map[string]struct {
		usual, over float64 // ns
		want        bool
	}{
		"as it was":               {100e3, 0, true},
		"more than twice that":    {100e3, 150e3, false},
		"delayed acknowledgement": {20e6, 0, false},
		"not known":               {0, 0, false},
	} {
		var x rtt
		if c.usual > 0 {
			for range 64 {
				x.usual.learn(c.usual)
			}
			x.now, x.over = c.usual+c.over, c.over
		}
		h := connHistory{delay: 70e6}
		h.base.learn(50e3)
		d := &slowLinks{window: &window{view: &view{}}, conns: []connHistory{h}}
		d.rtts.conns = []rtt{x}
		if got := d.sameRTT(0); got != c.want {
			t.Errorf("%s: excused %v, want %v", name, got, c.want)
		}
	}
}

// TestDelayedAcks: a round-trip time that has grown by no more than an acknowledgement is delayed is no network's when
// what is posted completes as soon as before, by a monitor that tells of it.
func TestDelayedAcks(t *testing.T) {
	for name, c := range map[string]struct {
		over, post float64 // ns
		outside    float32
		fresh      bool
		want       bool
	}{
		"completes as before":      {10e6, 1e6, 0, true, true},
		"completes later as well":  {10e6, 12e6, 0, true, false},
		"windows outside the norm": {10e6, 1e6, 0.4, true, false},
		"a monitor that is silent": {10e6, 0, 0, false, false},
		"longer than one is held":  {60e6, 1e6, 0, true, false},
		"hardly any":               {300e3, 0, 0, true, false},
	} {
		x := rtt{over: c.over, post: c.post}
		x.usual.learn(1e6)
		h := connHistory{fresh: c.fresh, delay: 3e6 + c.post, outside: c.outside}
		for range 64 {
			h.base.learn(3e6)
		}
		d := &slowLinks{window: &window{view: &view{}}, conns: []connHistory{h}}
		d.rtts.conns = []rtt{x}
		if got := d.delayedAcks(0, 1e6); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}
