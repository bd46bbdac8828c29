package jobsim_test

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/jobsim"
)

// TestSmallMessages has slow pairs of jobs whose messages are too small for monitors to take times of them. Round-trip
// times tell nearly all; where no transport has these, looks at bytes on their way tell some. By chance they see two
// other ranks, in few jobs.
func TestSmallMessages(t *testing.T) {
	for _, test := range []struct {
		name             string
		rtt              bool
		least, mostWrong float64
	}{
		{"with RTT", true, 0.8, 0.02},
		{"looks only", false, 0.15, 0.1},
	} {
		t.Run(test.name, func(t *testing.T) {
			told, wrong, of := 0, 0, 0
			for seed := uint64(41000); seed < 41320; seed++ {
				s, err := jobsim.Make(jobsim.Tuning, "slow pair", seed, 8)
				if err != nil || s.Config.Cluster.RDMA {
					continue // a NIC tells of small messages, too
				}
				s.Config.Cluster.Small = true
				if !test.rtt {
					s.Config.Cluster.RTT = -1
				}
				right, other := playSlowPair(t, s)
				of++
				if right {
					told++
				}
				if other {
					wrong++
				}
			}
			if float64(told) < test.least*float64(of) || float64(wrong) > test.mostWrong*float64(told) {
				t.Errorf("of %d slow pairs %d are told, others in %d jobs", of, told, wrong)
			}
			t.Logf("of %d slow pairs %d are told, others in %d jobs", of, told, wrong)
		})
	}
}

// playSlowPair plays a job with one slow pair, and reports whether that was confirmed, and anything else was.
func playSlowPair(t *testing.T, s *jobsim.Scenario) (right, other bool) {
	f := s.Config.Faults[0]
	_, err := jobsim.Play(s, diagnosis.New(diagnosis.Config{}).Diagnose, nil, func(_ *jobsim.Job, verdicts []diagnosis.Verdict) {
		for _, v := range verdicts {
			if v.Level != diagnosis.Confirmed {
				continue
			}
			c := v.Culprits[0]
			if v.Class == diagnosis.CommunicationSlow && c.Kind == diagnosis.CulpritConnection &&
				(int(c.Rank) == f.Rank && int(c.Peer) == f.Peer || int(c.Rank) == f.Peer && int(c.Peer) == f.Rank) {
				right = true
			} else {
				other = true
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return right, other
}
