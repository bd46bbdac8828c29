package diagnosis

// phases tells how many operations a stretch has to have. Where a step has a handful that come together, as the buckets
// of a backward pass do, a stretch of few is one phase of a step, and the next one another: none says what is usual.
// Stretches of several steps are alike.
type phases struct {
	doublings uint
	before    float64 // own time an operation of the stretch before, ns
	seen      int     // stretches
	jumps     int     // of these: far from the one before
}

const (
	phaseOps       = 2 // operations of each communicator in a stretch, at first
	phaseDoublings = 3 // at most
	phaseJump      = 2 // times the one before
	phaseJumps     = 5 // of 8 stretches
	phaseSeen      = 8 // that are looked at: later on a fault is as likely
)

// ops is how many operations of each communicator in use a stretch has at least.
func (p *phases) ops() uint64 { return phaseOps << p.doublings }

// uneven takes over a stretch, and reports whether they have to be longer from now on.
func (p *phases) uneven(perOp float64) bool {
	if p.seen == phaseSeen || p.doublings == phaseDoublings {
		return false
	}
	p.seen++
	if p.before > 0 && (perOp > phaseJump*p.before || p.before > phaseJump*perOp) {
		p.jumps++
	}
	p.before = perOp
	return p.jumps >= phaseJumps
}
