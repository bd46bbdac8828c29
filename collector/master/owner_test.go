package master

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// words is a full report of some ranks of an epoch, in one communicator.
func words(e epoch, created int64, comm uint64, proc diagnosis.ProcState, ranks ...int32) *wire.Report {
	r := &wire.Report{Sequence: 1, MonoSentNs: 1e9}
	for _, i := range ranks {
		r.Ranks = append(r.Ranks, &wire.Rank{WorldRank: i, WorldSize: e.world, Pid: 100 + i, Attempt: e.attempt, CreatedUnixNs: created, Proc: uint32(proc)})
		r.Members = append(r.Members, &wire.Member{
			CommId: comm, WorldRank: i, Rank: i, Size: e.world, Attempt: e.attempt, State: uint32(record.CommJoined), Peer: -1, Enqueued: 5, Started: 5, Finished: 4,
		})
	}
	return r
}

const (
	noon  = int64(1e18)
	alive = diagnosis.ProcRunning
)

// whose returns the names of the nodes that the ranks are believed to be on.
func whose(s *state) (names []string) {
	for i := range s.ranks {
		if n := s.ranks[i].node; n < 0 {
			names = append(names, "")
		} else {
			names = append(names, s.ev.Nodes[n].Name)
		}
	}
	return names
}

func is(t *testing.T, s *state, e epoch, nodes ...string) {
	t.Helper()
	if err := check(s); err != nil || s.epoch != e || !slices.Equal(whose(s), nodes) {
		t.Errorf("%v; %+v on %q; want %+v on %q", err, s.epoch, whose(s), e, nodes)
	}
}

// A rank is its first agent's, whatever a later one says of times, until that is not
// heard any more, or says that the process has ended.
func TestARankIsItsFirstAgents(t *testing.T) {
	first := epoch{0, 2}
	start := func() (s *state, a, b, c int32) {
		s = newState("job", Limits{})
		a, b, c = s.node("a"), s.node("b"), s.node("c")
		s.merge(a, words(first, noon, 7, alive, 0), noon)
		s.merge(b, words(first, noon, 7, alive, 1), noon)
		is(t, s, first, "a", "b")
		return s, a, b, c
	}
	for _, younger := range []int64{-skew, 0, 1, skew} {
		s, _, b, c := start()
		s.merge(c, words(first, noon+younger, 7, alive, 1), noon)
		is(t, s, first, "a", "b")
		if s.foreign != 1 || s.ev.Ranks[1].Proc != alive {
			t.Errorf("younger by %d: %d entries about another's rank, %v", younger, s.foreign, s.ev.Ranks[1].Proc)
		}
		s.merge(b, words(first, noon, 7, diagnosis.ProcGone, 1), noon)
		if !s.nodes[c].stale {
			t.Error("who was denied is not asked again when the process has ended")
		}
		s.merge(c, words(first, noon+younger, 7, alive, 1), noon)
		is(t, s, first, "a", "c")
	}
	t.Run("what has ended takes nobody's place", func(t *testing.T) {
		s, _, b, c := start()
		s.merge(b, words(first, noon, 7, diagnosis.ProcGone, 1), noon)
		s.merge(c, words(first, noon+1, 7, diagnosis.ProcGone, 1), noon)
		is(t, s, first, "a", "b")
	})
	t.Run("of a lost agent", func(t *testing.T) {
		s, _, b, c := start()
		s.disconnected(b) // for a moment
		s.merge(c, words(first, noon, 7, alive, 1), noon)
		is(t, s, first, "a", "b")
		s.ev.Nodes[b].Lost = true
		s.merge(c, words(first, noon, 7, alive, 1), noon)
		is(t, s, first, "a", "c")
	})
	t.Run("as many as a node has", func(t *testing.T) {
		s := newState("job", Limits{PerNode: 2})
		a, b := s.node("a"), s.node("b")
		s.merge(a, words(epoch{0, 4}, noon, 9, alive, 0, 1, 2, 3), noon)
		is(t, s, epoch{0, 4}, "a", "a", "", "")
		s.merge(b, words(epoch{0, 4}, noon, 7, alive, 2, 3), noon)
		is(t, s, epoch{0, 4}, "a", "a", "b", "b")
		if s.overflow == 0 {
			t.Error("not counted")
		}
	})
	t.Run("moved with a restart", func(t *testing.T) {
		next := epoch{1, 2}
		s, a, b, c := start()
		// The first word of the next attempt comes while others have not said that the last is over.
		s.merge(c, words(next, noon+2, 8, alive, 1), noon)
		is(t, s, first, "a", "b")
		s.merge(a, words(next, noon+2, 8, alive, 0), noon)
		is(t, s, next, "a", "") // two against one
		if !s.nodes[c].stale {
			t.Error("who said it before is not asked again")
		}
		s.merge(c, words(next, noon+2, 8, alive, 1), noon)
		is(t, s, next, "a", "c")
		s.merge(b, words(first, noon, 7, alive, 1), noon) // a process that cannot be killed
		is(t, s, next, "a", "c")
	})
	t.Run("to where nobody was", func(t *testing.T) {
		next := epoch{1, 2}
		s, a, b, c := start()
		s.merge(c, words(next, noon+2, 8, alive, 0, 1), noon)
		s.merge(a, words(first, noon, 7, diagnosis.ProcGone, 0), noon)
		is(t, s, first, "a", "b")
		s.merge(b, words(first, noon, 7, diagnosis.ProcGone, 1), noon)
		if s.epoch != next || !s.nodes[c].stale {
			t.Errorf("%+v, c asked again: %v", s.epoch, s.nodes[c].stale)
		}
		s.merge(c, words(next, noon+2, 8, alive, 0, 1), noon)
		is(t, s, next, "c", "c")
	})
}

// One agent pins neither the attempt nor the size, first or not.
func TestOneAgentDecidesNoEpoch(t *testing.T) {
	truth := epoch{3, 2}
	for _, lie := range []epoch{{3, 100}, {3, 1}, {4, 2}, {1000, 2}, {maxAttempt, 2}, {0, 2}} {
		for _, created := range []int64{1, noon - 1, noon + skew} {
			t.Run(fmt.Sprint(lie, created), func(t *testing.T) {
				for at := range 3 { // the liar is heard first, second, last
					s := newState("job", Limits{})
					nodes := []string{"a", "b"}
					nodes = slices.Insert(nodes, at, "liar")
					for range 3 {
						for _, name := range nodes {
							e, id, when := truth, uint64(7), noon
							if name == "liar" {
								e, id, when = lie, 99, created
							}
							var ranks []int32
							switch name {
							case "a":
								ranks = []int32{0}
							case "b":
								ranks = []int32{1}
							default:
								ranks = []int32{0, e.world - 1}
							}
							s.merge(s.node(name), words(e, when, id, alive, ranks...), noon)
						}
					}
					is(t, s, truth, "a", "b")
				}
			})
		}
	}
	t.Run("of a job on one node", func(t *testing.T) {
		s := newState("job", Limits{})
		a, c := s.node("a"), s.node("c")
		s.merge(a, words(truth, noon, 7, alive, 0, 1), noon)
		for _, lie := range []epoch{{4, 2}, {3, 8}, {0, 2}} {
			s.merge(c, words(lie, noon+skew, 9, alive, 0, 1), noon)
			is(t, s, truth, "a", "a")
		}
		// It waits until the job's agent is lost for a moment: that one gets it back.
		now := noon + 2*skew
		s.ev.Nodes[a].Lost = true
		s.merge(c, words(epoch{4, 2}, now, 9, alive, 0, 1), now)
		is(t, s, epoch{4, 2}, "c", "c")
		s.merge(a, words(truth, noon, 7, alive, 0, 1), now)
		s.merge(a, words(truth, noon, 7, alive, 0, 1), now)
		is(t, s, truth, "a", "a")
		s.merge(c, words(epoch{4, 2}, now, 9, alive, 0, 1), now)
		is(t, s, truth, "a", "a")
	})
	t.Run("an attempt that cannot be", func(t *testing.T) {
		s := newState("job", Limits{})
		s.merge(s.node("c"), words(epoch{1<<32 - 1, 2}, noon, 9, alive, 0, 1), noon)
		if s.epochs != 0 || s.refused == 0 {
			t.Errorf("%+v, %d refused", s.epoch, s.refused)
		}
	})
}

// Whatever one agent of four says, and when, the others' word stands as soon as they
// have said it, and their ranks are theirs.
func TestMostCorrectALiar(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := newState("job", Limits{})
		truth := epoch{uint32(rapid.IntRange(0, 3).Draw(t, "attempt")), 6}
		honest := []string{"a", "b", "c"}
		now, created := noon, noon
		say := func(name string) {
			i := int32(slices.Index(honest, name))
			s.merge(s.node(name), words(truth, created, uint64(7+truth.attempt), alive, 2*i, 2*i+1), now)
		}
		lie := func() {
			e := epoch{uint32(rapid.SampledFrom([]int{0, 1, 2, 3, 4, 5, 1001, maxAttempt}).Draw(t, "their attempt")), int32(rapid.SampledFrom([]int{1, 2, 6, 7, 64}).Draw(t, "their size"))}
			if rapid.Bool().Draw(t, "the true one") {
				e = truth
			}
			var ranks []int32
			for i := range e.world {
				if rapid.Bool().Draw(t, "rank") {
					ranks = append(ranks, i)
				}
			}
			proc := rapid.SampledFrom([]diagnosis.ProcState{alive, diagnosis.ProcStopped, diagnosis.ProcUnknown, diagnosis.ProcGone}).Draw(t, "process")
			s.merge(s.node("liar"), words(e, now+rapid.Int64Range(-2*skew, skew).Draw(t, "created"), uint64(rapid.IntRange(90, 93).Draw(t, "comm")), proc, ranks...), now)
		}
		for range rapid.IntRange(0, 12).Draw(t, "steps") {
			now += rapid.Int64Range(1, skew).Draw(t, "time")
			switch rapid.IntRange(0, 6).Draw(t, "what") {
			case 0, 1, 2:
				lie()
			case 3:
				say(rapid.SampledFrom(honest).Draw(t, "who"))
			case 4:
				n := s.node(rapid.SampledFrom(honest).Draw(t, "lost"))
				s.ev.Nodes[n].Lost = true
				s.disconnected(n)
			case 5: // the job restarts
				truth.attempt++
				created = now
			case 6:
				s.decide()
			}
			if err := check(s); err != nil {
				t.Fatal(err)
			}
		}
		for range 5 { // as often as they are asked, when what was refused may be believed
			for _, name := range honest {
				say(name)
			}
			lie()
		}
		if err := check(s); err != nil || s.epoch != truth || !slices.Equal(whose(s), []string{"a", "a", "b", "b", "c", "c"}) {
			t.Fatalf("%v; %+v, %q; want %+v", err, s.epoch, whose(s), truth)
		}
	})
}

// Nodes that have nothing to say any more make room; those that are connected, or
// have ranks, do not.
func TestIdleNodesAreEvicted(t *testing.T) {
	s := newState("job", Limits{Nodes: 3})
	a, b := s.node("a"), s.node("b")
	s.nodes[b].stream = &stream{}
	s.merge(a, words(epoch{0, 1}, noon, 7, alive, 0), noon)
	for i := range 100 {
		if n := s.node(fmt.Sprint("passer-by-", i)); n < 0 {
			t.Fatalf("no room for number %d", i)
		}
	}
	if s.node("a") != a || s.node("b") != b || len(s.nodes) != 3 || s.overflow != 0 {
		t.Errorf("a is %d, b is %d, of %d nodes, %d found no room", s.node("a"), s.node("b"), len(s.nodes), s.overflow)
	}
	s.evictIdle(noon + rememberFor + 1)
	if err := check(s); err != nil || len(s.nodeOf) != 2 || len(s.free) != 1 {
		t.Errorf("%v; %v", err, s.nodeOf)
	}
	s.nodes[s.node("c")].stream = &stream{}
	if s.node("d") >= 0 || s.overflow != 1 {
		t.Error("a connected agent was evicted")
	}
}
