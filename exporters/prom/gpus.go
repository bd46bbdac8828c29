package prom

import (
	"strconv"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// gpuValues are the values that a GPU has one of.
var gpuValues = []struct {
	metric *names.Metric
	of     func(*collector.GPU) *float64
}{
	{names.GPURemapPending, func(g *collector.GPU) *float64 { return g.RemapPending }},
	{names.GPURemapFailure, func(g *collector.GPU) *float64 { return g.RemapFailure }},
	{names.GPUTemperature, func(g *collector.GPU) *float64 { return g.Temperature }},
	{names.GPUMemoryTemperature, func(g *collector.GPU) *float64 { return g.MemoryTemperature }},
	{names.GPUPower, func(g *collector.GPU) *float64 { return g.Power }},
	{names.GPUPowerLimit, func(g *collector.GPU) *float64 { return g.PowerLimit }},
	{names.GPUEnergy, func(g *collector.GPU) *float64 { return g.Energy }},
	{names.GPUSMClock, func(g *collector.GPU) *float64 { return g.SMClock }},
	{names.GPUMemoryClock, func(g *collector.GPU) *float64 { return g.MemoryClock }},
	{names.GPUUtilization, func(g *collector.GPU) *float64 { return g.Utilization }},
	{names.GPUMemoryUsed, func(g *collector.GPU) *float64 { return g.MemoryUsed }},
	{names.GPUMemory, func(g *collector.GPU) *float64 { return g.MemoryTotal }},
	{names.GPUPCIeReplays, func(g *collector.GPU) *float64 { return g.PCIeReplays }},
	{names.GPUPCIeWidth, func(g *collector.GPU) *float64 { return g.PCIeWidth }},
	{names.GPUPCIeGeneration, func(g *collector.GPU) *float64 { return g.PCIeGeneration }},
}

// sendGPUs sends a node's GPUs. While the driver hangs, what it has said last
// is not sent: it is not known to hold any more.
func sendGPUs(p *pass, n *collector.GPUs) {
	p.send(names.GPUDriverUnresponsive, boolean(n.UnresponsiveAt != 0))
	p.send(names.GPUXidsDropped, float64(n.XidsDropped))
	if n.ProbeNs > 0 {
		p.send(names.GPUProbeDuration, seconds(n.ProbeNs))
	}
	for i := range n.GPUs {
		g := &n.GPUs[i]
		gpu := strconv.Itoa(g.Index)
		if g.UUID == "" && !g.Lost {
			continue // the agent may not look at it
		}
		p.send(names.GPUInfo, 1, gpu, g.UUID, g.Model, g.BusID, n.DriverVersion)
		for _, x := range g.Xids {
			_, effect := diagnosis.DescribeXid(x.Code)
			p.send(names.GPUXids, float64(x.Count), gpu, strconv.FormatUint(uint64(x.Code), 10), effect.String())
		}
		if n.UnresponsiveAt == 0 {
			sendGPU(p, g, gpu)
		}
	}
}

func sendGPU(p *pass, g *collector.GPU, gpu string) {
	p.send(names.GPUUp, boolean(!g.Lost), gpu)
	if g.Lost {
		return
	}
	for _, v := range gpuValues {
		p.sendKnown(v.metric, v.of(g), gpu)
	}
	p.sendKnown(names.GPUECCErrors, g.Corrected.Volatile, gpu, names.KindCorrected, names.LifetimeVolatile)
	p.sendKnown(names.GPUECCErrors, g.Corrected.Aggregate, gpu, names.KindCorrected, names.LifetimeAggregate)
	p.sendKnown(names.GPUECCErrors, g.Uncorrected.Volatile, gpu, names.KindUncorrected, names.LifetimeVolatile)
	p.sendKnown(names.GPUECCErrors, g.Uncorrected.Aggregate, gpu, names.KindUncorrected, names.LifetimeAggregate)
	p.sendKnown(names.GPURemappedRows, g.RowsCorrected, gpu, names.KindCorrected)
	p.sendKnown(names.GPURemappedRows, g.RowsUncorrected, gpu, names.KindUncorrected)
	if g.Throttle != nil {
		for _, reason := range diagnosis.Throttles() {
			p.send(names.GPUThrottled, boolean(*g.Throttle&reason != 0), gpu, reason.String())
		}
	}
	for _, l := range g.Links {
		link := strconv.Itoa(l.Link)
		p.send(names.GPUNVLinkUp, boolean(l.Up), gpu, link)
		p.sendKnown(names.GPUNVLinkCRC, l.CRC, gpu, link)
		p.sendKnown(names.GPUNVLinkReplays, l.Replays, gpu, link)
		p.sendKnown(names.GPUNVLinkRecoveries, l.Recoveries, gpu, link)
	}
	if g.PIDs != nil {
		p.send(names.GPUProcesses, float64(len(g.PIDs)), gpu)
	}
}

// sendKnown sends a value that is there.
func (p *pass) sendKnown(m *names.Metric, v *float64, labels ...string) {
	if v != nil {
		p.send(m, *v, labels...)
	}
}
