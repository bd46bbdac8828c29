package monitoring

import (
	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// standing is why alerts of slowness are muted by those of hangs.
const standing = "a job that stands still is slow, too"

// hangs are what explains much else.
var hangs = oneOf(names.AlertCommunicationHang, names.AlertNoncommunicationHang)

// mute is a rule of inhibition: while source fires, target is not sent, where both agree
// in the labels.
type mute struct {
	why            string // a comment for readers of this table
	source, target []string
	equal          []string
}

func mutes() []mute {
	hardware := `alertname=~"LockstepGPU.*|LockstepNIC.*|` + names.AlertConnectionPathDown + `"`
	lesser := `severity=~"warning|info"`
	return []mute{
		{"a hang names the node, whose GPUs and NICs then are its evidence",
			[]string{`alertname=~"` + hangs + `"`, names.LabelNode + `!=""`}, []string{hardware, lesser}, []string{names.LabelNode}},
		{"a confirmed verdict is more than a suspicion",
			[]string{names.LabelLevel + `="` + names.LevelConfirmed + `"`}, []string{`alertname="` + names.AlertFaultSuspected + `"`}, []string{names.LabelJob}},
		{standing,
			[]string{`alertname=~"` + hangs + `"`}, []string{`alertname=~"` + oneOf(names.AlertCommunicationSlow, names.AlertNoncommunicationSlow, names.AlertFallbackSlow) + `"`}, []string{names.LabelJob}},
		{"a driver that does not answer, and a GPU that is lost, explain what is counted on them",
			[]string{`alertname=~"` + oneOf(names.AlertGPUDriverUnresponsive, names.AlertGPULost) + `"`}, []string{`alertname=~"LockstepGPU.*"`, lesser}, []string{"instance"}},
		{"an agent that is down says nothing of its parts",
			[]string{`alertname="` + names.AlertAgentDown + `"`}, []string{`alertname=~"` + oneOf(names.AlertSourceDown, names.AlertAgentDisconnected, names.AlertReportsDropped, names.AlertClockError) + `"`}, []string{"instance"}},
		{"without a master there is nobody to lose agents or not to see ranks",
			[]string{`alertname="` + names.AlertMasterDown + `"`}, []string{`alertname=~"` + oneOf(names.AlertAgentLost, names.AlertRanksUnseen, names.AlertAgentDisconnected) + `"`}, []string{names.LabelJob}},
	}
}

// Receivers, by what is asked of a person.
const (
	remediator = "remediator"
	now        = "people-now"
	today      = "people-today"
	nobody     = "nobody"
)

func (c Config) alertmanager() object {
	receivers := []object{}
	var routes []object
	if a := c.Alertmanager; a.Remediator != "" {
		receivers = append(receivers, object{"name": remediator, "webhook_configs": []object{{
			"url": a.Remediator, "send_resolved": true, "max_alerts": 0, // a truncated webhook is refused
			"http_config": object{"authorization": object{"type": "Bearer", "credentials_file": a.TokenFile}},
		}}})
		routes = append(routes, object{
			"receiver": remediator, "matchers": []string{names.LabelIncident + `!=""`},
			// One group an incident: the first notification of a new one waits for nobody.
			"group_by":   []string{names.LabelJob, names.LabelIncident, "alertname"},
			"group_wait": "0s", "group_interval": "1s", "repeat_interval": duration(a.RepeatInterval),
			"continue": true, // people are told as well
		})
	}
	for _, r := range []struct{ severity, receiver, wait, repeat string }{{"critical", now, "10s", "1h"}, {"warning", today, "1m", "12h"}, {"info", nobody, "1m", "1d"}} {
		routes = append(routes, object{
			"receiver": r.receiver, "matchers": []string{`alertname=~"Lockstep.*"`, `severity="` + r.severity + `"`},
			"group_by": []string{names.LabelJob, "alertname"}, "group_wait": r.wait, "repeat_interval": r.repeat,
		})
	}
	receivers = append(receivers, object{"name": now}, object{"name": today}, object{"name": nobody})
	var inhibit []object
	for _, m := range mutes() {
		inhibit = append(inhibit, object{"source_matchers": m.source, "target_matchers": m.target, "equal": m.equal})
	}
	return object{
		"route":         object{"receiver": today, "group_by": []string{"alertname"}, "routes": routes},
		"inhibit_rules": inhibit,
		"receivers":     receivers,
	}
}

func (c Config) prometheus() object {
	p := c.Prometheus
	var scrapes []object
	for _, s := range []struct {
		job     string
		targets []string
	}{{"lockstep-agent", p.Agents}, {"lockstep-master", p.Masters}, {"lockstep-remediator", p.Remediators}, {"lockstep-planner", p.Planners}} {
		if len(s.targets) > 0 {
			scrapes = append(scrapes, object{"job_name": s.job, "static_configs": []object{{"targets": s.targets}}})
		}
	}
	out := object{
		"global": object{
			"scrape_interval": duration(p.ScrapeInterval), "evaluation_interval": duration(p.ScrapeInterval),
			"scrape_native_histograms": true, "always_scrape_classic_histograms": true,
		},
		"rule_files":     []string{rulesFile},
		"scrape_configs": scrapes,
		"storage":        object{"exemplars": object{"max_exemplars": 100_000}},
	}
	if len(p.Alertmanagers) > 0 {
		out["alerting"] = object{"alertmanagers": []object{{"static_configs": []object{{"targets": p.Alertmanagers}}}}}
	}
	return out
}
