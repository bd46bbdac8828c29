package diagnosis_test

import (
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/diagnosistest"
	"github.com/lockstep-ccl/lockstep/record"
)

// lost makes a job of two nodes of which the second was heard last so long ago.
// All are in one communicator, whose last operation ended then.
func lost(age float64) (*job, *diagnosis.Comm) {
	j := newJob(8)
	c := j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
	for i := range c.Members {
		idleSince(c, i, age+0.05)
	}
	j.ev.Nodes[1].Lost, j.ev.Nodes[1].LastSeen = true, ago(age)
	return j, c
}

// TestNodeThatTakesTheJobWithIt: the ranks of a node that goes down are not seen
// to die. Those that are seen to, or to give up, do so because of it.
func TestNodeThatTakesTheJobWithIt(t *testing.T) {
	const node = "confirmed noncommunication_hang node1 node_lost"
	died := func(j *job, proc diagnosis.ProcState, age float64) {
		for r := range 4 {
			j.ev.Ranks[r].Proc, j.ev.Ranks[r].ProcAt = proc, ago(age+float64(r)/10)
		}
	}
	abort := func(c *diagnosis.Comm, members ...int) {
		for _, m := range members {
			c.Members[m].State = record.CommAborted
		}
	}
	for _, x := range []struct {
		name string
		job  func() *job
		want string
	}{
		{"the others abort and crash", func() *job {
			j, c := lost(10)
			abort(c, 0, 1, 2, 3)
			died(j, diagnosis.ProcGone, 6)
			return j
		}, node},
		{"the others crash", func() *job {
			j, _ := lost(10)
			died(j, diagnosis.ProcGone, 6)
			return j
		}, node},
		{"the others abort and exit", func() *job {
			j, c := lost(10)
			abort(c, 0, 1, 2, 3)
			died(j, diagnosis.ProcExited, 6)
			return j
		}, node},
		{"the others abort and sleep", func() *job {
			j, c := lost(10)
			abort(c, 0, 1, 2, 3)
			return j
		}, node},
		{"most abort and sleep, one waits for them", func() *job {
			j, c := lost(11)
			j.enter(c, 0, record.AllReduce, 10.9)
			abort(c, 1, 2, 3)
			return j
		}, node},
		{"not certain yet", func() *job {
			j, c := lost(4)
			abort(c, 0, 1, 2, 3)
			died(j, diagnosis.ProcGone, 1)
			return j
		}, ""},
		{"it was a rank, and a node fell silent later", func() *job {
			j, c := lost(10)
			abort(c, 1, 2, 3)
			j.ev.Ranks[0].Proc, j.ev.Ranks[0].ProcAt = diagnosis.ProcGone, ago(10.2)
			return j
		}, "confirmed noncommunication_hang 0 process_gone"},
		{"an agent was lost, the job went on until a rank died", func() *job {
			j, c := lost(30)
			for i := range 4 {
				idleSince(c, i, 1)
			}
			j.ev.Ranks[2].Proc, j.ev.Ranks[2].ProcAt = diagnosis.ProcGone, ago(0.6)
			return j
		}, "confirmed noncommunication_hang 2 process_gone"},
		{"an agent was lost long ago, and who works with its ranks does not name them", func() *job {
			j, _ := lost(60)
			j.ev.Comms = nil
			a, b := j.comm("tp", 0, 1, 2, 3), j.comm("pp", 0, 4)
			b.Members[0].Coll, b.Members[1].Coll = record.Group, record.Group
			then := j.ev
			then.Now, then.Nodes = ago(70), []diagnosis.Node{{Name: "node0"}, {Name: "node1"}}
			j.engine.Diagnose(&then) // the communicators are older than that
			for i := range a.Members {
				idleSince(a, i, 1)
			}
			idleSince(b, 0, 1)
			j.ev.Ranks[2].Proc, j.ev.Ranks[2].ProcAt = diagnosis.ProcGone, ago(0.6)
			return j
		}, "confirmed noncommunication_hang 2 process_gone"},
		{"they go on without it", func() *job {
			j, c := lost(30)
			abort(c, 0, 1, 2, 3)
			j.comm("world.1", 0, 1, 2, 3)
			return j
		}, ""},
		{"they go on without it until a rank dies", func() *job {
			j, c := lost(30)
			abort(c, 0, 1, 2, 3)
			j.comm("world.1", 0, 1, 2, 3)
			j.ev.Ranks[2].Proc, j.ev.Ranks[2].ProcAt = diagnosis.ProcGone, ago(0.6)
			return j
		}, "confirmed noncommunication_hang 2 process_gone"},
	} {
		t.Run(x.name, func(t *testing.T) {
			j := x.job()
			var got []string
			vs := j.verdicts()
			for i := range vs {
				got = append(got, describe(&vs[i]))
			}
			if s := strings.Join(got, "; "); s != x.want {
				t.Fatalf("got  %q\nwant %q\n%v", s, x.want, vs)
			}
		})
	}
}

func TestAnyLostNodeIsNamed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var cfg diagnosistest.Config
		world := topology(t, &cfg)
		cfg.Survivors = rapid.SampledFrom([]diagnosistest.Reaction{diagnosistest.Linger, diagnosistest.Exit, diagnosistest.Crash, diagnosistest.Idle}).Draw(t, "survivors")
		f := diagnosistest.Fault{
			Kind: diagnosistest.LostNode,
			At:   time.Duration(rapid.IntRange(4000, 8000).Draw(t, "at")) * time.Millisecond,
			Rank: rapid.IntRange(0, world-1).Draw(t, "rank"),
		}
		cfg.Faults = []diagnosistest.Fault{f}
		want := "noncommunication_hang " + diagnosistest.Node(f.Rank/cfg.RanksPerNode) + " node_lost"
		j, h := diagnosistest.New(cfg), newHistory()
		watch(j, diagnosis.New(diagnosis.Config{}), h, f.At+20*time.Second)
		if at, ok := h.confirmed[want]; !ok || len(h.confirmed) != 1 || at-f.At > 12*time.Second {
			t.Fatalf("want %q alone, got\n%s", want, h)
		}
		if len(h.last) != 1 || h.last[0].Level != diagnosis.Confirmed {
			t.Fatalf("the node is still lost, the verdict is not: %v\n%s", h.last, h)
		}
	})
}
