package rules

import "github.com/lockstep-ccl/lockstep/exporters/names"

// remediation watches the last link: what should act, and whether it may.
func remediation(c Config) []alert {
	return []alert{
		{
			name: names.AlertRemediatorDown, expr: down(c, names.Remediator, names.AlertRemediatorDown), hold: c.DownFor, severity: critical,
			summary:     `Remediator {{ $labels.instance }} does not answer scrapes`,
			description: `Nothing restarts a hung job until it is back. Alertmanager keeps telling it, so that it acts on what is still firing then.`,
			dashboard:   names.DashboardPipeline,
		},
		{
			name: names.AlertBreakerOpen, severity: critical,
			expr:        promql(`max by (instance, scope) ({open}) == 1`, "open", names.BreakerOpen),
			summary:     `Remediation breaker {{ $labels.scope }} is open`,
			description: `Too many actions in too short a time: a cause that restarts do not cure. No action is taken in this scope until a person closes the breaker.`,
			dashboard:   names.DashboardPipeline,
		},
		{
			name: names.AlertActionFailed, severity: critical,
			expr: promql(`
sum by (instance, action, class) (
{increase}
) > 0`, "increase", newly(names.Actions, `{outcome=~"failed|unfenced"}`, c)),
			summary:     `Remediation: {{ $labels.action }} after a {{ $labels.class }} failed`,
			description: `The actuator could not do it, after retries. The job is likely still down; the journal has the actuator's answer.`,
			dashboard:   names.DashboardPipeline,
		},
		{
			name: names.AlertActionStuck, hold: c.StuckFor, severity: warning,
			expr:        promql(`max by (instance) ({pending}) > 0`, "pending", names.ActionsPending),
			summary:     `{{ $value }} remediation actions do not finish`,
			description: `Actions are journaled and neither done nor failed for longer than any should take.`,
			dashboard:   names.DashboardPipeline,
		},
		{
			name: names.AlertWebhookRefused, severity: warning,
			expr: promql(`sum by (instance, result) (increase({webhooks}{result!~"accepted|duplicate|resolved|stale"}[{window}])) > 0`,
				"webhooks", names.Webhooks, "window", c.Window),
			summary:     `Remediator {{ $labels.instance }} refuses webhooks: {{ $labels.result }}`,
			description: `Alerts reach the remediator in a form that it may not act on, or from someone who may not send them. An incident may go without an action.`,
			dashboard:   names.DashboardPipeline,
		},
	}
}
