package dashboards

import (
	"github.com/grafana/grafana-foundation-sdk/go/units"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// fabric answers: is every link used alike, which one is bad, and what does the planner do about it?
func fabric() board {
	const cable = "leaf, spine"
	load := func(of, direction string) string {
		return "max by (" + cable + ") (" + of + direction + " / " + names.FabricLinkRate.Name + direction + ")"
	}
	const up, down = `{direction="up"}`, `{direction="down"}`
	full := []step{{0, "transparent"}, {0.01, "light-blue"}, {0.5, "blue"}, {0.9, good}, {1.05, fair}, {1.25, bad}}
	state := func(direction string) string {
		return "max by (" + cable + ") (" + names.FabricLinkLoss.Name + direction + ")"
	}
	lossy := []step{{0, good}, {0.0005, fair}, {0.5, bad}}
	probes := sum("direction", rate(names.FabricProbesSent))
	return board{
		uid: names.DashboardFabric, title: "Lockstep / Fabric",
		why:       "Links between leaves and spines as the planner has them: what is planned onto each, what arrives, which one is bad.",
		variables: []variable{vSource},
		rows: []row{
			{"Load", []panel{
				{
					title: "Planned, leaf to spine", view: cells(names.LabelLeaf, names.LabelSpine), width: 12, height: 10, unit: units.PercentUnit,
					why:     "What the lanes of all jobs would send over a link if all sent at once, of its rate; the fullest of parallel links. A row of one colour is what a plan is for.",
					targets: []target{{expr: load(names.FabricLinkPlanned.Name, up)}}, steps: full, alerts: []string{names.AlertFabricUnbalanced},
				},
				{
					title: "Planned, spine to leaf", view: cells(names.LabelLeaf, names.LabelSpine), width: 12, height: 10, unit: units.PercentUnit,
					why:     "The same for the way down to the leaf.",
					targets: []target{{expr: load(names.FabricLinkPlanned.Name, down)}}, steps: full,
				},
				{
					title: "Measured, leaf to spine", view: cells(names.LabelLeaf, names.LabelSpine), width: 12, height: 10, unit: units.PercentUnit,
					why:     "What senders of planned lanes say that arrives over a link, of its rate. Traffic that is not planned is not in it.",
					targets: []target{{expr: load(names.FabricLinkMeasured.Name, up)}}, steps: full,
				},
				{
					title: "Measured, spine to leaf", view: cells(names.LabelLeaf, names.LabelSpine), width: 12, height: 10, unit: units.PercentUnit,
					why:     "The same for the way down to the leaf.",
					targets: []target{{expr: load(names.FabricLinkMeasured.Name, down)}}, steps: full,
				},
				{
					title: "Fullest link over the mean", view: lines, width: 12, height: 7, unit: times,
					why: "The fullest link of a leaf, planned, over the mean of the leaf's links, the five worst leaves; 1 is even. Lanes that do not divide by links leave a little.",
					targets: []target{{
						expr:   "topk(5, max by (leaf, direction) (" + names.FabricLinkPlanned.Name + " / " + names.FabricLinkRate.Name + ") / (avg by (leaf, direction) (" + names.FabricLinkPlanned.Name + " / " + names.FabricLinkRate.Name + " unless " + names.FabricLinkUp.Name + " == 0) > 0))",
						legend: "{{leaf}} {{direction}}",
					}},
				},
				{
					title: "Lanes", view: lines, width: 12, height: 7,
					why:     "Lanes that are planned onto the links of a leaf, the ten leaves with most.",
					targets: []target{{expr: "topk(10, " + sum("leaf, direction", of(names.FabricLinkLanes)) + ")", legend: "{{leaf}} {{direction}}"}},
				},
			}},
			{"Bad links", []panel{
				{
					title: "Loss, leaf to spine", view: cells(names.LabelLeaf, names.LabelSpine), width: 12, height: 10, unit: units.PercentUnit,
					why:     "Share of packets that a link loses, as inferred from all paths that lose: 100 % is a dead link, green is well.",
					targets: []target{{expr: state(up)}}, steps: lossy, alerts: []string{names.AlertFabricLinkDead, names.AlertFabricLinkLossy},
				},
				{
					title: "Loss, spine to leaf", view: cells(names.LabelLeaf, names.LabelSpine), width: 12, height: 10, unit: units.PercentUnit,
					why:     "The same for the way down to the leaf.",
					targets: []target{{expr: state(down)}}, steps: lossy,
				},
				{
					title: "Links by state", view: lines, width: 6, height: 7,
					why: "Directed links that carry something, those that are dead, and those that some job's losses speak of.",
					targets: []target{
						{expr: sum("", of(names.FabricLinkUp)), legend: "up"},
						{expr: "count(" + names.FabricLinkUp.Name + " == 0) or vector(0)", legend: "dead"},
						{expr: sum("", of(names.FabricSuspected)), legend: "suspected"},
					},
				},
				{
					title: "Probes", view: lines, width: 6, height: 7, unit: units.CountsPerSecond,
					why: "Probes a second, counted on each link that they crossed, and those lost. 0 sent: nothing finds bad links.",
					targets: []target{
						{expr: probes, legend: "sent {{direction}}"},
						{expr: sum("direction", rate(names.FabricProbesLost)), legend: "lost {{direction}}"},
					},
				},
				{
					title: "Lost by senders", view: lines, width: 6, height: 7, unit: units.PercentUnit,
					why:     "Share of segments that senders of planned lanes had to send again, the ten links with most. Both links of a path that loses show it.",
					targets: []target{{expr: "topk(10, sum by (leaf, spine, direction) (" + rate(names.FabricSegmentsLost) + ") / (sum by (leaf, spine, direction) (" + rate(names.FabricSegmentsSent) + ") > 0))", legend: "{{leaf}} {{direction}} {{spine}}"}},
					alerts:  []string{names.AlertFabricSuspected},
				},
				{
					title: "Hosts that probe", view: lines, width: 6, height: 7,
					why:     "Hosts whose prober is connected to the planner.",
					targets: []target{{expr: sum("", of(names.PlannerProbers)), legend: "probers"}},
				},
			}},
			{"Planner", []panel{
				{
					title: "Lanes moved", view: stacked, width: 8, height: 7, unit: units.CountsPerSecond,
					why:     "Lanes that were given another path a second, by why. All 0 is normal.",
					targets: []target{{expr: sum("reason", rate(names.PlannerMoves)), legend: "{{reason}}"}},
					alerts:  []string{names.AlertPlannerDown},
				},
				{
					title: "Jobs and processes", view: lines, width: 8, height: 7,
					why: "Jobs that hold a lease on paths, and processes that are connected.",
					targets: []target{
						{expr: sum("", of(names.PlannerJobs)), legend: "leases"},
						{expr: sum("", of(names.PlannerStreams)), legend: "processes"},
					},
				},
				{
					title: "Refused by the planner", view: lines, width: 8, height: 7,
					why:     "What certificates did not allow, and what was malformed or over a bound. All 0 is normal.",
					targets: []target{{expr: sum("reason", of(names.PlannerRefused)), legend: "{{reason}}"}},
				},
			}},
		},
	}
}
