package master

import (
	"testing"
	"time"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// A node's wall clock is set back; the launcher then restarts the ranks in place, and counts that or does not.
func TestClockSetBack(t *testing.T) {
	const second, now = int64(1e9), int64(1e18)
	for _, next := range []uint32{0, 1} {
		for _, back := range []int64{0, 60 * second, 3600 * second} {
			s := newState("job", Limits{})
			a := s.node("a")
			s.merge(a, life(2, 0, now, diagnosis.ProcRunning), now+second)
			s.merge(a, life(2, 0, now, diagnosis.ProcGone), now+30*second)
			for i := int64(32); i < 600; i++ {
				s.merge(a, life(2, next, now+31*second-back, diagnosis.ProcRunning), now+i*second)
			}
			if s.attempt != next || s.ev.Ranks[0].Proc != diagnosis.ProcRunning {
				t.Errorf("attempt %d, %d s back: the job is in attempt %d, rank 0 lives and is taken for %v, %d entries refused",
					next, back/second, s.attempt, s.ev.Ranks[0].Proc, s.refused)
			}
		}
	}
}

// setBack is a time that was read when the wall clock stood d behind; its monotonic part is as it was.
func setBack(t time.Time, d time.Duration) time.Time {
	*(*uint64)(unsafe.Pointer(&t)) -= uint64(d/time.Second) << 30
	return t
}

// The host of the master is suspended for an hour, or had a wrong clock when the master started.
func TestMasterBehind(t *testing.T) {
	m, err := New(Options{Job: "job", Listen: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	defer m.listener.Close()
	m.started = setBack(m.started, time.Hour)
	m.pass()
	if err := m.Ready(); err != nil {
		t.Errorf("ready: %v", err)
	}
	m.mu.Lock()
	n := m.state.node("a")
	s := &stream{out: make(chan *wire.MasterMessage, outbox), done: make(chan error, 1)}
	m.state.nodes[n].stream = s
	m.mu.Unlock()
	m.report(n, s, life(2, 0, time.Now().UnixNano(), diagnosis.ProcRunning), false)
	if m.state.seen != 2 {
		t.Errorf("%d of 2 ranks are seen, %d entries refused", m.state.seen, m.state.refused)
	}
}
