package master

import (
	"math"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

const (
	delayEvery = int64(time.Second)
	maxDelay   = 32 // members of a communicator with a delay matrix, and number of matrices
	// delayFor is how long the delay of a connection that closes no windows is shown. After a
	// hang, or when nothing is sent any more, the last measure says nothing about now.
	delayFor = int64(10 * time.Second)
)

// delayMatrices makes the delay matrices of the communicators that are small
// enough to be shown, those that have connections to show.
func delayMatrices(ev *diagnosis.Evidence, now int64) (out []collector.DelayMatrix) {
	shown := make(map[int32]int) // by communicator: 1 + index into out, 0 when it has none
	for i := range ev.Conns {
		c := ev.Conns[i].Comm
		n := len(ev.Comms[c].Members)
		if _, seen := shown[c]; seen || n > maxDelay || len(out) == maxDelay {
			continue
		}
		m := collector.DelayMatrix{Comm: ev.Comms[c].Name, Size: n, Ratio: diagnosis.DelayRatios(ev, int(c), nil)}
		for k := range ev.Comms[c].Members {
			m.World = append(m.World, ev.Comms[c].Members[k].World)
		}
		out = append(out, m)
		shown[c] = len(out)
	}
	fresh := make(map[[3]int32]bool)
	for i := range ev.Conns {
		if c := &ev.Conns[i]; shown[c.Comm] != 0 && now-c.LastWindowAt < delayFor {
			fresh[[3]int32{c.Comm, c.Src, c.Dst}] = true
		}
	}
	for c, at := range shown {
		m := &out[at-1]
		for k := range m.Ratio {
			if !fresh[[3]int32{c, int32(k / m.Size), int32(k % m.Size)}] {
				m.Ratio[k] = float32(math.NaN())
			}
		}
	}
	return out
}
