package dashboards

import (
	"github.com/grafana/grafana-foundation-sdk/go/units"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// node answers: is it this host?
func node() board {
	here := []string{onNode, inJob}
	const port, portName = "device, port", "{{device}}:{{port}}"
	slow := append([]string{`cause!="none"`}, here...)
	return board{
		uid: names.DashboardNode, title: "Lockstep / Node",
		why:       "One node as its agent sees it: its ranks, its connections and the agent's own sources.",
		variables: []variable{vSource, vNode, vJobs},
		rows: []row{
			{"Now", []panel{
				{
					title: "Agent", view: number, width: 6, height: 4,
					why:     "Whether the agent answers scrapes.",
					targets: []target{{expr: highest("", `up{`+onNode+`}`)}},
					values:  up,
					alerts:  []string{names.AlertAgentDown},
				},
				{
					title: "Stream to master", view: number, width: 6, height: 4,
					why:     "Whether progress reaches the master of each job.",
					targets: []target{{expr: lowest("training_job", of(names.StreamConnected, here...)), legend: "{{training_job}}"}},
					values:  up,
					alerts:  []string{names.AlertAgentDisconnected, names.AlertAgentLost},
				},
				{
					title: "Steps behind", view: number, width: 6, height: 4,
					why:     "Steps that this node's ranks are behind where the job's foremost was one rate interval ago: master and agent are not scraped at the same moment.",
					targets: []target{{expr: "clamp_min(" + highest("training_job", "min_over_time("+of(names.JobStep, inJob)+"["+interval+"])") + " - on (training_job) " + highest("training_job", of(names.AgentStep, here...)) + ", 0)", legend: "{{training_job}}"}},
					steps:   []step{{2, fair}},
				},
				{
					title: "Records lost", view: number, width: 6, height: 4, unit: units.PercentUnit,
					why:     "Flight records overwritten before the agent read them. 0 is normal.",
					targets: []target{{expr: sum("", rate(names.RecorderLost, here...)) + " / (" + sum("", rate(names.RecorderLost, here...)) + " + " + sum("", rate(names.RecorderRecords, here...)) + ")"}},
					steps:   []step{{0.001, fair}, {0.05, bad}},
					alerts:  []string{names.AlertRecorderLoss},
				},
			}},
			{"Ranks", []panel{
				{
					title: "Rank processes here", view: stacked, width: 12, height: 7,
					why:     "Local rank processes by state.",
					targets: []target{{expr: sum("state", of(names.Ranks, here...)), legend: "{{state}}"}},
					series:  processes,
				},
				{
					title: "Waiting, here and elsewhere", view: lines, width: 12, height: 7, unit: units.PercentUnit,
					why: "Share of the time inside collectives that is waiting. A node that waits much less than the others is the one that they wait for.",
					targets: []target{
						{expr: waitShare("", here...), legend: "this node"},
						{expr: waitShare("", inJob), legend: "all nodes"},
					},
					alerts: []string{names.AlertNoncommunicationSlow},
				},
				{
					title: "Collectives here", view: stacked, width: 12, height: 7, unit: units.OpsPerSecond,
					why:     "Collectives ended a second by communicator, summed over local ranks.",
					targets: []target{{expr: sum("communicator", rate(names.Collectives, here...)), legend: "{{communicator}}"}},
				},
				{
					title: "Mean duration here", view: lines, width: 12, height: 7, unit: units.Seconds,
					why:     "Mean time inside a collective of local ranks, by communicator.",
					targets: []target{{expr: average(names.CollectiveDuration, "communicator", here...), legend: "{{communicator}}", exemplar: true}},
				},
			}},
			{"Connections", []panel{
				{
					title: "Slow windows by cause", view: lines, width: 12, height: 7, unit: units.PercentUnit,
					why: "Share of transport windows that were slow, and why: network (backlog high, bandwidth low), sender_starved, receiver_not_ready, cpu_starved.",
					targets: []target{{
						expr:   sum("transport, cause", rate(names.Windows, slow...)) + " / on (transport) group_left () " + sum("transport", rate(names.Windows, here...)),
						legend: "{{transport}} {{cause}}",
					}},
					alerts: []string{names.AlertCommunicationSlow},
				},
				{
					title: "Outstanding", view: stacked, width: 12, height: 7, unit: units.BytesSI,
					why:     "Bytes handed to a transport and not yet taken by their receivers. High and flat is a hang.",
					targets: []target{{expr: sum("transport", of(names.ConnOutstanding, here...)), legend: "{{transport}}"}},
					alerts:  []string{names.AlertCommunicationHang},
				},
				{
					title: "Paths down", view: lines, width: 12, height: 7,
					why:     "Broken paths of open connections. Where a connection has another path it goes on over that one.",
					targets: []target{{expr: sum("training_job, transport", of(names.ConnBroken, here...)), legend: "{{training_job}} {{transport}}"}},
					alerts:  []string{names.AlertConnectionPathDown},
				},
				{
					title: "Connections of their own", view: lines, width: 12, height: 7,
					why: "The connections of which lockstep_connection_info tells who they are: those whose path broke or whose network is slow first.",
					targets: []target{
						{expr: highest("connection", of(names.ConnBandwidth, here...)), legend: "{{connection}} bandwidth", unit: units.BytesPerSecondSI},
						{expr: highest("connection", of(names.ConnLatency, here...)), legend: "{{connection}} latency", unit: units.Seconds},
						{expr: sum("connection", rate(names.ConnSlow, here...)), legend: "{{connection}} slow windows", unit: units.CountsPerSecond},
					},
				},
				{
					title: "Who these connections are", view: rows(names.LabelConnection, names.LabelCommunicator, names.LabelRank, names.LabelPeer, names.LabelTransport, names.LabelDevice, names.LabelPort, names.LabelRail, names.LabelQueuePair, names.LabelPeerPair, names.LabelAddress), width: 24, height: 7,
					why:     "Queue pair, NIC and port of a connection, to be read beside the counters of that port.",
					targets: []target{{expr: of(names.ConnInfo, here...)}},
				},
				{
					title: "Switches and bytes sent again", view: lines, width: 12, height: 7,
					why: "Paths that took over from another a second, and bytes a second sent again because the other path may have lost them.",
					targets: []target{
						{expr: sum("transport", rate(names.ConnSwitches, here...)), legend: "{{transport}} switches", unit: units.CountsPerSecond},
						{expr: sum("transport", rate(names.ConnResent, here...)), legend: "{{transport}} bytes", unit: units.BytesPerSecondSI},
					},
				},
				{
					title: "Connections", view: stacked, width: 12, height: 7,
					why:     "Connections of local ranks by transport.",
					targets: []target{{expr: sum("transport", of(names.Connections, here...)), legend: "{{transport}}"}},
				},
				{
					title: "Time stamp error", view: lines, width: 24, height: 7, unit: units.Seconds,
					why: "Bound on the error of mapped time stamps by clock, of the node's times on the clocks of its jobs, and how far its wall clock is off those.",
					targets: []target{
						{expr: highest("clock", of(names.ClockError, here...)), legend: "{{clock}}"},
						{expr: highest("training_job", of(names.JobClockError, here...)), legend: "on the clock of {{training_job}}"},
						{expr: highest("training_job", of(names.JobClockOffset, here...)), legend: "wall clock behind that of {{training_job}}"},
					},
					alerts: []string{names.AlertClockError},
				},
			}},
			{"NICs", []panel{
				{
					title: "RDMA ports", view: timeline, width: 12, height: 7,
					why:     "Whether each port is active. One that was and is not costs bandwidth, or its connections.",
					none:    "no RDMA ports on this node",
					targets: []target{{expr: lowest(port, of(names.NICPortUp, onNode)), legend: portName}},
					values:  up,
					alerts:  []string{names.AlertNICPortDown},
				},
				{
					title: "States of ports", view: rows(names.LabelDevice, names.LabelPort, names.LabelState, names.LabelPhysical), width: 12, height: 7,
					why:     "What each port says. Disabled: shut; Polling: no signal from the other side.",
					none:    "no RDMA ports on this node",
					targets: []target{{expr: of(names.NICPortState, onNode)}},
				},
				{
					title: "Use of the ports' rate", view: lines, width: 12, height: 7, unit: units.PercentUnit,
					why:  "Share of what each port has negotiated, by direction.",
					none: "no RDMA ports on this node",
					targets: []target{
						{expr: sum(port, rate(names.NICTransmitted, onNode)) + " / on (device, port) " + sum(port, of(names.NICPortRate, onNode)), legend: portName + " sent"},
						{expr: sum(port, rate(names.NICReceived, onNode)) + " / on (device, port) " + sum(port, of(names.NICPortRate, onNode)), legend: portName + " received"},
					},
				},
				{
					title: "Packets", view: lines, width: 12, height: 7, unit: units.PacketsPerSecond,
					why:  "Packets a second, by direction.",
					none: "no RDMA ports on this node",
					targets: []target{
						{expr: sum(port, rate(names.NICTransmittedPackets, onNode)), legend: portName + " sent"},
						{expr: sum(port, rate(names.NICReceivedPackets, onNode)), legend: portName + " received"},
					},
				},
				{
					title: "Lost or repeated packets", view: lines, width: 12, height: 7, unit: units.CountsPerSecond,
					why:     "By the driver's counter. out_of_sequence: lost on the way here; packet_seq_err: lost on the way there; local_ack_timeout_err: nothing came back.",
					none:    "none, or no RDMA ports on this node",
					targets: []target{{expr: sum("device, counter", rate(names.NICRetransmissions, onNode)) + " > 0", legend: "{{device}} {{counter}}"}},
					alerts:  []string{names.AlertNICRetransmissions},
				},
				{
					title: "Marks of congestion", view: lines, width: 12, height: 7, unit: units.CountsPerSecond,
					why:     "By the driver's counter. np_: this port is where many send to; rp_: its own traffic was slowed down.",
					none:    "none, or no RDMA ports on this node",
					targets: []target{{expr: sum("device, counter", rate(names.NICCongestion, onNode)) + " > 0", legend: "{{device}} {{counter}}"}},
					alerts:  []string{names.AlertNICCongestion},
				},
				{
					title: "Port errors", view: lines, width: 12, height: 7, unit: units.CountsPerSecond,
					why:  "Errors by the driver's counter, and reads of counters that failed. 0 is normal.",
					none: "no RDMA ports on this node",
					targets: []target{
						{expr: sum("device, counter", rate(names.NICErrors, onNode)) + " > 0", legend: "{{device}} {{counter}}"},
						{expr: sum(port, rate(names.NICReadErrors, onNode)), legend: portName + " unreadable"},
					},
					alerts: []string{names.AlertNICCountersUnreadable},
				},
				{
					title: "Flaps", view: lines, width: 12, height: 7,
					why:  "Times that a port or an interface of it went down, between two probes included.",
					none: "no RDMA ports on this node",
					targets: []target{
						{expr: sum(port, of(names.NICPortFlaps, onNode)), legend: portName},
						{expr: sum(port+", netdev", of(names.NICLinkFlaps, onNode)), legend: portName + " {{netdev}}"},
					},
					alerts: []string{names.AlertNICPortFlapping},
				},
				{
					title: "Links", view: timeline, width: 12, height: 6,
					why:     "Whether each port's interface, and each member of a bond, has a carrier.",
					none:    "no RDMA ports on this node",
					targets: []target{{expr: lowest("device, netdev", of(names.NICLinkUp, onNode)), legend: "{{device}} {{netdev}}"}},
					values:  up,
				},
				{
					title: "NICs", view: rows(names.LabelDevice, names.LabelPort, names.LabelLinkLayer, names.LabelModel, names.LabelBusID, names.LabelFirmware), width: 12, height: 6,
					why:     "Which device is which, and with which firmware.",
					none:    "no RDMA ports on this node",
					targets: []target{{expr: of(names.NICInfo, onNode)}},
				},
				{
					title: "Waiting to send", view: lines, width: 8, height: 6, unit: units.CountsPerSecond,
					why:     "Ticks a second in which a port had data to send and the other side had no room: the congestion is behind it.",
					none:    "no RDMA ports on this node",
					targets: []target{{expr: sum(port, rate(names.NICTransmitWaits, onNode)), legend: portName}},
				},
				{
					title: "Duration of a NIC probe", view: lines, width: 8, height: 6, unit: units.Seconds,
					why:  "Time to read all ports once, and whether a read hangs. Firmware in trouble shows here first.",
					none: "no RDMA ports on this node",
					targets: []target{
						{expr: highest("", of(names.NICProbeDuration, onNode)), legend: "last probe"},
						{expr: highest("", of(names.NICDriverUnresponsive, onNode)), legend: "hangs", unit: units.Number},
					},
					alerts: []string{names.AlertNICDriverUnresponsive},
				},
				{
					title: "Announcements lost", view: lines, width: 8, height: 6, unit: units.CountsPerSecond,
					why:     "Changes of links a second that came faster than they were read. What changed is seen at the next probe.",
					none:    "no RDMA ports on this node",
					targets: []target{{expr: sum("", rate(names.NICLinkEventsLost, onNode)), legend: "lost"}},
				},
			}},
			{"Probes on NCCL", []panel{
				{
					title: "Probes work", view: timeline, width: 8, height: 6,
					why:     "Whether eBPF probes are on NCCL, and why not.",
					none:    "no probes: agents use them with --ebpf.watch",
					targets: []target{{expr: lowest("reason", of(names.ProbesActive, onNode)), legend: "probes {{reason}}"}},
					values:  up,
				},
				{
					title: "What is probed", view: lines, width: 8, height: 6,
					why:  "Files with NCCL in them, processes that use them, and ranks that are seen by probes alone.",
					none: "no probes: agents use them with --ebpf.watch",
					targets: []target{
						{expr: sum("", of(names.ProbesLibraries, onNode)), legend: "libraries"},
						{expr: sum("", of(names.ProbesProcesses, onNode)), legend: "processes"},
						{expr: sum("", of(names.ProbesRanks, onNode)), legend: "ranks"},
					},
				},
				{
					title: "Calls seen", view: lines, width: 8, height: 6, unit: units.CountsPerSecond,
					why:  "Calls of NCCL a second, and those of them that are counted only.",
					none: "no probes: agents use them with --ebpf.watch",
					targets: []target{
						{expr: sum("kind", rate(names.ProbesCalls, onNode)), legend: "{{kind}}"},
						{expr: sum("reason", rate(names.ProbesUnrecorded, onNode)), legend: "not recorded: {{reason}}"},
					},
				},
				{
					title: "Communicators not followed", view: lines, width: 24, height: 6,
					why:  "Communicators that were made before the probes, and those there was no room for or whose id could not be read. Verdicts do not see them.",
					none: "no probes: agents use them with --ebpf.watch",
					targets: []target{
						{expr: sum("", of(names.ProbesUnidentified, onNode)), legend: "older than the probes"},
						{expr: sum("reason", of(names.ProbesLost, onNode)), legend: "{{reason}}"},
					},
				},
			}},
			{"Sources", []panel{
				{
					title: "Sources of evidence", view: timeline, width: 12, height: 6,
					why:     "Whether each source delivered on its last pass.",
					targets: []target{{expr: lowest("source", of(names.SourceUp, onNode)), legend: "{{source}}"}},
					values:  up,
					alerts:  []string{names.AlertSourceDown},
				},
				{
					title: "Duration of a pass", view: lines, width: 12, height: 6, unit: units.Seconds,
					why:     "Time of each source's last pass. A source that hangs on a driver shows here first.",
					targets: []target{{expr: highest("source", of(names.SourceDuration, onNode)), legend: "{{source}}"}},
				},
			}},
		},
	}
}
