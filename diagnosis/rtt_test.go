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
