package dashboards

import (
	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// heldUp is 1 for each job that has a confirmed incident.
var heldUp = "clamp_max(" + sum("training_job", of(names.IncidentsOpen, `level="confirmed"`)) + ", 1)"

// placed is 1 by node and the instance of its agent; faulty is that of nodes with an open incident.
var (
	placed = highest("node, instance", of(names.NodeInfo))
	faulty = placed + " and on (node) " + of(names.IncidentInfo)
)

// fleet answers: which of all jobs needs somebody, and what have faults cost?
func fleet() board {
	orNone := func(expr string) string { return expr + " or vector(0)" }
	return board{
		uid: names.DashboardFleet, title: "Lockstep / Fleet",
		why:       "All training jobs: which have faults, which do not go on, what faults have cost, and what was found before jobs began.",
		variables: []variable{vSource, vTraces},
		rows: []row{
			{"Now", []panel{
				{
					title: "Jobs", view: number, width: 6, height: 4,
					why:     "Jobs that have a master.",
					targets: []target{{expr: "count(" + highest("training_job", of(names.JobWorldSize)) + ")", legend: "jobs"}},
				},
				{
					title: "Jobs with a confirmed fault", view: number, width: 6, height: 4,
					why:     "Jobs that somebody or something breaks step of, for sure.",
					targets: []target{{expr: orNone("sum(" + heldUp + ")"), legend: "jobs"}},
					steps:   []step{{1, bad}},
					alerts:  []string{names.AlertCommunicationHang, names.AlertNoncommunicationHang},
				},
				{
					title: "Ranks of those", view: number, width: 6, height: 4,
					why:     "Ranks, a GPU each as a rule, of jobs with a confirmed fault: what stands still or is slow now.",
					targets: []target{{expr: orNone("sum(" + heldUp + " * on (training_job) " + highest("training_job", of(names.JobWorldSize)) + ")"), legend: "ranks"}},
					steps:   []step{{1, bad}},
				},
				{
					title: "GPU hours lost in a day", view: number, width: 6, height: 4,
					why:     "Ranks times the time in which their job had a confirmed fault, of the last 24 hours, by the minute. What a restart loses since the last checkpoint is not in it.",
					targets: []target{{expr: orNone("sum(sum_over_time((" + heldUp + " * on (training_job) " + highest("training_job", of(names.JobWorldSize)) + ")[1d:1m])) / 60"), legend: "hours"}},
				},
				{
					title: "Who broke step", width: 24, height: 8,
					view:    rows(names.LabelJob, names.LabelClass, names.LabelLevel, names.LabelCulprit, names.LabelReason, names.LabelNode, names.LabelIncident, names.LabelTraceID),
					why:     "Open incidents of all jobs, with the culprit that everyone waits for.",
					none:    "none",
					targets: []target{{expr: highest("training_job, class, level, culprit, reason, node, incident, trace_id", of(names.IncidentInfo))}},
				},
			}},
			{"Nodes of open faults", []panel{
				{
					title: "Where they are", view: rows(names.LabelNode, "instance"), width: 12, height: 6,
					why:     "Nodes that open incidents name, and the address of their agent.",
					none:    "no open incident names a node",
					targets: []target{{expr: faulty}},
				},
				{
					title: "Their ranks", view: lines, width: 12, height: 6,
					why:     "Rank processes on these nodes, by state.",
					none:    "no open incident names a node",
					targets: []target{{expr: sum("node, state", of(names.Ranks)+" * on (instance) group_left (node) ("+faulty+")") + " > 0", legend: "{{node}} {{state}}"}},
				},
			}},
			{"Jobs", []panel{
				{
					title: "Faults by job", view: timeline, width: 12, height: 8,
					why: "When each job was suspected of a fault, and when that was confirmed.",
					targets: []target{{
						expr: "clamp_max(" + sum("training_job", of(names.IncidentsOpen, `level="suspected"`)) + ", 1) + 2 * " + heldUp, legend: "{{training_job}}",
					}},
					values: []value{{"0", "none", good}, {"1", "suspected", fair}, {"2", "confirmed", bad}, {"3", "confirmed", bad}},
				},
				{
					title: "Steps per second", view: lines, width: 12, height: 8,
					why:     "By job; 0 while it hangs or reloads a checkpoint.",
					targets: []target{{expr: "clamp_min(deriv(" + of(names.JobStep) + "[" + interval + "]), 0)", legend: "{{training_job}}"}},
				},
				{
					title: "Incidents confirmed in a day", view: lines, width: 12, height: 7,
					why:     "By job, of the last 24 hours.",
					targets: []target{{expr: sum("training_job", "increase("+of(names.IncidentConfirms)+"[1d])"), legend: "{{training_job}}"}},
				},
				{
					title: "Ranks nobody sees", view: lines, width: 12, height: 7,
					why:     "Ranks that no agent tells of now: nothing is known of them.",
					targets: []target{{expr: highest("training_job", of(names.JobUnseen)), legend: "{{training_job}}"}},
					alerts:  []string{names.AlertRanksUnseen},
				},
			}},
			{"Before jobs", []panel{
				{
					title: "Checks that found something bad", view: number, width: 8, height: 4,
					why:     "Preflight checks whose last result was not good, as textfile collectors tell.",
					targets: []target{{expr: orNone("count(" + of(names.PreflightGood) + " == 0)"), legend: "checks"}},
					steps:   []step{{1, fair}},
				},
				{
					title: "Bad pairs of ranks", view: number, width: 8, height: 4,
					why:     "Ordered pairs that a preflight check called bad.",
					targets: []target{{expr: orNone(sum("", of(names.PreflightBadEdges))), legend: "pairs"}},
					steps:   []step{{1, fair}},
				},
				{
					title: "Bad nodes", view: number, width: 8, height: 4,
					why:     "Nodes of which a preflight check found something bad.",
					targets: []target{{expr: orNone("count(" + lowest("node", of(names.PreflightNodeGood)) + " == 0)"), legend: "nodes"}},
					steps:   []step{{1, fair}},
				},
			}},
		},
	}
}
