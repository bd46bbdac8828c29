package master

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/record"
)

// clocks is a job of nodes whose monotonic clocks stand and drift as they please.
type clocks struct {
	*state
	rng    *rand.Rand
	begin  []int64   // monotonic time of each node at master's time 0
	rate   []float64 // of each node's clock
	delay  int64     // of messages, at most
	took   int64     // of a collective, at most
	groups [][]int32 // communicators, as nodes
	seq    uint64
	now    int64
}

func newClocks(rng *rand.Rand, nodes int, delay, took int64) *clocks {
	c := &clocks{state: newState("job", Limits{}), rng: rng, delay: delay, took: took, now: 1e18}
	for n := range nodes {
		c.node(fmt.Sprint("node", n))
		c.nodes[n].stream = &stream{}
		c.begin = append(c.begin, rng.Int64N(1e15))
		c.rate = append(c.rate, 1+(rng.Float64()-0.5)*drift)
	}
	return c
}

// mono is what a node's clock shows at master's time t.
func (c *clocks) mono(n int32, t int64) int64 {
	return c.begin[n] + int64(float64(t-1e18)*c.rate[n])
}

// step is a quarter of a second: collectives, and a report of each agent.
func (c *clocks) step() {
	for range 5 {
		c.now += 50e6
		for g, members := range c.groups {
			c.seq++
			last := c.now
			var start []int64
			for range members {
				start = append(start, c.now-c.rng.Int64N(5e6))
				last = max(last, start[len(start)-1])
			}
			for m, n := range members {
				c.clock.meet(n, int32(g), &wire.Arrival{
					Seq: c.seq, Coll: uint32(record.AllReduce), MonoStartedNs: c.mono(n, start[m]), MonoEndedNs: c.mono(n, last+c.rng.Int64N(c.took)+1),
				}, c.now)
			}
		}
	}
	for n := range c.nodes {
		sent, back := c.now-c.rng.Int64N(c.delay), c.now-c.delay-c.rng.Int64N(c.delay)
		c.nodes[n].clock.observe(c.mono(int32(n), sent), c.now, back-c.rng.Int64N(c.delay), c.mono(int32(n), back))
	}
	c.align(c.now)
}

// truth is how far a node's times are off those of the reference.
func (c *clocks) truth(n int32) int64 {
	ref := c.clock.reference
	return c.mono(n, c.now) + c.clock.nodes[n].offset - (c.mono(ref, c.now) + c.clock.nodes[ref].offset)
}

// The error that is stated is never less than the true one, whatever the clocks, delays and groups.
func TestJobClockStatesItsError(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := newClocks(rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1)), rapid.IntRange(1, 9).Draw(t, "nodes"), rapid.Int64Range(1e3, 50e6).Draw(t, "delay"), rapid.Int64Range(1e3, 5e6).Draw(t, "took"))
		c.groups = rapid.SliceOfN(rapid.SliceOfN(rapid.Int32Range(0, int32(len(c.nodes)-1)), 1, 12), 0, 6).Draw(t, "groups")
		for range 12 {
			c.step()
			for n := range c.nodes {
				if off, err := c.truth(int32(n)), c.clock.nodes[n].err(); off > err+100 || -off > err+100 {
					t.Fatalf("node %d is off by %d ns and says at most %d", n, off, err)
				}
			}
		}
		if c.clock.contradictions != 0 {
			t.Fatalf("%d contradictions among honest clocks", c.clock.contradictions)
		}
	})
}

// The job's clock follows the master's, and never faster than agents can be told: what one of
// them was told before differs from what another one is told now by no more than is stated.
func TestJobClockDoesNotJump(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 1))
	c := newClocks(rng, 3, 1e6, 50e3)
	c.rate = []float64{1 + 22e-6, 1 - 22e-6, 1 + 10e-6} // against the master's
	c.groups = [][]int32{{0, 1, 2}}
	c.step()
	before := make([]*wire.JobClock, 3)
	for range 4 * 600 {
		for n := range before {
			before[n] = c.jobClock(int32(n), c.now)
		}
		c.step()
		for n := range before {
			was, is := before[n], c.jobClock(int32(n), c.now)
			if d := is.OffsetNs - was.OffsetNs; d > is.ErrorNs+was.ErrorNs || -d > is.ErrorNs+was.ErrorNs {
				t.Fatalf("node %d: from %v to %v", n, was, is)
			}
			if off := c.mono(int32(n), c.now) + is.OffsetNs - c.now; off > 5e6 || off < -5e6 {
				t.Fatalf("node %d is %d ns off the master's clock", n, off)
			}
		}
	}
}

// Collectives bound offsets to about their own length where messages do to tens of
// milliseconds, also of nodes that share no communicator with the reference.
func TestCollectivesTightenTheJobClock(t *testing.T) {
	for name, groups := range map[string][][]int32{
		"world": {{0, 1, 2, 3, 4, 5}},
		"chain": {{0, 1}, {1, 2}, {2, 3}, {3, 4}, {4, 5}},
	} {
		t.Run(name, func(t *testing.T) {
			c := newClocks(rand.New(rand.NewPCG(7, 1)), 6, 20e6, 50e3)
			for range 4 {
				c.step()
			}
			for n := range c.nodes {
				if n := int32(n); n != c.clock.reference && c.clock.nodes[n].err() < 1e6 {
					t.Fatalf("without collectives node %d says %d ns", n, c.clock.nodes[n].err())
				}
			}
			c.groups = groups
			for range 40 {
				c.step()
			}
			for n := range c.nodes {
				if err := c.clock.nodes[n].err(); err > 800e3 {
					t.Errorf("node %d says %d ns", n, err)
				}
				if j := c.jobClock(int32(n), c.now); j == nil || j.OffsetNs != c.clock.nodes[n].offset {
					t.Errorf("node %d is told %v", n, j)
				}
			}
		})
	}
}

// A node that lies about its collectives moves others' clocks by no more than their agents' messages allow,
// and a contradiction is not believed.
func TestALyingNode(t *testing.T) {
	c := newClocks(rand.New(rand.NewPCG(3, 1)), 4, 1e6, 50e3)
	c.groups = [][]int32{{0, 1, 2, 3}}
	c.step()
	for range 20 {
		liar := (c.clock.reference + 1) % 4
		c.begin[liar] += 40e6 // its collectives say one thing
		c.step()
		for n := range c.nodes {
			if n := int32(n); n != liar {
				if off, err := c.truth(n), c.clock.nodes[n].err(); off > err+100 || -off > err+100 {
					t.Fatalf("node %d is off by %d ns and says at most %d", n, off, err)
				}
			}
		}
	}
}

// Without its reference another node's clock becomes the job's.
func TestTheReferenceLeaves(t *testing.T) {
	c := newClocks(rand.New(rand.NewPCG(5, 1)), 4, 1e6, 50e3)
	c.groups = [][]int32{{0, 1, 2, 3}}
	for range 8 {
		c.step()
	}
	gone := c.clock.reference
	c.nodes[gone].stream = nil
	c.step()
	if c.clock.reference == gone {
		t.Fatal("it is still the reference")
	}
	for n := range c.nodes {
		if off, err := c.truth(int32(n)), c.clock.nodes[n].err(); off > err+100 || -off > err+100 {
			t.Errorf("node %d is off by %d ns and says at most %d", n, off, err)
		}
	}
	for n := range c.nodes {
		c.nodes[n].stream = nil
	}
	c.step()
	if c.jobClock(0, c.now) != nil {
		t.Error("nobody is there to have a clock")
	}
}

func TestMeetingsAreBounded(t *testing.T) {
	c := newClocks(rand.New(rand.NewPCG(5, 1)), 2, 1e6, 50e3)
	for i := range uint64(3 * maxMeetings) {
		for n := range int32(2) {
			c.clock.meet(n, 0, &wire.Arrival{Seq: i, Coll: uint32(record.Barrier), MonoStartedNs: 1, MonoEndedNs: 2}, 1)
		}
	}
	if n := len(c.clock.meetings); n < maxMeetings/2 || n > maxMeetings || len(c.clock.of) != n || c.clock.cells != 2*n {
		t.Errorf("%d meetings, %d known, %d cells", len(c.clock.meetings), len(c.clock.of), c.clock.cells)
	}
}
