package jobsim_test

import (
	"reflect"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis/jobsim"
)

// jobs are one of each shape.
var jobs = map[string]jobsim.Config{
	"pipeline":    {Tensor: 2, Data: 2, Pipeline: 2, Micro: 4, Seed: 1, Steps: true},
	"overlap":     {Data: 8, Seed: 2, Buckets: 4, Layers: 4},
	"interleaved": {Tensor: 2, Data: 4, Pipeline: 4, Chunks: 3, Micro: 8, Seed: 3, Tuned: true},
	"experts":     {Tensor: 2, Data: 4, Expert: 4, Context: 2, Micro: 2, Seed: 4, World: true, Experts: .3, Cluster: jobsim.Cluster{GPU: true, RDMA: true, Ports: 2}},
	"resize":      {Tensor: 2, Data: 4, Pipeline: 2, Micro: 8, Seed: 3, ResizeAt: 10, Cluster: jobsim.Cluster{RanksPerNode: 4}},
}

func TestJobsGoOn(t *testing.T) {
	for name, c := range jobs {
		t.Run(name, func(t *testing.T) {
			j, err := jobsim.New(c)
			if err != nil {
				t.Fatal(err)
			}
			last := 0
			for range 6 {
				j.Advance(5 * time.Second)
				if s := j.Steps(); s <= last {
					t.Fatalf("at %v: step %d, and %d five seconds before", j.Now(), s, last)
				} else {
					last = s
				}
			}
		})
	}
}

func TestSameSeedSameRun(t *testing.T) {
	for name, c := range jobs {
		t.Run(name, func(t *testing.T) {
			c.Faults = []jobsim.Fault{{Kind: jobsim.Straggler, Rank: 3, Factor: 2, At: 5 * time.Second}, {Kind: jobsim.Die, Rank: 5, Signal: 9, At: 9 * time.Second}}
			run := func() any {
				j, err := jobsim.New(c)
				if err != nil {
					t.Fatal(err)
				}
				j.Advance(12 * time.Second)
				return *j.Evidence()
			}
			if a, b := run(), run(); !reflect.DeepEqual(a, b) {
				t.Error("two runs of one configuration differ")
			}
		})
	}
}
