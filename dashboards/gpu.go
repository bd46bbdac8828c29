package dashboards

import (
	"github.com/grafana/grafana-foundation-sdk/go/units"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// gpu answers: is it a GPU?
func gpu() board {
	each := "instance, gpu"
	const legend = "{{instance}} GPU {{gpu}}"
	one := func(m *names.Metric) []target {
		return []target{{expr: highest(each, of(m, onNode)), legend: legend}}
	}
	return board{
		uid: names.DashboardGPU, title: "Lockstep / GPUs",
		why:       "The GPUs of one node or several as NVIDIA's driver tells: what is broken, what is slowed down, who uses them.",
		variables: []variable{vSource, vGPUNode},
		rows: []row{
			{"Now", []panel{
				{
					title: "GPUs that do not answer", view: number, width: 6, height: 4,
					why:     "GPUs that do not answer their driver: they have fallen off the bus. 0 is normal.",
					targets: []target{{expr: "count(" + of(names.GPUUp, onNode) + ") - " + sum("", of(names.GPUUp, onNode))}},
					steps:   []step{{1, bad}},
					alerts:  []string{names.AlertGPULost},
				},
				{
					title: "Driver", view: number, width: 6, height: 4,
					why:     "Whether a call into the driver hangs. While it does, nothing else is known of its GPUs.",
					targets: []target{{expr: highest("", of(names.GPUDriverUnresponsive, onNode))}},
					values:  []value{{"0", "answers", good}, {"1", "hangs", bad}},
					alerts:  []string{names.AlertGPUDriverUnresponsive},
				},
				{
					title: "NVLinks down", view: number, width: 6, height: 4,
					why:     "Links that are not up. 0 is normal where all GPUs are connected.",
					targets: []target{{expr: "count(" + of(names.GPUNVLinkUp, onNode) + ") - " + sum("", of(names.GPUNVLinkUp, onNode))}},
					steps:   []step{{1, fair}},
				},
				{
					title: "GPUs to be replaced", view: number, width: 6, height: 4,
					why:     "GPUs whose memory has errors and no spare row for them. 0 is normal.",
					targets: []target{{expr: sum("", of(names.GPURemapFailure, onNode))}},
					steps:   []step{{1, bad}},
					alerts:  []string{names.AlertGPURowRemapFailure},
				},
				{
					title: "Xids in the last hour", view: rows(names.LabelGPU, names.LabelXid, names.LabelEffect, "Value as times"), width: 12, height: 7,
					why:     "What the driver has reported, by code and by whom it ends: application, gpu, info (nobody).",
					targets: []target{{expr: "round(sum by (instance, gpu, xid, effect) (increase(" + of(names.GPUXids, onNode) + "[1h]))) > 0"}},
					none:    "none",
					alerts:  []string{names.AlertGPUXidFatal},
				},
				{
					title: "GPUs", view: rows(names.LabelGPU, names.LabelModel, names.LabelUUID, names.LabelBusID, names.LabelDriver), width: 12, height: 7,
					why:     "Which GPU has which index.",
					targets: []target{{expr: of(names.GPUInfo, onNode)}},
				},
			}},
			{"Speed", []panel{
				{
					title: "Clock of the multiprocessors", view: lines, width: 12, height: 7, unit: units.Hertz,
					why:     "One that is lower than the others under the same load makes its rank a straggler.",
					targets: one(names.GPUSMClock),
				},
				{
					title: "Clocks lowered by", view: lines, width: 12, height: 7,
					why:     "GPUs whose clocks are lowered, by reason. power_cap is normal under full load; heat and power_brake never are.",
					targets: []target{{expr: sum("reason", of(names.GPUThrottled, onNode)), legend: "{{reason}}"}},
					alerts:  []string{names.AlertGPUThrottled},
				},
				{
					title: "Busy", view: lines, width: 8, height: 7, unit: units.PercentUnit,
					why:     "Share of the time in which a kernel runs. One that waits for a peer runs, too.",
					targets: one(names.GPUUtilization),
				},
				{
					title: "Temperature", view: lines, width: 8, height: 7, unit: units.Celsius,
					why: "Of GPUs and of their memory, the hottest of each node.",
					targets: []target{
						{expr: highest("instance", of(names.GPUTemperature, onNode)), legend: "{{instance}} GPU"},
						{expr: highest("instance", of(names.GPUMemoryTemperature, onNode)), legend: "{{instance}} memory"},
					},
				},
				{
					title: "Power", view: lines, width: 8, height: 7, unit: units.PercentUnit,
					why:     "Share of the power that a GPU may draw. One that waits in a collective draws much less than one that computes.",
					targets: []target{{expr: highest(each, of(names.GPUPower, onNode)+" / "+of(names.GPUPowerLimit, onNode)), legend: legend}},
				},
				{
					title: "Mean power", view: lines, width: 8, height: 7, unit: units.Watt,
					why:     "Of all GPUs of a node, from the energy that they have used.",
					targets: []target{{expr: sum("instance", rate(names.GPUEnergy, onNode)), legend: "{{instance}}"}},
				},
				{
					title: "Memory in use", view: lines, width: 8, height: 7, unit: units.PercentUnit,
					why:     "Share of each GPU's memory.",
					targets: []target{{expr: highest(each, of(names.GPUMemoryUsed, onNode)+" / "+of(names.GPUMemory, onNode)), legend: legend}},
				},
				{
					title: "Memory clock", view: lines, width: 8, height: 7, unit: units.Hertz,
					why:     "It changes on idle GPUs only.",
					targets: one(names.GPUMemoryClock),
				},
			}},
			{"Links", []panel{
				{
					title: "NVLink repairs", view: lines, width: 12, height: 7, unit: units.CountsPerSecond,
					why: "Replays and new trainings of links a second. 0 is normal.",
					targets: []target{
						{expr: sum(each, rate(names.GPUNVLinkReplays, onNode)), legend: legend + " replays"},
						{expr: sum(each, rate(names.GPUNVLinkRecoveries, onNode)), legend: legend + " recoveries"},
					},
					alerts: []string{names.AlertGPUNVLinkErrors},
				},
				{
					title: "NVLink checksum errors", view: lines, width: 12, height: 7, unit: units.CountsPerSecond,
					why:     "They are corrected; a GPU that has many more than the others has a bad link.",
					targets: []target{{expr: sum(each, rate(names.GPUNVLinkCRC, onNode)), legend: legend}},
				},
				{
					title: "PCIe lanes", view: lines, width: 8, height: 7,
					why:     "Lanes in use. Fewer than usual: a bad connection.",
					targets: one(names.GPUPCIeWidth),
				},
				{
					title: "PCIe generation", view: lines, width: 8, height: 7,
					why:     "It falls while a GPU is idle.",
					targets: one(names.GPUPCIeGeneration),
				},
				{
					title: "PCIe replays", view: lines, width: 8, height: 7, unit: units.CountsPerSecond,
					why:     "Packets sent again a second. 0 is normal.",
					targets: []target{{expr: sum(each, rate(names.GPUPCIeReplays, onNode)), legend: legend}},
				},
			}},
			{"Memory errors", []panel{
				{
					title: "Memory errors", view: lines, width: 12, height: 7,
					why:     "Since the drivers' start, by kind. A step of uncorrected is data lost.",
					targets: []target{{expr: sum("instance, kind", of(names.GPUECCErrors, onNode, `lifetime="volatile"`)), legend: "{{instance}} {{kind}}"}},
					alerts:  []string{names.AlertGPUUncorrectableECC},
				},
				{
					title: "Rows remapped", view: lines, width: 12, height: 7,
					why: "Rows of memory replaced by spare ones, and GPUs that wait for a reset to do so.",
					targets: []target{
						{expr: sum(each, of(names.GPURemappedRows, onNode)), legend: legend},
						{expr: sum("", of(names.GPURemapPending, onNode)), legend: "GPUs that wait for a reset"},
					},
				},
			}},
			{"Who asks and who computes", []panel{
				{
					title: "Ranks and processes", view: lines, width: 8, height: 7,
					why: "Ranks by job and node, and all processes that compute on its GPUs. More processes than ranks: somebody else is there.",
					targets: []target{
						{expr: sum("instance, training_job", of(names.GPURanks, onNode)), legend: "{{instance}} {{training_job}}"},
						{expr: sum("instance", of(names.GPUProcesses, onNode)), legend: "{{instance}} processes"},
					},
				},
				{
					title: "Duration of a probe", view: lines, width: 8, height: 7, unit: units.Seconds,
					why:     "Time to ask all GPUs of a node once. A driver in trouble shows here first.",
					targets: []target{{expr: highest("instance", of(names.GPUProbeDuration, onNode)), legend: "{{instance}}"}},
				},
				{
					title: "Xids dropped", view: lines, width: 8, height: 7, unit: units.CountsPerSecond,
					why:     "Xids a second that came too fast to be counted. 0 is normal.",
					targets: []target{{expr: sum("instance", rate(names.GPUXidsDropped, onNode)), legend: "{{instance}}"}},
				},
			}},
		},
	}
}
