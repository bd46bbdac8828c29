//go:build cgo

package nvml

import (
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

func TestXids(t *testing.T) {
	r := start(t, newMachine(2))
	r.probe()
	before := record.Now()
	r.report(1, 31)
	r.report(1, 43)
	r.report(1, 31)
	r.report(0, 63)
	r.report(-1, 79) // of no GPU that is known
	r.until("all", func() bool {
		return r.xid(1, 31).Count == 2 && r.xid(1, 43).Count == 1 && r.xid(0, 63).Count == 1 && r.v.GPUs.XidsDropped == 1
	})
	if at := r.xid(1, 31).At; at < before || at > record.Now() {
		t.Errorf("at %d", at)
	}
	// What was published stays as it was.
	old := r.v.GPUs
	r.report(1, 31)
	r.until("one more", func() bool { return r.xid(1, 31).Count == 3 })
	if old.GPUs[1].Xids[0].Count != 2 {
		t.Error("a published view has changed")
	}
}

// A storm fills the queue, and no more: the rest is counted as dropped.
func TestXidStorm(t *testing.T) {
	r := start(t, newMachine(1))
	r.probe()
	const sent = 3 * maxQueued
	for range sent { // nobody reads meanwhile
		r.report(0, 74)
	}
	total := func() uint64 { return r.xid(0, 74).Count + r.v.GPUs.XidsDropped }
	r.until("all accounted for", func() bool { return total() == sent })
	if n := r.xid(0, 74).Count; n < maxQueued || n > maxQueued+1 {
		t.Errorf("%d of %d were kept, the queue has room for %d", n, sent, maxQueued)
	}
	for code := range uint64(2 * maxCodes) {
		r.report(0, 1000+code)
		_ = r.pass(0)
	}
	r.until("all accounted for", func() bool { return r.v.GPUs.XidsDropped == sent-r.xid(0, 74).Count+maxCodes+1 })
	if n := len(r.v.GPUs.GPUs[0].Xids); n != maxCodes {
		t.Errorf("%d codes, want %d", n, maxCodes)
	}
}

// A GPU falls off the bus while its rank and another one train.
func TestGPUFallsOffTheBus(t *testing.T) {
	r := start(t, newMachine(2))
	r.probe()
	now := record.Now()
	rank := func(gpu int, pid int32) *source.Process {
		p := &source.Process{State: diagnosis.ProcRunning}
		p.PID, p.Created, p.Anchor = pid, time.Now(), record.Anchor{Mono: now, Real: time.Now().UnixNano()}
		p.Devices = []record.DeviceStatus{{DeviceEntry: record.DeviceEntry{UUID: uuidBytes(gpu)}}}
		return p
	}
	hit, other, cpu := rank(0, 10), rank(1, 11), &source.Process{}
	r.v.Processes = []*source.Process{hit, other, cpu}
	_ = r.pass(0)
	if !hit.GPU.Seen || hit.GPU.Index != 0 || other.GPU.Index != 1 || cpu.GPU.Seen {
		t.Fatalf("%+v %+v %+v", hit.GPU, other.GPU, cpu.GPU)
	}
	r.gpus[0].fail("*", nvml.ERROR_GPU_IS_LOST)
	r.report(0, 79)
	r.report(0, 119) // follows from it
	r.lost.Store(true)
	calls := len(r.gpus[0].GetPowerUsageCalls())
	r.probe()
	r.until("the Xids", func() bool { return r.xid(0, 119).Count == 1 })
	g := &r.v.GPUs.GPUs[0]
	if !g.Lost || g.LostAt == 0 || g.UUID != uuidOf(0) || len(g.Failed) != 1 {
		t.Errorf("GPU 0: %+v", g)
	}
	absent(t, "power of a lost GPU", g.Power)
	if n := len(r.gpus[0].GetPowerUsageCalls()); n != calls {
		t.Errorf("a lost GPU was asked %d more times", n-calls)
	}
	is(t, "power of the other", r.v.GPUs.GPUs[1].Power, 650.5)
	if hit.Xid != 79 || hit.GPU.XidAt != r.xid(0, 79).At || hit.GPU.LostAt != g.LostAt {
		t.Errorf("its rank: Xid %d, %+v", hit.Xid, hit.GPU)
	}
	if other.Xid != 0 || other.GPU.LostAt != 0 {
		t.Errorf("the other rank: Xid %d, %+v", other.Xid, other.GPU)
	}
	// The process dies of it; the restarted one is not what the Xid was about.
	hit.State, hit.StateAt = diagnosis.ProcGone, record.Now()
	next := rank(0, 12)
	next.Created = time.Now().Add(time.Second)
	r.v.Processes = []*source.Process{hit, next, other}
	_ = r.pass(0)
	if hit.Xid != 79 || next.Xid != 0 || next.GPU.LostAt == 0 {
		t.Errorf("dead: Xid %d; next: Xid %d, %+v", hit.Xid, next.Xid, next.GPU)
	}
	// It comes back.
	r.lost.Store(false)
	r.gpus[0].heal()
	r.probe()
	if g := &r.v.GPUs.GPUs[0]; g.Lost || g.LostAt != 0 || g.Power == nil || next.GPU.LostAt != 0 {
		t.Errorf("back: %+v", g)
	}
}

// The real-time clock is set back while a rank trains: what hits it later hits it all the same.
func TestClockSetBack(t *testing.T) {
	r := start(t, newMachine(1))
	r.probe()
	p := &source.Process{State: diagnosis.ProcRunning}
	p.Created, p.Anchor = time.Now().Add(time.Hour), record.Anchor{Mono: record.Now(), Real: time.Now().UnixNano()}
	p.Devices = []record.DeviceStatus{{DeviceEntry: record.DeviceEntry{UUID: uuidBytes(0)}}}
	r.v.Processes = []*source.Process{p}
	_ = r.pass(0)
	r.report(0, 79)
	r.until("the Xid", func() bool { return r.xid(0, 79).Count == 1 })
	_ = r.pass(0)
	if p.Xid != 79 {
		t.Errorf("Xid %d", p.Xid)
	}
}

// Which Xid counts for a process: the gravest of its time, of these the first.
func TestReason(t *testing.T) {
	h := &history{fatal: []collector.Xid{{Code: 13, At: 50}, {Code: 31, At: 150}, {Code: 13, At: 160}, {Code: 48, At: 200}, {Code: 95, At: 201}, {Code: 119, At: 9e10}}}
	p := &source.Process{State: diagnosis.ProcRunning}
	p.Created, p.Anchor = time.Unix(0, 1100), record.Anchor{Mono: 0, Real: 1000} // 100 on the monotonic clock
	if x := h.reason(p, 1e12, 1); x.Code != 48 || x.At != 200 {
		t.Errorf("got %+v", x)
	}
	h.fatal = h.fatal[:3]
	if x := h.reason(p, 1e12, 1); x.Code != 31 {
		t.Errorf("got %+v", x)
	}
	if x := h.reason(p, 1e12, 2); x.Code != 0 {
		t.Errorf("an application's Xid on a shared GPU: %+v", x)
	}
	h.fatal = []collector.Xid{{Code: 79, At: 9e10}}
	p.State, p.StateAt = diagnosis.ProcGone, 1e10
	if x := h.reason(p, 1e12, 0); x.Code != 0 {
		t.Errorf("of long after its death: %+v", x)
	}
}
