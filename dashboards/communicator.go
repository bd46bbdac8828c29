package dashboards

import (
	"github.com/grafana/grafana-foundation-sdk/go/units"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// communicator answers: which connection, and is it transfer or waiting?
func communicator() board {
	in := []string{inJob, inComm, inColl}
	// A single look catches a single late request: the median of a few says how a connection is.
	delays := highest(names.LabelSrc+", "+names.LabelDst, "quantile_over_time(0.5, "+of(names.DelayRatio, inJob, inComm)+"["+interval+"])")
	// No rank has a connection to itself; a NaN there makes the matrix meet its
	// rows and columns in the same order.
	diagonal := " or label_replace(" + highest(names.LabelSrc, of(names.DelayRatio, inJob, inComm)) +
		`, "` + names.LabelDst + `", "$1", "` + names.LabelSrc + `", "(.+)") * NaN`
	return board{
		uid: names.DashboardCommunicator, title: "Lockstep / Communicator",
		why:       "One communicator of a job: the delay of each connection, and how the time of its collectives is spent.",
		variables: []variable{vSource, vTraces, vJob, vComm, vCollective},
		rows: []row{
			{"Connections", []panel{
				{
					title: "Delay matrix", view: matrix(names.LabelSrc, names.LabelDst), width: 12, height: 12, unit: units.Number,
					why:     "Delay of each connection over the median of its kind, of the last few looks; 1 is normal. The bluer, the longer; whether it is a fault is the verdict's to say: directions of a pipeline differ in health. A cell is a connection, a row everything its source sends, a column everything its destination receives, a block a node or switch. Ranks are ranks in the communicator; communicators above 32 ranks have no matrix.",
					targets: []target{{expr: delays + diagonal}},
					steps:   []step{{2, "light-blue"}, {4, "semi-dark-blue"}, {8, "dark-blue"}}, // a measure: what is a fault, a verdict says
					alerts:  []string{names.AlertCommunicationSlow},
				},
				{
					title: "Slowest connections", view: lines, width: 12, height: 12, unit: times,
					why:     "The eight largest cells of the matrix over time: whether it is one of them all the time, or all of them now and then.",
					targets: []target{{expr: "topk(8, " + delays + ")", legend: "{{source_rank}} → {{destination_rank}}"}},
					steps:   []step{{2, fair}},
				},
			}},
			{"Time", []panel{
				{
					title: "Where the time goes", view: stacked, width: 12, height: 8, unit: units.Seconds,
					why: "Mean time of a collective on one rank, in two parts: waiting for the last member to enter, and the transfer after that. More waiting is a straggler, more transfer a slow connection.",
					targets: []target{
						{expr: average(names.CollectiveWait, "", in...), legend: "waiting"},
						{expr: "(" + spent(names.CollectiveDuration, "", in...) + " - " + spent(names.CollectiveWait, "", in...) + ") / " + often(names.CollectiveDuration, "", in...), legend: "transfer"},
					},
					alerts: []string{names.AlertFallbackSlow, names.AlertNoncommunicationSlow},
				},
				{
					title: "Quantiles by collective", view: lines, width: 12, height: 8, unit: units.Seconds,
					why: "Duration of a collective on one rank. The dots are exemplars: they open the trace.",
					targets: []target{
						{expr: quantile(0.5, names.CollectiveDuration, "collective", in...), legend: "{{collective}} 50 %"},
						{expr: quantile(0.999, names.CollectiveDuration, "collective", in...), legend: "{{collective}} 99.9 %", exemplar: true},
					},
				},
				{
					title: "Distribution", view: heat, width: 24, height: 9, unit: units.Seconds,
					why:     "All durations over time; two bands are two kinds of message or two kinds of path. Needs native histograms (scrape_native_histograms).",
					targets: []target{{expr: sum("", rate(names.CollectiveDuration, in...)), exemplar: true}},
				},
			}},
			{"Work", []panel{
				{
					title: "Bandwidth inside collectives", view: lines, width: 12, height: 8, unit: units.BytesPerSecondSI,
					why:     "Payload over the time that a rank is inside, waiting included: what the program gets.",
					targets: []target{{expr: sum("collective", rate(names.CollectiveBytes, in...)) + " / " + spent(names.CollectiveDuration, "collective", in...), legend: "{{collective}}"}},
				},
				{
					title: "Collectives", view: stacked, width: 12, height: 8, unit: units.OpsPerSecond,
					why:     "Collectives ended a second, summed over ranks.",
					targets: []target{{expr: sum("collective", rate(names.Collectives, in...)), legend: "{{collective}}"}},
				},
				{
					title: "Members inside, by node", view: lines, width: 12, height: 8, unit: units.PercentUnit,
					why:     "Share of a node's members that are inside a collective. In a hang, the node that stays below the others has the member that did not enter.",
					targets: []target{{expr: sum("instance", of(names.CommOpenMembers, inJob, inComm)) + " / " + sum("instance", of(names.CommMembers, inJob, inComm)), legend: "{{instance}}"}},
					alerts:  []string{names.AlertNoncommunicationHang},
				},
				{
					title: "Oldest open, by node", view: lines, width: 12, height: 8, unit: units.Seconds,
					why:     "The node that entered first waits longest; one at 0 while the others climb has not entered.",
					targets: []target{{expr: highest("instance", of(names.CommOldestOpen, inJob, inComm)), legend: "{{instance}}"}},
					alerts:  []string{names.AlertCommunicationHang},
				},
			}},
		},
	}
}
