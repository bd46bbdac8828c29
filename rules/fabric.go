package rules

import "github.com/lockstep-ccl/lockstep/exporters/names"

// fabric tells of links between switches, as the planner's probes and plan have them.
func fabric(c Config) []alert {
	const link = `{{ $labels.leaf }} {{ $labels.direction }} {{ $labels.spine }} (#{{ $labels.link }})`
	return []alert{
		{
			name: names.AlertFabricLinkDead, severity: warning,
			expr:        promql(`max by (instance, leaf, spine, direction, link) ({up}) == 0`, "up", names.FabricLinkUp),
			summary:     `Link ` + link + ` carries nothing`,
			description: `No probe gets through, or no source port leads over it any more. Planned connections have left it; what is not planned may be hashed onto it.`,
			dashboard:   names.DashboardFabric,
		},
		{
			name: names.AlertFabricLinkLossy, severity: warning,
			expr: promql(`
max by (instance, leaf, spine, direction, link) ({loss}) > 0
unless on (instance, leaf, spine, direction, link)
{up} == 0`, "loss", names.FabricLinkLoss, "up", names.FabricLinkUp),
			summary:     `Link ` + link + ` loses {{ $value | humanizePercentage }} of packets`,
			description: `Inferred from all paths that lose. Planned connections leave it where there is another; what is not planned is slow over it.`,
			dashboard:   names.DashboardFabric,
		},
		{
			name: names.AlertFabricSuspected, severity: info,
			expr: promql(`
max by (instance, leaf, spine, direction, link) ({suspected}) == 1
unless on (instance, leaf, spine, direction, link)
{loss} > 0`, "suspected", names.FabricSuspected, "loss", names.FabricLinkLoss),
			summary:     `A job loses segments over link ` + link + `, or another of the paths with it`,
			description: `Its senders lose much more over paths with this link than over others. The job's lanes leave these paths; probes look closely, and have not proven yet which link it is.`,
			dashboard:   names.DashboardFabric,
		},
		{
			name: names.AlertFabricUnbalanced, hold: c.TroubleFor, severity: info,
			expr: promql(`
max by (instance, leaf, direction) ({planned} / {rate}) > {most} * avg by (instance, leaf, direction) ({planned} / {rate} unless {up} == 0)
and on (instance, leaf, direction)
max by (instance, leaf, direction) ({planned} / {rate}) > 0.5
and on (instance, leaf, direction)
sum by (instance, leaf, direction) ({lanes}) >= 4 * count by (instance, leaf, direction) ({up} == 1)`,
				"planned", names.FabricLinkPlanned, "rate", names.FabricLinkRate, "up", names.FabricLinkUp, "lanes", names.FabricLinkLanes, "most", c.FabricUneven),
			summary:     `Links {{ $labels.direction }} of {{ $labels.leaf }} are not even: the fullest is planned for {{ $value | humanizePercentage }} of its rate`,
			description: `The planner has enough lanes to fill the leaf's links alike and cannot: source ports of some paths are not found, or moves do not keep up.`,
			dashboard:   names.DashboardFabric,
		},
		{
			name: names.AlertPlannerDown, expr: down(c, names.Planner, names.AlertPlannerDown), hold: c.DownFor, severity: warning,
			summary:     `Planner {{ $labels.instance }} does not answer scrapes`,
			description: `Connections keep the paths that they have and new ones hash; a link that fails now is left by nobody's plan.`,
			dashboard:   names.DashboardFabric,
		},
	}
}
