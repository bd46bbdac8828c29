package rules

import (
	"fmt"
	"strings"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// denied are the refusals of which LockstepAccessDenied tells: of somebody who claims to be another, or
// costs others their place. No two rows take series of the same labels. The refusals that no alert tells
// of have their reasons in names.Refusals.
var denied = []struct {
	metric  *names.Metric
	reasons []string // values of the label reason; nil: it has none
	by      string
	when    string // in a template, unless the reasons tell it
	says    string
}{
	{names.RecordersRefused, []string{"process", "job"}, "instance, reason", "",
		`A user of the node wrote a recorder that speaks for another user's {{ $labels.reason }}.`},
	{names.Disbelieved, []string{"unknown_incident"}, "instance, reason", "",
		`An alert named an incident that the job's master does not have.`},
	{names.RankRefused, []string{"unproved", "replayed", "crowded"}, "training_job, instance, reason", "",
		`Connections to the ranks of {{ $labels.training_job }} were turned away ({{ $labels.reason }}): they do not know the job's secret, or there are too many.`},
	{names.WebRefused, []string{names.WebPassword}, "instance, reason", "",
		`Somebody tried a password for its page that is not the right one.`},
	{names.PlannerRefused, []string{"certificate"}, "instance, reason", `and (eq $labels.reason "certificate") (not $labels.training_job)`,
		`A caller of the planner showed a certificate of another node, job or role.`},
	{names.CoordinatorRefused, []string{"certificate", "message", "another_job", "full"}, "training_job, instance, reason", "",
		`The coordinator of {{ $labels.training_job }} turned a host away ({{ $labels.reason }}): its certificate is of another node or job, it was started with other flags or another version, or there are too many.`},
	{names.ConnsCrowded, nil, "instance, listener", "$labels.listener",
		`Its listener ({{ $labels.listener }}) held as many connections as it may, and hung up on some of the address that has most.`},
	{names.MasterDenied, nil, "training_job, instance", "", deniedMaster},
	{names.MasterMessages, nil, "training_job, instance", "", deniedMaster},
}

// deniedMaster is the last of the chain.
const deniedMaster = `A caller of {{ $labels.training_job }}'s master showed a certificate of another node, job or role, or sent what no agent sends.`

func deniedExpr(c Config) string {
	var terms []string
	for _, d := range denied {
		matchers := ""
		if d.reasons != nil {
			matchers = fmt.Sprintf("{reason=~%q}", strings.Join(d.reasons, "|"))
		}
		terms = append(terms, fmt.Sprintf("sum by (%s) (\n%s\n) > 0", d.by, newly(d.metric, matchers, c)))
	}
	return strings.Join(terms, "\nor\n")
}

func deniedText() string {
	var b strings.Builder
	for _, d := range denied {
		if d.says == deniedMaster {
			continue
		}
		when := d.when
		if when == "" {
			when = `eq $labels.reason "` + strings.Join(d.reasons, `" "`) + `"`
		}
		open := "{{ if "
		if b.Len() > 0 {
			open = "{{ else if "
		}
		b.WriteString(open + when + " }}" + d.says)
	}
	return b.String() + "{{ else }}" + deniedMaster + "{{ end }}"
}
