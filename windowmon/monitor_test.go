package windowmon_test

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
	"github.com/lockstep-ccl/lockstep/windowmon"
	"pgregory.net/rapid"
)

func TestCausesAreRecords(t *testing.T) {
	for w, r := range map[windowmon.Cause]record.Cause{
		windowmon.None:             record.CauseNone,
		windowmon.Network:          record.CauseNetwork,
		windowmon.SenderStarved:    record.CauseSenderStarved,
		windowmon.ReceiverNotReady: record.CauseReceiverNotReady,
		windowmon.CPUStarved:       record.CauseCPUStarved,
	} {
		if uint8(w) != uint8(r) {
			t.Errorf("%v is %d here and %d there", r, w, r)
		}
	}
}

func TestSlowNetworkAndRecovery(t *testing.T) {
	for _, depth := range []int{1, 4, 32, 100} {
		s := newSim(windowmon.Config{})
		s.send(2000, 64<<10, depth)
		if s.causes[windowmon.Network] != 0 || s.m.State() != windowmon.None {
			t.Fatalf("depth %d: healthy: %v", depth, s.causes)
		}
		s.perByte *= 4
		s.latency *= 4
		s.send(8*12+depth, 64<<10, depth)
		if s.m.State() != windowmon.Network || s.anomalies == 0 {
			t.Errorf("depth %d: four times slower for 12 windows: state %v, %v", depth, s.m.State(), s.causes)
		}
		s.send(20_000, 64<<10, depth)
		if s.m.State() != windowmon.Network {
			t.Errorf("depth %d: slow was learnt as normal", depth)
		}
		s.perByte /= 4
		s.latency /= 4
		s.send(8*20+depth, 64<<10, depth)
		if s.m.State() != windowmon.None {
			t.Errorf("depth %d: recovered: state %v", depth, s.m.State())
		}
		s.reset()
		s.send(2000, 64<<10, depth)
		if s.causes[windowmon.Network] != 0 {
			t.Errorf("depth %d: healthy again: %v", depth, s.causes)
		}
	}
}

// Another flow takes three quarters of a port of 400 Gbit/s from a connection: a window
// says so within a millisecond of the network's time, the state after 6 to 10 windows.
func TestDisturbedLink(t *testing.T) {
	for _, bytes := range []int{8 << 10, 64 << 10, 256 << 10} {
		for _, depth := range []int{1, 8, 64} {
			s := newSim(windowmon.Config{})
			s.perByte = 0.02 // 50 GB/s
			s.send(20_000, bytes, depth)
			s.reset()
			begin, windows := s.now, s.m.Windows()
			s.perByte, s.latency = 4*s.perByte, 4*s.latency // and queues are full
			window := int64(0)
			for s.m.State() != windowmon.Network && s.now < begin+100_000_000 {
				if len(s.flying) >= depth {
					s.advance(max(s.flying[0].done, s.now+1))
				}
				s.post(bytes)
				if window == 0 && s.causes[windowmon.Network] > 0 {
					window = s.now - begin
				}
			}
			windows = s.m.Windows() - windows
			t.Logf("%d KiB, %d outstanding: a window after %v, the state after %v and %d windows", bytes>>10, depth, time.Duration(window), time.Duration(s.now-begin), windows)
			if window == 0 || window > 1_000_000 || windows > 10 {
				t.Errorf("%d KiB, %d outstanding: a window after %v, the state after %d windows", bytes>>10, depth, time.Duration(window), windows)
			}
		}
	}
}

// The network may change for good: after Adopt the new speed is normal.
func TestAdopt(t *testing.T) {
	s := newSim(windowmon.Config{Adopt: time.Second})
	s.send(1000, 64<<10, 4)
	s.perByte *= 10
	s.send(2000, 64<<10, 4)
	if s.m.State() != windowmon.Network {
		t.Fatalf("state %v before the network is adopted", s.m.State())
	}
	for end := s.now + 2e9; s.now < end; {
		s.send(100, 64<<10, 4)
	}
	if s.m.State() != windowmon.None {
		t.Errorf("state %v after twice the time", s.m.State())
	}
}

// A stopped network is told although nothing ever completes.
func TestStall(t *testing.T) {
	s := newSim(windowmon.Config{})
	s.send(1000, 64<<10, 4)
	s.latency = math.MaxInt64 / 2
	s.post(64 << 10)
	s.post(64 << 10)
	s.reset()
	s.advance(s.now + 1e9)
	w := s.m.Last()
	if s.m.State() != windowmon.Network || w.Bytes != 0 || w.Bandwidth() != 0 || w.Backlog != 2 || !w.Anomaly {
		t.Errorf("state %v, window %+v", s.m.State(), w)
	}
	if len(s.told) == 0 || len(s.told) > 10 {
		t.Errorf("told %d times in a second", len(s.told))
	}
}

func TestOtherCauses(t *testing.T) {
	for _, tt := range []struct {
		name string
		want windowmon.Cause
		turn func(s *sim) // what a slow sender, receiver or host does around each of its requests
	}{
		{"sender starved", windowmon.SenderStarved, func(s *sim) {
			s.advance(s.now + 200_000)
			s.post(64 << 10)
			s.drain()
		}},
		{"receiver not ready", windowmon.ReceiverNotReady, func(s *sim) {
			s.post(64 << 10)
			s.m.Blocked(s.now)
			s.advance(s.now + 2_000_000)
			s.m.Unblocked(s.now)
			s.drain()
		}},
		{"receiver not ready from the first byte", windowmon.ReceiverNotReady, func(s *sim) {
			s.m.Blocked(s.now)
			s.advance(s.now + 2_000_000)
			s.m.Unblocked(s.now)
			s.post(64 << 10)
			s.drain()
		}},
		{"CPU starved", windowmon.CPUStarved, func(s *sim) {
			s.post(64 << 10)
			s.post(64 << 10)
			s.now += 30_000_000
			s.drain()
		}},
	} {
		s := newSim(windowmon.Config{})
		s.send(1000, 64<<10, 4)
		s.reset()
		for range 200 {
			tt.turn(s)
		}
		if s.m.State() != tt.want || s.causes[windowmon.Network] > 0 || s.anomalies > 0 {
			t.Errorf("%s: state %v, causes %v", tt.name, s.m.State(), s.causes)
		}
		s.advance(s.now + 10_000_000)
		s.send(1000, 64<<10, 4)
		if s.m.State() != windowmon.None {
			t.Errorf("%s: state %v when it is over", tt.name, s.m.State())
		}
	}
}

// A training job's sender: bursts, then long silence. It is told of once a
// period while it sends, and never as slow.
func TestIdleSenderIsQuiet(t *testing.T) {
	s := newSim(windowmon.Config{})
	for range 100 {
		s.send(40, 256<<10, 8)
		s.advance(s.now + 300_000_000)
	}
	if s.causes[windowmon.None] < 100 || len(s.causes) != 1 || s.m.State() != windowmon.None {
		t.Errorf("state %v, causes %v", s.m.State(), s.causes)
	}
	if len(s.told) > 31 {
		t.Errorf("told %d times in 30 s", len(s.told))
	}
	told := len(s.told)
	s.advance(s.now + 60_000_000_000)
	if len(s.told) != told {
		t.Errorf("told %d times while silent", len(s.told)-told)
	}
}

// On an oversubscribed host, a peer that is not scheduled makes some windows
// many times slower than others. That is no slow network; a network that is
// slow for all of them is.
func TestJitterIsNormal(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		s := newSim(windowmon.Config{})
		s.jitter = func() float64 {
			j := math.Exp(rng.NormFloat64() * 0.7)
			if rng.IntN(40) == 0 {
				j *= 100
			}
			return j
		}
		s.send(1000, 64<<10, 4)
		s.reset()
		s.send(40_000, 64<<10, 4)
		if s.anomalies > 0 {
			t.Errorf("seed %d: %d anomalies in %v", seed, s.anomalies, s.causes)
		}
		s.perByte *= 20
		s.send(800, 64<<10, 4)
		if s.m.State() != windowmon.Network {
			t.Errorf("seed %d: state %v when everything is 20 times slower", seed, s.m.State())
		}
	}
}

// What a fault teaches until it is found does not hide the next one; nor do pauses of
// this host's own progress thread, which tell nothing of the network, hide any.
func TestFaultsInARow(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 2))
		s := newSim(windowmon.Config{})
		s.jitter = func() float64 { return math.Exp(rng.NormFloat64() * 0.3) }
		burst := func(i int) {
			s.send(8, 64<<10, 4)
			if i%3 == 0 { // the thread is away, and work is outstanding
				s.post(64 << 10)
				s.now += 30_000_000
				s.drain()
			}
		}
		for i := range 500 {
			burst(i)
		}
		for fault := range 20 {
			s.perByte, s.latency = s.perByte*3, s.latency*3
			found := 0
			for ; found < 40 && s.m.State() != windowmon.Network; found++ {
				burst(found)
			}
			if found > 20 {
				t.Errorf("seed %d, fault %d: state %v after %d slow bursts", seed, fault, s.m.State(), found)
			}
			s.perByte, s.latency = s.perByte/3, s.latency/3
			for i := range 60 {
				burst(i)
			}
			if s.m.State() != windowmon.None {
				t.Errorf("seed %d, fault %d: state %v when it is over", seed, fault, s.m.State())
			}
		}
	}
}

// What is normal outlives what was dropped, and nothing dropped completes later.
func TestDrop(t *testing.T) {
	s := newSim(windowmon.Config{})
	s.send(2000, 64<<10, 4)
	s.latency *= 20
	for range 20 {
		for range 4 {
			s.post(64 << 10)
		}
		s.flying = nil
		s.m.Drop()
		if n := s.m.Outstanding(); n != 0 || s.m.Complete(s.now, 64<<10) {
			t.Fatalf("%d bytes outstanding, or one completes, after they were dropped", n)
		}
		s.send(8, 64<<10, 1)
	}
	if s.m.State() != windowmon.Network {
		t.Errorf("state %v when the path that replaces another is slower", s.m.State())
	}
}

// Where most windows are slow, one more says nothing; a network that is slower than
// all of them is found at once, and left when it is over.
func TestSlowerThanUsual(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 2))
		s := newSim(windowmon.Config{})
		s.jitter = func() float64 {
			if rng.IntN(10) == 0 {
				return 5 + 15*rng.Float64()
			}
			return 1
		}
		s.send(8_000, 64<<10, 1)
		s.reset()
		s.send(8_000, 64<<10, 1)
		// Half of the windows have a late request, which is usual here and told as normal.
		if n, of := s.causes[windowmon.Network], s.causes[windowmon.None]; s.anomalies > 0 || 20*n > of {
			t.Errorf("seed %d: %d anomalies, %d of %d windows told as slow", seed, s.anomalies, n, n+of)
		}
		for range 5 {
			s.latency += 1_000_000
			s.send(8*12, 64<<10, 1)
			if s.m.State() != windowmon.Network {
				t.Errorf("seed %d: state %v when each request takes a hundred times as long", seed, s.m.State())
			}
			s.latency -= 1_000_000
			s.send(8*60, 64<<10, 1)
			if s.m.State() != windowmon.None {
				t.Errorf("seed %d: state %v when it is over", seed, s.m.State())
			}
		}
	}
}

// Whatever a sender does on a network that does not change, in sizes, depth,
// bursts and silences: the network is not to blame.
func TestSteadyNetworkIsNeverSlow(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := newSim(windowmon.Config{})
		s.perByte = rapid.Float64Range(0.02, 1).Draw(t, "ns per byte")
		s.latency = rapid.Int64Range(500, 100_000).Draw(t, "latency")
		for range rapid.IntRange(1, 60).Draw(t, "bursts") {
			size := 1 << rapid.IntRange(0, 22).Draw(t, "size")
			if rapid.Bool().Draw(t, "odd") {
				size += rapid.IntRange(0, size).Draw(t, "more")
			}
			s.send(rapid.IntRange(1, 200).Draw(t, "requests"), size, rapid.IntRange(1, 70).Draw(t, "depth"))
			s.advance(s.now + rapid.Int64Range(0, 3_000_000).Draw(t, "silence"))
			if s.causes[windowmon.Network] != 0 {
				t.Fatalf("causes %v, last %+v", s.causes, s.m.Last())
			}
		}
	})
}

func TestFirstWindowIsTold(t *testing.T) {
	s := newSim(windowmon.Config{})
	s.send(8, 64<<10, 1)
	if len(s.told) != 1 {
		t.Fatalf("told %d times", len(s.told))
	}
	w := s.told[0]
	want := windowmon.Window{First: 1, Last: 1 + 8*(6553+5000), Bytes: 8 * 64 << 10, WRs: 8, Backlog: 1, Latency: 6553 + 5000, Network: 8 * (6553 + 5000)}
	if w != want {
		t.Errorf("got  %+v\nwant %+v", w, want)
	}
	if bw := w.Bandwidth(); math.Abs(bw-5.67e9) > 1e7 {
		t.Errorf("bandwidth %g", bw)
	}
}

func BenchmarkWorkRequest(b *testing.B) {
	for _, depth := range []int64{1, 16} {
		b.Run(map[int64]string{1: "depth=1", 16: "depth=16"}[depth], func(b *testing.B) {
			var m windowmon.Monitor
			m.Init(windowmon.Config{})
			now := int64(1)
			for range depth - 1 {
				m.Post(now, 64<<10)
			}
			b.ReportAllocs()
			for b.Loop() {
				m.Post(now, 64<<10)
				now += 7000
				m.Complete(now, 64<<10)
				now += 100
			}
		})
	}
}

func BenchmarkProgress(b *testing.B) {
	var m windowmon.Monitor
	m.Init(windowmon.Config{})
	m.Post(1, 1)
	now := int64(1)
	b.ReportAllocs()
	for b.Loop() {
		now += 100
		m.Progress(now)
	}
}
