package diagnosis_test

import (
	"math"
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
