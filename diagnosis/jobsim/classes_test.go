package jobsim_test

import (
	"slices"
	"testing"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/jobsim"
)

// TestEveryClassIsProvoked: each class is what some kind of scenario asks for.
func TestEveryClassIsProvoked(t *testing.T) {
	missing := diagnosis.Classes()
	for _, row := range jobsim.Rows() {
		s, err := jobsim.Make(jobsim.Tuning, row, 1, 64)
		if err != nil {
			continue // it wants a larger job
		}
		for _, truth := range s.Truths {
			missing = slices.DeleteFunc(missing, func(c diagnosis.Class) bool { return slices.Contains(truth.Classes, c) })
		}
		if len(missing) == 0 {
			return
		}
	}
	t.Errorf("no row provokes %v", missing)
}
