package master

import "math"

// drift is how fast two hosts' clocks may part; a bound that is not confirmed loosens at this
// rate. Undisciplined crystals stay within 50 ppm.
const drift = 50e-6

// unknownError is the error of a mapping that nothing bounds yet, ns. It is larger than any
// difference that is compared, and small enough to be added up.
const unknownError = int64(1e9 * 3600)

// clockMap bounds one node's offset (master's clock − agent's monotonic clock)
// from both sides by causality: a report is received after it was sent, an ack
// likewise. Nothing is assumed about symmetric delays.
type clockMap struct {
	lo, hi     int64 // bounds at time at
	at         int64 // master's clock
	offset     int64 // the mapping in use; always within the bounds
	width      int64 // hi − lo when offset was chosen
	haveLo, ok bool

	job *aligned // the node on the job's clock, nil while there is none to be used
}

// observe takes in one report: when the agent sent it, when it arrived here,
// and the echo of an ack (0, 0 when there is none).
func (c *clockMap) observe(monoSent, received, ackSent, monoAckReceived int64) {
	hi := received - monoSent
	lo, haveLo := ackSent-monoAckReceived-loosened(received-ackSent), ackSent != 0
	newHi, newLo := hi, lo
	age := loosened(received - c.at)
	if c.ok {
		hi = min(hi, c.hi+age)
	}
	if c.haveLo && (!haveLo || c.lo-age > lo) {
		lo, haveLo = c.lo-age, true
	}
	if haveLo && lo > hi {
		// A clock was stepped or stood still: what was known is void.
		hi, lo, haveLo = newHi, newLo, ackSent != 0 && newLo <= newHi
		c.ok = false
	}
	c.hi, c.at, c.lo, c.haveLo = hi, received, lo, haveLo
	if !haveLo {
		c.offset, c.width, c.ok = hi, math.MaxInt64, true
		return
	}
	// A mapping that changed with each report would add its jitter to every difference of two
	// times. It is kept until it is wrong, or one twice as good is known.
	if w := hi - lo; !c.ok || c.offset < lo || c.offset > hi || w < c.width/2 {
		c.offset, c.width, c.ok = lo+w/2, w, true
	}
}

// loosened is how far a bound of this age may be off.
func loosened(age int64) int64 { return int64(float64(max(age, 0))*drift) + 1 }

// real maps a monotonic time of the node to the job's clock, to the master's while there is
// none; 0 stays 0, and nothing lies in the future.
func (c *clockMap) real(mono, now int64) int64 {
	if mono == 0 {
		return 0
	}
	if c.job != nil {
		return min(mono+c.job.offset, now)
	}
	return min(mono+c.offset, now)
}

// err bounds the mistake of real, ns: against the reference node's times.
func (c *clockMap) err() int64 {
	if c.job != nil {
		return c.job.err()
	}
	if !c.ok || !c.haveLo {
		return unknownError
	}
	return max(c.hi-c.offset, c.offset-c.lo)
}

// use makes real and err those of the job's clock.
func (c *clockMap) use(a *aligned) {
	c.job = nil
	if a.ok {
		now := *a
		c.job = &now
	}
}
