package dashboards

import (
	"github.com/grafana/grafana-foundation-sdk/go/units"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// pipeline answers: can I trust what the others show, and what does it cost?
func pipeline() board {
	return board{
		uid: names.DashboardPipeline, title: "Lockstep / Pipeline health",
		why:       "Lockstep itself: agents, masters, what they lose, what they cost, and what the remediator did.",
		variables: []variable{vSource, vJobs},
		rows: []row{
			{"Processes", []panel{
				{
					title: "Versions", view: rows(names.LabelComponent, names.LabelVersion, names.LabelRevision, "Value as processes"), width: 8, height: 7,
					why:     "Processes by component and version.",
					targets: []target{{expr: "count by (component, version, revision) (" + of(names.BuildInfo) + ")"}},
				},
				{
					title: "CPU", view: lines, width: 8, height: 7, unit: "suffix: cores",
					why:     "Cores that Lockstep's processes use, the busiest of each component.",
					targets: []target{{expr: highest("component", "rate(process_cpu_seconds_total["+interval+"]) * on (job, instance) group_left (component) "+of(names.BuildInfo)), legend: "{{component}}"}},
				},
				{
					title: "Memory", view: lines, width: 8, height: 7, unit: units.BytesIEC,
					why:     "Resident memory, the largest of each component.",
					targets: []target{{expr: highest("component", "process_resident_memory_bytes * on (job, instance) group_left (component) "+of(names.BuildInfo)), legend: "{{component}}"}},
				},
			}},
			{"Agents", []panel{
				{
					title: "Agents by state", view: stacked, width: 12, height: 7,
					why:     "As the masters see them. Lost is disconnected for longer than their patience.",
					targets: []target{{expr: sum("state", of(names.AgentsConnected, inJob)), legend: "{{state}}"}},
					series:  agents,
					alerts:  []string{names.AlertAgentLost, names.AlertMasterDown},
				},
				{
					title: "Progress reports", view: lines, width: 12, height: 7, unit: units.CountsPerSecond,
					why: "Reports a second from agents to masters, and those dropped because a stream was down or slow; attempts to open streams again; and what masters refused, as contradicting what they know. Volume grows with ranks, not with collectives.",
					targets: []target{
						{expr: sum("", rate(names.StreamReports, inJob)), legend: "sent"},
						{expr: sum("", rate(names.StreamDropped, inJob)), legend: "dropped"},
						{expr: sum("", rate(names.StreamRetries, inJob)), legend: "streams tried again"},
						{expr: sum("", rate(names.ArrivalsDropped, inJob)), legend: "sampled arrivals dropped"},
						{expr: sum("", rate(names.MasterRefused, inJob)), legend: "entries refused"},
					},
					alerts: []string{names.AlertReportsDropped},
				},
				{
					title: "Flight records", view: lines, width: 12, height: 7, unit: units.CountsPerSecond,
					why: "Records read a second by all agents, and those lost.",
					targets: []target{
						{expr: sum("", rate(names.RecorderRecords, inJob)), legend: "read"},
						{expr: sum("", rate(names.RecorderLost, inJob)), legend: "lost"},
					},
				},
				{
					title: "Bounds reached", view: lines, width: 12, height: 7,
					why: "What was not tracked or exported because a bound was reached. All 0 is normal.",
					targets: []target{
						{expr: sum("", of(names.MasterOverflow, inJob)), legend: "untracked by masters"},
						{expr: sum("", of(names.RecorderOverflow, inJob)), legend: "no slot in a recorder"},
						{expr: sum("", of(names.ConnsWithoutHistory, inJob)), legend: "connections without a history"},
						{expr: sum("", of(names.SeriesOverflow)) + " or vector(0)", legend: "label sets not exported"},
					},
					alerts: []string{names.AlertTrackingOverflow, names.AlertSeriesOverflow},
				},
				{
					title: "Spans", view: lines, width: 12, height: 7, unit: units.CountsPerSecond,
					why: "Spans accepted by the OTLP backend a second, and those dropped, by reason.",
					targets: []target{
						{expr: sum("", rate(names.SpansExported)), legend: "exported"},
						{expr: sum("reason", rate(names.SpansDropped)), legend: "dropped: {{reason}}"},
						{expr: sum("", rate(names.TraceEventsDropped)), legend: "events left out of spans"},
					},
					alerts: []string{names.AlertTraceDrops},
				},
				{
					title: "Clock error between nodes", view: lines, width: 12, height: 7, unit: units.Seconds,
					why:     "Bound on the error of a node's times on its job's clock, the worst node. Slowness below it cannot be told.",
					targets: []target{{expr: highest("training_job", of(names.NodeClockError, inJob)), legend: "{{training_job}}"}},
					alerts:  []string{names.AlertClockError},
				},
			}},
			{"Several machines", []panel{
				{
					title: "Hosts", view: stacked, width: 8, height: 7,
					why: "Of jobs of lockstep run on several machines, as their coordinators see them: running, standing by, silent, left out. Fewer than needed: the job waits.",
					targets: []target{
						{expr: sum("training_job, state", of(names.CoordinatorHosts, inJob)), legend: "{{training_job}}: {{state}}"},
						{expr: highest("training_job", of(names.CoordinatorNeeded, inJob)), legend: "{{training_job}}: needed"},
					},
					alerts: []string{names.AlertHostsMissing},
				},
				{
					title: "Attempts", view: lines, width: 8, height: 7,
					why: "The last attempt of each such job, and how many were begun; hosts whose ranks were ended because they did not hear the coordinator for a lease.",
					targets: []target{
						{expr: highest("training_job", of(names.CoordinatorAttempt, inJob)), legend: "{{training_job}}: attempt"},
						{expr: highest("training_job", of(names.CoordinatorAttempts, inJob)), legend: "{{training_job}}: begun"},
						{expr: sum("training_job", of(names.SupervisorLeases, inJob)), legend: "{{training_job}}: leases that ended"},
					},
				},
				{
					title: "Supervisors", view: lines, width: 8, height: 7,
					why: "Connections of supervisors that their coordinator has let in, how often it did, supervisors that hear it, and their ranks.",
					targets: []target{
						{expr: highest("training_job", of(names.CoordinatorConns, inJob)), legend: "{{training_job}}: connected"},
						{expr: highest("training_job", of(names.CoordinatorJoins, inJob)), legend: "{{training_job}}: let in"},
						{expr: sum("training_job", of(names.SupervisorHeard, inJob)), legend: "{{training_job}}: that hear the coordinator"},
						{expr: sum("training_job, state", of(names.SupervisorRanks, inJob)), legend: "{{training_job}}: ranks {{state}}"},
					},
				},
			}},
			{"Trust", []panel{
				{
					title: "Refused", view: lines, width: 12, height: 7,
					why: "Calls to masters whose certificate does not allow them, alerts that masters knew nothing of, recorders that speak for others, connections to ranks of who is no rank, connections over a listener's limit, passwords, hosts that are none of a job of lockstep run. All 0 is normal.",
					targets: []target{
						{expr: sum("training_job", of(names.MasterDenied, inJob)), legend: "calls to the master of {{training_job}}"},
						{expr: sum("training_job", of(names.MasterHandshakes, inJob)), legend: "connections to the master of {{training_job}}"},
						{expr: sum("training_job", of(names.MasterMessages, inJob)), legend: "messages to the master of {{training_job}}"},
						{expr: sum("reason", of(names.Disbelieved)), legend: "alerts: {{reason}}"},
						{expr: sum("reason", of(names.RecordersRefused)), legend: "recorders: {{reason}}"},
						{expr: sum("training_job, reason", of(names.RankRefused, inJob)), legend: "connections to ranks of {{training_job}}: {{reason}}"},
						{expr: sum("", of(names.NotesDropped)), legend: "notes that the master was not told"},
						{expr: sum("instance, listener", of(names.ConnsCrowded)), legend: "too many connections: {{instance}} {{listener}}"},
						{expr: sum("instance, reason", of(names.WebRefused)), legend: "requests to the page of {{instance}}: {{reason}}"},
						{expr: sum("training_job, reason", of(names.CoordinatorRefused, inJob)), legend: "hosts of {{training_job}}: {{reason}}"},
					},
					alerts: []string{names.AlertAccessDenied},
				},
				{
					title: "Without authentication", view: lines, width: 12, height: 7,
					why: "1 where a process was started with an --insecure flag.",
					targets: []target{
						{expr: highest("training_job", of(names.MasterInsecure, inJob)), legend: "master of {{training_job}}"},
						{expr: highest("instance", of(names.RemediatorTrust)), legend: "remediator {{instance}}"},
					},
					alerts: []string{names.AlertInsecure},
				},
				{
					title: "Agents that contradict each other", view: lines, width: 12, height: 7,
					why: "Entries about ranks that another node's agent tells of, agents of a name that is taken, agents that say another attempt or size than most do. All 0 is normal; a restart shows for a second.",
					targets: []target{
						{expr: sum("training_job", of(names.MasterForeign, inJob)), legend: "{{training_job}}: about others' ranks"},
						{expr: sum("training_job", of(names.MasterDuplicates, inJob)), legend: "{{training_job}}: of a name that is taken"},
						{expr: highest("training_job", of(names.MasterDisagree, inJob)), legend: "{{training_job}}: agents that disagree"},
					},
					alerts: []string{names.AlertIdentityConflict},
				},
				{
					title: "Ranks that no agent tells of", view: lines, width: 12, height: 7,
					why:     "Of these ranks nothing is known: their job is not called healthy.",
					targets: []target{{expr: highest("training_job", of(names.JobUnseen, inJob)), legend: "{{training_job}}"}},
					alerts:  []string{names.AlertRanksUnseen},
				},
				{
					title: "Certificates end in", view: lines, width: 12, height: 7, unit: units.Seconds,
					why: "Time until a process's certificate ends, of the first; and -1 where it cannot be read again. Empty without certificates.",
					targets: []target{
						{expr: "min(" + of(names.CertExpiry) + " - time()) or vector(0)", legend: "first"},
						{expr: "-max(" + of(names.CertUnreadable) + ") or vector(0)", legend: "unreadable"},
					},
					alerts: []string{names.AlertCertificate},
				},
				{
					title: "State can be written", view: lines, width: 12, height: 7,
					why:     "1 where a master or the remediator could write its state when it last tried; both try every few seconds.",
					targets: []target{{expr: "min by (instance) (" + of(names.StateWritable) + ")", legend: "{{instance}}"}},
					alerts:  []string{names.AlertStateUnwritable},
				},
				{
					title: "Attempts fenced", view: lines, width: 24, height: 7,
					why: "Proof that was asked that nothing of an attempt goes on, and what agents have done to processes that were left. 'unproven' says that an attempt may go on beside its successor.",
					targets: []target{
						{expr: sum("result", of(names.FenceProofs)), legend: "remediator: {{result}}"},
						{expr: "histogram_avg(sum(" + of(names.FenceDuration) + ")) or sum(" + names.FenceDuration.Name + "_sum) / sum(" + names.FenceDuration.Name + "_count)", legend: "time to an answer", unit: units.Seconds},
						{expr: sum("training_job, result", of(names.MasterFences, inJob)), legend: "master of {{training_job}}: {{result}}"},
						{expr: highest("training_job", of(names.MasterFenced, inJob)), legend: "{{training_job}}: fenced attempt"},
						{expr: sum("training_job, result", of(names.FenceProcesses, inJob)), legend: "{{training_job}}: processes {{result}}"},
						{expr: sum("training_job", of(names.FenceLeases, inJob)), legend: "{{training_job}}: leases over"},
					},
				},
			}},
			{"Diagnosis", []panel{
				{
					title: "Time of a pass", view: lines, width: 8, height: 7, unit: units.Seconds,
					why:     "Mean time of a diagnosis pass.",
					targets: []target{{expr: sum("training_job", rate(names.DiagnosisSeconds, inJob)) + " / " + sum("training_job", rate(names.Diagnoses, inJob)), legend: "{{training_job}}"}},
				},
				{
					title: "Passes", view: lines, width: 8, height: 7, unit: units.OpsPerSecond,
					why:     "Diagnosis passes a second. 0 means that a fault would go unseen.",
					targets: []target{{expr: sum("training_job", rate(names.Diagnoses, inJob)), legend: "{{training_job}}"}},
					alerts:  []string{names.AlertDiagnosisStalled},
				},
				{
					title: "From fault to confirmed verdict", view: lines, width: 8, height: 7, unit: units.Seconds,
					why:     "Mean time from a fault's estimated onset to its confirmed verdict, of all incidents that the master has seen.",
					targets: []target{{expr: "histogram_avg(" + sum("class", of(names.IncidentLatency, inJob)) + ") or " + sum("class", series(names.IncidentLatency.Name+"_sum", []string{inJob})) + " / " + sum("class", series(names.IncidentLatency.Name+"_count", []string{inJob})), legend: "{{class}}"}},
					steps:   []step{{3, fair}},
				},
				{
					title: "Incidents", view: lines, width: 24, height: 6,
					why: "Incidents ever opened and ever confirmed by class. Many that are never confirmed are noise: look at what is suspected.",
					targets: []target{
						{expr: sum("class", of(names.Incidents, inJob)), legend: "{{class}} opened"},
						{expr: sum("class", of(names.IncidentConfirms, inJob)), legend: "{{class}} confirmed"},
					},
					alerts: []string{names.AlertFaultSuspected},
				},
				{
					title: "Recording of evidence reaches back", view: lines, width: 8, height: 6, unit: units.Seconds,
					why:     "How far back a master's rolling recording goes: what lockstep diagnose can judge again.",
					targets: []target{{expr: lowest("training_job", of(names.RecordingReach, inJob)), legend: "{{training_job}}"}},
				},
				{
					title: "Recording of evidence", view: lines, width: 8, height: 6, unit: units.BytesPerSecondSI,
					why:     "Bytes of evidence that masters record a second.",
					targets: []target{{expr: sum("training_job", rate(names.RecordingBytes, inJob)), legend: "{{training_job}}"}},
				},
				{
					title: "Passes not recorded", view: lines, width: 8, height: 6, unit: units.CountsPerSecond,
					why:     "Passes whose evidence is not recorded, a second: paced because the job is large, busy or failed because of the disk.",
					targets: []target{{expr: sum("reason", rate(names.RecordingSkipped, inJob)), legend: "{{reason}}"}},
				},
			}},
			{"Remediation", []panel{
				{
					title: "Mode", view: number, width: 4, height: 7,
					why:     "In a dry run, actions are only journaled and logged.",
					targets: []target{{expr: highest("", of(names.DryRun))}},
					values:  []value{{"0", "acts", good}, {"1", "dry run", fair}},
					alerts:  []string{names.AlertRemediatorDown},
				},
				{
					title: "Breakers", view: timeline, width: 10, height: 7,
					why:     "Whether a breaker is open: no action in its scope until a person closes it.",
					targets: []target{{expr: highest("scope", of(names.BreakerOpen)), legend: "{{scope}} open"}},
					values:  yes,
					alerts:  []string{names.AlertBreakerOpen},
				},
				{
					title: "Actions left", view: lines, width: 10, height: 7,
					why:     "Actions that a breaker still allows in its window.",
					targets: []target{{expr: lowest("scope", of(names.BreakerRemaining)), legend: "{{scope}}"}},
				},
				{
					title: "Nodes out, spares", view: lines, width: 8, height: 7,
					why:  "Nodes that the remediator has taken out (suspect: blamed; silent: not heard), those that came back, and what is left in the pools.",
					none: "no remediator of a cluster",
					targets: []target{
						{expr: sum("reason", of(names.NodesOut)), legend: "out: {{reason}}"},
						{expr: sum("reason", of(names.NodesReturned)), legend: "returned: {{reason}}"},
						{expr: sum("pool", of(names.SpareNodes)), legend: "spares of {{pool}}"},
					},
				},
				{
					title: "Fences", view: lines, width: 8, height: 7,
					why:  "Whether ranks on silent nodes were proven to have ended (waiting: pods wait for proof; unproven: a policy went on without), and pods deleted by force since.",
					none: "no remediator of a cluster",
					targets: []target{
						{expr: sum("result", of(names.Fences)), legend: "{{result}}"},
						{expr: sum("", of(names.ForcedDeletions)), legend: "pods deleted by force"},
					},
				},
				{
					title: "API server", view: lines, width: 8, height: 7,
					why:  "The remediator's requests to the cluster's API server by result, and how many remediators lead: one.",
					none: "no remediator of a cluster",
					targets: []target{
						{expr: sum("verb, result", rate(names.SchedulerCalls)), legend: "{{verb}}: {{result}}", unit: units.RequestsPerSecond},
						{expr: sum("", of(names.Leading)), legend: "leading"},
					},
				},
				{
					title: "Decisions", view: lines, width: 12, height: 7,
					why:     "Decisions on alerts since the remediator started, by action and outcome.",
					targets: []target{{expr: sum("action, outcome", of(names.Actions)), legend: "{{action}}: {{outcome}}"}},
					alerts:  []string{names.AlertActionFailed},
				},
				{
					title: "Webhooks", view: stacked, width: 12, height: 7, unit: units.CountsPerSecond,
					why:     "Alertmanager's notifications a second by what became of them.",
					targets: []target{{expr: sum("result", rate(names.Webhooks)), legend: "{{result}}"}},
					alerts:  []string{names.AlertWebhookRefused},
				},
				{
					title: "Time of an action", view: lines, width: 12, height: 7, unit: units.Seconds,
					why:     "Mean time from the journal entry to the actuator's answer, since the remediator started.",
					targets: []target{{expr: "histogram_avg(" + sum("action", of(names.ActionDuration)) + ") or " + sum("action", names.ActionDuration.Name+"_sum") + " / " + sum("action", names.ActionDuration.Name+"_count"), legend: "{{action}}"}},
				},
				{
					title: "Actions pending", view: lines, width: 12, height: 7,
					why:     "Journaled actions that are not finished.",
					targets: []target{{expr: sum("", of(names.ActionsPending)), legend: "pending"}},
					alerts:  []string{names.AlertActionStuck},
				},
			}},
		},
	}
}
