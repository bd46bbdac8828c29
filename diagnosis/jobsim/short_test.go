package jobsim_test

import (
	"flag"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/jobsim"
	"github.com/lockstep-ccl/lockstep/record"
)

var (
	shortJobs  = flag.Int("short-jobs", 40, "healthy jobs with short steps, and with pauses as a habit, to play")
	shortFirst = flag.Uint64("short-first", 0, "the first one's seed")
)

// TestShortSteps plays healthy jobs whose steps take some milliseconds, dozens of them in
// the time between two reports. One rank or all pause every so many steps, for as long as
// up to twice what lies between and less than a hang takes: that is how they always were,
// and no rank is slow.
func TestShortSteps(t *testing.T) { confirmNothing(t, shortJob) }

// TestHabits does the same with steps and pauses of all lengths. Pauses every few steps, from the
// first one on, are none of them: who judges a rank by its peers takes it for slow.
func TestHabits(t *testing.T) { confirmNothing(t, habitJob) }

// TestStrangers plays healthy jobs of other shapes, with steps of a millisecond to three
// seconds: interruptions with heavy tails, garbage collections that each rank makes for
// itself, uneven lengths and experts, saving, evaluation, and agents that are late.
func TestStrangers(t *testing.T) { confirmNothing(t, strangerJob) }

// TestShortStepsSums plays healthy jobs whose pauses were taken for a rank that costs its job a
// little for long: windows of many steps, some with a pause and most without, two ranks that vary
// together, and seconds of history.
func TestShortStepsSums(t *testing.T) {
	for _, seed := range []uint64{100370, 300219, 500484} {
		mustConfirmNothing(t, shortJob, seed)
	}
	for _, seed := range []uint64{100479, 700144, 700486} {
		mustConfirmNothing(t, habitJob, seed)
	}
}

// TestShortStepsWindows plays healthy jobs in which a rank was late in window after window: by
// chance, where every window varies by a third; because pauses and windows came in turns; and
// beside ranks that do other work, or that come early as often as late; or because pauses every dozen of
// steps, or what else repeats, were taken for steps.
func TestShortStepsWindows(t *testing.T) {
	for _, seed := range []uint64{900239, 990225} {
		mustConfirmNothing(t, shortJob, seed)
	}
	for _, seed := range []uint64{500024, 500193, 700203, 700388, 900239, 3000067, 3000188, 3000193} {
		mustConfirmNothing(t, habitJob, seed)
	}
}

// TestShortStepsRounds plays healthy jobs in which a rank was taken for one that comes late again and again: samples
// showed a habit of its own only now and then, or collectives became so many that a round of later ones was as late
// as dozens.
func TestShortStepsRounds(t *testing.T) {
	mustConfirmNothing(t, shortJob, 7000621)
	for _, seed := range []uint64{7000156, 11000709, 11001414} {
		mustConfirmNothing(t, habitJob, seed)
	}
}

// TestLongSequence has a sequence that is twice as long as others once in half an hour: its rank is late for all of
// the collectives of that step, and that is one cause.
func TestLongSequence(t *testing.T) {
	mustAccuseNobody(t, mustMake(t, "healthy, uneven lengths", 64))
}

// TestBursts has a rank that is late for six steps of twelve, for as many bursts as there are:
// what the first ones cost is not forgotten between them.
func TestBursts(t *testing.T) {
	for _, job := range []jobsim.Config{
		{Data: 8, Buckets: 4, Seed: 1, Steps: true, Noise: 0.02, Cluster: jobsim.Cluster{RanksPerNode: 4, GPU: true, RDMA: true}},
		{Data: 4, Tensor: 2, Layers: 2, Seed: 2, Noise: 0.02, Cluster: jobsim.Cluster{RanksPerNode: 4}},
	} {
		job.Compute, job.Warmup = 130*time.Millisecond, 2*time.Second
		const at = 15 * time.Second
		job.Faults = []jobsim.Fault{{Kind: jobsim.Straggler, Rank: 5, Factor: 1.8, Shape: jobsim.Periodic, Period: 6 * time.Second, At: at}}
		told := time.Duration(0)
		_, err := jobsim.Play(&jobsim.Scenario{Config: job, Length: at + 15*time.Second}, diagnosis.New(diagnosis.Config{}).Diagnose, nil, func(j *jobsim.Job, verdicts []diagnosis.Verdict) {
			for _, v := range verdicts {
				if v.Class != diagnosis.NoncommunicationSlow || v.Culprits[0].Rank != 5 {
					t.Fatalf("at %v: %v %+v, want rank 5 slow", j.Now(), v.Class, v.Culprits)
				}
				if v.Level == diagnosis.Confirmed && told == 0 {
					told = j.Now()
				}
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		if told == 0 {
			t.Errorf("%d × %d: a rank that is late for six steps of twelve is not confirmed in 15 s", job.Data, job.Tensor)
		}
	}
}

func confirmNothing(t *testing.T, job func(r *rand.Rand) jobsim.Config) {
	for seed := *shortFirst; seed < *shortFirst+uint64(*shortJobs); seed++ {
		mustConfirmNothing(t, job, seed)
	}
}

func mustConfirmNothing(t *testing.T, job func(r *rand.Rand) jobsim.Config, seed uint64) {
	t.Helper()
	c := job(rand.New(rand.NewPCG(seed, 12)))
	c.Seed = seed
	mustAccuseNobody(t, &jobsim.Scenario{Seed: seed, Config: c, Length: 40 * time.Second})
}

func between(r *rand.Rand, lo, hi time.Duration) time.Duration {
	if hi <= lo {
		return lo
	}
	return time.Duration(float64(lo) * math.Pow(float64(hi)/float64(lo), r.Float64()))
}

func shortJob(r *rand.Rand) jobsim.Config {
	return pausing(r, between(r, 300*time.Microsecond, 4*time.Millisecond), func() int { return 50 + r.IntN(10)*50 })
}

func strangerJob(r *rand.Rand) jobsim.Config {
	c := jobsim.Config{
		Tensor: 1 << (r.IntN(4) / 2), Pipeline: 1 << (r.IntN(5) / 3), Data: []int{1, 2, 2, 3, 4, 6}[r.IntN(6)], Context: 1 + r.IntN(6)/5,
		Buckets: []int{0, 0, 3, 8}[r.IntN(4)], Layers: 1 + r.IntN(3), Sharded: r.IntN(3) == 0, World: r.IntN(2) == 0, Steps: r.IntN(2) == 0, Tuned: r.IntN(3) == 0,
		Noise: between(r, 10*time.Millisecond, 600*time.Millisecond).Seconds(), Lengths: []float64{0, 0, 0.1, 0.4}[r.IntN(4)], Uneven: r.Float64() * 0.3,
		Hiccups: []float64{0, 0.002, 0.01, 0.05}[r.IntN(4)], Tail: 0.8 + 2*r.Float64(),
		Warmup: between(r, 200*time.Millisecond, 8*time.Second),
	}
	if c.Tensor*c.Pipeline*c.Data*c.Context == 1 {
		c.Data = 2
	}
	c.Micro = c.Pipeline * (1 + r.IntN(3))
	if c.Data%2 == 0 && r.IntN(3) == 0 {
		c.Expert, c.Experts = 2, r.Float64()*0.4
	}
	step := between(r, time.Millisecond, 3*time.Second)
	c.Compute = max(100*time.Microsecond, step/time.Duration(3*(c.Micro+c.Pipeline-1)))
	c.TensorTime, c.ContextTime, c.PipeTime, c.ExpertTime = c.Compute/20+50*time.Microsecond, c.Compute/20+50*time.Microsecond, c.Compute/30+50*time.Microsecond, c.Compute/15+50*time.Microsecond
	c.DataTime = between(r, step/100+100*time.Microsecond, step/4+200*time.Microsecond)
	c.Hiccup = between(r, time.Millisecond, max(2*time.Millisecond, step/5))
	if r.IntN(2) == 0 {
		c.Collect = between(r, 500*time.Millisecond, 30*time.Second)
		c.Garbage = between(r, 2*time.Millisecond, min(c.Collect/4, 700*time.Millisecond))
	}
	c.Cluster = jobsim.Cluster{RanksPerNode: 1 << r.IntN(4), GPU: r.IntN(2) == 0, Spin: r.IntN(2) == 0, Mute: r.IntN(3) == 0}
	c.Cluster.RDMA = c.Cluster.GPU && r.IntN(2) == 0
	c.Agents = jobsim.Agents{Drop: r.Float64() * 0.02, MapError: between(r, 50*time.Microsecond, 2*time.Millisecond), Busy: r.Float64() * 0.3}
	if r.IntN(4) == 0 {
		c.Agents.Late, c.Agents.LateBy = 1, time.Second
	}
	if r.IntN(2) == 0 {
		ranks := c.Tensor * c.Pipeline * c.Data * c.Context
		p := jobsim.Pause{Every: 1 + int(between(r, time.Second, 20*time.Second)/step), Length: between(r, 10*time.Millisecond, 5*time.Second), Rank: jobsim.AllRanks}
		p.Every = max(p.Every, 10)
		p.IO, p.Spread = r.IntN(2) == 0, p.Length/4
		if r.IntN(2) == 0 { // one rank's: of a length that is no hang
			p.Rank, p.Length, p.Spread = []int{0, 0, ranks - 1}[r.IntN(3)], min(p.Length, 1800*time.Millisecond), 0
		}
		p.Sleep = !p.IO && r.IntN(3) == 0
		if r.IntN(3) == 0 {
			p.Mark = record.MarkCheckpoint
		}
		c.Pauses = append(c.Pauses, p)
	}
	return c
}

func habitJob(r *rand.Rand) jobsim.Config {
	return pausing(r, between(r, 300*time.Microsecond, 100*time.Millisecond), func() int { return int(between(r, 10, 500)) })
}

// pausing draws a job by how long a forward takes, one in which ranks pause every so many steps.
func pausing(r *rand.Rand, compute time.Duration, every func() int) jobsim.Config {
	c := jobsim.Config{
		Data: []int{2, 2, 4, 8}[r.IntN(4)], Tensor: 1 + r.IntN(4)/3, Pipeline: 1 + r.IntN(5)/4, Buckets: 4 * r.IntN(2),
		Compute: compute, DataTime: between(r, 100*time.Microsecond, compute+200*time.Microsecond),
		TensorTime: 100 * time.Microsecond, PipeTime: 100 * time.Microsecond,
		Noise: []float64{0.02, 0.05, 0.2, 0.5}[r.IntN(4)], Hiccups: []float64{0, 0.01, 0.05}[r.IntN(3)], Hiccup: between(r, 2*time.Millisecond, 30*time.Millisecond),
		Steps: r.IntN(2) == 0, World: r.IntN(2) == 0, Warmup: between(r, 500*time.Millisecond, 3*time.Second),
	}
	c.Micro = c.Pipeline
	c.Cluster = jobsim.Cluster{RanksPerNode: 2 << r.IntN(3), GPU: r.IntN(2) == 0, Mute: r.IntN(3) == 0}
	c.Cluster.RDMA = c.Cluster.GPU && r.IntN(2) == 0
	step := 3*c.Compute*time.Duration(2*c.Pipeline-1) + c.DataTime
	for range 1 + r.IntN(2) {
		p := jobsim.Pause{Every: every(), Rank: []int{0, 0, 0, 1, jobsim.AllRanks}[r.IntN(5)]}
		p.Length = between(r, 5*time.Millisecond, min(2*step*time.Duration(p.Every), 1800*time.Millisecond))
		p.IO, p.Sleep = r.IntN(3) == 0, r.IntN(3) == 0
		if r.IntN(4) == 0 {
			p.Mark = record.MarkCheckpoint
		}
		if p.Rank == jobsim.AllRanks {
			p.Spread = p.Length / 3
		}
		c.Pauses = append(c.Pauses, p)
	}
	return c
}
