package names

import "strings"

// Attribute documents one span attribute.
type Attribute struct {
	Key  string
	Type string // string, string[], int, double or bool
	On   string // where it appears: resource, collective, window, incident, action
	Help string
}

// Attributes returns every attribute that Lockstep's spans carry beyond
// OpenTelemetry's own (service.*, host.*), in reading order.
func Attributes() []Attribute { return attributes }

var attributes = []Attribute{
	{AttrJob, "string", "resource, incident, action", "Training job."},
	{AttrCollective, "string", "collective, incident", "Kind: AllReduce, AllGather, Send; of an incident, that of the collective which shows it best."},
	{AttrCommunicator, "string", "collective, incident", "Name of the communicator."},
	{AttrCommID, "string", "collective, incident", "Id of the communicator, 16 hexadecimal digits."},
	{AttrCommSize, "int", "collective", "Ranks in the communicator."},
	{AttrRank, "int", "collective", "Rank in the communicator."},
	{AttrWorldRank, "int", "collective", "Rank in the job."},
	{AttrAttempt, "int", "collective, incident, action", "Restart count of the job, from 0."},
	{AttrSequence, "int", "collective, incident", "Sequence number in the communicator, from 1."},
	{AttrBytes, "int", "collective, window", "Payload bytes by NCCL's convention; of a window, the bytes that it moved."},
	{AttrDType, "string", "collective", "Element type."},
	{AttrOp, "string", "collective", "Reduction operator, on collectives that reduce."},
	{AttrAlgo, "string", "collective", "Algorithm, as options name it: direct, ring, doubling, tree, hierarchical; of GPUs ce, ll, ll2, ll12, sym, bulk, pushbulk, chain."},
	{AttrProto, "string", "collective", "Protocol of the data path: ll, simple."},
	{AttrRoot, "int", "collective", "Root, on collectives that have one."},
	{AttrPeer, "int", "collective, wait, reduce, receive, window, link", "The other end: of Send and Recv, and of a window's or link's connection; of a wait, the peer that entered last; of what was received, and reduced or not, its sender."},
	{AttrPeerWait, "double", "reduce, receive", "Seconds from the span's begin, when the rank came to what the peer sends in this phase, to the first of it."},
	{AttrPeerStall, "double", "reduce, receive", "Seconds in between in which nothing of it came, as far as that was noticed: a tenth of a millisecond each, at least."},
	{AttrClock, "string", "collective", "The clock that made the stamps: host (CLOCK_MONOTONIC) or gpu (globaltimer)."},
	{AttrClockScale, "string", "collective", "What the span's times are on: job, the one clock of all of the job's ranks, or node, the wall clock of the node, while no master has told where it stands."},
	{AttrClockError, "double", "collective", "Bound on the error of the span's times on the job's clock, in seconds: that of the node's mapping and of the stamps. Absent on the node's scale, where nothing bounds it."},
	{AttrClockCorrection, "double", "collective", "Job's clock minus the node's wall clock, in seconds."},
	{AttrStampError, "double", "collective", "Bound on the error of a GPU's stamps against the node's clock, in seconds."},
	{AttrReplay, "bool", "collective", "True when a CUDA graph replayed the operation."},
	{AttrTracedRanks, "int", "root", "Ranks whose spans the root covers."},
	{AttrLate, "bool", "collective", "True on a span that ended after its trace's root was sent: it is linked to the root and no child of it."},
	{AttrLinkState, "string", "link", "What became of the path: up, down, switched (it carries what another one did), retreat (sent again from the last chunk that both ends agree on)."},
	{AttrTransport, "string", "window, link", "Transport of the connection: shm, tcp, rdma, nvlink."},
	{AttrConnection, "string", "window, link", "Both ends of the connection: NICs and ports, or addresses."},
	{AttrChannel, "int", "window, link", "Lane and path of the connection."},
	{AttrQueuePair, "int", "window, link", "Number of this end's queue pair."},
	{AttrPeerQueuePair, "int", "window, link", "Number of the other end's queue pair."},
	{AttrConnState, "string", "window", "Why the connection was slow after the window, past hysteresis; absent when it was not."},
	{AttrOverlaps, "bool", "window", "The window is an estimate over the last requests that turned bad; they are other windows', too."},
	{AttrNIC, "string", "window, link, nic", "Device of this end's port."},
	{AttrPort, "int", "window, link, nic", "Number of this end's port on its device."},
	{AttrRail, "int", "window, link, nic", "Rail of this end's port among its node's, from 1."},
	{AttrNICCounter, "string", "nic", "What of the port moved: one of the driver's counters of loss (packet_seq_err, out_of_sequence, ...), congestion (np_cnp_sent, rp_cnp_handled, ...) or errors, of each kind the one that gained most; or flaps, how often the port went down."},
	{AttrNICGained, "int", "nic", "By how much, since the look before."},
	{AttrNICInterval, "double", "nic", "Seconds between the two looks; the event's time is that of the second, or when the port went down."},
	{AttrAddress, "string", "window, link", "GID of this end's port."},
	{AttrChannels, "int", "collective", "Channels used."},
	{AttrResult, "string", "collective", "How it ended; anything but ok also sets the span's status to error."},
	{AttrOpen, "bool", "collective", "True on the snapshot of a collective that had not ended when it was exported."},
	{AttrQueueTime, "double", "collective", "Seconds from the call to the start: time spent behind earlier work of its stream."},
	{AttrCause, "string", "window", "Why the window was slow: network, sender_starved, receiver_not_ready, cpu_starved."},
	{AttrBandwidth, "double", "window", "Bytes per second between the first post and the last completion."},
	{AttrBacklog, "int", "window", "Largest number of work requests waiting."},
	{AttrWRs, "int", "window", "Work requests in the window."},
	{AttrIncident, "string", "incident, action", "Id of the incident, as in the label incident of alerts."},
	{AttrClass, "string", "incident, action", "Class of the verdict: " + strings.Join(Classes, ", ") + "."},
	{AttrCulprit, "string", "incident, action", "Who is to blame: rank 5, rank 2 → rank 6, node b."},
	{AttrCulpritKind, "string", "incident", "What that is: rank, connection, source, destination, node."},
	{AttrReason, "string", "incident, action", "Why, as far as is known: process_gone, stalled, network."},
	{AttrNode, "string", "incident", "Node of the culprit."},
	{AttrVictims, "int", "incident", "Ranks held up."},
	{AttrEvidence, "string[]", "incident", "Evidence in sentences, most telling first."},
	{AttrActionID, "string", "action", "Id of the action, the same on every repeat."},
	{AttrActionKind, "string", "action", "What the policy says: restart, restart_excluding."},
	{AttrPolicy, "string", "action", "Name of the policy that decided."},
	{AttrOutcome, "string", "action", "How it ended: done, failed, refused, dry_run; done and dry_run leave the span's status unset."},
	{AttrUnit, "string", "action", "Unit taken out: a slot, a node."},
	{AttrTries, "int", "action", "Calls of the actuator."},
	{AttrEntry, "int", "action", "Number of the journal entry."},
	{AttrMoves, "int", "planner", "Lanes that one look of the planner moved; each is an event of the span."},
	{AttrLane, "int", "planner", "Lane of the connection."},
	{AttrPathFrom, "string", "planner", "Path that the lane had: leaf1–spine2–leaf5."},
	{AttrPathTo, "string", "planner", "Path that it has now."},
	{AttrFabricLink, "string", "planner", "Link that is bad, or was: leaf2–spine5."},
	{AttrFabricDead, "bool", "planner", "Nothing gets through the link."},
	{AttrFabricLoss, "double", "planner", "Share of packets that the link loses, as inferred."},
}

// Attributes of collective spans beyond those in names.go.
const (
	AttrOpen      = "ccl.open"
	AttrQueueTime = "ccl.queue_time"

	AttrClock           = "ccl.clock"
	AttrClockScale      = "ccl.clock.scale"
	AttrClockError      = "ccl.clock.error"
	AttrClockCorrection = "ccl.clock.correction"
	AttrStampError      = "ccl.clock.stamp_error"
	AttrReplay          = "ccl.graph.replay"
	AttrTracedRanks     = "ccl.traced_ranks"
	AttrLate            = "ccl.late"
	AttrLinkState       = "ccl.link.state"
	AttrTransport       = "ccl.connection.transport"
	AttrConnection      = "ccl.connection.name"
	AttrChannel         = "ccl.connection.channel"
	AttrQueuePair       = "ccl.connection.queue_pair"
	AttrPeerQueuePair   = "ccl.connection.peer_queue_pair"
	AttrConnState       = "ccl.window.state"
	AttrOverlaps        = "ccl.window.overlaps"
	AttrNIC             = "ccl.connection.nic"
	AttrPort            = "ccl.connection.port"
	AttrRail            = "ccl.connection.rail"
	AttrAddress         = "ccl.connection.address"
	AttrNICCounter      = "ccl.nic.counter"
	AttrNICGained       = "ccl.nic.gained"
	AttrNICInterval     = "ccl.nic.interval"
)

// Attributes of the control plane's spans.
const (
	AttrIncident    = "ccl.incident.id"
	AttrMoves       = "ccl.planner.moves"
	AttrLane        = "ccl.planner.lane"
	AttrPathFrom    = "ccl.path.from"
	AttrPathTo      = "ccl.path.to"
	AttrFabricLink  = "ccl.fabric.link"
	AttrFabricDead  = "ccl.fabric.link.dead"
	AttrFabricLoss  = "ccl.fabric.link.loss"
	AttrClass       = "ccl.incident.class"
	AttrCulprit     = "ccl.incident.culprit"
	AttrCulpritKind = "ccl.incident.culprit_kind"
	AttrReason      = "ccl.incident.reason"
	AttrNode        = "ccl.incident.node"
	AttrVictims     = "ccl.incident.victims"
	AttrEvidence    = "ccl.incident.evidence"
	AttrActionID    = "ccl.action.id"
	AttrActionKind  = "ccl.action.kind"
	AttrPolicy      = "ccl.action.policy"
	AttrOutcome     = "ccl.action.outcome"
	AttrUnit        = "ccl.action.unit"
	AttrTries       = "ccl.action.tries"
	AttrEntry       = "ccl.action.journal_entry"
)
