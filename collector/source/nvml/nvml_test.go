//go:build cgo

package nvml

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"go.uber.org/goleak"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

func TestMain(m *testing.M) {
	if lib := os.Getenv("LOCKSTEP_TEST_NVML"); lib != "" {
		linked(lib)
	}
	goleak.VerifyTestMain(m)
}

// rig drives a source over a machine through passes of its own clock.
type rig struct {
	*machine
	t    *testing.T
	s    *Source
	v    source.View
	logs *logs
}

// logs counts messages by text.
type logs struct {
	slog.Handler
	mu   sync.Mutex
	seen map[string]int
}

func (l *logs) Enabled(context.Context, slog.Level) bool { return true }
func (l *logs) Handle(_ context.Context, r slog.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seen[r.Message]++
	return nil
}

func start(t *testing.T, m *machine) *rig {
	r := &rig{machine: m, t: t, logs: &logs{seen: map[string]int{}}}
	r.s = newSource(Options{Log: slog.New(r.logs)}, &library{nvml: m.lib})
	r.v.Now = record.Now()
	t.Cleanup(func() {
		if err := r.s.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// pass lets d go by and updates once.
func (r *rig) pass(d time.Duration) error {
	r.v.Now += d.Nanoseconds()
	return r.s.Update(&r.v)
}

// probe passes until a further probe has been taken in.
func (r *rig) probe() {
	r.t.Helper()
	before := int64(0)
	if r.v.GPUs != nil {
		before = r.v.GPUs.ProbedAt
	}
	_ = r.pass(5 * time.Second)
	r.until("a probe", func() bool { return r.v.GPUs != nil && r.v.GPUs.ProbedAt > before })
}

// until passes, with no time going by on the source's clock, until ok.
func (r *rig) until(what string, ok func() bool) {
	r.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		if err := r.pass(0); err != nil && ok() {
			return
		}
		if ok() {
			return
		}
	}
	r.t.Fatalf("never happened: %s", what)
}

func (r *rig) xid(gpu int, code uint32) collector.Xid {
	if r.v.GPUs != nil {
		for _, x := range r.v.GPUs.GPUs[gpu].Xids {
			if x.Code == code {
				return x
			}
		}
	}
	return collector.Xid{}
}

func is(t *testing.T, what string, got *float64, want float64) {
	t.Helper()
	if got == nil || math.Abs(*got-want) > 1e-9*math.Abs(want) {
		t.Errorf("%s is %v, want %v", what, deref(got), want)
	}
}

func absent(t *testing.T, what string, got *float64) {
	t.Helper()
	if got != nil {
		t.Errorf("%s is %v, want none", what, *got)
	}
}

func deref(x *float64) any {
	if x == nil {
		return "absent"
	}
	return *x
}

func TestValues(t *testing.T) {
	r := start(t, newMachine(2))
	r.gpus[1].throttle(0x40 | 0x4)
	r.probe()
	n := r.v.GPUs
	if n.DriverVersion != "580.95.05" || len(n.GPUs) != 2 || n.UnresponsiveAt != 0 || n.ProbeNs <= 0 {
		t.Fatalf("node: %+v", n)
	}
	g := &n.GPUs[1]
	if g.Index != 1 || g.UUID != uuidOf(1) || g.Model != "NVIDIA H200" || g.BusID != "00000000:01:00.0" || g.Lost || len(g.Failed) > 0 {
		t.Errorf("gpu: %+v", g)
	}
	is(t, "temperature", g.Temperature, 41)
	is(t, "memory temperature", g.MemoryTemperature, 55)
	is(t, "power", g.Power, 650.5)
	is(t, "power limit", g.PowerLimit, 700)
	is(t, "energy", g.Energy, 5000)
	is(t, "SM clock", g.SMClock, 1.98e9)
	is(t, "memory clock", g.MemoryClock, 3.201e9)
	is(t, "utilization", g.Utilization, 0.98)
	is(t, "memory used", g.MemoryUsed, 10<<30)
	is(t, "memory", g.MemoryTotal, 150<<30)
	is(t, "PCIe replays", g.PCIeReplays, 12)
	is(t, "PCIe generation", g.PCIeGeneration, 5)
	is(t, "PCIe width", g.PCIeWidth, 8)
	is(t, "PCIe width, at most", g.PCIeMaxWidth, 16)
	is(t, "corrected, volatile", g.Corrected.Volatile, 0)
	is(t, "corrected, aggregate", g.Corrected.Aggregate, 1)
	is(t, "uncorrected, volatile", g.Uncorrected.Volatile, 10)
	is(t, "uncorrected, aggregate", g.Uncorrected.Aggregate, 11)
	is(t, "rows, corrected", g.RowsCorrected, 2)
	is(t, "rows, uncorrected", g.RowsUncorrected, 1)
	is(t, "remap pending", g.RemapPending, 1)
	is(t, "remap failure", g.RemapFailure, 0)
	if g.Throttle == nil || *g.Throttle != diagnosis.ThrottleHWThermal|diagnosis.ThrottlePowerCap || g.ThrottledAt == 0 {
		t.Errorf("throttle %v since %d", g.Throttle, g.ThrottledAt)
	}
	if n.GPUs[0].ThrottledAt != 0 {
		t.Error("GPU 0 is not throttled")
	}
	if len(g.Links) != 2 || !g.Links[0].Up || g.Links[1].Up {
		t.Fatalf("links: %+v", g.Links)
	}
	is(t, "CRC", g.Links[0].CRC, 7)
	is(t, "replays", g.Links[0].Replays, 3)
	is(t, "recoveries", g.Links[1].Recoveries, 1)

	// The next probe has the same beginning of throttling; then it is over.
	since := g.ThrottledAt
	r.probe()
	if at := r.v.GPUs.GPUs[1].ThrottledAt; at != since {
		t.Errorf("throttled since %d, then %d", since, at)
	}
	r.gpus[1].throttle(0x4)
	r.probe()
	if at := r.v.GPUs.GPUs[1].ThrottledAt; at != 0 {
		t.Errorf("at the power limit is not throttled: %d", at)
	}
}

// What is not supported is absent, what fails costs itself only and is named.
func TestUnsupportedAndFailing(t *testing.T) {
	m := newMachine(1)
	g := m.gpus[0]
	for _, call := range []string{"GetTemperature", "GetTotalEccErrors", "GetRemappedRows", "GetPcieReplayCounter", "GetCurrentClocksEventReasons", "GetUtilizationRates"} {
		g.fail(call, nvml.ERROR_NOT_SUPPORTED)
	}
	g.fail("GetPowerUsage", nvml.ERROR_UNKNOWN)
	g.fail("GetComputeRunningProcesses", nvml.ERROR_NO_PERMISSION)
	g.fields = map[uint32]float64{nvml.FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS: 9} // no count of links either
	r := start(t, m)
	r.probe()
	s := &r.v.GPUs.GPUs[0]
	for what, v := range map[string]*float64{
		"temperature": s.Temperature, "memory temperature": s.MemoryTemperature, "power": s.Power, "PCIe replays": s.PCIeReplays, "utilization": s.Utilization,
		"ECC": s.Uncorrected.Volatile, "rows": s.RowsCorrected, "pending": s.RemapPending, "failure": s.RemapFailure,
	} {
		absent(t, what, v)
	}
	if s.Throttle != nil || s.ThrottledAt != 0 || s.PIDs != nil {
		t.Errorf("throttle %v, pids %v", s.Throttle, s.PIDs)
	}
	is(t, "SM clock", s.SMClock, 1.98e9)
	if len(s.Failed) != 2 || !strings.HasPrefix(s.Failed[0], "GetPowerUsage: ") || !strings.HasPrefix(s.Failed[1], "GetComputeRunningProcesses: ") {
		t.Errorf("failed: %q", s.Failed)
	}
	// Counters of links by the older call, recoveries by Blackwell's field.
	if len(s.Links) != 2 {
		t.Fatalf("links: %+v", s.Links)
	}
	is(t, "CRC", s.Links[0].CRC, 102)
	is(t, "replays", s.Links[0].Replays, 100)
	is(t, "recoveries", s.Links[0].Recoveries, 9)

	g.fail("GetNvLinkErrorCounter", nvml.ERROR_NOT_SUPPORTED)
	g.fail("GetFieldValues", nvml.ERROR_NOT_SUPPORTED)
	r.probe()
	absent(t, "CRC", r.v.GPUs.GPUs[0].Links[0].CRC)
	absent(t, "recoveries", r.v.GPUs.GPUs[0].Links[0].Recoveries)
}

func TestOldLibrary(t *testing.T) {
	m := newMachine(1)
	m.lib.ExtensionsFunc = func() nvml.ExtendedInterface {
		return &mock.ExtendedInterface{LookupSymbolFunc: func(string) error { return errors.New("undefined symbol") }}
	}
	// A mock without the function panics, as a library without it ends the process.
	m.gpus[0].GetCurrentClocksEventReasonsFunc, m.gpus[0].GetRemappedRowsFunc = nil, nil
	m.gpus[0].throttle(0x80)
	r := start(t, m)
	r.probe()
	if g := &r.v.GPUs.GPUs[0]; g.Throttle == nil || *g.Throttle != diagnosis.ThrottlePowerBrake || g.RowsCorrected != nil {
		t.Errorf("%+v", g)
	}
}

// A GPU that may not be looked at costs nobody else, is not called lost, and is there once it may be.
func TestGPUWithoutHandle(t *testing.T) {
	m := newMachine(3)
	m.gpus[1].fail("GetHandle", nvml.ERROR_NO_PERMISSION)
	m.gpus[2].fail("GetHandle", nvml.ERROR_GPU_IS_LOST)
	r := start(t, m)
	r.probe()
	g := r.v.GPUs.GPUs
	if len(g) != 3 || g[0].Power == nil || len(g[0].Failed) != 0 {
		t.Fatalf("%+v", g)
	}
	if g[1].Index != 1 || g[1].UUID != "" || g[1].Lost || g[1].LostAt != 0 || g[1].Power != nil || len(g[1].Failed) != 1 {
		t.Errorf("not allowed: %+v", g[1])
	}
	if g[2].Index != 2 || !g[2].Lost || g[2].LostAt == 0 || len(g[2].Failed) != 1 {
		t.Errorf("lost: %+v", g[2])
	}
	m.gpus[1].heal()
	m.gpus[2].heal()
	r.probe()
	for i, g := range r.v.GPUs.GPUs {
		if g.UUID != uuidOf(i) || g.Lost || g.Power == nil || len(g.Failed) != 0 {
			t.Errorf("healed: %+v", g)
		}
	}
}

func TestFieldValueTypes(t *testing.T) {
	bits := func(v uint64) (b [8]byte) { binary.NativeEndian.PutUint64(b[:], v); return b }
	for _, c := range []struct {
		kind  nvml.ValueType
		value [8]byte
		want  float64
	}{
		{nvml.VALUE_TYPE_DOUBLE, bits(math.Float64bits(2.5)), 2.5},
		{nvml.VALUE_TYPE_UNSIGNED_INT, [8]byte{1, 0, 0, 0, 9, 9, 9, 9}, 1}, // what is behind it is not its own
		{nvml.VALUE_TYPE_UNSIGNED_LONG, bits(1 << 40), 1 << 40},
		{nvml.VALUE_TYPE_UNSIGNED_LONG_LONG, bits(1 << 41), 1 << 41},
		{nvml.VALUE_TYPE_SIGNED_LONG_LONG, bits(math.MaxUint64), -1},
		{nvml.VALUE_TYPE_SIGNED_INT, [8]byte{255, 255, 255, 255}, -1},
		{nvml.VALUE_TYPE_UNSIGNED_SHORT, [8]byte{2, 1, 7}, 258},
	} {
		is(t, fmt.Sprint("type ", c.kind), fieldValue(&nvml.FieldValue{ValueType: uint32(c.kind), Value: c.value}), c.want)
	}
	absent(t, "unknown type", fieldValue(&nvml.FieldValue{ValueType: 99}))
}

// A call that hangs: no second probe, the driver is unresponsive in time, and back when the call is.
func TestHungCall(t *testing.T) {
	r := start(t, newMachine(2))
	r.probe()
	p := &source.Process{Header: record.Header{PID: 77}, State: diagnosis.ProcRunning}
	p.Devices = []record.DeviceStatus{{DeviceEntry: record.DeviceEntry{UUID: uuidBytes(1)}}}
	r.v.Processes = []*source.Process{p}
	release := r.gpus[1].block()
	_ = r.pass(5 * time.Second)
	began := r.v.Now
	r.until("the call", func() bool { return len(r.gpus[1].GetPowerUsageCalls()) == 2 })
	if err := r.pass(9 * time.Second); err != nil || r.v.GPUs.UnresponsiveAt != 0 {
		t.Fatalf("too early: %v, %d", err, r.v.GPUs.UnresponsiveAt)
	}
	for range 20 {
		err := r.pass(5 * time.Second)
		if err == nil || errors.Is(err, source.ErrNoData) || !strings.Contains(err.Error(), "GetPowerUsage of GPU 1") {
			t.Fatalf("err = %v", err)
		}
	}
	n := r.v.GPUs
	if n.UnresponsiveAt != began || n.Hangs != "GetPowerUsage of GPU 1" || len(n.GPUs) != 2 || n.GPUs[0].Power == nil {
		t.Errorf("node: %+v", n)
	}
	if p.GPU.UnresponsiveAt != began || p.GPU.Index != 1 || !p.GPU.Seen {
		t.Errorf("process: %+v", p.GPU)
	}
	if calls := len(r.gpus[1].GetPowerUsageCalls()); calls != 2 {
		t.Errorf("%d probes, want the first and the one that hangs", calls)
	}
	// Xids come all the same.
	r.report(0, 119)
	r.until("an Xid", func() bool { return r.xid(0, 119).Count == 1 })
	release()
	r.until("recovery", func() bool { return r.v.GPUs.UnresponsiveAt == 0 })
	if err := r.pass(0); err != nil || r.v.GPUs.Hangs != "" || p.GPU.UnresponsiveAt != 0 {
		t.Errorf("after recovery: %v, %+v", err, r.v.GPUs)
	}
	r.probe()
}

// The first call of all may be the one that hangs.
func TestHungInit(t *testing.T) {
	m := newMachine(1)
	release := make(chan struct{})
	m.lib.InitFunc = func() nvml.Return { <-release; return nvml.SUCCESS }
	r := start(t, m)
	if err := r.pass(0); err != nil || r.v.GPUs != nil {
		t.Fatal(err)
	}
	if err := r.pass(11 * time.Second); err == nil || r.v.GPUs == nil || r.v.GPUs.UnresponsiveAt == 0 || r.v.GPUs.Hangs != "Init" {
		t.Fatalf("%v, %+v", err, r.v.GPUs)
	}
	close(release)
	r.until("recovery", func() bool { return r.v.GPUs.UnresponsiveAt == 0 && len(r.v.GPUs.GPUs) == 1 })
}

// Close leaves behind what hangs, and says so.
func TestCloseWhileACallHangs(t *testing.T) {
	m := newMachine(1)
	release := m.gpus[0].block()
	s := newSource(Options{Log: slog.New(slog.DiscardHandler)}, &library{nvml: m.lib})
	v := source.View{Now: record.Now()}
	_ = s.Update(&v)
	for len(m.gpus[0].GetPowerUsageCalls()) == 0 {
		time.Sleep(time.Millisecond)
	}
	if err := s.Close(); err == nil || !strings.Contains(err.Error(), "GetPowerUsage of GPU 0") {
		t.Errorf("err = %v", err)
	}
	release()
	for m.stops.Load() == 0 {
		time.Sleep(time.Millisecond)
	}
}

func TestProcessByPID(t *testing.T) {
	m := newMachine(2)
	m.gpus[1].pids = []nvml.ProcessInfo{{Pid: 4242}}
	r := start(t, m)
	p := &source.Process{State: diagnosis.ProcRunning}
	p.PID = 4242 // its own: that it is no other's here is not known
	r.v.Processes = []*source.Process{p}
	r.probe()
	if p.GPU.Seen {
		t.Fatalf("by a pid of any namespace: %+v", p.GPU)
	}
	p.PID, p.HostPID = 1, 4242
	r.probe()
	if !p.GPU.Seen || p.GPU.Index != 1 {
		t.Fatalf("%+v", p.GPU)
	}
	m.gpus[1].pids = nil // it is gone, and its GPU still was that one
	p.State = diagnosis.ProcGone
	r.probe()
	if !p.GPU.Seen || p.GPU.Index != 1 {
		t.Errorf("after its death: %+v", p.GPU)
	}
	r.v.Processes = nil
	r.probe()
	if len(r.s.matches) != 0 {
		t.Error("a process that left the view is remembered")
	}
}

func TestNothingToSee(t *testing.T) {
	for name, c := range map[string]struct {
		m    func(*machine)
		said string
	}{
		"no library": {func(m *machine) {
			m.lib.InitFunc = func() nvml.Return { m.inits.Add(1); return nvml.ERROR_LIBRARY_NOT_FOUND }
		}, "libnvidia-ml.so.1"},
		"no driver": {func(m *machine) {
			m.lib.InitFunc = func() nvml.Return { m.inits.Add(1); return nvml.ERROR_DRIVER_NOT_LOADED }
		}, "not loaded"},
		"no GPU": {func(m *machine) { m.gpus = nil }, "sees no GPU"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(1)
			c.m(m)
			r := start(t, m)
			_ = r.pass(0)
			r.until("the answer", func() bool { return r.s.err != nil })
			for range 100 {
				err := r.pass(5 * time.Second)
				if !errors.Is(err, source.ErrNoData) || !strings.Contains(err.Error(), c.said) || r.v.GPUs != nil {
					t.Fatalf("%v, %+v", err, r.v.GPUs)
				}
				r.until("the probe to end", func() bool { return !r.s.probes.Busy() })
			}
			if n := m.inits.Load(); n < 5 || n > 10 {
				t.Errorf("looked %d times in 500 s", n)
			}
			if n := r.logs.seen["no GPUs are watched"]; n != 1 {
				t.Errorf("said so %d times", n)
			}
		})
	}
}

// A driver that comes later is found.
func TestDriverComesLater(t *testing.T) {
	m := newMachine(1)
	var there atomic.Bool
	m.lib.InitFunc = func() nvml.Return {
		if there.Load() {
			return nvml.SUCCESS
		}
		return nvml.ERROR_DRIVER_NOT_LOADED
	}
	r := start(t, m)
	_ = r.pass(0)
	r.until("the answer", func() bool { return r.s.err != nil })
	there.Store(true)
	_ = r.pass(2 * time.Minute)
	r.until("GPUs", func() bool { return r.v.GPUs != nil && len(r.v.GPUs.GPUs) == 1 && r.s.err == nil })
}

// The real library: on a machine without it the answer is that, on one with it GPUs.
func TestRealLibrary(t *testing.T) {
	found, _ := filepath.Glob("/usr/lib/*/libnvidia-ml.so.1")
	if len(found) > 0 {
		t.Log("libnvidia-ml:", found)
	} else if _, err := os.Stat("/dev/nvidiactl"); err == nil {
		t.Skip("a driver without its library")
	}
	s := New(Options{Log: slog.New(slog.DiscardHandler)})
	defer s.Close()
	v := source.View{Now: record.Now()}
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		err := s.Update(&v)
		if errors.Is(err, source.ErrNoData) && v.GPUs == nil || err == nil && v.GPUs != nil && len(v.GPUs.GPUs) > 0 {
			return
		}
	}
	t.Fatal("neither GPUs nor no data")
}

// BenchmarkUpdate is a pass between two probes, ten of which the agent makes a second.
func BenchmarkUpdate(b *testing.B) {
	m := newMachine(8)
	s := newSource(Options{Log: slog.New(slog.DiscardHandler)}, &library{nvml: m.lib})
	defer s.Close()
	v := source.View{Now: record.Now()}
	for i := range 8 {
		p := &source.Process{State: diagnosis.ProcRunning}
		p.Devices = []record.DeviceStatus{{DeviceEntry: record.DeviceEntry{UUID: uuidBytes(i)}}}
		v.Processes = append(v.Processes, p)
	}
	for v.GPUs == nil {
		_ = s.Update(&v)
	}
	b.ReportAllocs()
	for b.Loop() {
		_ = s.Update(&v)
	}
}
