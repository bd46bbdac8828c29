//go:build cgo

package nvml

import (
	"encoding/binary"
	"fmt"
	"math"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// library is libnvidia-ml.so.1.
type library struct {
	nvml    nvml.Interface
	opened  bool
	version string
	devices []device

	events nvml.EventSet // nil: no GPU tells of Xids
	index  map[nvml.Device]int

	// Whether the library has functions that are younger than most. A call of
	// one that it has not ends the process: symbols are resolved at the first call.
	clocksEventReasons, remappedRows bool
}

// device is a GPU and what is fixed about it.
type device struct {
	handle nvml.Device // nil: it could not be had yet
	fixed  collector.GPU
	links  int
}

func newLibrary() driver { return &library{nvml: nvml.New()} }

func (l *library) open() error {
	switch ret := l.nvml.Init(); ret {
	case nvml.SUCCESS:
	case nvml.ERROR_LIBRARY_NOT_FOUND:
		return fmt.Errorf("%w: no libnvidia-ml.so.1 (it comes with NVIDIA's driver; a container needs the driver capability utility)", source.ErrNoData)
	case nvml.ERROR_DRIVER_NOT_LOADED:
		return fmt.Errorf("%w: NVIDIA's driver is not loaded", source.ErrNoData)
	default:
		return fmt.Errorf("nvml: Init: %w", ret)
	}
	count, ret := l.nvml.DeviceGetCount()
	if ret != nvml.SUCCESS || count == 0 {
		_ = l.nvml.Shutdown()
		if ret != nvml.SUCCESS {
			return fmt.Errorf("nvml: DeviceGetCount: %w", ret)
		}
		return fmt.Errorf("%w: NVIDIA's driver sees no GPU", source.ErrNoData)
	}
	l.opened = true
	l.version, _ = l.nvml.SystemGetDriverVersion()
	has := l.nvml.Extensions().LookupSymbol
	l.clocksEventReasons = has("nvmlDeviceGetCurrentClocksEventReasons") == nil
	l.remappedRows = has("nvmlDeviceGetRemappedRows") == nil
	l.devices, l.index = make([]device, count), map[nvml.Device]int{}
	for i := range l.devices {
		d := &l.devices[i]
		d.fixed.Index = i
		if d.handle, ret = l.nvml.DeviceGetHandleByIndex(i); ret != nvml.SUCCESS {
			d.handle = nil // a probe tries again, and tells
			continue
		}
		l.index[d.handle] = i
		d.learn(func(int, string) {})
	}
	l.register()
	return nil
}

// learn asks what does not change.
func (d *device) learn(at func(int, string)) {
	k := look{g: &d.fixed, at: at}
	d.fixed.UUID = text(&k, "GetUUID", d.handle.GetUUID)
	d.fixed.Model = text(&k, "GetName", d.handle.GetName)
	if pci, ok := ask(&k, "GetPciInfo", d.handle.GetPciInfo); ok {
		d.fixed.BusID = chars(pci.BusId[:])
	}
	d.fixed.PCIeMaxWidth = number(&k, "GetMaxPcieLinkWidth", 1, d.handle.GetMaxPcieLinkWidth)
	d.links = nvml.NVLINK_MAX_LINKS
	if n := k.fields(d.handle, 0, nvml.FI_DEV_NVLINK_LINK_COUNT)[0]; n != nil {
		d.links = int(min(max(*n, 0), nvml.NVLINK_MAX_LINKS))
	}
	d.fixed.Failed, d.fixed.Lost = nil, false // a probe says it again
}

// register asks for the Xids of all GPUs that tell of them.
func (l *library) register() {
	set, ret := l.nvml.EventSetCreate()
	if ret != nvml.SUCCESS {
		return
	}
	registered := false
	for _, d := range l.devices {
		if d.handle != nil && d.handle.RegisterEvents(nvml.EventTypeXidCriticalError, set) == nvml.SUCCESS {
			registered = true
		}
	}
	if !registered {
		_ = set.Free()
		return
	}
	l.events = set
}

func (l *library) close() {
	if !l.opened {
		return
	}
	l.opened = false
	if l.events != nil {
		_ = l.events.Free()
	}
	_ = l.nvml.Shutdown()
}

func (l *library) wait(timeout time.Duration) (xid, error) {
	if l.events == nil {
		return xid{}, errNoEvents
	}
	e, ret := l.events.Wait(uint32(timeout.Milliseconds()))
	switch {
	case ret == nvml.ERROR_TIMEOUT, ret == nvml.SUCCESS && e.EventType != nvml.EventTypeXidCriticalError:
		return xid{}, errTimeout
	case ret != nvml.SUCCESS:
		return xid{}, fmt.Errorf("nvml: EventSetWait: %w", ret)
	}
	// Its handle, not its UUID: a GPU that has fallen off the bus answers nothing.
	gpu, ok := l.index[e.Device]
	if !ok {
		gpu = -1
	}
	return xid{gpu: gpu, code: uint32(e.EventData)}, nil
}

func (l *library) probe(at func(gpu int, call string)) collector.GPUs {
	node := collector.GPUs{DriverVersion: l.version}
	for i := range l.devices {
		d := &l.devices[i]
		g := collector.GPU{Index: i}
		k := look{g: &g, at: at}
		if d.handle == nil {
			// Its Xids are not waited for: nobody else may touch the set while somebody waits.
			h, ok := ask(&k, "GetHandleByIndex", func() (nvml.Device, nvml.Return) { return l.nvml.DeviceGetHandleByIndex(i) })
			if ok {
				d.handle = h
				d.learn(at)
			}
		}
		if d.handle != nil {
			g = d.fixed
			k.device(l, d)
		}
		node.GPUs = append(node.GPUs, g)
	}
	return node
}

// look is one probe of one GPU.
type look struct {
	g  *collector.GPU
	at func(gpu int, call string)
}

// device fills in all that the GPU can tell.
func (k *look) device(l *library, d *device) {
	g, h := k.g, d.handle
	g.Temperature = number(k, "GetTemperature", 1, func() (uint32, nvml.Return) { return h.GetTemperature(nvml.TEMPERATURE_GPU) })
	g.MemoryTemperature = k.fields(h, 0, nvml.FI_DEV_MEMORY_TEMP)[0]
	g.Power = number(k, "GetPowerUsage", 1e-3, h.GetPowerUsage)
	g.PowerLimit = number(k, "GetEnforcedPowerLimit", 1e-3, h.GetEnforcedPowerLimit)
	g.Energy = number(k, "GetTotalEnergyConsumption", 1e-3, h.GetTotalEnergyConsumption)
	g.SMClock = number(k, "GetClockInfo", 1e6, func() (uint32, nvml.Return) { return h.GetClockInfo(nvml.CLOCK_SM) })
	g.MemoryClock = number(k, "GetClockInfo", 1e6, func() (uint32, nvml.Return) { return h.GetClockInfo(nvml.CLOCK_MEM) })
	if u, ok := ask(k, "GetUtilizationRates", h.GetUtilizationRates); ok {
		g.Utilization = value(float64(u.Gpu) / 100)
	}
	if m, ok := ask(k, "GetMemoryInfo", h.GetMemoryInfo); ok {
		g.MemoryUsed, g.MemoryTotal = value(float64(m.Used)), value(float64(m.Total))
	}
	g.PCIeReplays = number(k, "GetPcieReplayCounter", 1, h.GetPcieReplayCounter)
	g.PCIeGeneration = number(k, "GetCurrPcieLinkGeneration", 1, h.GetCurrPcieLinkGeneration)
	g.PCIeWidth = number(k, "GetCurrPcieLinkWidth", 1, h.GetCurrPcieLinkWidth)
	ecc := func(kind nvml.MemoryErrorType, counter nvml.EccCounterType) *float64 {
		return number(k, "GetTotalEccErrors", 1, func() (uint64, nvml.Return) { return h.GetTotalEccErrors(kind, counter) })
	}
	g.Corrected = collector.ECC{Volatile: ecc(nvml.MEMORY_ERROR_TYPE_CORRECTED, nvml.VOLATILE_ECC), Aggregate: ecc(nvml.MEMORY_ERROR_TYPE_CORRECTED, nvml.AGGREGATE_ECC)}
	g.Uncorrected = collector.ECC{Volatile: ecc(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC), Aggregate: ecc(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.AGGREGATE_ECC)}
	if l.remappedRows {
		k.rows(h)
	}
	reasons := h.GetCurrentClocksThrottleReasons
	if l.clocksEventReasons {
		reasons = h.GetCurrentClocksEventReasons
	}
	if bits, ok := ask(k, "GetCurrentClocksEventReasons", reasons); ok {
		t := diagnosis.Throttle(bits)
		g.Throttle = &t
	}
	for link := range d.links {
		if !k.link(h, link) {
			break
		}
	}
	if ps, ok := ask(k, "GetComputeRunningProcesses", h.GetComputeRunningProcesses); ok {
		g.PIDs = make([]int32, 0, len(ps))
		for _, p := range ps {
			g.PIDs = append(g.PIDs, int32(p.Pid))
		}
	}
}

func (k *look) rows(h nvml.Device) {
	var unc int
	var pending, failure bool
	cor, ok := ask(k, "GetRemappedRows", func() (c int, ret nvml.Return) {
		c, unc, pending, failure, ret = h.GetRemappedRows()
		return c, ret
	})
	if ok {
		k.g.RowsCorrected, k.g.RowsUncorrected = value(float64(cor)), value(float64(unc))
		k.g.RemapPending, k.g.RemapFailure = value(truth(pending)), value(truth(failure))
	}
}

// link asks one NVLink; false when the GPU has no more of them.
func (k *look) link(h nvml.Device, link int) bool {
	state, ok := ask(k, "GetNvLinkState", func() (nvml.EnableState, nvml.Return) {
		s, ret := h.GetNvLinkState(link)
		return s, noSuchLink(ret)
	})
	if !ok {
		return false
	}
	n := collector.NVLink{Link: link, Up: state == nvml.FEATURE_ENABLED}
	// Hopper counts by field, for a link; older GPUs by call; Blackwell and later only recoveries, under another field.
	f := k.fields(h, link, nvml.FI_DEV_NVLINK_ERROR_DL_CRC, nvml.FI_DEV_NVLINK_ERROR_DL_REPLAY,
		nvml.FI_DEV_NVLINK_ERROR_DL_RECOVERY, nvml.FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS)
	counter := func(c nvml.NvLinkErrorCounter) func() *float64 {
		return func() *float64 {
			return number(k, "GetNvLinkErrorCounter", 1, func() (uint64, nvml.Return) {
				v, ret := h.GetNvLinkErrorCounter(link, c)
				return v, noSuchLink(ret)
			})
		}
	}
	n.CRC = first(f[0], counter(nvml.NVLINK_ERROR_DL_CRC_FLIT))
	n.Replays = first(f[1], counter(nvml.NVLINK_ERROR_DL_REPLAY))
	if n.Recoveries = f[2]; n.Recoveries == nil {
		n.Recoveries = first(f[3], counter(nvml.NVLINK_ERROR_DL_RECOVERY))
	}
	k.g.Links = append(k.g.Links, n)
	return true
}

// noSuchLink is the answer to a link or counter that the GPU has not.
func noSuchLink(ret nvml.Return) nvml.Return {
	if ret == nvml.ERROR_INVALID_ARGUMENT {
		return nvml.ERROR_NOT_SUPPORTED
	}
	return ret
}

func first(v *float64, or func() *float64) *float64 {
	if v != nil {
		return v
	}
	return or()
}

// fields reads values by NVML's field ids; nil for each that there is not.
func (k *look) fields(h nvml.Device, scope int, ids ...uint32) []*float64 {
	out := make([]*float64, len(ids))
	values := make([]nvml.FieldValue, len(ids))
	for i, id := range ids {
		values[i].FieldId, values[i].ScopeId = id, uint32(scope)
	}
	if _, ok := ask(k, "GetFieldValues", func() (struct{}, nvml.Return) { return struct{}{}, h.GetFieldValues(values) }); !ok {
		return out
	}
	for i := range values {
		if nvml.Return(values[i].NvmlReturn) == nvml.SUCCESS {
			out[i] = fieldValue(&values[i])
		}
	}
	return out
}

// fieldValue decodes a field by its type; nil when the type is not known.
func fieldValue(f *nvml.FieldValue) *float64 {
	u := binary.NativeEndian.Uint64(f.Value[:])
	switch nvml.ValueType(f.ValueType) {
	case nvml.VALUE_TYPE_DOUBLE:
		return value(math.Float64frombits(u))
	case nvml.VALUE_TYPE_UNSIGNED_LONG, nvml.VALUE_TYPE_UNSIGNED_LONG_LONG:
		return value(float64(u))
	case nvml.VALUE_TYPE_SIGNED_LONG_LONG:
		return value(float64(int64(u)))
	case nvml.VALUE_TYPE_UNSIGNED_INT:
		return value(float64(binary.NativeEndian.Uint32(f.Value[:])))
	case nvml.VALUE_TYPE_SIGNED_INT:
		return value(float64(int32(binary.NativeEndian.Uint32(f.Value[:]))))
	case nvml.VALUE_TYPE_UNSIGNED_SHORT:
		return value(float64(binary.NativeEndian.Uint16(f.Value[:])))
	}
	return nil
}

// ask makes one call. It is not made any more once the GPU is lost: each would
// fail, and take its time. A call that is not supported leaves no trace.
func ask[T any](k *look, call string, f func() (T, nvml.Return)) (T, bool) {
	var none T
	if k.g.Lost {
		return none, false
	}
	k.at(k.g.Index, call)
	v, ret := f()
	switch ret {
	case nvml.SUCCESS:
		return v, true
	case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND, nvml.ERROR_NO_DATA:
	case nvml.ERROR_GPU_IS_LOST:
		k.g.Lost = true
		k.g.Failed = append(k.g.Failed, fmt.Sprintf("%s: %v", call, ret))
	default:
		k.g.Failed = append(k.g.Failed, fmt.Sprintf("%s: %v", call, ret))
	}
	return none, false
}

func number[T int | uint32 | uint64](k *look, call string, scale float64, f func() (T, nvml.Return)) *float64 {
	v, ok := ask(k, call, f)
	if !ok {
		return nil
	}
	return value(float64(v) * scale)
}

func text(k *look, call string, f func() (string, nvml.Return)) string {
	v, _ := ask(k, call, f)
	return v
}

func value(x float64) *float64 { return &x }

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// chars reads a C string.
func chars(c []int8) string {
	var b []byte
	for _, x := range c {
		if x == 0 {
			break
		}
		b = append(b, byte(x))
	}
	return string(b)
}
