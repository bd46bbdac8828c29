package ccl

import (
	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
)

// plans keeps the schedules of the shapes that were called.
type plans struct {
	c       *Comm
	shape   algo.Call
	recent  *algo.Schedule
	all     map[algo.Call]*algo.Schedule
	last    *algo.Schedule // of the current operation, kept or not
	keeping int            // steps in all
}

// maxSteps bounds the memory of kept schedules (about 16 MiB).
const maxSteps = 1 << 18

func (p *plans) init(c *Comm) { p.c, p.all = c, make(map[algo.Call]*algo.Schedule) }

func (p *plans) of(op *operation) (*algo.Schedule, error) {
	call := algo.Call{Coll: op.coll, DType: op.dtype, Op: op.redop, Root: op.root, Count: op.count, InPlace: op.inPlace}
	if call == p.shape && p.recent != nil {
		return p.recent, nil
	}
	s := p.all[call]
	if s == nil {
		var err error
		if s, err = p.make(call); err != nil {
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

func (p *plans) make(call algo.Call) (*algo.Schedule, error) {
	c := p.c
	return algo.Build(call, c.place, c.choose(call, &c.place))
}

// choose picks how a collective runs among the ranks of a place.
func (c *Comm) choose(call algo.Call, place *algo.Place) algo.Choice {
	return c.model.Choose(call, place, algo.Overrides{Algo: c.cfg.Algo, Proto: c.cfg.Proto})
}
