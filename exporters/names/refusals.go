package names

import (
	"fmt"
	"strings"
)

// Refusal is a way in which a part of Lockstep turns somebody away, and who hears of it. Package rules
// makes LockstepAccessDenied of these, docs/design/trust.md shows them, and tests hold that each counter
// of refusals is here with all its reasons.
type Refusal struct {
	What    string
	Metric  *Metric
	Reasons []string // values of the label that the metric has for it; nil: all that there are
	Alert   string   // "" for none
	Why     string   // there is none
	Test    string
}

// Refusals returns all of them.
func Refusals() []Refusal {
	return []Refusal{
		{"a call to a master, by a certificate of another node, job or role", MasterDenied, nil, AlertAccessDenied, "", "TestAttackers/OtherCertificates"},
		{"a message that no agent sends", MasterMessages, nil, AlertAccessDenied, "", "TestAttackers/HostileMessages"},
		{"a connection to a master without a certificate of its authority", MasterHandshakes, nil, "",
			"any port scanner is one, and it has said nothing; when it is an agent of yours, LockstepAgentDisconnected tells", "TestAttackers/HostOnTheNetwork"},
		{"an agent's word about ranks of a node that is heard", MasterForeign, nil, AlertIdentityConflict, "", "TestAttackers/AgentOfAnotherNode"},
		{"another word of an agent's that contradicts what is known", MasterRefused, nil, "",
			"late words of the last attempt are normal at each restart; what is about others' ranks counts above", "TestAttackers/AgentOfAnotherNode"},
		{"a second agent of a node", MasterDuplicates, nil, AlertIdentityConflict, "", "TestAttackers/StolenCertificate"},
		{"a fence that cannot be (a coming attempt, too many at a time)", MasterFences, []string{"refused"}, "",
			"only a remediator gets so far, and its action ends unfenced: LockstepActionFailed", "TestFenceIsTheRemediators"},
		{"an alert about an incident that no master has", Disbelieved, []string{"unknown_incident"}, AlertAccessDenied, "", "TestAttackers/WhoCanPostAlerts"},
		{"an alert about one that is over, or about another attempt", Disbelieved, []string{"closed", "other_attempt", "stale"}, "",
			"Alertmanager repeats alerts, and jobs are restarted meanwhile", "TestTheMasterIsBelieved"},
		{"an alert of whose incident no master can be asked", Disbelieved, []string{"no_answer"}, "", "the action ends as failed: LockstepActionFailed", "TestTheMasterIsBelieved"},
		{"a webhook or a request without the door's token, or that is none", Webhooks, []string{"unauthorized", "malformed", "version", "truncated", "incomplete_alert", "journal_error", "job_full"},
			AlertWebhookRefused, "", "TestEachTokenIsForItsDoor"},
		{"an action that a breaker holds", Actions, []string{"refused"}, "", "the open breaker itself is told: LockstepBreakerOpen", "TestBreakerStaysOpenUntilClosed"},
		{"a recorder that speaks for another user's process or job", RecordersRefused, []string{"process", "job"}, AlertAccessDenied, "", "TestAttackers/HostileRecorders"},
		{"a directory or file of recorders that is not one user's alone", RecordersRefused, []string{"directory", "file"}, "",
			"anybody can make a directory of any name: it costs that name, and whose ranks are unseen for it is told by LockstepRanksUnseen", "TestAttackers/HostileRecorders"},
		{"a connection to a rank that does not know the job's secret, repeats another's words, or is one too many", RankRefused, []string{"unproved", "replayed", "crowded"}, AlertAccessDenied, "", "TestAttackers/RendezvousFlood"},
		{"one that says nothing, or something else", RankRefused, []string{"silent", "garbage"}, "", "any port scanner is one", "TestAttackers/RendezvousFlood"},
		{"a host of `lockstep run`, by a certificate of another node or job, of another version or other flags, or one too many", CoordinatorRefused, []string{"certificate", "message", "another_job", "full"},
			AlertAccessDenied, "", "TestAttackers/HostsOfAJob"},
		{"a second supervisor of a node", CoordinatorRefused, []string{"name"}, AlertIdentityConflict, "", "TestAttackers/HostsOfAJob"},
		{"a connection to the coordinator without a certificate of its authority, or that says nothing", CoordinatorRefused, []string{"handshake", "silent"}, "",
			"any port scanner is one; when it is a host of yours, LockstepHostsMissing tells", "TestAttackers/HostsOfAJob"},
		{"a caller of the planner, by a certificate of another node, job or role", PlannerRefused, []string{"certificate"}, AlertAccessDenied, "", "TestTenants"},
		{"one without a certificate of its authority", PlannerRefused, []string{"handshake"}, "", "any port scanner is one", "TestRefusedByThePlanner"},
		{"a request to the planner that is malformed, or over a bound", PlannerRefused, []string{"request"}, "", "it costs whose it is its plan, and nothing else: its connections hash", "TestMessagesAreBounded"},
		{"a connection over a listener's bound", ConnsCrowded, nil, AlertAccessDenied, "", "TestAttackers/Floods"},
		{"a wrong password for a page", WebRefused, []string{WebPassword}, AlertAccessDenied, "", "TestMetricsBehindTLSAndAPassword"},
		{"a request to a page without a password, from elsewhere, or over its configuration's rate", WebRefused, []string{WebAnonymous, WebElsewhere, WebLimited}, "",
			"a browser's first request is without; a scrape that is refused shows as a target that is down", "TestMetricsBehindTLSAndAPassword"},
	}
}

// RefusalTable is the table of docs/design/trust.md.
func RefusalTable() string {
	var b strings.Builder
	b.WriteString("| refused | counted as | alert, or why none | test |\n| --- | --- | --- | --- |\n")
	for _, r := range Refusals() {
		counted := "`" + r.Metric.Name + "`"
		if r.Reasons != nil {
			counted += ": " + strings.Join(r.Reasons, ", ")
		}
		heard := r.Alert
		if heard == "" {
			heard = "none: " + r.Why
		}
		fmt.Fprintf(&b, "| %s | %s | %s | `%s` |\n", r.What, counted, heard, r.Test)
	}
	return b.String()
}
