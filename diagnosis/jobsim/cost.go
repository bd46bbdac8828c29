package jobsim

import (
	"slices"
	"time"
)

// costSteps is how many steps a fault's cost is measured over, costLonger how many times a
// scenario's length that may take.
const (
	costSteps  = 20
	costLonger = 8
)

// Cost is the share of its time that a job loses by one of its faults: of the steps that
// follow the onset, beside the same steps of the same job without the fault. What a fault
// does not cost its job no verdict has to tell. 0 when the fault was never felt.
func Cost(s *Scenario, truth int) (float64, error) {
	fault := s.Truths[truth].Fault
	sick, err := New(s.Config)
	if err != nil {
		return 0, err
	}
	without := s.Config
	without.Faults = slices.Delete(slices.Clone(without.Faults), fault, fault+1)
	well, err := New(without)
	if err != nil {
		return 0, err
	}
	limit := costLonger * s.Length
	for sick.Onset(fault) == 0 && sick.Now() < s.Length {
		sick.Advance(Tick)
	}
	if sick.Onset(fault) == 0 {
		return 0, nil
	}
	from := sick.Steps() + 1 // the one under way began before
	took := func(j *Job) time.Duration {
		for j.Steps() < from && j.Now() < limit {
			j.Advance(Tick)
		}
		began := j.Now()
		for j.Steps() < from+costSteps && j.Now() < limit {
			j.Advance(Tick)
		}
		return j.Now() - began
	}
	a := took(sick)
	if sick.Steps() < from+costSteps { // it does not get on
		return 1, nil
	}
	return 1 - float64(took(well))/float64(max(a, Tick)), nil
}
