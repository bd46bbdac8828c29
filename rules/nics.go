package rules

import (
	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// nics tells of RDMA ports that are broken, or make their traffic slow.
func nics(c Config) []alert {
	const port = `Port {{ $labels.device }}:{{ $labels.port }} of {{ $labels.instance }}`
	return []alert{
		{
			name: names.AlertNICPortDown, severity: warning,
			expr: promql(`
max by (instance, device, port) (
  {up} == 0
  and on (instance, device, port)
  (max_over_time({up}[{memory}]) == 1 or {told})
) == 0
and on (instance)
sum by (instance) (max_over_time({ranks}{state!~"{none}"}[{window}])) > 0`,
				"up", names.NICPortUp, "memory", c.Memory, "told", told(names.AlertNICPortDown), "ranks", names.Ranks, "none", names.StateUnknown+"|"+names.StateGone+"|"+names.StateExited, "window", c.NICWindow),
			summary:     port + ` is down`,
			description: `It was up before, and the node has ranks. What has another path goes on over it, with less bandwidth and no reserve; NCCL's connections over the port fail. lockstep_nic_port_state tells what the port says.`,
			dashboard:   names.DashboardNode,
		},
		{
			name: names.AlertNICPortFlapping, severity: warning,
			expr: promql(`
sum by (instance, device, port) (increase({port}[{window}])) >= {flaps}
or
sum by (instance, device, port) (increase({link}[{window}])) >= {flaps}`,
				"port", names.NICPortFlaps, "link", names.NICLinkFlaps, "window", c.NICWindow, "flaps", c.NICFlaps),
			summary:     port + ` goes down and up again`,
			description: `Each time costs a pause of whatever uses it. It, a member of its bond, the cable, the transceiver or the switch's port is bad.`,
			dashboard:   names.DashboardNode,
		},
		{
			name: names.AlertNICRetransmissions, hold: c.TroubleFor, severity: warning,
			expr: promql(`sum by (instance, device, port) (rate({retransmissions}[{window}])) > {most}`,
				"retransmissions", names.NICRetransmissions, "window", c.Window, "most", c.NICRetransmissions),
			summary:     port + ` counts {{ $value | humanize }} lost or repeated packets a second`,
			description: `RDMA goes back to what was lost, or waits until a timer runs out: every collective through the port waits with it. The counters' names tell which; a network that is meant to be lossless drops packets.`,
			dashboard:   names.DashboardNode,
		},
		{
			name: names.AlertNICCongestion, hold: c.TroubleFor, severity: info,
			expr: promql(`sum by (instance, device, port) (rate({congestion}[{window}])) > {most}`,
				"congestion", names.NICCongestion, "window", c.Window, "most", c.NICCongestion),
			summary:     port + ` counts {{ $value | humanize }} marks of congestion a second`,
			description: `Switches mark packets and senders slow down. Some of it is how a full network works; when collectives are slow as well, several connections share a link that others do not use.`,
			dashboard:   names.DashboardNode,
		},
		{
			name: names.AlertNICCountersUnreadable, hold: c.TroubleFor, severity: info,
			expr: promql(`sum by (instance, device, port) (increase({errors}[{window}])) > 0`,
				"errors", names.NICReadErrors, "window", c.Window),
			summary:     port + ` has states or counters that cannot be read`,
			description: `Some of what the port would tell is missing; the rest goes on. lockstep nics names the files.`,
			dashboard:   names.DashboardNode,
		},
		{
			name: names.AlertNICDriverUnresponsive, severity: critical,
			expr:        promql(`max by (instance) ({unresponsive}) == 1`, "unresponsive", names.NICDriverUnresponsive),
			summary:     `A NIC driver of {{ $labels.instance }} does not answer`,
			description: `A read of a port's state or counters has not returned for longer than it may take (--nic.bound, 10 s). The NIC's firmware hangs or is being reset; what opens a connection hangs as well. The agent's log names the file, hence the device.`,
			dashboard:   names.DashboardNode,
		},
	}
}
