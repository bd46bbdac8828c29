package windowmon_test

import "github.com/lockstep-ccl/lockstep/windowmon"

// sim drives a Monitor with a sender over a network of a fixed bandwidth and
// latency, in virtual time.
type sim struct {
	m       windowmon.Monitor
	now     int64
	free    int64 // when the wire is free
	perByte float64
	latency int64
	jitter  func() float64 // multiplies each request's time on the wire; nil: none
	poll    int64          // how often the progress thread looks when nothing happens
	flying  []flight

	causes    map[windowmon.Cause]int // of closed windows
	anomalies int
	told      []windowmon.Window
	closed    uint64
}

type flight struct {
	done  int64
	bytes int
}

func newSim(cfg windowmon.Config) *sim {
	s := &sim{perByte: 0.1, latency: 5_000, poll: 100_000, now: 1, causes: map[windowmon.Cause]int{}} // 10 GB/s, 5 µs
	s.m.Init(cfg)
	return s
}

func (s *sim) heard(tell bool) {
	if n := s.m.Stats().Windows; n != s.closed {
		s.closed = n
		w := s.m.Last()
		s.causes[w.Cause]++
		if w.Anomaly {
			s.anomalies++
		}
	}
	if tell {
		s.told = append(s.told, s.m.Last())
	}
}

func (s *sim) post(bytes int) {
	s.heard(s.m.Post(s.now, bytes))
	wire := float64(bytes) * s.perByte
	if s.jitter != nil {
		wire *= s.jitter()
	}
	s.free = max(s.free, s.now) + int64(wire)
	s.flying = append(s.flying, flight{s.free + s.latency, bytes})
}

// advance lets the progress thread run until some time.
func (s *sim) advance(to int64) {
	for s.now < to {
		next := min(to, s.now+s.poll)
		if len(s.flying) > 0 {
			next = min(next, max(s.flying[0].done, s.now))
		}
		s.now = next
		if len(s.flying) > 0 && s.flying[0].done <= s.now {
			bytes := s.flying[0].bytes
			s.flying = s.flying[1:]
			s.heard(s.m.Complete(s.now, bytes))
			if len(s.flying) > 0 && s.flying[0].done <= s.now {
				continue
			}
		} else {
			s.heard(s.m.Progress(s.now))
			s.m.Overdue(s.now)
		}
	}
}

// send moves n requests with at most depth outstanding.
func (s *sim) send(n, bytes, depth int) {
	for range n {
		for len(s.flying) >= depth {
			s.advance(max(s.flying[0].done, s.now+1))
		}
		s.post(bytes)
	}
	s.drain()
}

func (s *sim) drain() {
	for len(s.flying) > 0 {
		s.advance(max(s.flying[0].done, s.now+1))
	}
}

func (s *sim) reset() { s.causes, s.anomalies, s.told = map[windowmon.Cause]int{}, 0, nil }
