package rules

import (
	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// connections tells of jobs that go on with less than they began with.
func connections(c Config) []alert {
	return []alert{
		{
			name: names.AlertConnectionPathDown, severity: warning,
			expr: promql(`
sum by (training_job, instance, transport) ({down}) > 0
and on (training_job, instance, transport) (
  sum by (training_job, instance, transport) (increase({switches}[{memory}])) > 0
  or
  {told}
)`,
				"down", names.ConnBroken, "switches", names.ConnSwitches, "memory", c.Memory, "told", told(names.AlertConnectionPathDown)),
			summary:     `{{ $labels.training_job }}: {{ $value }} paths of connections from {{ $labels.instance }} are down`,
			description: `A port or link broke and the job goes on over other paths, with less bandwidth and without a reserve: the next failure ends it. The node's NIC alerts and the recorder's link records name the port.`,
			dashboard:   names.DashboardNode,
		},
	}
}
