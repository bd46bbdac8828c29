package engine

import (
	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/record"
)

// MaxLegs is how many legs are recorded of an operation. Those that begin later are not.
const MaxLegs = 16

// Leg says when the bytes of one leg arrived. Times are in ns of CLOCK_MONOTONIC.
type Leg struct {
	algo.Leg
	Asked int64 // when this rank began to receive, 0 for the operation's start
	Came  int64 // when the first bytes came, 0 if this rank did not have to wait for them
	Ended int64 // when the last bytes were received, 0 if that has not happened
	Stall int64 // ns of waits in between, as far as they were long enough for Idle
}

// legs holds the legs of the current operation. There are few, so of scans them.
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
