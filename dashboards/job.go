package dashboards

import (
	"github.com/grafana/grafana-foundation-sdk/go/units"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// waitOdds is the job's waiting for each second of transfer: unlike the share, it has room
// to grow where waiting is most of the time in health.
var waitOdds = spent(names.CollectiveWait, "training_job", inJob) + " / (" + spent(names.CollectiveDuration, "training_job", inJob) + " - " + spent(names.CollectiveWait, "training_job", inJob) + ")"

// onItsNodes keeps what is of agents that have ranks of the job.
var onItsNodes = " and on (instance) (" + sum("instance", of(names.Ranks, inJob)) + " > 0)"

// job answers: do steps go on, and if not, who broke step?
func job() board {
	return board{
		uid: names.DashboardJob, title: "Lockstep / Job",
		why:       "One training job: its faults, its progress and where its time goes.",
		variables: []variable{vSource, vTraces, vJob},
		rows: []row{
			{"Now", []panel{
				{
					title: "Open faults", view: number, width: 4, height: 4,
					why:     "Open incidents by level. Confirmed ones may lead to an action.",
					targets: []target{{expr: sum("level", of(names.IncidentsOpen, inJob)), legend: "{{level}}"}},
					steps:   []step{{1, bad}},
					alerts:  []string{names.AlertCommunicationHang, names.AlertNoncommunicationHang, names.AlertCommunicationSlow, names.AlertNoncommunicationSlow, names.AlertFaultSuspected},
				},
				{
					title: "Steps per second", view: number, width: 4, height: 4,
					why:     "Growth of the highest step mark; the program has to set marks. 0 while the job hangs or reloads a checkpoint.",
					targets: []target{{expr: "clamp_min(deriv(" + of(names.JobStep, inJob) + "[" + interval + "]), 0)", legend: "{{training_job}}"}},
				},
				{
					title: "Ranks running", view: number, width: 4, height: 4, unit: units.PercentUnit,
					why:     "Rank processes that run, of those that the job is meant to have.",
					targets: []target{{expr: sum("training_job", of(names.JobRanks, inJob, `state="`+names.StateRunning+`"`)) + " / on (training_job) " + highest("training_job", of(names.JobWorldSize, inJob)), legend: "{{training_job}}"}},
					steps:   []step{{0, fair}, {1, good}},
				},
				{
					title: "Time spent waiting", view: number, width: 4, height: 4, unit: units.PercentUnit,
					why:     "Share of the time inside collectives, of all ranks, that is waiting for a member to enter. What is normal is the job's own: a pipeline waits most of the time in health.",
					targets: []target{{expr: waitShare("training_job", inJob), legend: "{{training_job}}"}},
				},
				{
					title: "Waiting beside its usual", view: number, width: 4, height: 4, unit: times,
					why:     "Seconds of waiting for each second of transfer, over the job's own median of the last hour: 1 is as usual. A straggler raises it at once, a slow network lowers it.",
					targets: []target{{expr: waitOdds + " / quantile_over_time(0.5, (" + waitOdds + ")[1h:15s])", legend: "{{training_job}}"}},
					steps:   []step{{3, fair}, {10, bad}},
				},
				{
					title: "Restarts", view: number, width: 4, height: 4,
					why:     "How often the job was restarted.",
					targets: []target{{expr: highest("training_job", of(names.JobAttempt, inJob)), legend: "{{training_job}}"}},
					steps:   []step{{1, fair}},
				},
				{
					title: "Who broke step", width: 24, height: 6,
					view:    rows(names.LabelClass, names.LabelLevel, names.LabelCulprit, names.LabelReason, names.LabelNode, names.LabelCommunicator, names.LabelIncident, names.LabelAttempt, names.LabelTraceID),
					why:     "Open incidents with the culprit that everyone waits for. The trace shows the collective on every rank; the master's status page has the evidence.",
					none:    "none",
					targets: []target{{expr: highest("class, level, culprit, reason, node, communicator, incident, attempt, trace_id", of(names.IncidentInfo, inJob))}},
				},
			}},
			{"Progress", []panel{
				{
					title: "Faults by class", view: timeline, width: 12, height: 7,
					why: "When each class was suspected and confirmed.",
					targets: []target{{
						expr: sum("class", "clamp_max("+of(names.IncidentsOpen, inJob, `level="suspected"`)+", 1)") +
							" + 2 * " + sum("class", "clamp_max("+of(names.IncidentsOpen, inJob, `level="confirmed"`)+", 1)"),
						legend: "{{class}}",
					}},
					values: []value{{"0", "none", good}, {"1", "suspected", fair}, {"2", "confirmed", bad}, {"3", "confirmed", bad}},
				},
				{
					title: "Step", view: lines, width: 12, height: 7,
					why:     "Highest step that any rank has marked. It falls back to the last checkpoint with a restart.",
					targets: []target{{expr: highest("training_job", of(names.JobStep, inJob)), legend: "{{training_job}}"}},
				},
				{
					title: "Rank processes", view: stacked, width: 12, height: 7,
					why:     "Ranks by what the agents see of their process: running is normal, disk_sleep and stopped hang a job without an error.",
					targets: []target{{expr: sum("state", of(names.JobRanks, inJob)), legend: "{{state}}"}},
					series:  processes,
				},
				{
					title: "Oldest open collective", view: lines, width: 12, height: 7, unit: units.Seconds,
					why:     "Age of the longest open collective by communicator. Where it climbs first is where the wait began.",
					targets: []target{{expr: highest("communicator", of(names.CommOldestOpen, inJob)), legend: "{{communicator}}"}},
					alerts:  []string{names.AlertFallbackCommunicationHang, names.AlertFallbackNoncommunicationHang},
				},
			}},
			{"GPUs", []panel{
				{
					title: "GPUs that do not answer", view: lines, width: 8, height: 7,
					why:     "GPUs of the job's nodes that have fallen off the bus, by agent. 0 is normal.",
					none:    "no GPUs on this job's nodes",
					targets: []target{{expr: "(count by (instance) (" + of(names.GPUUp) + ") - " + sum("instance", of(names.GPUUp)) + ")" + onItsNodes, legend: "{{instance}}"}},
					alerts:  []string{names.AlertGPULost},
				},
				{
					title: "Xids in an hour", view: lines, width: 8, height: 7,
					why:     "What the driver has reported on the job's nodes that ends a process or a GPU.",
					none:    "no GPUs on this job's nodes",
					targets: []target{{expr: "sum by (instance) (increase(" + of(names.GPUXids, `effect=~"application|gpu"`) + "[1h]))" + onItsNodes, legend: "{{instance}}"}},
					alerts:  []string{names.AlertGPUXidFatal},
				},
				{
					title: "GPUs slowed down", view: lines, width: 8, height: 7,
					why:     "GPUs of the job's nodes whose clocks are held back by heat or for want of power. One of them makes all ranks wait.",
					none:    "no GPUs on this job's nodes",
					targets: []target{{expr: "sum by (instance) (max by (instance, gpu) (" + of(names.GPUThrottled, `reason!="power_cap"`) + ") > bool 0)" + onItsNodes, legend: "{{instance}}"}},
					alerts:  []string{names.AlertGPUThrottled},
				},
			}},
			{"Collectives", []panel{
				{
					title: "Duration, 99th percentile", view: lines, width: 12, height: 8, unit: units.Seconds,
					why:     "Time from start to end of a collective on one rank, by communicator. The dots are exemplars: they open the trace.",
					targets: []target{{expr: quantile(0.99, names.CollectiveDuration, "communicator", inJob), legend: "{{communicator}}", exemplar: true}},
					alerts:  []string{names.AlertFallbackSlow},
				},
				{
					title: "Waiting share by communicator", view: lines, width: 12, height: 8, unit: units.PercentUnit,
					why:     "Which communicators the waiting is in. Whom they wait for is on the node dashboards: the node that waits least.",
					targets: []target{{expr: waitShare("communicator", inJob), legend: "{{communicator}}"}},
				},
				{
					title: "Ends by result", view: stacked, width: 12, height: 8, unit: units.OpsPerSecond,
					why:     "Collectives ended a second, summed over ranks. Anything but ok was an error to the program.",
					targets: []target{{expr: sum("result", rate(names.Collectives, inJob)), legend: "{{result}}"}},
					series:  results,
				},
				{
					title: "Payload", view: stacked, width: 12, height: 8, unit: units.BytesPerSecondSI,
					why:     "Payload bytes a second by communicator, summed over ranks, counted as NCCL does.",
					targets: []target{{expr: sum("communicator", rate(names.CollectiveBytes, inJob)), legend: "{{communicator}}"}},
				},
			}},
		},
	}
}
