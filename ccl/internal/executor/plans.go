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
	call := algo.Call{Coll: op.Coll, DType: op.DType, Op: op.Op, Root: op.Root, Count: op.Count, InPlace: op.InPlace}
	if call == p.shape && p.recent != nil {
		return p.recent, nil
	}
	s := p.all[call]
	if s == nil {
		var err error
		if s, err = algo.Build(call, *p.place, p.choose(call, p.place)); err != nil {
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
		p.all[call] = s
	}
	p.shape, p.recent = call, s
	return s, nil
}
