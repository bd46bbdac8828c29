package diagnosis_test

import (
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/diagnosistest"
	"github.com/lockstep-ccl/lockstep/record"
)

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

// What a job came back from before it was started again it may do again: else its first pause would have it restarted for ever.
func TestPausesOfNextAttempt(t *testing.T) {
	const second = int64(1e9)
	for _, ranks := range []int{4, 3} { // as many as before, and after a shrink
		e := diagnosis.New(diagnosis.Config{})
		ev := diagnosis.Evidence{Job: "job", Now: 1000 * second, Nodes: []diagnosis.Node{{Name: "a"}}}
		level := diagnosis.Level(0)
		begin := func(attempt uint32, n int) {
			ev.Ranks, ev.Comms = nil, []diagnosis.Comm{{ID: uint64(attempt) + 7, Name: "world", Members: make([]diagnosis.Member, n)}}
			for i := range n {
				ev.Ranks = append(ev.Ranks, diagnosis.Rank{PID: int32(100*int(attempt+1) + i), Attempt: attempt, Proc: diagnosis.ProcRunning, ProcAt: ev.Now, CPU: 0.01})
				ev.Comms[0].Members[i] = diagnosis.Member{World: int32(i), State: record.CommJoined, Coll: record.AllReduce, Peer: -1, FaultPeer: -1}
			}
		}
		// pass is 100 ms, in which rank 2 is away or not.
		pass := func(away bool) {
			ev.Now += second / 10
			ev.Nodes[0].LastSeen = ev.Now
			for i := range ev.Comms[0].Members {
				m := &ev.Comms[0].Members[i]
				if m.Started == m.Finished && !(away && i == 2) {
					m.Enqueued, m.Started, m.EnqueuedAt, m.StartedAt = m.Enqueued+1, m.Started+1, ev.Now, ev.Now
				} else if m.Started > m.Finished && !away {
					m.Finished, m.FinishedAt, m.Ops, m.OwnNs = m.Started, ev.Now, m.Ops+1, m.OwnNs+1e7
				}
			}
			level = 0
			for _, v := range e.Diagnose(&ev) {
				level = max(level, v.Level)
			}
		}
		begin(0, 4)
		for range 600 {
			pass(false)
		}
		for range 60 { // it is confirmed, and comes back
			pass(true)
		}
		if level != diagnosis.Confirmed {
			t.Fatalf("an idle rank that others wait for: level %v", level)
		}
		for range 600 {
			pass(false)
		}
		begin(1, ranks)
		for range 600 {
			pass(false)
		}
		for range 60 {
			pass(true)
		}
		if known := ranks == 4; known == (level == diagnosis.Confirmed) {
			t.Errorf("%d ranks, the same pause in the next attempt: level %v", ranks, level)
		}
	}
}
