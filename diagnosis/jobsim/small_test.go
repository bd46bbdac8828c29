package jobsim_test

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/jobsim"
)

// TestSmallMessages has slow pairs of jobs whose messages are too small for monitors to take times of them: looks at
// bytes on their way tell some of them. By chance they see two other ranks, in few jobs.
func TestSmallMessages(t *testing.T) {
	const least, mostWrong = 0.15, 0.1
	told, wrong, of := 0, 0, 0
	for seed := uint64(41000); seed < 41320; seed++ {
		s, err := jobsim.Make(jobsim.Tuning, "slow pair", seed, 8)
		if err != nil || s.Config.Cluster.RDMA {
			continue // a NIC tells of small messages, too
		}
		s.Config.Cluster.Small = true
		f, right, other := s.Config.Faults[0], false, false
		_, err = jobsim.Play(s, diagnosis.New(diagnosis.Config{}).Diagnose, nil, func(_ *jobsim.Job, verdicts []diagnosis.Verdict) {
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
		of++
		if right {
			told++
		}
		if other {
			wrong++
		}
	}
	if float64(told) < least*float64(of) || float64(wrong) > mostWrong*float64(told) {
		t.Errorf("of %d slow pairs %d are told, others in %d jobs", of, told, wrong)
	}
	t.Logf("of %d slow pairs %d are told, others in %d jobs", of, told, wrong)
}
