package rules

import (
	"fmt"
	"time"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// pipeline watches what the verdicts rest on: agents, masters and what they lose.
func pipeline(c Config) []alert {
	return []alert{
		{
			name: names.AlertAgentDown, expr: down(c, names.Agent, names.AlertAgentDown), hold: c.DownFor, severity: warning,
			summary:     `Agent {{ $labels.instance }} does not answer scrapes`,
			description: `The agent on {{ $labels.instance }} is down or unreachable. Its ranks train on; a hang among them is seen from the other nodes only.`,
			dashboard:   names.DashboardNode,
		},
		{
			name: names.AlertAgentLost, severity: warning,
			expr:        promql(`max by (training_job, node) ({lost}) == 1`, "lost", names.AgentLostInfo),
			summary:     `{{ $labels.training_job }}: the master has lost the agent of node {{ $labels.node }}`,
			description: `The agent of node {{ $labels.node }} has sent nothing for longer than the master's patience. Verdicts about its ranks rest on what their peers see.`,
			dashboard:   names.DashboardPipeline,
		},
		{
			name: names.AlertAgentDisconnected, hold: c.TroubleFor, severity: warning,
			expr: promql(`max by (training_job, instance) ({connected}) == 0 and on (training_job) {world}`,
				"connected", names.StreamConnected, "world", names.JobWorldSize),
			summary:     `{{ $labels.training_job }}: agent {{ $labels.instance }} cannot reach its master`,
			description: `The master answers scrapes and the agent does too, but the stream between them is down: an address, a certificate or a network policy.`,
			dashboard:   names.DashboardNode,
		},
		{
			name: names.AlertReportsDropped, hold: c.TroubleFor, severity: warning,
			expr: promql(`
sum by (training_job, instance) (rate({dropped}[{window}])) > 0
and on (training_job, instance) {connected} == 1`,
				"dropped", names.StreamDropped, "window", c.Window, "connected", names.StreamConnected),
			summary:     `{{ $labels.training_job }}: agent {{ $labels.instance }} drops progress reports`,
			description: `The stream to the master is up but too slow: {{ $value | humanize }} reports a second are dropped, and verdicts rest on old evidence.`,
			dashboard:   names.DashboardPipeline,
		},
		{
			name: names.AlertSourceDown, hold: c.TroubleFor, severity: warning,
			expr:        promql(`max by (instance, source) ({up}) == 0`, "up", names.SourceUp),
			summary:     `Source {{ $labels.source }} fails on {{ $labels.instance }}`,
			description: `The agent's source {{ $labels.source }} delivered nothing on its last passes. The agent's log says why.`,
			dashboard:   names.DashboardNode,
		},
		{
			name: names.AlertRecorderLoss, hold: c.TroubleFor, severity: warning,
			expr: promql(`
sum by (training_job, instance) (rate({lost}[{window}]))
/ (
  sum by (training_job, instance) (rate({lost}[{window}]))
  + sum by (training_job, instance) (rate({records}[{window}]))
) > {ratio}`,
				"lost", names.RecorderLost, "records", names.RecorderRecords, "window", c.Window, "ratio", c.RecorderLossRatio),
			summary:     `{{ $labels.training_job }}: {{ $value | humanizePercentage }} of the records on {{ $labels.instance }} are lost`,
			description: `Ranks write flight records faster than the agent reads them. Hangs are still seen (progress does not pass through the ring); durations, traces and slowness are judged from a sample.`,
			dashboard:   names.DashboardNode,
		},
		{
			name: names.AlertMasterDown, hold: c.DownFor, severity: critical,
			expr: promql(`sum by (training_job) ({members}) > 0 unless on (training_job) {open}`,
				"members", names.CommMembers, "open", names.IncidentsOpen),
			summary:     `{{ $labels.training_job }}: no master answers`,
			description: `Agents see ranks of this job, and no master reports on it: no verdicts, no restarts. Until it is back only the LockstepFallback alerts watch the job.`,
			dashboard:   names.DashboardPipeline,
		},
		{
			name: names.AlertDiagnosisStalled, hold: c.DownFor, severity: critical,
			expr: promql(`
sum by (training_job) (rate({diagnoses}[{window}])) == 0
and on (training_job) sum by (training_job) ({members}) > 0`,
				"diagnoses", names.Diagnoses, "window", c.Window, "members", names.CommMembers),
			summary:     `{{ $labels.training_job }}: the master answers but does not diagnose`,
			description: `No diagnosis pass has ended for a while: a fault would go unseen. This also mutes the fallbacks, because the master's metrics are there.`,
			dashboard:   names.DashboardPipeline,
		},
		{
			name: names.AlertTrackingOverflow, hold: c.TroubleFor, severity: warning,
			expr: promql(`
max by (training_job, instance) ({untracked}) > 0
or
max by (training_job, instance) ({tables}) > 0`, "untracked", names.MasterOverflow, "tables", names.RecorderOverflow),
			summary:     `{{ $labels.training_job }}: {{ $value }} ranks, communicators or connections are not tracked`,
			description: `A bound of the recorder's tables or of the master was reached on {{ $labels.instance }}. What is beyond it is not diagnosed.`,
			dashboard:   names.DashboardPipeline,
		},
		{
			name: names.AlertSeriesOverflow, severity: warning,
			expr: promql(`
sum by (instance, family) (
{increase}
) > 0`, "increase", newly(names.SeriesOverflow, "", c)),
			summary:     `{{ $labels.instance }} has reached the series cap of {{ $labels.family }}`,
			description: `Label sets of {{ $labels.family }} beyond the cap are not exported: dashboards and fallbacks do not see them. Diagnosis does.`,
			dashboard:   names.DashboardPipeline,
		},
		{
			name: names.AlertClockError, hold: c.TroubleFor, severity: warning,
			expr: promql(`
max by (training_job, instance, clock) ({mapping}) > {mappingBound}
or
max by (training_job, instance) ({node}) > {nodeBound}`,
				"mapping", names.ClockError, "mappingBound", c.ClockError.Seconds(),
				"node", names.NodeClockError, "nodeBound", c.NodeClockError.Seconds()),
			summary:     `{{ $labels.training_job }}: times seen by {{ $labels.instance }} are uncertain by {{ $value | humanizeDuration }}`,
			description: `{{ with $labels.clock }}An agent's mapping of clock {{ . }} to host time{{ else }}The worst node's clock against the master's{{ end }} is uncertain. Which rank entered last cannot be told below that, so slowness may be missed or blamed with less confidence; hangs are not touched.`,
			dashboard:   names.DashboardPipeline,
		},
		{
			name: names.AlertAccessDenied, severity: warning,
			expr:        deniedExpr(c),
			summary:     `{{ $labels.instance }} has refused somebody who claims to be another, an incident that no master has, or too many connections`,
			description: deniedText() + ` Nothing was done. A wrong certificate, password or address, a port scanner, or an attempt.`,
			dashboard:   names.DashboardPipeline,
		},
		{
			name: names.AlertIdentityConflict, severity: warning,
			expr: promql(`
sum by (training_job, instance) (
{foreign}
) > 0
or
sum by (training_job, instance) (
{duplicates}
) > 0
or
sum by (training_job, instance) (
{hosts}
) > 0
or
max by (training_job, instance) (min_over_time({disagree}[{trouble}])) > 0`,
				"foreign", newly(names.MasterForeign, "", c), "duplicates", newly(names.MasterDuplicates, "", c),
				"hosts", newly(names.CoordinatorRefused, `{reason="name"}`, c),
				"disagree", names.MasterDisagree, "trouble", c.TroubleFor),
			summary:     `{{ $labels.training_job }}: agents, or hosts' supervisors, contradict each other`,
			description: `Two agents tell of the same ranks, two agents or two supervisors have the same name, or one says that the job is in another attempt, or of another size, than the others do. The one that was there first, or what most say, is believed. A renamed node, a process that a restart left behind, or somebody with a stolen certificate.`,
			dashboard:   names.DashboardPipeline,
		},
		{
			name: names.AlertRanksUnseen, hold: c.TroubleFor, severity: warning,
			expr:        promql(`max by (training_job) ({unseen}) > 0`, "unseen", names.JobUnseen),
			summary:     `{{ $labels.training_job }}: no agent tells of {{ $value }} ranks`,
			description: `The job is larger than what its master sees: a node has no agent, or its agent cannot report. Whether these ranks are well nobody knows; the job's status is unknown, not healthy.`,
			dashboard:   names.DashboardPipeline,
		},
		{
			name: names.AlertCertificate, hold: c.TroubleFor, severity: warning,
			expr: promql(`max by (instance) ({unreadable}) > 0 or min by (instance) ({expiry}) - time() < {soon}`,
				"unreadable", names.CertUnreadable, "expiry", names.CertExpiry, "soon", c.CertificateSoon.Seconds()),
			summary:     `{{ $labels.instance }}: its certificate cannot be read again, or ends soon`,
			description: `While it lasts the process uses what it could read last. When that ends its streams end with it: its node is not watched, or its job not judged.`,
			dashboard:   names.DashboardPipeline,
		},
		{
			name: names.AlertStateUnwritable, hold: c.DownFor, severity: critical,
			expr:        promql(`max by (instance) ({writable}) == 0`, "writable", names.StateWritable),
			summary:     `{{ $labels.instance }} cannot write its state`,
			description: `A full or read-only disk: a master judges on, and would report open incidents a second time after a restart; a remediator, and the coordinator of lockstep run, decide nothing until they can write, and hosts that hear nothing end their ranks. All say that they are not ready.`,
			dashboard:   names.DashboardPipeline,
		},
		{
			name: names.AlertHostsMissing, hold: c.TroubleFor, severity: warning,
			expr: promql(`
(
  sum by (training_job, instance) ({hosts}{state=~"running|standby"})
  < on (training_job, instance)
  max by (training_job, instance) ({needed})
)
or
max by (training_job, instance) ({heard}) == 0`, "hosts", names.CoordinatorHosts, "needed", names.CoordinatorNeeded, "heard", names.SupervisorHeard),
			summary:     `{{ $labels.training_job }}: {{ $labels.instance }} misses hosts of the job, or its coordinator`,
			description: `A job of lockstep run on several machines: its coordinator hears fewer hosts than an attempt takes, or this host's supervisor does not hear the coordinator. The job waits for them as long as --join-timeout says, and fails then.`,
			dashboard:   names.DashboardPipeline,
		},
		{
			name: names.AlertInsecure, hold: c.TroubleFor, severity: info,
			expr:        promql(`max by (instance) ({master} or {remediator}) > 0`, "master", names.MasterInsecure, "remediator", names.RemediatorTrust),
			summary:     `{{ $labels.instance }} runs without authentication`,
			description: `It was started with an --insecure flag: whoever reaches it, or Alertmanager, can have jobs restarted.`,
			dashboard:   names.DashboardPipeline,
		},
		{
			name: names.AlertTraceDrops, hold: c.TroubleFor, severity: info,
			expr: promql(`
sum by (instance, reason) (rate({dropped}[{window}]))
/ on (instance) group_left ()
(
  sum by (instance) (rate({dropped}[{window}]))
  + sum by (instance) (rate({exported}[{window}]))
) > {ratio}`,
				"dropped", names.SpansDropped, "exported", names.SpansExported, "window", c.Window, "ratio", c.TraceDropRatio),
			summary:     `{{ $labels.instance }} drops {{ $value | humanizePercentage }} of its spans ({{ $labels.reason }})`,
			description: `Traces are incomplete; metrics and verdicts are not touched.`,
			dashboard:   names.DashboardPipeline,
		},
	}
}

// down selects targets that do not answer and that were of a component when
// they last did, whatever their scrape jobs are called.
func down(c Config, component names.Component, alert string) string {
	return promql(`
up == 0
and on (job, instance) (
  last_over_time({info}{component="{component}"}[{memory}])
  or
  {told}
)`,
		"info", names.BuildInfo, "component", component, "memory", c.Memory, "told", told(alert))
}

// told selects an alert that is active already: what has been wrong for longer
// than it is remembered that it was right is wrong still.
func told(alert string) string { return fmt.Sprintf(`ALERTS{alertname="%s"}`, alert) }

// newly is how much a counter grew within the window, counting from 0 a series
// that is new: increase() does not see its first step.
func newly(m *names.Metric, matchers string, c Config) string { return newlyIn(m, matchers, c.Window) }

func newlyIn(m *names.Metric, matchers string, window time.Duration) string {
	return "  " + promql(`
increase({m}{matchers}[{window}]) > 0
  or
  ({m}{matchers} unless {m}{matchers} offset {window})`, "m", m, "matchers", matchers, "window", window)
}
