package master

import (
	"testing"

	"pgregory.net/rapid"
)

// TestClockMap checks that the true offset is always within the bounds, on
// simulated links with asymmetric, varying delays and a drifting clock.
func TestClockMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		offset := rapid.Int64Range(-1e18, 1e18).Draw(t, "offset")
		ppm := rapid.Float64Range(-20, 20).Draw(t, "ppm")
		delay := rapid.Int64Range(0, 50e6)
		var c clockMap
		mono, ackSent, ackReceived := int64(1e12), int64(0), int64(0)
		truth := func(mono int64) int64 { return mono + offset + int64(float64(mono)*ppm*1e-6) }
		for range rapid.IntRange(2, 50).Draw(t, "reports") {
			mono += rapid.Int64Range(1e6, 10e9).Draw(t, "interval")
			received := truth(mono) + delay.Draw(t, "up")
			c.observe(mono, received, ackSent, ackReceived)
			if ackSent != 0 {
				at := truth(mono) - mono
				if err := c.err(); err > 200e6 || c.offset-at > err+1 || at-c.offset > err+1 {
					t.Fatalf("offset %d, truly %d: off by %d, bound %d", c.offset, at, c.offset-at, err)
				}
			}
			ackSent = received
			// The ack arrives when the master's clock shows this; the agent's shows what maps to it.
			back := delay.Draw(t, "down")
			ackReceived = mono + int64(float64(received-truth(mono)+back)*(1+30e-6)) + 1
			mono = ackReceived
		}
	})
}

func TestClockMapIsStable(t *testing.T) {
	var c clockMap
	c.observe(1000, 5000, 4000, 900) // offset in [3100, 4000]
	first := c.offset
	c.observe(2000, 6100, 4900, 1900) // a worse observation moves nothing
	if c.offset != first || c.err() > 460 {
		t.Errorf("offset %d, then %d ± %d", first, c.offset, c.err())
	}
	c.observe(2000, 1e9, 1e9-100, 2050) // the agent's clock was stepped
	if e := c.err(); c.offset < 1e9-2150 || e > 2000 {
		t.Errorf("after a step: offset %d ± %d", c.offset, e)
	}
}
