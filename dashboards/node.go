package dashboards

import (
	"github.com/grafana/grafana-foundation-sdk/go/units"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// node answers: is it this host?
func node() board {
	here := []string{onNode, inJob}
	slow := append([]string{`cause!="none"`}, here...)
	return board{
		uid: names.DashboardNode, title: "Lockstep / Node",
		why:       "One node as its agent sees it: its ranks, its connections and the agent's own sources.",
		variables: []variable{vSource, vNode, vJobs},
		rows: []row{
			{"Now", []panel{
				{
					title: "Agent", view: number, width: 6, height: 4,
					why:     "Whether the agent answers scrapes.",
					targets: []target{{expr: highest("", `up{`+onNode+`}`)}},
					values:  up,
					alerts:  []string{names.AlertAgentDown},
				},
				{
					title: "Stream to master", view: number, width: 6, height: 4,
					why:     "Whether progress reaches the master of each job.",
					targets: []target{{expr: lowest("training_job", of(names.StreamConnected, here...)), legend: "{{training_job}}"}},
					values:  up,
					alerts:  []string{names.AlertAgentDisconnected, names.AlertAgentLost},
				},
				{
					title: "Steps behind", view: number, width: 6, height: 4,
					why:     "Steps that this node's ranks are behind the job's foremost.",
					targets: []target{{expr: highest("training_job", of(names.JobStep, inJob)) + " - on (training_job) " + highest("training_job", of(names.AgentStep, here...)), legend: "{{training_job}}"}},
					steps:   []step{{2, fair}},
				},
				{
					title: "Records lost", view: number, width: 6, height: 4, unit: units.PercentUnit,
					why:     "Flight records overwritten before the agent read them. 0 is normal.",
					targets: []target{{expr: sum("", rate(names.RecorderLost, here...)) + " / (" + sum("", rate(names.RecorderLost, here...)) + " + " + sum("", rate(names.RecorderRecords, here...)) + ")"}},
					steps:   []step{{0.001, fair}, {0.05, bad}},
					alerts:  []string{names.AlertRecorderLoss},
				},
			}},
			{"Ranks", []panel{
				{
					title: "Rank processes here", view: stacked, width: 12, height: 7,
					why:     "Local rank processes by state.",
					targets: []target{{expr: sum("state", of(names.Ranks, here...)), legend: "{{state}}"}},
				},
				{
					title: "Waiting, here and elsewhere", view: lines, width: 12, height: 7, unit: units.PercentUnit,
					why: "Share of the time inside collectives that is waiting. A node that waits much less than the others is the one that they wait for.",
					targets: []target{
						{expr: waitShare("", here...), legend: "this node"},
						{expr: waitShare("", inJob), legend: "all nodes"},
					},
					alerts: []string{names.AlertNoncommunicationSlow},
				},
				{
					title: "Collectives here", view: stacked, width: 12, height: 7, unit: units.OpsPerSecond,
					why:     "Collectives ended a second by communicator, summed over local ranks.",
					targets: []target{{expr: sum("communicator", rate(names.Collectives, here...)), legend: "{{communicator}}"}},
				},
				{
					title: "Mean duration here", view: lines, width: 12, height: 7, unit: units.Seconds,
					why:     "Mean time inside a collective of local ranks, by communicator.",
					targets: []target{{expr: average(names.CollectiveDuration, "communicator", here...), legend: "{{communicator}}", exemplar: true}},
				},
			}},
			{"Connections", []panel{
				{
					title: "Slow windows by cause", view: lines, width: 12, height: 7, unit: units.PercentUnit,
					why: "Share of transport windows that were slow, and why: network (backlog high, bandwidth low), sender_starved, receiver_not_ready, cpu_starved.",
					targets: []target{{
						expr:   sum("transport, cause", rate(names.Windows, slow...)) + " / on (transport) group_left () " + sum("transport", rate(names.Windows, here...)),
						legend: "{{transport}} {{cause}}",
					}},
					alerts: []string{names.AlertCommunicationSlow},
				},
				{
					title: "Outstanding", view: stacked, width: 12, height: 7, unit: units.BytesSI,
					why:     "Bytes handed to a transport and not yet taken by their receivers. High and flat is a hang.",
					targets: []target{{expr: sum("transport", of(names.ConnOutstanding, here...)), legend: "{{transport}}"}},
					alerts:  []string{names.AlertCommunicationHang},
				},
				{
					title: "Paths down", view: lines, width: 12, height: 7,
					why:     "Broken paths of open connections. Where a connection has another path it goes on over that one.",
					targets: []target{{expr: sum("training_job, transport", of(names.ConnBroken, here...)), legend: "{{training_job}} {{transport}}"}},
					alerts:  []string{names.AlertConnectionPathDown},
				},
				{
					title: "Switches and bytes sent again", view: lines, width: 12, height: 7,
					why: "Paths that took over from another a second, and bytes a second sent again because the other path may have lost them.",
					targets: []target{
						{expr: sum("transport", rate(names.ConnSwitches, here...)), legend: "{{transport}} switches"},
						{expr: sum("transport", rate(names.ConnResent, here...)), legend: "{{transport}} bytes"},
					},
				},
				{
					title: "Connections", view: stacked, width: 12, height: 7,
					why:     "Connections of local ranks by transport.",
					targets: []target{{expr: sum("transport", of(names.Connections, here...)), legend: "{{transport}}"}},
				},
				{
					title: "Time stamp error", view: lines, width: 12, height: 7, unit: units.Seconds,
					why:     "Bound on the error of mapped time stamps by clock.",
					targets: []target{{expr: highest("clock", of(names.ClockError, here...)), legend: "{{clock}}"}},
					alerts:  []string{names.AlertClockError},
				},
			}},
			{"Sources", []panel{
				{
					title: "Sources of evidence", view: timeline, width: 12, height: 6,
					why:     "Whether each source delivered on its last pass.",
					targets: []target{{expr: lowest("source", of(names.SourceUp, onNode)), legend: "{{source}}"}},
					values:  up,
					alerts:  []string{names.AlertSourceDown},
				},
				{
					title: "Duration of a pass", view: lines, width: 12, height: 6, unit: units.Seconds,
					why:     "Time of each source's last pass. A source that hangs on a driver shows here first.",
					targets: []target{{expr: highest("source", of(names.SourceDuration, onNode)), legend: "{{source}}"}},
				},
			}},
		},
	}
}
