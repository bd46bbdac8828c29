package engine

import (
	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/record"
)

// MaxLegs bounds the legs that an operation records; those that begin later are left out.
const MaxLegs = 16

// Leg is what one peer sends in one phase of an operation, and when, in ns of CLOCK_MONOTONIC.
type Leg struct {
	algo.Leg
	Asked int64 // this rank began to receive; 0: at the operation's start
	Came  int64 // its first bytes came; 0: they were there already
	Ended int64 // its last bytes were received; 0: not yet
	Stall int64 // ns without arrivals in between, as far as Idle noticed
}

// legs records the legs of the running operation. There are few, so lookup is a scan.
type legs struct {
	n   int
	all [MaxLegs]Leg
}

func (s *legs) of(st *algo.Step) *Leg {
	for i := s.n - 1; i >= 0; i-- {
		if s.all[i].Leg == st.Leg() {
			return &s.all[i]
		}
	}
	return nil
}

func (s *legs) begin(st *algo.Step, at int64) {
	if s.n < MaxLegs {
		s.all[s.n] = Leg{Leg: st.Leg(), Asked: at}
		s.n++
	}
}

func (s *legs) came(st *algo.Step) {
	if l := s.of(st); l != nil {
		l.Came = record.Now()
	}
}

func (s *legs) end(st *algo.Step) {
	if l := s.of(st); l != nil {
		l.Ended = record.Now()
	}
}

func (s *legs) stalled(st *algo.Step, by int64) {
	if l := s.of(st); l != nil {
		l.Stall += max(by, 0)
	}
}

// Legs returns the legs of an operation with Op.Legs. They are valid until the next Begin.
func (e *Engine) Legs() []Leg { return e.legs.all[:e.legs.n] }
