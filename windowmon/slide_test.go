package windowmon_test

import (
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/windowmon"
)

// Requests that are slow are an event wherever windows begin: at the completion with which most of
// the time of the last ones is theirs, also where no window has most of its time from them. A
// few are no state.
func TestSlidingEvent(t *testing.T) {
	for offset := range 8 {
		s := newSim(windowmon.Config{})
		s.send(2000+offset, 64<<10, 1)
		if n := s.m.Events(); n != 0 {
			t.Fatalf("%d events on a steady network", n)
		}
		before := s.now
		s.latency *= 4
		s.send(4, 64<<10, 1)
		s.latency /= 4
		if n := s.m.Events(); n != 1 {
			t.Errorf("offset %d: %d events after 4 slow requests", offset, n)
			continue
		}
		e := s.m.Event()
		if e.Cause != windowmon.Network || e.State != windowmon.None || e.First > before || e.Last <= before || e.Last > s.now || e.WRs < 8 || e.WRs > 12 || e.Bytes != uint64(e.WRs)*64<<10 || e.Latency < 11_553 {
			t.Errorf("offset %d, onset %d: %+v", offset, before, e)
		}
		s.send(500, 64<<10, 1)
		if n := s.m.Events(); n != 1 || s.m.State() != windowmon.None {
			t.Errorf("offset %d: %d events, state %v after it is over", offset, n, s.m.State())
		}
		// One that lasts is a state, and one event more.
		s.latency *= 4
		s.send(200, 64<<10, 1)
		if n := s.m.Events(); n != 2 || s.m.State() != windowmon.Network {
			t.Errorf("offset %d: %d events, state %v when it lasts", offset, n, s.m.State())
		}
		s.m.Drop()
		s.flying = nil
		s.latency /= 4
		s.send(100, 64<<10, 1)
		if n := s.m.Events(); n != 2 {
			t.Errorf("offset %d: %d events on the next queue pair", offset, n)
		}
	}
}

// A pause is no part of an estimate: requests from before it do not count after it.
func TestSlidingForgetsBeforeAPause(t *testing.T) {
	s := newSim(windowmon.Config{})
	s.send(2000, 64<<10, 1)
	s.latency *= 4
	s.send(2, 64<<10, 1)
	s.latency /= 4
	s.advance(s.now + int64(time.Second))
	s.send(5, 64<<10, 1)
	s.latency *= 4
	s.send(2, 64<<10, 1)
	if n := s.m.Events(); n != 0 {
		t.Errorf("%d events, %+v", n, s.m.Event())
	}
}

// A network that becomes much slower is an event before anything completes on it: after some of
// the connection's normal times, for someone who looks. It stays one event.
func TestOverdue(t *testing.T) {
	const usual = 50_000 // ns
	for _, depth := range []int{1, 8} {
		s := newSim(windowmon.Config{})
		s.latency, s.poll = usual, 10_000
		s.send(2000, 4<<10, depth)
		onset := s.now
		s.latency = 40e6
		s.post(4 << 10)
		for s.m.Events() == 0 && s.now < onset+s.latency/2 {
			s.advance(s.now + s.poll)
		}
		e := s.m.Event()
		if s.m.Events() != 1 || e.First > onset || e.Last > onset+20*usual || e.Latency <= usual/2 || e.State != windowmon.None {
			t.Fatalf("depth %d: %d events, %d ns after the onset: %+v", depth, s.m.Events(), e.Last-onset, e)
		}
		s.drain()
		s.latency = usual
		s.send(500, 4<<10, depth)
		if n := s.m.Events(); n != 1 {
			t.Errorf("depth %d: %d events after it has completed", depth, n)
		}
	}
}

// A network whose requests are late now and then, so that the estimate is bad already when it becomes much slower.
func TestOverdueAgain(t *testing.T) {
	const usual = 50_000 // ns
	s := newSim(windowmon.Config{})
	s.latency, s.poll = usual, 10_000
	s.send(2000, 4<<10, 1)
	s.latency = 12 * usual
	s.send(1, 4<<10, 1)
	if n := s.m.Events(); n != 1 {
		t.Fatalf("%d events of one late request", n)
	}
	onset := s.now
	s.latency = 40e6
	s.post(4 << 10)
	for s.m.Events() == 1 && s.now < onset+s.latency/2 {
		s.advance(s.now + s.poll)
	}
	if e := s.m.Event(); s.m.Events() != 2 || e.Last > onset+40*usual {
		t.Fatalf("%d events, %d ns after the onset: %+v", s.m.Events(), e.Last-onset, e)
	}
	s.drain()
	s.latency = usual
	s.send(500, 4<<10, 1)
	if n := s.m.Events(); n != 2 {
		t.Errorf("%d events after it has completed", n)
	}
}

// What waits for the receiver, or for a progress thread that was away, is not overdue.
func TestNotOverdue(t *testing.T) {
	s := newSim(windowmon.Config{})
	s.send(2000, 4<<10, 1)
	s.m.Post(s.now, 4<<10)
	s.m.Blocked(s.now)
	for range 100 {
		s.now += 100_000
		s.m.Progress(s.now)
		s.m.Overdue(s.now)
	}
	s.m.Unblocked(s.now)
	s.m.Overdue(s.now)
	s.m.Drop()
	s.m.Overdue(s.now)
	s.m.Post(s.now, 4<<10)
	s.now += int64(20 * time.Millisecond) // longer than Gap, and nobody looked
	s.m.Overdue(s.now)
	if n := s.m.Events(); n != 0 {
		t.Errorf("%d events: %+v", n, s.m.Event())
	}
}
