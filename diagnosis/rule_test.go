package diagnosis_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// collective is one of a step's: what every rank spends before it, and in which communicator it is.
type collective struct {
	comm int
	own  time.Duration
}

// buckets are a step's n collectives of a communicator: the first after the forward pass.
func buckets(comm, n int) (step []collective) {
	for k := range n {
		step = append(step, collective{comm, 2 * time.Millisecond})
		if k == 0 {
			step[0].own = 30 * time.Millisecond
		}
	}
	return step
}

// threeComms is a step of a job whose ranks meet in a communicator of nine collectives, after which they come
// together to those of the other two.
func threeComms() []collective {
	const ms = time.Millisecond
	return append(buckets(1, 9), collective{0, ms}, collective{2, ms / 2}, collective{0, ms / 2}, collective{2, ms})
}

// stepped plays a job of four ranks of one node, whose program marks no steps and whose transports tell nothing.
type stepped struct {
	step    []collective
	late    func(step int, at time.Duration) time.Duration // of rank 1, before a step
	sampled int                                            // of ten collectives; 0: none
}

// play returns when rank 1 was confirmed to be slow, and what else was.
func (j stepped) play(length time.Duration) (confirmed []time.Duration, others string) {
	const ranks, start = 4, int64(1e18)
	rng, engine := rand.New(rand.NewPCG(1, 2)), diagnosis.New(diagnosis.Config{})
	ev := diagnosis.Evidence{Job: "job", Nodes: []diagnosis.Node{{Name: "node0"}}}
	for r := range ranks {
		ev.Ranks = append(ev.Ranks, diagnosis.Rank{PID: int32(100 + r), Proc: diagnosis.ProcRunning, CPU: 0.8})
	}
	for _, c := range j.step {
		for len(ev.Comms) <= c.comm {
			x := diagnosis.Comm{ID: uint64(len(ev.Comms) + 1), Name: fmt.Sprint("comm", len(ev.Comms))}
			for r := range ranks {
				x.Members = append(x.Members, diagnosis.Member{World: int32(r), State: record.CommJoined, Peer: -1})
			}
			ev.Comms = append(ev.Comms, x)
		}
	}
	end, pass, before := start, start, false // end: of the last collective
	diagnose := func(until int64) {
		for ; pass < until; pass += 1e8 {
			ev.Now, ev.Nodes[0].LastSeen = pass, pass
			now := false
			for _, v := range engine.Diagnose(&ev) {
				switch {
				case v.Level != diagnosis.Confirmed:
				case v.Class == diagnosis.NoncommunicationSlow && v.Culprits[0].Kind == diagnosis.CulpritRank && v.Culprits[0].Rank == 1:
					now = true
				default:
					others = fmt.Sprintf("at %v: %v %v: %v", time.Duration(pass-start), v.Class, v.Culprits, v.Why)
				}
			}
			if now && !before {
				confirmed = append(confirmed, time.Duration(pass-start))
			}
			before = now
		}
	}
	for n := 0; end < start+int64(length); n++ {
		for k, c := range j.step {
			a := diagnosis.Arrival{Comm: int32(c.comm), Coll: record.AllReduce}
			last := int64(0)
			for r := range ranks {
				own := float64(c.own) * math.Exp(0.05*rng.NormFloat64())
				if r == 1 && k == 0 {
					own += float64(j.late(n, time.Duration(end-start)))
				}
				a.Start = append(a.Start, end+int64(own))
				last = max(last, a.Start[r])
			}
			diagnose(min(a.Start[0], a.Start[1], a.Start[2], a.Start[3]))
			for r := range ranks { // a pass in between sees some of them inside
				m := &ev.Comms[c.comm].Members[r]
				m.Coll, m.Bytes, m.Enqueued, m.Started, m.EnqueuedAt, m.StartedAt = record.AllReduce, 1<<20, m.Enqueued+1, m.Started+1, a.Start[r], a.Start[r]
				a.Seq = m.Started
				if r == 1 {
					m.Enqueued, m.Started = m.Enqueued-1, m.Started-1
				}
			}
			diagnose(a.Start[1])
			ev.Comms[c.comm].Members[1].Enqueued, ev.Comms[c.comm].Members[1].Started = a.Seq, a.Seq
			for r := range ranks {
				m := &ev.Comms[c.comm].Members[r]
				own := uint64(a.Start[r] - end)
				m.Finished, m.FinishedAt, m.Ops = m.Started, last+1e6, m.Ops+1
				m.OwnNs, m.MaxOwnNs, m.WaitNs, m.TransferNs = m.OwnNs+own, max(m.MaxOwnNs, own), m.WaitNs+uint64(last-a.Start[r]), m.TransferNs+1e6
				a.End = append(a.End, m.FinishedAt)
			}
			if end = last + 1e6; rng.IntN(10) < j.sampled {
				ev.Arrivals = append(ev.Arrivals, a)
			}
		}
	}
	return confirmed, others
}

// since is late in every step from a moment on, until another one.
func since(from, until, late time.Duration) func(int, time.Duration) time.Duration {
	return func(_ int, at time.Duration) time.Duration {
		if at >= from && at < until {
			return late
		}
		return 0
	}
}

// TestLateAsARule has a rank that is late for a step's first collective only, in jobs that mark no steps and have
// no past when it begins: it is confirmed, and one that pauses as long as ten of these once in twenty steps is not.
func TestLateAsARule(t *testing.T) {
	const begin, late = 2200 * time.Millisecond, 120 * time.Millisecond
	every := since(begin, time.Hour, late)
	pause := func(step int, _ time.Duration) time.Duration {
		if step%20 == 19 {
			return 10 * late
		}
		return 0
	}
	one, many := buckets(0, 10), threeComms()
	short := make([]collective, len(one)) // twenty steps in less than a window
	for i := range one {
		short[i] = collective{0, one[i].own / 10}
	}
	for name, c := range map[string]struct {
		job  stepped
		want bool
	}{
		"one communicator":                    {stepped{one, every, 10}, true},
		"one communicator, sampled":           {stepped{one, every, 6}, true},
		"three communicators":                 {stepped{many, every, 10}, true},
		"three communicators, sampled":        {stepped{many, every, 6}, true},
		"one communicator, pauses":            {stepped{one, pause, 10}, false},
		"three communicators, pauses":         {stepped{many, pause, 10}, false},
		"one communicator of short steps":     {stepped{short, func(n int, at time.Duration) time.Duration { return pause(n, at) / 10 }, 10}, false},
		"short steps, sampled, shorter pause": {stepped{short, func(n int, at time.Duration) time.Duration { return pause(n, at) / 20 }, 6}, false},
	} {
		t.Run(name, func(t *testing.T) {
			confirmed, others := c.job.play(20 * time.Second)
			if c.want != (len(confirmed) == 1) || others != "" {
				t.Fatalf("confirmed at %v, want one %v; others: %s", confirmed, c.want, others)
			}
			if c.want && (confirmed[0] < begin || confirmed[0] > begin+2600*time.Millisecond) {
				t.Errorf("confirmed at %v, want it within 2.6 s of %v, of which 2 s are what a slow rank is given", confirmed[0], begin)
			}
		})
	}
}

// TestPausesBegin has a rank pause in every third step of a job that marks none and takes two a window: it is
// confirmed where it began to, and not where it has always done so.
func TestPausesBegin(t *testing.T) {
	five := make([]collective, 5)
	for i := range five {
		five[i] = collective{0, 22 * time.Millisecond}
	}
	const begin, pause = 9 * time.Second, 165 * time.Millisecond
	for _, from := range []time.Duration{begin, 0} {
		job := stepped{five, func(step int, at time.Duration) time.Duration {
			if at >= from && step%3 == 2 {
				return pause
			}
			return 0
		}, 0}
		confirmed, others := job.play(25 * time.Second)
		if others != "" || (len(confirmed) > 0) != (from > 0) {
			t.Errorf("since %v: confirmed at %v; others: %s", from, confirmed, others)
		}
		if len(confirmed) > 0 && confirmed[0] < begin {
			t.Errorf("confirmed at %v, before it was slow", confirmed[0])
		}
	}
}

// TestFaultIsNoHabit has a rank that becomes slow, recovers and becomes slow again in a job of which no collective
// is sampled: what the first fault cost does not excuse the second one.
func TestFaultIsNoHabit(t *testing.T) {
	first, second := since(30*time.Second, 60*time.Second, 120*time.Millisecond), since(70*time.Second, time.Hour, 120*time.Millisecond)
	job := stepped{buckets(0, 10), func(n int, at time.Duration) time.Duration { return first(n, at) + second(n, at) }, 0}
	if confirmed, others := job.play(90 * time.Second); len(confirmed) != 2 || confirmed[1] > 73*time.Second || others != "" {
		t.Errorf("confirmed at %v, want two, the second within three seconds of 70 s; others: %s", confirmed, others)
	}
}
