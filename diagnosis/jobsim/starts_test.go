package jobsim_test

import (
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis/jobsim"
)

// TestStartsTeachLittle has healthy jobs whose first windows are unlike what follows: ranks compile
// for 15 to 20 s, each for as long as it happens to take, steps that are a third longer or shorter than
// the mean come first, an agent is lost after a few. What that teaches of a rank accuses none.
func TestStartsTeachLittle(t *testing.T) {
	for _, x := range []struct {
		set   jobsim.Set
		row   string
		seed  uint64
		ranks int
	}{
		{jobsim.Reporting, "healthy, compile pauses", 245, 64},
		{jobsim.Reporting, "healthy, epochs", 246, 64},
		{jobsim.Reporting, "healthy, uneven lengths", 847, 8},
		{jobsim.Tuning, "healthy, agent lost", 86086, 8},
	} {
		s, err := jobsim.Make(x.set, x.row, x.seed, x.ranks)
		if err != nil {
			t.Fatal(err)
		}
		s.Length = min(s.Length, 5*time.Minute)
		mustAccuseNobody(t, s)
	}
}
