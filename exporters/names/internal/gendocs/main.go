// Command gendocs writes docs/metrics.md from exporters/names.
package main

import (
	"flag"
	"fmt"
	"os"
	"strings"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

func main() {
	out := flag.String("o", "", "file to write; standard output when empty")
	flag.Parse()
	text := Reference()
	if *out == "" {
		fmt.Print(text)
		return
	}
	if err := os.WriteFile(*out, []byte(text), 0o644); err != nil {
		fmt.Fprintln(os.Stderr, "gendocs:", err)
		os.Exit(1)
	}
}

var components = []struct {
	from  names.Component
	title string
	intro string
}{
	{names.Agent, "Agent", "One agent a node; `lockstep agent` serves these on /metrics."},
	{names.Master, "Master", "One master a job; `lockstep master` serves these on /metrics and shows them on /status."},
	{names.Remediator, "Remediator", "`lockstep remediator` serves these on /metrics."},
	{names.Preflight, "Preflight", "`lockstep preflight --prom FILE` writes these for a textfile collector; `rank`, `node` and pairs are bounded by the size of what is checked."},
	{names.Planner, "Planner", "One planner a fabric; `lockstep planner serve` serves these on /metrics."},
	{names.Supervisor, "Supervisors of several machines", "`lockstep run --coordinator` serves these on /metrics of each host whose supervisor is given `--web.listen-address`, those of the coordinator where it is."},
	{names.All, "Every component", "Served by agent, master, remediator, planner and supervisors, beside client_golang's `go_*` and `process_*`."},
}

// examples are queries for the metrics that an operator reaches for first.
var examples = map[*names.Metric]string{
	names.CollectiveDuration: fmt.Sprintf(`histogram_quantile(0.99, sum by (%s, %s) (rate(%s[5m])))`, names.LabelCommunicator, names.LabelCollective, names.CollectiveDuration),
	names.CollectiveWait:     fmt.Sprintf(`histogram_sum(sum by (%[1]s) (rate(%[2]s[5m]))) / histogram_sum(sum by (%[1]s) (rate(%[3]s[5m])))`, names.LabelCommunicator, names.CollectiveWait, names.CollectiveDuration),
	names.Collectives:        fmt.Sprintf(`sum by (%s, %s) (rate(%s{%s!="ok"}[5m]))`, names.LabelJob, names.LabelResult, names.Collectives, names.LabelResult),
	names.CollectiveBytes:    fmt.Sprintf(`sum by (%s) (rate(%s[1m]))`, names.LabelCommunicator, names.CollectiveBytes),
	names.CommOldestOpen:     fmt.Sprintf(`max by (%s, %s) (%s) > 30`, names.LabelJob, names.LabelCommunicator, names.CommOldestOpen),
	names.CommOpenMembers:    fmt.Sprintf(`sum by (%[1]s) (%[2]s) / sum by (%[1]s) (%[3]s)`, names.LabelCommunicator, names.CommOpenMembers, names.CommMembers),
	names.Windows:            fmt.Sprintf(`sum by (%s) (rate(%s{%s!="none"}[5m]))`, names.LabelCause, names.Windows, names.LabelCause),
	names.Ranks:              fmt.Sprintf(`sum by (%s) (%s{%s="%s"})`, names.LabelJob, names.Ranks, names.LabelState, names.StateGone),
	names.RecorderLost:       fmt.Sprintf(`sum(rate(%s[5m])) / sum(rate(%s[5m]))`, names.RecorderLost, names.RecorderRecords),
	names.SourceUp:           fmt.Sprintf(`%s == 0`, names.SourceUp),
	names.SpansDropped:       fmt.Sprintf(`sum by (%s) (rate(%s[5m]))`, names.LabelReason, names.SpansDropped),
	names.GPUXids:            fmt.Sprintf(`sum by (instance, %[1]s, %[2]s) (increase(%[3]s{%[4]s=~"%[5]s|%[6]s"}[1h])) > 0`, names.LabelGPU, names.LabelXid, names.GPUXids, names.LabelEffect, names.EffectApplication, names.EffectGPU),
	names.GPUThrottled:       fmt.Sprintf(`%s{%s!="power_cap"} == 1`, names.GPUThrottled, names.LabelReason),
	names.GPUTemperature:     fmt.Sprintf(`%[1]s * on (instance, %[2]s) group_left (%[3]s, %[4]s) %[5]s`, names.GPUTemperature, names.LabelGPU, names.LabelUUID, names.LabelModel, names.GPUInfo),
	names.GPURanks:           fmt.Sprintf(`sum by (%[1]s) (%[2]s * on (instance, %[3]s) group_right () %[4]s)`, names.LabelJob, names.GPUPower, names.LabelGPU, names.GPURanks),
	names.NICPortUp:          fmt.Sprintf(`%[1]s == 0 and on (instance, %[2]s, %[3]s) max_over_time(%[1]s[1h]) == 1`, names.NICPortUp, names.LabelDevice, names.LabelPort),
	names.NICRetransmissions: fmt.Sprintf(`sum by (instance, %[1]s, %[2]s) (rate(%[3]s[5m])) > 0`, names.LabelDevice, names.LabelCounter, names.NICRetransmissions),
	names.NICTransmitted:     fmt.Sprintf(`rate(%[1]s[1m]) / on (instance, %[2]s, %[3]s) %[4]s`, names.NICTransmitted, names.LabelDevice, names.LabelPort, names.NICPortRate),
	names.IncidentInfo:       fmt.Sprintf(`%s{%s="confirmed"}`, names.IncidentInfo, names.LabelLevel),
	names.IncidentsOpen:      fmt.Sprintf(`sum by (%s) (%s{%s="confirmed"}) > 0`, names.LabelClass, names.IncidentsOpen, names.LabelLevel),
	names.IncidentLatency:    fmt.Sprintf(`histogram_quantile(0.5, sum by (%s) (rate(%s[1d])))`, names.LabelClass, names.IncidentLatency),
	names.JobRanks:           fmt.Sprintf(`sum by (%s) (%s{%s="%s"})`, names.LabelJob, names.JobRanks, names.LabelState, names.StateRunning),
	names.JobStep:            fmt.Sprintf(`rate(%s[5m])`, names.JobStep),
	names.AgentsConnected:    fmt.Sprintf(`%s{%s="%s"} > 0`, names.AgentsConnected, names.LabelState, names.StateLost),
	names.DelayRatio:         fmt.Sprintf(`topk(5, %s)`, names.DelayRatio),
	names.Actions:            fmt.Sprintf(`sum by (%s, %s) (increase(%s[1d]))`, names.LabelAction, names.LabelOutcome, names.Actions),
	names.BreakerOpen:        fmt.Sprintf(`max by (%s) (%s) == 1`, names.LabelScope, names.BreakerOpen),
	names.PreflightNodeGood:  fmt.Sprintf(`%s == 0`, names.PreflightNodeGood),
	names.PreflightBandwidth: fmt.Sprintf(`bottomk(5, %s)`, names.PreflightBandwidth),
	names.SeriesOverflow:     fmt.Sprintf(`sum by (%s) (increase(%s[1h])) > 0`, names.LabelFamily, names.SeriesOverflow),
}

// Reference returns docs/metrics.md.
func Reference() string {
	var b strings.Builder
	b.WriteString("<!-- Generated by go generate ./exporters/names. Do not edit. -->\n\n# Metrics and span attributes\n\n")
	b.WriteString("Every series is bounded by design: no rank, peer, queue pair, sequence or process id is a label, except on the `_info`\n" +
		"metrics of open incidents and in the capped delay matrix. Join the details with `group_left`. A family that reaches its cap\n" +
		"exports no more label sets and counts them in `" + names.SeriesOverflow.Name + "`.\n\n" +
		"Histograms are native (factor 1.1) with a few classic buckets as fallback; the queries below are for native histograms.\n" +
		"For classic ones add `le` to the `by` clause and `_bucket` to the name.\n")
	for _, c := range components {
		fmt.Fprintf(&b, "\n## %s\n\n%s\n\n| metric | type | unit | labels | meaning |\n| --- | --- | --- | --- | --- |\n", c.title, c.intro)
		for _, m := range names.Metrics() {
			if m.From == c.from {
				fmt.Fprintf(&b, "| `%s` | %s | %s | %s | %s |\n", m.Name, m.Type, m.Unit, code(m.Labels), m.Help)
			}
		}
		b.WriteString("\nQueries to start from:\n\n")
		for _, m := range names.Metrics() {
			if q, ok := examples[m]; ok && m.From == c.from {
				fmt.Fprintf(&b, "- `%s`\n", q)
			}
		}
	}
	b.WriteString("\n## Span attributes\n\n" +
		"One trace per collective; one span per rank, children `wait` and `transfer`, abnormal transport windows as `window` events.\n" +
		"One trace per confirmed incident, linked to the collective that shows it: the incident, its detection, and each action on it.\n" +
		"The resource carries `service.name`, `host.name` and whatever `OTEL_RESOURCE_ATTRIBUTES` adds.\n\n" +
		"| attribute | type | on | meaning |\n| --- | --- | --- | --- |\n")
	for _, a := range names.Attributes() {
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", a.Key, a.Type, a.On, a.Help)
	}
	return b.String()
}

func code(labels []string) string {
	quoted := make([]string, len(labels))
	for i, l := range labels {
		quoted[i] = "`" + l + "`"
	}
	return strings.Join(quoted, " ")
}
