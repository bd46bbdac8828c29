package jobsim_test

import (
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis/jobsim"
)

// BenchmarkSecond is one simulated second of 4,096 ranks in steps of about one second,
// evidence ten times.
func BenchmarkSecond(b *testing.B) {
	c := jobsim.Config{Tensor: 8, Data: 64, Pipeline: 8, Micro: 8, Seed: 3, World: true, Compute: 20 * time.Millisecond, Cluster: jobsim.Cluster{GPU: true, RDMA: true, Ports: 2}}
	j, err := jobsim.New(c)
	if err != nil {
		b.Fatal(err)
	}
	j.Advance(10 * time.Second)
	for b.Loop() {
		for range 10 {
			j.Advance(100 * time.Millisecond)
			j.Evidence()
		}
	}
}
