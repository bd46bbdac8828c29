package rules

import (
	"fmt"
	"slices"
	"strings"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// verdictLabels travel from an incident into its alerts: all but the trace id,
// which may change while the incident is the same and would make it another alert.
var verdictLabels = slices.DeleteFunc(slices.Clone(names.IncidentInfo.Labels), func(l string) bool { return l == names.LabelTraceID })

// openTrace finds the trace id of the alert's incident when the alert is sent.
var openTrace = fmt.Sprintf(`{{ with printf "%s{%s=%%q}" $labels.%s | query }}{{ . | first | label "%s" }}{{ end }}`,
	names.IncidentInfo, names.LabelIncident, names.LabelIncident, names.LabelTraceID)

// suspectLabels are those of a suspicion. Its reason may change by the second, and a
// reason more would be another alert, which begins to wait anew.
var suspectLabels = slices.DeleteFunc(slices.Clone(verdictLabels), func(l string) bool { return l == names.LabelReason })

const suspect = `{{ $labels.culprit }}{{ with $labels.node }} on node {{ . }}{{ end }}`

const blame = suspect + `{{ with $labels.reason }} ({{ . }}){{ end }}`

const evidence = ` The evidence is on the master's status page under incident {{ $labels.incident }}{{ with $labels.communicator }}, in communicator {{ . }}{{ end }}.`

// verdicts turns the master's open incidents into alerts. Confirmed ones fire
// at once: the master has debounced them.
func verdicts(c Config) []alert {
	confirmed := func(class, severity, summary, description string) alert {
		return alert{
			name:        names.VerdictAlerts[class],
			expr:        incidents(verdictLabels, names.LevelConfirmed, class),
			severity:    severity,
			summary:     `{{ $labels.training_job }}: ` + summary,
			description: description + evidence,
			dashboard:   names.DashboardCommunicator,
			annotations: map[string]string{names.LabelTraceID: openTrace},
		}
	}
	suspected := func(severity string, classes ...string) alert {
		return alert{
			name:        names.AlertFaultSuspected,
			expr:        incidents(suspectLabels, names.LevelSuspected, classes...),
			hold:        c.SuspectedFor,
			severity:    severity,
			summary:     `{{ $labels.training_job }}: suspected {{ $labels.class }}, perhaps ` + suspect,
			description: `Something looks like a {{ $labels.class }} and is not certain enough to act on, such as one rank that computes or writes a checkpoint while the others wait.` + evidence,
			dashboard:   names.DashboardCommunicator,
			annotations: map[string]string{names.LabelTraceID: openTrace},
		}
	}
	return []alert{
		confirmed(names.ClassCommunicationHang, critical,
			`communication hang, `+blame,
			`All members entered the collective, it does not end, and the transport makes no progress. To blame: `+blame+`.`),
		confirmed(names.ClassNoncommunicationHang, critical,
			`hang outside communication, `+blame,
			`Members wait in a collective for a rank that has not entered it. To blame: `+blame+`.`),
		confirmed(names.ClassCommunicationSlow, warning,
			`communication slow, `+blame,
			`Members enter together and the transfer takes longer than normal. To blame: `+blame+`.`),
		confirmed(names.ClassNoncommunicationSlow, warning,
			`straggler, `+blame,
			`The same rank enters collectives last, again and again, and all others wait for it. To blame: `+blame+`.`),
		suspected(warning, names.ClassCommunicationHang, names.ClassNoncommunicationHang),
		suspected(info, names.ClassCommunicationSlow, names.ClassNoncommunicationSlow),
	}
}

// incidents selects open incidents, one series each: max drops the scrape's
// labels, so that a master that restarts elsewhere continues its alerts.
func incidents(labels []string, level string, classes ...string) string {
	return promql(`
max by ({labels}) (
  {info}{level="{level}", class=~"{classes}"}
) == 1`,
		"labels", strings.Join(labels, ", "),
		"info", names.IncidentInfo,
		"level", level,
		"classes", strings.Join(classes, "|"))
}
