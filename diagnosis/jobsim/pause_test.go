package jobsim_test

import (
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/jobsim"
)

// TestFirstPauseOfRank0 has rank 0 of a job on GPUs stay away for the first time, without
// a mark and without I/O. Its process uses next to no CPU at any time: one that goes on
// with that little works on, one in which nothing runs may sleep for a while, and hangs
// when it does not come back.
func TestFirstPauseOfRank0(t *testing.T) {
	job := jobsim.Config{Data: 4, Tensor: 2, Seed: 4, Cluster: jobsim.Cluster{RanksPerNode: 4, GPU: true, RDMA: true}}
	hang, pause, sleep := job, job, job
	hang.Faults = []jobsim.Fault{{Kind: jobsim.HangIdle, Rank: 0, At: 12 * time.Second}}
	pause.Pauses = []jobsim.Pause{{Every: 100, Length: 6 * time.Second}}
	sleep.Pauses = []jobsim.Pause{{Every: 100, Length: 6 * time.Second, Sleep: true}}
	for name, test := range map[string]struct {
		job  jobsim.Config
		want diagnosis.Level
	}{
		"works":  {pause, diagnosis.Suspected},
		"sleeps": {sleep, diagnosis.Suspected},
		"hangs":  {hang, diagnosis.Confirmed},
	} {
		t.Run(name, func(t *testing.T) {
			most, suspected, confirmed := diagnosis.Level(0), time.Duration(0), time.Duration(0)
			_, err := jobsim.Play(&jobsim.Scenario{Config: test.job, Length: 25 * time.Second}, diagnosis.New(diagnosis.Config{}).Diagnose, nil, func(j *jobsim.Job, verdicts []diagnosis.Verdict) {
				for _, v := range verdicts {
					if v.Culprits[0].Rank != 0 {
						t.Fatalf("at %v: %v %v", j.Now(), v.Class, v.Culprits)
					}
					if most = max(most, v.Level); suspected == 0 {
						suspected = j.Now()
					}
					if v.Level == diagnosis.Confirmed && confirmed == 0 {
						confirmed = j.Now()
					}
				}
			})
			if err != nil {
				t.Fatal(err)
			}
			if most != test.want {
				t.Errorf("level %v, want %v", most, test.want)
			}
			if confirmed > 23*time.Second {
				t.Errorf("confirmed at %v, eleven seconds after the fault at the latest", confirmed)
			}
			if suspected == 0 {
				t.Error("nothing suspected")
			}
		})
	}
}
