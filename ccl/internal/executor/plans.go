package executor

import (
	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
)

// plans caches schedules by shape, since training repeats the same calls.
type plans struct {
	place   *algo.Place
	choose  func(algo.Call, *algo.Place) algo.Choice
	shape   algo.Call      // the last shape
	recent  *algo.Schedule // its schedule, found without hashing
	all     map[algo.Call]*algo.Schedule
	last    *algo.Schedule // of the current operation, cached or not
	keeping int            // number of steps in all
}

// maxSteps bounds the steps of cached schedules (about 16 MiB). When there are more, plans drops
// all of them.
const maxSteps = 1 << 18

// of returns the schedule of a collective.
func (p *plans) of(op *Operation) (*algo.Schedule, error) {
	if op.Call == p.shape && p.recent != nil {
		return p.recent, nil
	}
	s := p.all[op.Call]
	if s == nil {
		var err error
		if s, err = algo.Build(op.Call, *p.place, p.choose(op.Call, p.place)); err != nil {
			return nil, err
		}
		steps := 0
		for _, t := range s.Tracks {
			steps += len(t)
		}
		if p.keeping += steps; p.keeping > maxSteps {
			clear(p.all)
			p.keeping = steps
		}
		p.all[op.Call] = s
	}
	p.shape, p.recent = op.Call, s
	return s, nil
}
