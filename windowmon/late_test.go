package windowmon_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/lockstep-ccl/lockstep/windowmon"
	"pgregory.net/rapid"
)

// late is a connection of two ranks that are often late, in virtual time: they wait for a core, or
// compute. Each request is taken when the receiver looks, and its credit when the sender does.
type late struct {
	m      windowmon.Monitor
	rng    *rand.Rand
	now    int64
	flight float64 // of a request of 8 KiB, one way
	credit float64 // of a credit
	told   bool    // the receiver says how late it was
	away   float64 // mean of how late a rank is, when it is
	causes map[windowmon.Cause]int
	closed uint64
}

func newLate(seed uint64, told bool) *late {
	l := &late{rng: rand.New(rand.NewPCG(seed, 19)), now: 1, flight: 60e3, credit: 30e3, told: told, away: 3e6, causes: map[windowmon.Cause]int{}}
	l.m.Init(windowmon.Config{Witnessed: told})
	return l
}

func (l *late) heard() {
	if n := l.m.Windows(); n != l.closed {
		l.closed = n
		l.causes[l.m.Last().Cause]++
	}
}

// lateness is how long a rank takes to look: nothing, mostly, or until it has a core.
func (l *late) lateness() int64 {
	if l.rng.IntN(3) > 0 {
		return int64(2e3 * l.rng.Float64())
	}
	return int64(l.away * l.rng.ExpFloat64())
}

func (l *late) jitter(ns float64) int64 { return int64(ns * (0.8 + 0.4*l.rng.Float64())) }

// request is one, and the sender's own work after it.
func (l *late) request() {
	l.m.Post(l.now, 8<<10)
	l.heard()
	there := l.now + l.jitter(l.flight)
	taken := there + l.lateness()
	back := taken + l.jitter(l.credit)
	read := back + l.lateness()
	x := windowmon.Late{}
	if l.told {
		x = windowmon.Late{Receiver: taken - there, Sender: read - back, Told: true}
	}
	for l.now+5e6 < read { // it looks every 5 ms while it waits
		l.now += 5e6
		if l.told && l.now > there+5e6 {
			l.m.Arrived(l.now)
		}
		l.m.Progress(l.now)
		l.heard()
	}
	l.now = read
	l.m.CompleteLate(l.now, 8<<10, x)
	l.heard()
	l.now += l.jitter(50e3)
}

func (l *late) run(n int) (network, receiver, all float64) {
	l.causes = map[windowmon.Cause]int{}
	for range n {
		l.request()
	}
	for _, n := range l.causes {
		all += float64(n)
	}
	return float64(l.causes[windowmon.Network]) / all, float64(l.causes[windowmon.ReceiverNotReady]) / all, all
}

// Ranks that are late are not the network: neither are their windows its, nor does it get away
// with anything while they are.
func TestRanksAreLate(t *testing.T) {
	for seed := range uint64(5) {
		before, told := newLate(seed, false), newLate(seed, true)
		noise, _, _ := before.run(20_000)
		healthy, receiver, _ := told.run(20_000)
		if healthy > 0 || receiver == 0 {
			t.Errorf("seed %d: of a healthy network %.1f%% of the windows are slow, %.1f%% of the receiver", seed, 100*healthy, 100*receiver)
		}
		out := fmt.Sprintf("seed %d: healthy %.1f%% where nobody tells, %.1f%% where the receiver does; slower:", seed, 100*noise, 100*healthy)
		for _, slow := range []float64{3, 10, 30, 100, 300} {
			a, b := newLate(seed, false), newLate(seed, true)
			for _, l := range []*late{a, b} {
				l.run(20_000)
				l.flight *= slow
				l.credit *= slow
			}
			an, _, _ := a.run(800)
			bn, _, _ := b.run(800)
			out += fmt.Sprintf(" %.0f times %.0f%% and %.0f%%,", slow, 100*an, 100*bn)
			if slow >= 100 && bn < 0.9 {
				t.Errorf("seed %d: of a network %.0f times slower only %.0f%% of the windows are", seed, slow, 100*bn)
			}
			if b.flight, b.credit = 60e3, 30e3; slow >= 100 {
				if was := b.m.State(); was != windowmon.Network {
					t.Errorf("seed %d: the state of a network %.0f times slower is %v", seed, slow, was)
				}
				if b.run(2000); b.m.State() == windowmon.Network {
					t.Errorf("seed %d: the network is well again, and its state is not", seed)
				}
			}
		}
		t.Log(out)
	}
}

// What a rank says of itself counts for no more than has passed, whatever it says.
func TestLateIsBounded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var m windowmon.Monitor
		m.Init(windowmon.Config{WRs: rapid.IntRange(1, 4).Draw(t, "WRs"), Resolution: 1, MaxAge: 200, Idle: 30, Gap: 50, Warmup: 1, Witnessed: rapid.Bool().Draw(t, "witnessed")})
		now, windows := int64(0), uint64(0)
		for range rapid.IntRange(1, 200).Draw(t, "events") {
			now += rapid.Int64Range(0, 60).Draw(t, "wait")
			switch rapid.SampledFrom([]string{"post", "post", "complete", "complete", "progress", "arrived", "way", "block", "unblock", "drop"}).Draw(t, "event") {
			case "post":
				m.Post(now, rapid.IntRange(0, 10).Draw(t, "bytes"))
			case "complete":
				m.CompleteLate(now, rapid.IntRange(0, 20).Draw(t, "bytes"), windowmon.Late{
					Receiver: rapid.Int64Range(-50, 300).Draw(t, "receiver"), Sender: rapid.Int64Range(-50, 300).Draw(t, "sender"), Told: rapid.Bool().Draw(t, "told"),
				})
			case "progress":
				m.Progress(now)
				m.Overdue(now)
			case "arrived":
				m.Arrived(now)
			case "way":
				m.OnItsWay(rapid.Bool().Draw(t, "known"))
			case "block":
				m.Blocked(now)
			case "unblock":
				m.Unblocked(now)
			case "drop":
				m.Drop()
			}
			if m.Windows() == windows {
				continue
			}
			windows = m.Windows()
			w := m.Last()
			if least := min(w.Network, w.Starved, w.Blocked, w.Stalled, w.Held); least < 0 || w.Network+w.Starved+w.Blocked+w.Stalled+w.Held != w.Last-w.First {
				t.Fatalf("times do not add up: %+v", w)
			}
		}
	})
}
