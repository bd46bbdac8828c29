//go:build cgo

package nvml

import (
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
)

// machine is a mocked node. What is set on it while a source runs is atomic or a channel.
type machine struct {
	lib    *mock.Interface
	gpus   []*gpu
	events chan nvml.EventData
	lost   atomic.Bool // waiting for events fails, as it does then
	inits  atomic.Int32
	stops  atomic.Int32
}

// gpu is a mocked H200 with two NVLinks.
type gpu struct {
	mock.Device
	mu      sync.Mutex
	answers map[string]nvml.Return // by call, those that fail
	blocks  chan struct{}          // GetPowerUsage waits until it is closed, when it is not nil
	reasons uint64
	fields  map[uint32]float64 // of field ids, for link 1 as well as 0
	pids    []nvml.ProcessInfo
}

func (g *gpu) ret(call string) nvml.Return {
	g.mu.Lock()
	defer g.mu.Unlock()
	if r, ok := g.answers["*"]; ok {
		return r
	}
	return g.answers[call]
}

func (g *gpu) fail(call string, ret nvml.Return) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.answers[call] = ret
}

func (g *gpu) heal() {
	g.mu.Lock()
	defer g.mu.Unlock()
	clear(g.answers)
}

func (g *gpu) throttle(bits uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.reasons = bits
}

func (g *gpu) block() (release func()) {
	c := make(chan struct{})
	g.mu.Lock()
	defer g.mu.Unlock()
	g.blocks = c
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.blocks = nil
		close(c)
	}
}

func uuidOf(i int) string { return fmt.Sprintf("GPU-00010203-0405-0607-0809-0a0b0c0d0e%02x", i) }

func uuidBytes(i int) [16]byte {
	return [16]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, byte(i)}
}

func newGPU(i int) *gpu {
	g := &gpu{answers: map[string]nvml.Return{}, fields: map[uint32]float64{
		nvml.FI_DEV_NVLINK_LINK_COUNT: 2, nvml.FI_DEV_MEMORY_TEMP: 55,
		nvml.FI_DEV_NVLINK_ERROR_DL_CRC: 7, nvml.FI_DEV_NVLINK_ERROR_DL_REPLAY: 3, nvml.FI_DEV_NVLINK_ERROR_DL_RECOVERY: 1,
	}}
	g.GetUUIDFunc = func() (string, nvml.Return) { return uuidOf(i), g.ret("GetUUID") }
	g.GetNameFunc = func() (string, nvml.Return) { return "NVIDIA H200", g.ret("GetName") }
	g.GetPciInfoFunc = func() (nvml.PciInfo, nvml.Return) {
		var p nvml.PciInfo
		for k, c := range fmt.Sprintf("00000000:%02X:00.0", i) {
			p.BusId[k] = int8(c)
		}
		return p, g.ret("GetPciInfo")
	}
	g.GetMaxPcieLinkWidthFunc = func() (int, nvml.Return) { return 16, g.ret("GetMaxPcieLinkWidth") }
	g.RegisterEventsFunc = func(types uint64, _ nvml.EventSet) nvml.Return { return g.ret("RegisterEvents") }
	g.GetTemperatureFunc = func(nvml.TemperatureSensors) (uint32, nvml.Return) { return 41, g.ret("GetTemperature") }
	g.GetPowerUsageFunc = func() (uint32, nvml.Return) {
		g.mu.Lock()
		wait := g.blocks
		g.mu.Unlock()
		if wait != nil {
			<-wait
		}
		return 650_500, g.ret("GetPowerUsage")
	}
	g.GetEnforcedPowerLimitFunc = func() (uint32, nvml.Return) { return 700_000, g.ret("GetEnforcedPowerLimit") }
	g.GetTotalEnergyConsumptionFunc = func() (uint64, nvml.Return) { return 5_000_000, g.ret("GetTotalEnergyConsumption") }
	g.GetClockInfoFunc = func(c nvml.ClockType) (uint32, nvml.Return) {
		if c == nvml.CLOCK_SM {
			return 1980, g.ret("GetClockInfo")
		}
		return 3201, g.ret("GetClockInfo")
	}
	g.GetUtilizationRatesFunc = func() (nvml.Utilization, nvml.Return) {
		return nvml.Utilization{Gpu: 98, Memory: 40}, g.ret("GetUtilizationRates")
	}
	g.GetMemoryInfoFunc = func() (nvml.Memory, nvml.Return) {
		return nvml.Memory{Total: 150 << 30, Used: 10 << 30}, g.ret("GetMemoryInfo")
	}
	g.GetPcieReplayCounterFunc = func() (int, nvml.Return) { return 12, g.ret("GetPcieReplayCounter") }
	g.GetCurrPcieLinkGenerationFunc = func() (int, nvml.Return) { return 5, g.ret("GetCurrPcieLinkGeneration") }
	g.GetCurrPcieLinkWidthFunc = func() (int, nvml.Return) { return 8, g.ret("GetCurrPcieLinkWidth") }
	g.GetTotalEccErrorsFunc = func(kind nvml.MemoryErrorType, counter nvml.EccCounterType) (uint64, nvml.Return) {
		return uint64(kind)*10 + uint64(counter), g.ret("GetTotalEccErrors")
	}
	g.GetRemappedRowsFunc = func() (int, int, bool, bool, nvml.Return) { return 2, 1, true, false, g.ret("GetRemappedRows") }
	reasons := func() (uint64, nvml.Return) {
		g.mu.Lock()
		bits := g.reasons
		g.mu.Unlock()
		return bits, g.ret("GetCurrentClocksEventReasons")
	}
	g.GetCurrentClocksEventReasonsFunc, g.GetCurrentClocksThrottleReasonsFunc = reasons, reasons
	g.GetNvLinkStateFunc = func(link int) (nvml.EnableState, nvml.Return) {
		if link > 1 {
			return 0, nvml.ERROR_INVALID_ARGUMENT
		}
		return nvml.EnableState(1 - link), g.ret("GetNvLinkState") // link 1 is down
	}
	g.GetNvLinkErrorCounterFunc = func(_ int, c nvml.NvLinkErrorCounter) (uint64, nvml.Return) {
		return 100 + uint64(c), g.ret("GetNvLinkErrorCounter")
	}
	g.GetFieldValuesFunc = func(values []nvml.FieldValue) nvml.Return {
		g.mu.Lock()
		defer g.mu.Unlock()
		for k := range values {
			v, ok := g.fields[values[k].FieldId]
			if !ok {
				values[k].NvmlReturn = uint32(nvml.ERROR_NOT_SUPPORTED)
				continue
			}
			values[k].ValueType = uint32(nvml.VALUE_TYPE_UNSIGNED_LONG_LONG)
			binary.NativeEndian.PutUint64(values[k].Value[:], uint64(v))
		}
		if r, ok := g.answers["*"]; ok {
			return r
		}
		return g.answers["GetFieldValues"]
	}
	g.GetComputeRunningProcessesFunc = func() ([]nvml.ProcessInfo, nvml.Return) {
		return g.pids, g.ret("GetComputeRunningProcesses")
	}
	return g
}

func newMachine(n int) *machine {
	m := &machine{events: make(chan nvml.EventData)}
	for i := range n {
		m.gpus = append(m.gpus, newGPU(i))
	}
	set := &mock.EventSet{
		WaitFunc: func(ms uint32) (nvml.EventData, nvml.Return) {
			if m.lost.Load() {
				return nvml.EventData{}, nvml.ERROR_GPU_IS_LOST
			}
			select {
			case e := <-m.events:
				return e, nvml.SUCCESS
			case <-time.After(min(time.Duration(ms)*time.Millisecond, 20*time.Millisecond)):
				return nvml.EventData{}, nvml.ERROR_TIMEOUT
			}
		},
		FreeFunc: func() nvml.Return { return nvml.SUCCESS },
	}
	m.lib = &mock.Interface{
		InitFunc:                   func() nvml.Return { m.inits.Add(1); return nvml.SUCCESS },
		ShutdownFunc:               func() nvml.Return { m.stops.Add(1); return nvml.SUCCESS },
		SystemGetDriverVersionFunc: func() (string, nvml.Return) { return "580.95.05", nvml.SUCCESS },
		DeviceGetCountFunc:         func() (int, nvml.Return) { return len(m.gpus), nvml.SUCCESS },
		DeviceGetHandleByIndexFunc: func(i int) (nvml.Device, nvml.Return) { return m.gpus[i], m.gpus[i].ret("GetHandle") },
		EventSetCreateFunc:         func() (nvml.EventSet, nvml.Return) { return set, nvml.SUCCESS },
		ExtensionsFunc: func() nvml.ExtendedInterface {
			return &mock.ExtendedInterface{LookupSymbolFunc: func(string) error { return nil }}
		},
	}
	return m
}

// report makes the driver tell of an Xid.
func (m *machine) report(gpu int, code uint64) {
	e := nvml.EventData{EventType: nvml.EventTypeXidCriticalError, EventData: code, Device: &mock.Device{}}
	if gpu >= 0 {
		e.Device = m.gpus[gpu]
	}
	m.events <- e
}
