package diagnosis_test

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/diagnosistest"
	"github.com/lockstep-ccl/lockstep/record"
)

// These tests are about what the engine remembers from pass to pass.

func hung() (*job, *diagnosis.Comm) {
	j := newJob(8)
	c := j.comm("dp", 0, 1, 2, 3)
	j.allBut(c, 3, 2)
	return j, c
}

func one(t *testing.T, vs []diagnosis.Verdict, want string) diagnosis.Verdict {
	t.Helper()
	if len(vs) != 1 || describe(&vs[0]) != want {
		t.Fatalf("got %v, want %s", vs, want)
	}
	return vs[0]
}

func TestPausedMasterFindsNothing(t *testing.T) {
	j, _ := hung()
	j.ev.Paused = true
	if vs := j.verdicts(); vs != nil {
		t.Fatal(vs)
	}
	j.ev.Paused = false
	if vs := j.pass(500 * time.Millisecond); vs != nil {
		t.Fatalf("ages across a pause count: %v", vs)
	}
	j.pass(1600 * time.Millisecond)
	one(t, j.pass(300*time.Millisecond), "confirmed noncommunication_hang 2 idle")
}

func TestPauseKeepsWhatIsOpen(t *testing.T) {
	j, _ := hung()
	one(t, j.verdicts(), "confirmed noncommunication_hang 2 idle")
	for range 5 {
		j.ev.Paused = true
		one(t, j.pass(10*time.Second), "confirmed noncommunication_hang 2 idle")
	}
	j.ev.Paused = false
	one(t, j.pass(100*time.Millisecond), "confirmed noncommunication_hang 2 idle")
}

func TestHangEnds(t *testing.T) {
	j, c := hung()
	one(t, j.verdicts(), "confirmed noncommunication_hang 2 idle")
	for i := range c.Members {
		c.Members[i].Started, c.Members[i].Finished, c.Members[i].FinishedAt = 101, 101, j.ev.Now+1e6
	}
	one(t, j.pass(100*time.Millisecond), "confirmed noncommunication_hang 2 idle") // it does not flap
	if vs := j.pass(time.Second); vs != nil {
		t.Fatal(vs)
	}
}

func TestHangOutlivesItsEvidence(t *testing.T) {
	j, c := hung()
	first := one(t, j.verdicts(), "confirmed noncommunication_hang 2 idle")
	// The survivors time out, abort and die one by one; the culprit last.
	for _, i := range []int{0, 1, 3, 2} {
		c.Members[i].State = record.CommAborted
		j.ev.Ranks[i].Proc, j.ev.Ranks[i].ProcAt = diagnosis.ProcGone, j.ev.Now
		v := one(t, j.pass(2*time.Second), "confirmed noncommunication_hang 2 idle")
		if v.Key != first.Key {
			t.Fatalf("key %q became %q", first.Key, v.Key)
		}
	}
	// The restart is what ends it.
	for i := range j.ev.Ranks {
		j.ev.Ranks[i] = diagnosis.Rank{Node: int32(i / 4), Attempt: 1, Proc: diagnosis.ProcRunning}
	}
	if vs := j.pass(100 * time.Millisecond); vs != nil {
		t.Fatal(vs)
	}
}

// TestWhatAHangLeavesBehind: those who give up for a hang are idle, and who still
// waits for them waits for the same fault.
func TestWhatAHangLeavesBehind(t *testing.T) {
	j := newJob(8)
	j.ev.Comms = make([]diagnosis.Comm, 0, 2) // c stays where it is
	c := j.comm("dp", 0, 1, 2, 3)
	j.allBut(c, 3)
	j.ring(c, 3)[1].Outstanding = 4096
	pp := j.comm("pp", 3, 5)
	j.pair(pp, 1, record.Recv, 0, 3)
	one(t, j.verdicts(), "confirmed communication_hang 1>2 stalled")
	for i := range c.Members {
		c.Members[i].State = record.CommAborted
	}
	for range 40 {
		one(t, j.pass(100*time.Millisecond), "confirmed communication_hang 1>2 stalled")
	}
}

// TestStragglerThatHangs: a confirmed hang whose evidence is gone does not turn back
// into the slowness that it began as.
func TestStragglerThatHangs(t *testing.T) {
	cfg := diagnosistest.Config{Seed: 2, Faults: []diagnosistest.Fault{
		{Kind: diagnosistest.SlowRank, At: 8 * time.Second, Rank: 2, Factor: 4},
		{Kind: diagnosistest.Hang, At: 20 * time.Second, Rank: 2},
	}}
	j, e, h := diagnosistest.New(cfg), diagnosis.New(diagnosis.Config{}), newHistory()
	watch(j, e, h, 24*time.Second)
	one(t, h.last, "confirmed noncommunication_hang 2 idle")
	ev := *j.Evidence()
	for i := range ev.Comms {
		for k := range ev.Comms[i].Members {
			ev.Comms[i].Members[k].State = record.CommAborted
		}
	}
	for range 20 {
		ev.Now += int64(passEvery)
		for i := range ev.Nodes {
			ev.Nodes[i].LastSeen = ev.Now
		}
		one(t, e.Diagnose(&ev), "confirmed noncommunication_hang 2 idle")
	}
}

// TestStragglerAfterAHang: a rank that was hung, came back by itself and is slow is
// another incident, which is only suspected at first.
func TestStragglerAfterAHang(t *testing.T) {
	cfg := diagnosistest.Config{Seed: 2, Faults: []diagnosistest.Fault{
		{Kind: diagnosistest.Hang, At: 10 * time.Second, Until: 16 * time.Second, Rank: 2},
		{Kind: diagnosistest.SlowRank, At: 16 * time.Second, Rank: 2, Factor: 4},
	}}
	j, e := diagnosistest.New(cfg), diagnosis.New(diagnosis.Config{})
	classes, levels := map[string]diagnosis.Class{}, map[string]diagnosis.Level{}
	for j.Now() < 30*time.Second {
		j.Advance(passEvery)
		for _, v := range e.Diagnose(j.Evidence()) {
			if was, told := classes[v.Key]; told && was == diagnosis.NoncommunicationHang && v.Class == diagnosis.NoncommunicationSlow && levels[v.Key] == diagnosis.Confirmed {
				t.Fatalf("a confirmed hang goes on as %s %s under key %s", v.Level, v.Class, v.Key)
			}
			classes[v.Key], levels[v.Key] = v.Class, v.Level
		}
	}
	if len(classes) != 2 {
		t.Errorf("incidents %v", classes)
	}
}

func TestAgentDiesInTheMiddle(t *testing.T) {
	j, c := hung()
	j.allBut(c, 3)
	c.Members[2].Started = 100
	first := one(t, j.verdicts(), "confirmed noncommunication_hang 2 idle")
	for i := range 4 {
		j.ev.Ranks[i].Proc = diagnosis.ProcUnknown
	}
	seen := j.ev.Nodes[0].LastSeen
	for range 100 {
		j.ev.Nodes[0].LastSeen = seen - int64(100*time.Millisecond) // pass adds it
		j.ev.Nodes[0].Lost = j.ev.Now-seen > 3e9
		v := one(t, j.pass(100*time.Millisecond), "confirmed noncommunication_hang 2 idle")
		if v.Key != first.Key {
			t.Fatalf("key %q became %q", first.Key, v.Key)
		}
	}
}

func TestRestartForgetsFormerCommunicators(t *testing.T) {
	j, c := hung()
	one(t, j.verdicts(), "confirmed noncommunication_hang 2 idle")
	for i := range j.ev.Ranks {
		j.ev.Ranks[i].Attempt = 1
	}
	for range 10 {
		if vs := j.pass(time.Second); vs != nil {
			t.Fatalf("the former attempt's operation still counts: %v", vs)
		}
	}
	// The new attempt uses the same id again, and hangs.
	now := j.ev.Now
	for i := range c.Members {
		c.Members[i] = diagnosis.Member{World: int32(i), State: record.CommJoined, Coll: record.AllReduce, Peer: -1, Enqueued: 20, Started: 20, Finished: 20, StartedAt: now, FinishedAt: now}
		if i != 1 {
			c.Members[i].Enqueued, c.Members[i].Started = 21, 21
		}
	}
	j.pass(time.Second)
	j.pass(1200 * time.Millisecond)
	one(t, j.pass(300*time.Millisecond), "confirmed noncommunication_hang 1 idle")
}

func TestReasonSharpensUnderOneKey(t *testing.T) {
	j, _ := hung()
	j.ev.Ranks[2].CPU = 1
	first := one(t, j.verdicts(), "suspected noncommunication_hang 2 computing")
	j.ev.Ranks[2].Proc, j.ev.Ranks[2].ProcAt = diagnosis.ProcStopped, j.ev.Now
	one(t, j.pass(100*time.Millisecond), "suspected noncommunication_hang 2 process_stopped")
	j.pass(2 * time.Second)
	v := one(t, j.pass(300*time.Millisecond), "confirmed noncommunication_hang 2 process_stopped")
	if v.Key != first.Key {
		t.Fatalf("key %q became %q", first.Key, v.Key)
	}
}

func TestPauseTeachesPatience(t *testing.T) {
	j, c := hung()
	one(t, j.verdicts(), "confirmed noncommunication_hang 2 idle")
	one(t, j.pass(3*time.Second), "confirmed noncommunication_hang 2 idle")
	// It comes back by itself after six seconds, and pauses like that again.
	for i := range c.Members {
		m := &c.Members[i]
		m.Enqueued, m.Started, m.Finished, m.StartedAt, m.FinishedAt = 101, 101, 101, j.ev.Now, j.ev.Now
	}
	j.pass(time.Second)
	for i := range c.Members {
		if m := &c.Members[i]; i != 2 {
			m.Enqueued, m.Started, m.StartedAt = 102, 102, j.ev.Now
		}
	}
	// The pause was of 14 s: it is told of again when it lasts half as long again, and
	// is a hang when it lasts three times as long.
	for range 18 {
		if vs := j.pass(time.Second); vs != nil {
			t.Fatal(vs)
		}
	}
	j.pass(3 * time.Second)
	for range 16 {
		one(t, j.pass(time.Second), "suspected noncommunication_hang 2 idle")
	}
	j.pass(3 * time.Second)
	one(t, j.pass(time.Second), "confirmed noncommunication_hang 2 idle")
}

func TestCheckpointsTeachPatience(t *testing.T) {
	j, _ := hung()
	j.ev.Ranks[2].Mark, j.ev.Ranks[2].MarkAt = record.MarkCheckpoint, ago(3)
	one(t, j.pass(40*time.Second), "suspected noncommunication_hang 2 checkpoint")
	one(t, j.pass(100*time.Second), "suspected noncommunication_hang 2 checkpoint")
	// A checkpoint of another rank completes in 5 s: now 140 s are too long.
	j.ev.Ranks[5].Mark, j.ev.Ranks[5].MarkAt = record.MarkCheckpoint, j.ev.Now
	j.pass(5 * time.Second)
	j.ev.Ranks[5].Mark, j.ev.Ranks[5].MarkAt = record.MarkNone, 0
	j.pass(100 * time.Millisecond)
	one(t, j.pass(400*time.Millisecond), "confirmed noncommunication_hang 2 checkpoint")
}

func TestCommunicatorThatNeverForms(t *testing.T) {
	j := newJob(4)
	c := j.comm("world", 0, 1, 2, 3)
	for i := range c.Members {
		c.Members[i] = diagnosis.Member{World: int32(i), State: record.CommJoining, Peer: -1}
	}
	c.Members[3].World = -1
	j.ev.Ranks[3] = diagnosis.Rank{Node: -1}
	for range 59 {
		if vs := j.pass(time.Second); vs != nil {
			t.Fatal(vs)
		}
	}
	j.pass(2 * time.Second)
	one(t, j.pass(time.Second), "suspected noncommunication_hang 3 not_joined")
	// A rank that dies meanwhile is worth more than patience.
	j.ev.Ranks[1].Proc, j.ev.Ranks[1].ProcAt = diagnosis.ProcGone, j.ev.Now
	j.pass(700 * time.Millisecond)
	vs := j.pass(300 * time.Millisecond)
	if len(vs) == 0 || describe(&vs[0]) != "confirmed noncommunication_hang 1 process_gone" {
		t.Fatal(vs)
	}
}

// run tells the verdicts of a simulated job.
func run(cfg diagnosistest.Config, d time.Duration) *history {
	h := newHistory()
	watch(diagnosistest.New(cfg), diagnosis.New(diagnosis.Config{}), h, d)
	return h
}

func TestOneRankCheckpoints(t *testing.T) {
	for _, length := range []time.Duration{500 * time.Millisecond, 3 * time.Second, 20 * time.Second} {
		h := run(diagnosistest.Config{Seed: 3, Pauses: []diagnosistest.Pause{{Every: 20, Length: length, Mark: record.MarkCheckpoint, IO: true, Rank: 0}}}, 2*time.Minute)
		if len(h.confirmed) != 0 {
			t.Errorf("%s\n%s", length, h)
		}
		for n := range h.first {
			if n != "noncommunication_hang rank 0 checkpoint" {
				t.Errorf("%s: %s", length, n)
			}
		}
	}
}

// A rank that does not come back from its data loader hangs, and the verdict says where it is.
func TestDataLoaderHangs(t *testing.T) {
	j := diagnosistest.New(diagnosistest.Config{Seed: 3, Pauses: []diagnosistest.Pause{
		{Every: 1, Length: 2 * time.Millisecond, Mark: record.MarkDataLoading, Sleep: true, Rank: diagnosistest.AllRanks},
		{Every: 400, Length: time.Hour, Mark: record.MarkDataLoading, Sleep: true, Rank: 5},
	}})
	e := diagnosis.New(diagnosis.Config{})
	for j.Now() < 5*time.Minute {
		j.Advance(passEvery)
		for _, v := range e.Diagnose(j.Evidence()) {
			if v.Level != diagnosis.Confirmed {
				continue
			}
			if len(v.Culprits) != 1 || v.Culprits[0].Rank != 5 || !strings.Contains(strings.Join(v.Why, "\n"), "by its own word in its data loader since") {
				t.Errorf("%+v", v)
			}
			return
		}
	}
	t.Error("no verdict")
}

// TestPausesAreLearnt: a rank that checkpoints without a word is suspected once or twice
// and then no more, a pause that is somewhat longer is no hang, and what other ranks are
// given does not change.
func TestPausesAreLearnt(t *testing.T) {
	const every = 20
	pause := diagnosistest.Pause{Every: every, Length: 1500 * time.Millisecond, IO: true, Rank: 0}
	for _, how := range []func(p *diagnosistest.Pause){
		func(*diagnosistest.Pause) {},
		func(p *diagnosistest.Pause) { p.IO, p.Sleep = false, true },
		func(p *diagnosistest.Pause) { p.IO = false },
		func(p *diagnosistest.Pause) { p.Mark = record.MarkCheckpoint },
	} {
		p := pause
		how(&p)
		long := p
		long.Every, long.Length = 12*every+1, p.Length*22/10
		cfg := diagnosistest.Config{Seed: 3, Noise: 0.05, Pauses: []diagnosistest.Pause{p, long}}
		j, e := diagnosistest.New(cfg), diagnosis.New(diagnosis.Config{})
		told, open := 0, false
		for j.Now() < 5*time.Minute {
			j.Advance(passEvery)
			vs := e.Diagnose(j.Evidence())
			for _, v := range vs {
				if v.Level == diagnosis.Confirmed {
					t.Fatalf("%+v: after %s: %+v", p, j.Now(), v)
				}
			}
			if !open && len(vs) > 0 {
				told++
			}
			open = len(vs) > 0
		}
		if told > 3 { // twice, and for the longer one
			t.Errorf("%+v: suspected %d times in %d steps", p, told, j.Steps())
		}
		cfg.Faults = []diagnosistest.Fault{{Kind: diagnosistest.Hang, At: time.Minute, Rank: 5}}
		h := run(cfg, 70*time.Second)
		if at, ok := h.confirmed["noncommunication_hang rank 5 idle"]; !ok || at > time.Minute+3500*time.Millisecond {
			t.Errorf("%+v: a rank that never paused hangs, and it is confirmed at %s:\n%s", p, at, h)
		}
	}
}

func TestUnmarkedPausesOfAll(t *testing.T) {
	for _, p := range []diagnosistest.Pause{
		{Every: 30, Length: 5 * time.Second, Spread: 500 * time.Millisecond, Rank: diagnosistest.AllRanks},
		{Every: 30, Length: 5 * time.Second, Spread: 500 * time.Millisecond, IO: true, Rank: diagnosistest.AllRanks},
		{Every: 30, Length: 5 * time.Second, Spread: 500 * time.Millisecond, Sleep: true, Rank: diagnosistest.AllRanks},
	} {
		if h := run(diagnosistest.Config{Seed: 4, Pauses: []diagnosistest.Pause{p}}, 2*time.Minute); len(h.confirmed) != 0 {
			t.Errorf("%+v\n%s", p, h)
		}
	}
}

// TestUnevenStart: all compile before their first operation, some for twice as long.
func TestUnevenStart(t *testing.T) {
	p := diagnosistest.Pause{Length: 100 * time.Second, Spread: 90 * time.Second, Rank: diagnosistest.AllRanks}
	for seed := range uint64(4) {
		j, e := diagnosistest.New(diagnosistest.Config{Seed: seed, Pauses: []diagnosistest.Pause{p}}), diagnosis.New(diagnosis.Config{})
		for j.Now() < 5*time.Minute {
			j.Advance(passEvery)
			for _, v := range e.Diagnose(j.Evidence()) {
				if v.Level == diagnosis.Confirmed || v.Since < diagnosistest.Start || strings.Contains(strings.Join(v.Why, "\n"), "00:00:00.000") {
					t.Fatalf("%s: %+v", j.Now(), v)
				}
			}
		}
	}
}

// TestUnevenPausesOfAll: an epoch ends, and all wait for their first batch.
func TestUnevenPausesOfAll(t *testing.T) {
	for _, p := range []diagnosistest.Pause{
		{Every: 30, Length: 6 * time.Second, Spread: 5 * time.Second, Sleep: true, Rank: diagnosistest.AllRanks},
		{Every: 6, Length: 60 * time.Second, Spread: 50 * time.Second, Rank: diagnosistest.AllRanks},
	} {
		for seed := range uint64(4) {
			if h := run(diagnosistest.Config{Seed: seed, Pauses: []diagnosistest.Pause{p}}, 4*time.Minute); len(h.confirmed) != 0 {
				t.Errorf("%+v\n%s", p, h)
			}
		}
	}
}

// TestLongComputations: a rank that computes for seconds between two operations, as
// it always does, is not hung, whether its CPU computes or its GPU.
func TestLongComputations(t *testing.T) {
	for seed := range uint64(8) {
		cfg := diagnosistest.Config{Seed: seed, DP: 2, TP: 2, PP: 4, Micro: 4, Compute: 2 * time.Second, Noise: 0.1, OnGPU: seed%2 == 0}
		if h := run(cfg, 10*time.Minute); len(h.first) != 0 {
			t.Errorf("%+v\n%s", cfg, h)
		}
	}
}

// TestUnevenPipeline: a last stage that also computes the loss does more work than
// the others. Its ranks are no stragglers, also where all stages share a communicator.
func TestUnevenPipeline(t *testing.T) {
	var faults []diagnosistest.Fault
	for r := 12; r < 16; r++ {
		faults = append(faults, diagnosistest.Fault{Kind: diagnosistest.SlowRank, Rank: r, Factor: 3})
	}
	for seed := range uint64(4) {
		cfg := diagnosistest.Config{Seed: seed, DP: 2, TP: 2, PP: 4, World: true, NoSteps: seed%2 == 0, Faults: faults}
		if h := run(cfg, time.Minute); len(h.first) != 0 {
			t.Errorf("%+v\n%s", cfg, h)
		}
	}
}

func TestSharedSlowdownsAreNobodys(t *testing.T) {
	h := run(diagnosistest.Config{Seed: 5, Faults: []diagnosistest.Fault{{Kind: diagnosistest.SlowAll, At: 10 * time.Second, Until: 40 * time.Second, Factor: 4}}}, time.Minute)
	if len(h.first) != 0 {
		t.Error(h)
	}
}

func TestLostAgentIsNoHang(t *testing.T) {
	h := run(diagnosistest.Config{Seed: 6, Faults: []diagnosistest.Fault{{Kind: diagnosistest.LostAgent, At: 10 * time.Second, Until: 30 * time.Second, Rank: 5}}}, time.Minute)
	if len(h.first) != 0 {
		t.Error(h)
	}
}

func TestLostNodeIsNamed(t *testing.T) {
	h := run(diagnosistest.Config{Seed: 6, Faults: []diagnosistest.Fault{{Kind: diagnosistest.LostNode, At: 10 * time.Second, Rank: 5}}}, 30*time.Second)
	if _, ok := h.confirmed["noncommunication_hang nodeb node_lost"]; !ok || len(h.confirmed) != 1 {
		t.Error(h)
	}
}

func TestSpinningRankIsSuspectedThenConfirmed(t *testing.T) {
	h := run(diagnosistest.Config{Seed: 7, Faults: []diagnosistest.Fault{{Kind: diagnosistest.Spin, At: 10 * time.Second, Rank: 3}}}, 50*time.Second)
	const want = "noncommunication_hang rank 3 computing"
	if at := h.confirmed[want]; at < 40*time.Second || len(h.first) != 1 || h.first[want] > 13*time.Second {
		t.Error(h)
	}
}

func TestSlowFaultsEnd(t *testing.T) {
	for _, f := range []diagnosistest.Fault{
		{Kind: diagnosistest.SlowRank, Rank: 2, Factor: 4},
		{Kind: diagnosistest.SlowConn, Rank: 2, Peer: 0, Factor: 60},
	} {
		f.At, f.Until = 10*time.Second, 25*time.Second
		j, e, h := diagnosistest.New(diagnosistest.Config{Seed: 8, Faults: []diagnosistest.Fault{f}}), diagnosis.New(diagnosis.Config{}), newHistory()
		watch(j, e, h, f.Until)
		if len(h.last) != 1 || h.last[0].Level != diagnosis.Confirmed || h.last[0].Culprits[0].Rank != 2 {
			t.Errorf("%+v: %v\n%s", f, h.last, h)
		}
		watch(j, e, h, 10*time.Second)
		if len(h.last) != 0 || len(h.confirmed) != 1 {
			t.Errorf("%+v: still %v\n%s", f, h.last, h)
		}
	}
}

// TestSlowVerdictsKeepTheirNames: a verdict's communicator and culprit are labels of
// an alert, which is another alert when they change.
func TestSlowVerdictsKeepTheirNames(t *testing.T) {
	for seed := range uint64(4) {
		for _, f := range []diagnosistest.Fault{
			{Kind: diagnosistest.SlowRank, At: 8 * time.Second, Rank: 2, Factor: 4},
			{Kind: diagnosistest.SlowConn, At: 8 * time.Second, Rank: 2, Peer: 4, Factor: 60},
		} {
			cfg := diagnosistest.Config{DP: 4, World: true, Seed: seed, Faults: []diagnosistest.Fault{f}}
			j, e := diagnosistest.New(cfg), diagnosis.New(diagnosis.Config{})
			names := map[string]bool{}
			for j.Now() < 40*time.Second {
				j.Advance(passEvery)
				for _, v := range e.Diagnose(j.Evidence()) {
					if v.Level == diagnosis.Confirmed {
						names[fmt.Sprint(v.Class, v.CommName, v.Culprits[0])] = true
					}
				}
			}
			if len(names) != 1 {
				t.Errorf("seed %d, %+v: told under %d names: %v", seed, f, len(names), names)
			}
		}
	}
}

func TestSlowFromTheStart(t *testing.T) {
	h := run(diagnosistest.Config{DP: 4, Seed: 9, Faults: []diagnosistest.Fault{{Kind: diagnosistest.SlowRank, Rank: 6, Factor: 4}}}, 20*time.Second)
	if _, ok := h.confirmed["noncommunication_slow rank 6 straggler"]; !ok || len(h.first) != 1 {
		t.Error(h)
	}
}

func TestSlowNode(t *testing.T) {
	var faults []diagnosistest.Fault
	for r := range 4 {
		faults = append(faults, diagnosistest.Fault{Kind: diagnosistest.SlowRank, At: 10 * time.Second, Rank: 4 + r, Factor: 3})
	}
	h := run(diagnosistest.Config{DP: 4, TP: 4, PP: 1, Seed: 10, Faults: faults}, 25*time.Second)
	if _, ok := h.confirmed["noncommunication_slow nodeb straggler"]; !ok {
		t.Error(h)
	}
}

func TestStragglerIsSeenByItsArrivals(t *testing.T) {
	cfg := diagnosistest.Config{Seed: 11, MapError: 50 * time.Millisecond, Faults: []diagnosistest.Fault{{Kind: diagnosistest.SlowRank, At: 10 * time.Second, Rank: 2, Factor: 4}}}
	h := run(cfg, 25*time.Second)
	if !strings.Contains(h.String(), "entered last in") {
		t.Errorf("clocks that differ by up to 100 ms hide who entered last:\n%s", h)
	}
}

func TestEngineIsDeterministic(t *testing.T) {
	cfg := diagnosistest.Config{Seed: 12, Faults: []diagnosistest.Fault{{Kind: diagnosistest.SlowRank, At: 5 * time.Second, Rank: 2, Factor: 4}, {Kind: diagnosistest.Hang, At: 15 * time.Second, Rank: 5}}}
	if a, b := run(cfg, 25*time.Second).String(), run(cfg, 25*time.Second).String(); a != b || a == "" {
		t.Errorf("%s\n\n%s", a, b)
	}
}

func TestDelayRatios(t *testing.T) {
	j := newJob(4)
	c := j.comm("dp", 0, 1, 2)
	for _, k := range [][3]int{{0, 1, 10}, {1, 2, 10}, {2, 0, 40}} {
		j.conn(c, k[0], k[1]).LatencyNs = float64(k[2])
	}
	j.conn(c, 0, 1).LatencyNs = 30 // a second one: the slower counts
	nan := float32(math.NaN())
	want := []float32{nan, 3, nan, nan, nan, 1, 4, nan, nan}
	got := diagnosis.DelayRatios(&j.ev, 0, nil)
	for i := range want {
		if got[i] != want[i] && (want[i] == want[i] || got[i] == got[i]) {
			t.Fatalf("%v, want %v", got, want)
		}
	}
}

// TestAgentStartsAgain: an agent that comes back is connected before it has told of its
// ranks. What the others wait for has long come.
func TestAgentStartsAgain(t *testing.T) {
	j := newJob(8)
	c := j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
	j.verdicts()
	proc := func(p diagnosis.ProcState) {
		for r := range 4 {
			j.ev.Ranks[r].Proc = p
		}
	}
	proc(diagnosis.ProcUnknown)
	for i := 4; i < 8; i++ { // they go on, and so do the ranks that nobody reports
		m := j.enter(c, i, record.AllReduce, 0)
		m.StartedAt, m.EnqueuedAt = j.ev.Now, j.ev.Now
	}
	for range 12 {
		if vs := j.pass(100 * time.Millisecond); vs != nil {
			t.Fatalf("the reports are late, not the ranks: %v", vs)
		}
	}
	proc(diagnosis.ProcRunning) // they have not come, indeed
	j.pass(100 * time.Millisecond)
	for range 9 {
		j.pass(100 * time.Millisecond)
	}
	if vs := j.pass(100 * time.Millisecond); len(vs) != 1 || vs[0].Class != diagnosis.NoncommunicationHang {
		t.Fatalf("a hang is told once the agent is back: %v", vs)
	}
	proc(diagnosis.ProcUnknown)
	for range 110 {
		j.pass(100 * time.Millisecond)
	}
	if vs := j.pass(100 * time.Millisecond); len(vs) != 1 || vs[0].Level != diagnosis.Confirmed {
		t.Fatalf("an agent that cannot tell of its ranks does not hide a hang: %v", vs)
	}
}
