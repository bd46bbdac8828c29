package jobsim

import (
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// Healthy jobs whose work changes while they run. All ranks are alike, unless a test says otherwise.

var (
	modesFirst = flag.Uint64("modes-first", 1000, "first seed of TestModes")
	modesJobs  = flag.Int("modes-jobs", 12, "jobs of TestModes, of each way to go from one kind of step to the next")
)

const (
	sec = time.Second
	ms  = time.Millisecond
)

// plays has a job run for so long, and reports what was confirmed.
func plays(t *testing.T, seed uint64, c Config, length time.Duration) (confirmed []string) {
	t.Helper()
	c.Seed = seed
	o, err := Play(&Scenario{Name: t.Name(), Seed: seed, Config: c, Length: length}, diagnosis.New(diagnosis.Config{}).Diagnose, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range o.Said {
		if s.Confirmed > 0 {
			confirmed = append(confirmed, fmt.Sprintf("confirmed after %v: %v %v: %s", s.Confirmed, s.Class, s.Culprits, strings.Join(s.Why, "; ")))
		}
	}
	return confirmed
}

func gpus(per int) Cluster { return Cluster{RanksPerNode: per, GPU: true, RDMA: true} }

func computes(d time.Duration) instr { return instr{op: opCompute, dur: int64(d)} }

func sleeps(d time.Duration) instr { return instr{op: opCompute, dur: int64(d), sleep: true} }

func inWorld(k record.CollKind, bytes uint64) instr {
	return instr{op: opColl, slot: slotWorld, coll: k, bytes: bytes}
}

// ended is a step of these instructions.
func ended(in ...instr) []instr { return append(in, instr{op: opStep}, instr{op: opPause}) }

// first puts instructions before the usual ones.
func first(usual []instr, in ...instr) []instr { return append(in, usual...) }

// lengthened has computations take f times as long.
func lengthened(usual []instr, f float64) []instr {
	out := append([]instr{}, usual...)
	for i := range out {
		if out[i].op == opCompute || out[i].op == opExpert {
			out[i].dur = int64(float64(out[i].dur) * f)
		}
	}
	return out
}

// TestLongerSequences: from a step on sequences are longer.
func TestLongerSequences(t *testing.T) {
	for _, f := range []float64{2, 8} {
		for seed := uint64(1); seed <= 2; seed++ {
			c := Config{Data: 16, Buckets: 2, Micro: 1, Compute: 60 * ms, Noise: 0.15 * float64(seed), World: true, Steps: seed%2 == 0, Warmup: 20 * sec, Cluster: gpus(8)}
			c.program = func(_, step int, usual []instr) []instr {
				if step < 400 {
					return usual
				}
				return lengthened(usual, f)
			}
			if said := plays(t, seed, c, 5*time.Minute); len(said) > 0 {
				t.Errorf("sequences %v times as long, seed %d: %s", f, seed, said)
			}
		}
	}
}

// TestEvaluationPhases: every few minutes steps are an evaluation's, which has other lengths and messages.
func TestEvaluationPhases(t *testing.T) {
	for _, x := range []struct {
		train, eval time.Duration
		messages    float64 // times as long
		every, of   int
	}{{400 * ms, 80 * ms, 1, 300, 150}, {80 * ms, 800 * ms, 1, 800, 60}, {200 * ms, 600 * ms, 3, 500, 80}} {
		if testing.Short() && x.messages == 1 {
			continue
		}
		for seed := uint64(1); seed <= 2; seed++ {
			c := Config{
				Data: 4, Tensor: 4, Layers: 4, Micro: 1, Compute: x.train / 3, TensorTime: 2 * ms, DataTime: 10 * ms, World: true,
				Steps: seed%2 == 0, Warmup: 20 * sec, Cluster: gpus(8),
			}
			c.program = func(_, step int, usual []instr) []instr {
				if step%x.every < x.every-x.of {
					return usual
				}
				var out []instr
				for range 4 {
					out = append(out, computes(x.eval/4), instr{op: opColl, slot: slotTensor, coll: record.AllReduce, bytes: uint64(x.messages * (16 << 20)), scale: x.messages})
				}
				return ended(append(out, inWorld(record.AllReduce, 8))...)
			}
			if said := plays(t, seed, c, 8*time.Minute); len(said) > 0 {
				t.Errorf("training %v, evaluation %v, seed %d: %s", x.train, x.eval, seed, said)
			}
		}
	}
}

// TestFirstRankAsks: rank 0 asks an inference server for rollouts in each step, the first among them; the others wait
// for its Broadcast. (When that takes longer than IdleAfter, the first one is a hang, as far as anybody can tell.)
func TestFirstRankAsks(t *testing.T) {
	for seed := uint64(1); seed <= 2; seed++ {
		c := Config{Data: 8, Sharded: true, Layers: 4, Buckets: 4, Micro: 2, Compute: 300 * ms, World: true, Steps: true, Warmup: 20 * sec, Cluster: gpus(4)}
		c.program = func(rank, step int, usual []instr) []instr {
			out := first(usual, inWorld(record.Broadcast, 1<<20))
			if rank == 0 {
				out = first(out, sleeps(8*sec))
			}
			if step == 0 { // weights are spread
				for range 12 {
					out = first(out, inWorld(record.Broadcast, 64<<20), computes(50*ms))
				}
			}
			return out
		}
		if said := plays(t, seed, c, 15*time.Minute); len(said) > 0 {
			t.Errorf("seed %d: %s", seed, said)
		}
	}
}

// TestRoles: two of eight ranks encode images, which takes three times as long as what the others do; all meet in the world.
func TestRoles(t *testing.T) {
	for seed := uint64(1); seed <= 2; seed++ {
		c := Config{Data: 8, World: true, Steps: seed%2 == 0, Warmup: 20 * sec, Cluster: gpus(4)}
		c.extra[0] = [][]int{{0, 1}, {2, 3, 4, 5, 6, 7}}
		c.program = func(rank, _ int, _ []instr) []instr {
			d := 150 * ms
			if rank < 2 {
				d = 450 * ms
			}
			return ended(computes(d), inWorld(record.AllGather, 64<<20), computes(50*ms), inWorld(record.AllReduce, 64<<20))
		}
		if said := plays(t, seed, c, 10*time.Minute); len(said) > 0 {
			t.Errorf("seed %d: %s", seed, said)
		}
	}
}

// TestModes: jobs of several kinds of steps, with communicators and collectives at random. What is known to be confirmed
// wrongly is in docs/benchmarks.md.
func TestModes(t *testing.T) {
	if testing.Short() {
		t.Skip("nothing runs concurrently here, and under the race detector it takes minutes")
	}
	for way, name := range []string{"in no order", "each for a while", "in turn", "phases"} {
		bad := 0
		for seed := *modesFirst; seed < *modesFirst+uint64(*modesJobs); seed++ {
			if said := plays(t, seed, modes(seed, way), 6*time.Minute); len(said) > 0 {
				bad++
				t.Logf("%s, seed %d: %s", name, seed, said)
			}
		}
		t.Logf("%s: %d of %d jobs confirmed", name, bad, *modesJobs)
		if bad*20 > *modesJobs { // of 220 jobs 3 are
			t.Errorf("%s: %d of %d healthy jobs are confirmed", name, bad, *modesJobs)
		}
	}
}

// modes is a job of a few kinds of steps; way is how it goes from one to the next.
func modes(seed uint64, way int) Config {
	r := rand.New(rand.NewPCG(seed, 77))
	between := func(lo, hi time.Duration) time.Duration {
		return time.Duration(float64(lo) * math.Pow(float64(hi)/float64(lo), r.Float64()))
	}
	n := []int{4, 8, 8, 16}[r.IntN(4)]
	c := Config{Data: n, World: true, Warmup: between(500*ms, 20*sec), Noise: between(5*ms, 150*ms).Seconds(), Steps: r.IntN(2) == 0}
	c.Cluster = Cluster{RanksPerNode: []int{2, 4, 8}[r.IntN(3)], GPU: r.IntN(4) > 0, Mute: r.IntN(3) == 0, Spin: r.IntN(3) == 0}
	c.Cluster.RDMA = c.Cluster.GPU && r.IntN(2) == 0
	if !c.Cluster.GPU {
		c.Agents.Busy, c.Cluster.Wake, c.Cluster.TransferNoise = 0.3*r.Float64(), between(50*time.Microsecond, 2*ms), 0.1+0.4*r.Float64()
	}
	if r.IntN(3) == 0 {
		c.Hiccups, c.Hiccup = 0.01, between(2*ms, 100*ms)
	}
	if r.IntN(4) == 0 {
		c.Agents.Late, c.Agents.LateBy = 1, 1500*ms
	}
	if r.IntN(4) == 0 {
		c.Agents.Restart = 0.2
	}
	slots := []slot{slotWorld, slotData}
	for i := range 1 + r.IntN(4) { // groups of neighbours, and of ranks far apart
		size := 2 << r.IntN(2)
		if size >= n {
			size = 2
		}
		for g := range n / size {
			var m []int
			for k := range size {
				if i%2 == 0 {
					m = append(m, g*size+k)
				} else {
					m = append(m, g+k*(n/size))
				}
			}
			c.extra[i] = append(c.extra[i], m)
		}
		c.extraTime[i] = between(100*time.Microsecond, 5*ms)
		slots = append(slots, slotExtra+slot(i))
	}
	c.DataTime = between(300*time.Microsecond, 20*ms)
	base := between(3*ms, 2*sec)
	var kinds [][]instr
	var took []time.Duration
	for range 2 + r.IntN(3) {
		var step []instr
		total, k := between(base/4, base*4), 1+r.IntN(6)
		sum := time.Duration(0)
		for i := range k {
			s := slots[r.IntN(len(slots))]
			if i == k-1 && r.IntN(2) == 0 {
				s = slotWorld
			}
			d := time.Duration(float64(total) / float64(k) * (0.2 + 1.6*r.Float64()))
			coll := []record.CollKind{record.AllReduce, record.AllGather, record.ReduceScatter}[r.IntN(3)]
			scale := between(sec/3, 3*sec).Seconds()
			step = append(step, computes(d), instr{op: opColl, slot: s, coll: coll, bytes: uint64(float64(8<<20) * scale), scale: scale})
			sum += d
		}
		kinds, took = append(kinds, ended(step...)), append(took, sum)
	}
	dwell := 2 + int(between(2*sec, 200*sec)/sec)
	each := max(1, int(between(10*sec, 100*sec)/max(took[0], ms)))
	c.program = func(_, step int, _ []instr) []instr {
		k := 0
		switch e := step / each; {
		case way == 0:
			k = int(hash(seed, uint64(step), 5) % uint64(len(kinds)))
		case way == 1:
			k = int(hash(seed, uint64(step/dwell), 6) % uint64(len(kinds)))
		case way == 2:
			k = step % len(kinds)
		case e%3 == 2:
			k = 1 + e/3%(len(kinds)-1)
		}
		return kinds[k]
	}
	return c
}
