package names

// Type is a metric's Prometheus type.
type Type string

const (
	Counter   Type = "counter"
	Gauge     Type = "gauge"
	Histogram Type = "histogram"
)

// Metric is one metric family, defined once: exporters build it, rules and
// dashboards can only refer to it through its variable, and docs/metrics.md is
// generated from it.
type Metric struct {
	Name   string // full name with unit suffix, and _total for counters
	Type   Type
	Unit   string // OpenMetrics unit, "" when it has none
	Help   string
	Labels []string
	From   Component
}

// Component is the process that exposes a metric.
type Component string

const (
	Agent      Component = "agent"
	Master     Component = "master"
	Remediator Component = "remediator"
	Preflight  Component = "preflight"
	Planner    Component = "planner"
	Supervisor Component = "supervisor" // lockstep run, of a job on several machines
	All        Component = "all"
)

// Labels, each written once.
const (
	LabelJob          = "training_job" // "job" is Prometheus's own scrape label
	LabelCommunicator = "communicator" // name; never the id
	LabelCollective   = "collective"   // AllReduce, ...
	LabelResult       = "result"
	LabelTransport    = "transport"
	LabelConnection   = "connection"      // rank and place in its recorder, on the few connections that have series of their own
	LabelQueuePair    = "queue_pair"      // only on their info metric, as are the following
	LabelPeerPair     = "peer_queue_pair" // the other end's
	LabelAddress      = "address"         // GID or IP address
	LabelRail         = "rail"
	LabelCause        = "cause"
	LabelState        = "state"
	LabelSource       = "source"
	LabelReason       = "reason"
	LabelFamily       = "family"
	LabelClass        = "class"
	LabelLevel        = "level"
	LabelIncident     = "incident"
	LabelCulprit      = "culprit" // human-readable: "rank 5", "rank 2 → rank 6"
	LabelCulpritKind  = "culprit_kind"
	LabelRank         = "rank" // only on info metrics of open incidents
	LabelPeer         = "peer"
	LabelNode         = "node"
	LabelAttempt      = "attempt"
	LabelTraceID      = "trace_id"
	LabelAction       = "action"
	LabelOutcome      = "outcome"
	LabelPolicy       = "policy"
	LabelScope        = "scope"
	LabelVerb         = "verb"
	LabelPool         = "pool"
	LabelClock        = "clock"
	LabelSrc          = "source_rank" // delay matrix only, capped
	LabelDst          = "destination_rank"
	LabelVersion      = "version"
	LabelRevision     = "revision"
	LabelGoVersion    = "goversion"
	LabelComponent    = "component"
	LabelGPU          = "gpu"  // index on its node; join lockstep_gpu_info for the rest
	LabelLink         = "link" // NVLink of a GPU
	LabelXid          = "xid"
	LabelEffect       = "effect"
	LabelKind         = "kind"
	LabelLifetime     = "lifetime"
	LabelUUID         = "uuid"
	LabelModel        = "model"
	LabelBusID        = "pci_bus_id"
	LabelDriver       = "driver_version"
	LabelDevice       = "device" // RDMA device on its node: mlx5_0; join lockstep_nic_info for the rest
	LabelPort         = "port"   // of an RDMA device
	LabelNetDev       = "netdev"
	LabelCounter      = "counter" // the driver's name of it; collector/source/rdma lists all
	LabelLinkLayer    = "link_layer"
	LabelFirmware     = "firmware"
	LabelPhysical     = "physical_state"
	LabelLeaf         = "leaf"
	LabelSpine        = "spine"
	LabelListener     = "listener"
	LabelDirection    = "direction" // up: leaf to spine, down: spine to leaf
)

var registry []*Metric

func def(from Component, t Type, name, unit, help string, labels ...string) *Metric {
	m := &Metric{Name: name, Type: t, Unit: unit, Help: help, Labels: labels, From: from}
	registry = append(registry, m)
	return m
}

// Metrics returns every metric in the order of definition.
func Metrics() []*Metric { return registry }

// String returns the name, so that a Metric can be used in a PromQL builder.
func (m *Metric) String() string { return m.Name }

// On every component.
var (
	BuildInfo      = def(All, Gauge, "lockstep_build_info", "", "Version of this lockstep process; always 1.", LabelVersion, LabelRevision, LabelGoVersion, LabelComponent)
	CertUnreadable = def(All, Gauge, "lockstep_certificate_unreadable", "", "1 while this process's certificate, its key or its CA cannot be read again, and those that could be last are used until they end. Absent without certificates.")
	CertExpiry     = def(All, Gauge, "lockstep_certificate_expiry_timestamp_seconds", "seconds", "When this process's certificate ends, in Unix time. Absent without certificates.")
	StateWritable  = def(All, Gauge, "lockstep_state_writable", "", "Whether a master's or planner's state directory, the remediator's journal, or the books of the coordinator of lockstep run could be written when that was last tried. Absent on others.")
	ConnsCrowded   = def(All, Counter, "lockstep_connections_crowded_total", "", "Connections that a listener hung up on because it held as many as it may, those of the address that had most: web (the pages), agents (a master's), planner (of hosts and processes), coordinator (of the hosts of a job of lockstep run).", LabelListener)
	WebRefused     = def(All, Counter, "lockstep_web_requests_refused_total", "", "Requests that a page's listener refused: anonymous (no password given), password (a wrong one), elsewhere (the page is for this host's loopback only), limited (more than its configuration allows).", LabelReason)
	SeriesOverflow = def(All, Counter, "lockstep_series_overflow_total", "", "Label sets that were not exported because their family had reached its cap; absent while there are none.", LabelFamily)
)

// On the agent: what the ranks of this node did.
var (
	NodeInfo           = def(Agent, Gauge, "lockstep_node_info", "", "What verdicts call this agent's node; always 1. Joins their node with the instance of all that the agent exports: * on (instance) group_left (node).", LabelNode)
	CollectiveDuration = def(Agent, Histogram, "lockstep_collective_duration_seconds", "seconds", "Time from start to end of a collective on one rank. Exemplars carry the trace id.", LabelJob, LabelCommunicator, LabelCollective)
	CollectiveWait     = def(Agent, Histogram, "lockstep_collective_wait_seconds", "seconds", "Time of a collective spent waiting for peers that had not entered yet.", LabelJob, LabelCommunicator, LabelCollective)
	Collectives        = def(Agent, Counter, "lockstep_collectives_total", "", "Collectives ended, by result.", LabelJob, LabelCommunicator, LabelCollective, LabelResult)
	CollectiveBytes    = def(Agent, Counter, "lockstep_collective_bytes_total", "bytes", "Payload bytes of collectives ended, by NCCL's convention.", LabelJob, LabelCommunicator, LabelCollective)

	CommMembers     = def(Agent, Gauge, "lockstep_communicator_members", "", "Local members of communicators of this name.", LabelJob, LabelCommunicator)
	CommOpenMembers = def(Agent, Gauge, "lockstep_communicator_open_members", "", "Local members that are inside a collective now.", LabelJob, LabelCommunicator)
	CommOldestOpen  = def(Agent, Gauge, "lockstep_communicator_oldest_open_seconds", "seconds", "Age of the longest open collective of local members, 0 when none is open.", LabelJob, LabelCommunicator)

	ConnOutstanding = def(Agent, Gauge, "lockstep_connection_outstanding_bytes", "bytes", "Bytes handed to a transport and not yet taken by their receivers.", LabelJob, LabelTransport)
	Connections     = def(Agent, Gauge, "lockstep_connections", "", "Connections of local ranks.", LabelJob, LabelTransport)
	Windows         = def(Agent, Counter, "lockstep_connection_windows_total", "", "Transport windows closed, by cause of slowness (none: not slow).", LabelJob, LabelTransport, LabelCause)
	ConnBroken      = def(Agent, Gauge, "lockstep_connection_paths_down", "", "Paths of open connections that are broken; a connection with another path goes on.", LabelJob, LabelTransport)
	ConnSwitches    = def(Agent, Counter, "lockstep_connection_switches_total", "", "Times that a connection's path took over from another one, back to the first included.", LabelJob, LabelTransport)
	ConnResent      = def(Agent, Counter, "lockstep_connection_resent_bytes_total", "bytes", "Bytes sent again because they may have been lost: over another path, on new sockets, or by TCP itself, unless the peer had them twice.", LabelJob, LabelTransport)

	ConnInfo      = def(Agent, Gauge, "lockstep_connection_info", "", "Who a connection is, to join with the series that have its connection label, and with NIC counters by device and port; always 1. At most 64 connections of a job on a node: those whose path broke or whose network is slow first.", LabelJob, LabelConnection, LabelCommunicator, LabelRank, LabelPeer, LabelTransport, LabelDevice, LabelPort, LabelRail, LabelQueuePair, LabelPeerPair, LabelAddress)
	ConnBandwidth = def(Agent, Gauge, "lockstep_connection_bandwidth_bytes_per_second", "", "Bandwidth in the last window of a connection that lockstep_connection_info has.", LabelJob, LabelConnection)
	ConnLatency   = def(Agent, Gauge, "lockstep_connection_latency_seconds", "seconds", "Mean time from post to completion in that window.", LabelJob, LabelConnection)
	ConnSlow      = def(Agent, Counter, "lockstep_connection_slow_windows_total", "", "Windows of that connection in which its network was slow, beyond what is usual for it.", LabelJob, LabelConnection)

	Ranks               = def(Agent, Gauge, "lockstep_ranks", "", "Local rank processes by state.", LabelJob, LabelState)
	AgentStep           = def(Agent, Gauge, "lockstep_step", "", "Highest training step that a local rank has marked.", LabelJob)
	RecorderRecords     = def(Agent, Counter, "lockstep_recorder_records_total", "", "Flight recorder records read.", LabelJob)
	RecorderLost        = def(Agent, Counter, "lockstep_recorder_lost_records_total", "", "Flight recorder records overwritten before they were read, or dropped by their writer.", LabelJob)
	RecorderOverflow    = def(Agent, Gauge, "lockstep_recorder_table_overflow", "", "Communicators and connections that found no slot in a recorder's tables.", LabelJob)
	ConnsWithoutHistory = def(Agent, Gauge, "lockstep_connections_without_history", "", "Connections of local ranks whose windows are not kept one by one: 64 others of their rank's were before them.", LabelJob)
	RecordersRefused    = def(Agent, Counter, "lockstep_recorders_refused_total", "", "Recorders and their directories that are not read, for whose they are: directory (not one user's alone), file (not the directory's owner's), process (it speaks of another user's process), job (of another user's job).", LabelReason)
	RankRefused         = def(Agent, Counter, "lockstep_rank_connections_refused_total", "", "Connections that the listeners of local ranks turned away: silent or garbage (they are no rank's), unproved (they do not know the job's secret), replayed (they repeat what another one has said), crowded (pushed out by later ones).", LabelJob, LabelReason)
	ClockError          = def(Agent, Gauge, "lockstep_clock_error_seconds", "seconds", "Bound on the error of time stamps that are mapped to the host's clock, of the worst of a kind of clocks; absent where none are.", LabelJob, LabelClock)

	SourceUp       = def(Agent, Gauge, "lockstep_source_up", "", "Whether a source of evidence delivered on its last pass.", LabelSource)
	SourceDuration = def(Agent, Gauge, "lockstep_source_duration_seconds", "seconds", "Duration of a source's last pass.", LabelSource)

	StreamConnected = def(Agent, Gauge, "lockstep_agent_stream_connected", "", "Whether the agent's stream to a job's master is up.", LabelJob)
	StreamReports   = def(Agent, Counter, "lockstep_agent_reports_total", "", "Progress reports sent to the master.", LabelJob)
	StreamDropped   = def(Agent, Counter, "lockstep_agent_reports_dropped_total", "", "Progress reports dropped because the stream was down or slow.", LabelJob)
	JobClockError   = def(Agent, Gauge, "lockstep_job_clock_error_seconds", "seconds", "Bound on the error of this node's times on the job's clock, as its master told it; absent while it has not.", LabelJob)
	JobClockOffset  = def(Agent, Gauge, "lockstep_job_clock_correction_seconds", "seconds", "Job's clock minus the node's wall clock: what is added to this node's wall clock times in traces.", LabelJob)
	StreamRetries   = def(Agent, Counter, "lockstep_agent_stream_retries_total", "", "Times that the stream to the master ended, or could not be opened, and was tried again.", LabelJob)
	ArrivalsDropped = def(Agent, Counter, "lockstep_agent_arrivals_dropped_total", "", "Sampled arrivals of collectives not reported because too many waited for the stream.", LabelJob)

	SpansExported      = def(All, Counter, "lockstep_trace_spans_exported_total", "", "Spans accepted by the OTLP backend.")
	TraceEventsDropped = def(Agent, Counter, "lockstep_trace_events_dropped_total", "", "Windows and changes of connections that spans had no room for. Each span says how many (dropped events).")
	SpansDropped       = def(All, Counter, "lockstep_trace_spans_dropped_total", "", "Spans not exported, by reason.", LabelReason)
)

// On the agent: its node's GPUs. What a GPU cannot tell is absent, never 0.
var (
	GPUInfo        = def(Agent, Gauge, "lockstep_gpu_info", "", "A GPU of this node, by its index in PCI order; always 1.", LabelGPU, LabelUUID, LabelModel, LabelBusID, LabelDriver)
	GPUUp          = def(Agent, Gauge, "lockstep_gpu_up", "", "Whether the GPU answers its driver; 0: it has fallen off the bus, or was given up.", LabelGPU)
	GPURanks       = def(Agent, Gauge, "lockstep_gpu_ranks", "", "Live ranks of a job that use the GPU.", LabelJob, LabelGPU)
	GPUXids        = def(Agent, Counter, "lockstep_gpu_xid_errors_total", "", "Xids that the driver has reported while this agent ran, by code and by whom they end: application, gpu, info (nobody) or unknown.", LabelGPU, LabelXid, LabelEffect)
	GPUXidsDropped = def(Agent, Counter, "lockstep_gpu_xid_events_dropped_total", "", "Xids that came faster than they were counted, or that the driver assigned to no GPU.")

	GPUECCErrors    = def(Agent, Counter, "lockstep_gpu_ecc_errors_total", "", "Memory errors by kind (corrected, uncorrected), since the driver's start (volatile) or over the GPU's life (aggregate).", LabelGPU, LabelKind, LabelLifetime)
	GPURemappedRows = def(Agent, Counter, "lockstep_gpu_remapped_rows_total", "", "Rows of memory remapped over the GPU's life, by the kind of errors that they had.", LabelGPU, LabelKind)
	GPURemapPending = def(Agent, Gauge, "lockstep_gpu_row_remap_pending", "", "Whether a row waits for a reset of the GPU to be remapped.", LabelGPU)
	GPURemapFailure = def(Agent, Gauge, "lockstep_gpu_row_remap_failure", "", "Whether remapping a row has failed: the GPU is to be replaced.", LabelGPU)

	GPUNVLinkUp         = def(Agent, Gauge, "lockstep_gpu_nvlink_up", "", "Whether the NVLink is up.", LabelGPU, LabelLink)
	GPUNVLinkCRC        = def(Agent, Counter, "lockstep_gpu_nvlink_crc_errors_total", "", "Checksum errors on the NVLink; each is corrected by a replay.", LabelGPU, LabelLink)
	GPUNVLinkReplays    = def(Agent, Counter, "lockstep_gpu_nvlink_replays_total", "", "Replays on the NVLink.", LabelGPU, LabelLink)
	GPUNVLinkRecoveries = def(Agent, Counter, "lockstep_gpu_nvlink_recoveries_total", "", "Times that the NVLink had to be trained again.", LabelGPU, LabelLink)

	GPUThrottled         = def(Agent, Gauge, "lockstep_gpu_throttled", "", "Whether the GPU's clocks are lowered for this reason; power_cap is normal under full load.", LabelGPU, LabelReason)
	GPUTemperature       = def(Agent, Gauge, "lockstep_gpu_temperature_celsius", "celsius", "Temperature of the GPU.", LabelGPU)
	GPUMemoryTemperature = def(Agent, Gauge, "lockstep_gpu_memory_temperature_celsius", "celsius", "Temperature of the GPU's memory.", LabelGPU)
	GPUPower             = def(Agent, Gauge, "lockstep_gpu_power_watts", "watts", "Power that the GPU draws.", LabelGPU)
	GPUPowerLimit        = def(Agent, Gauge, "lockstep_gpu_power_limit_watts", "watts", "Power that the GPU may draw.", LabelGPU)
	GPUEnergy            = def(Agent, Counter, "lockstep_gpu_energy_joules_total", "joules", "Energy that the GPU has used since the driver's start.", LabelGPU)
	GPUSMClock           = def(Agent, Gauge, "lockstep_gpu_sm_clock_hertz", "hertz", "Clock of the GPU's multiprocessors.", LabelGPU)
	GPUMemoryClock       = def(Agent, Gauge, "lockstep_gpu_memory_clock_hertz", "hertz", "Clock of the GPU's memory.", LabelGPU)
	GPUUtilization       = def(Agent, Gauge, "lockstep_gpu_utilization_ratio", "ratio", "Share of the driver's last sample in which a kernel ran; a kernel that waits for a peer runs, too.", LabelGPU)
	GPUMemoryUsed        = def(Agent, Gauge, "lockstep_gpu_memory_used_bytes", "bytes", "Memory of the GPU in use.", LabelGPU)
	GPUMemory            = def(Agent, Gauge, "lockstep_gpu_memory_bytes", "bytes", "Memory of the GPU.", LabelGPU)
	GPUPCIeReplays       = def(Agent, Counter, "lockstep_gpu_pcie_replays_total", "", "Replays on the GPU's PCIe link.", LabelGPU)
	GPUPCIeWidth         = def(Agent, Gauge, "lockstep_gpu_pcie_lanes", "", "Lanes of the GPU's PCIe link in use.", LabelGPU)
	GPUPCIeGeneration    = def(Agent, Gauge, "lockstep_gpu_pcie_generation", "", "Generation of the GPU's PCIe link in use; it falls while the GPU is idle.", LabelGPU)
	GPUProcesses         = def(Agent, Gauge, "lockstep_gpu_processes", "", "Processes that compute on the GPU, ranks or not.", LabelGPU)

	GPUDriverUnresponsive = def(Agent, Gauge, "lockstep_gpu_driver_unresponsive", "", "Whether a call into the GPU driver has not returned for longer than it may take.")
	GPUProbeDuration      = def(Agent, Gauge, "lockstep_gpu_probe_duration_seconds", "seconds", "Duration of the last probe of all GPUs of the node.")
)

// On the agent: its node's RDMA ports. What a driver does not tell is absent, never 0.
var (
	ProbesActive       = def(Agent, Gauge, "lockstep_probes_active", "", "Whether the agent watches NCCL by eBPF probes, where it was told to; 0 with the reason where this machine does not let it.", LabelReason)
	ProbesLibraries    = def(Agent, Gauge, "lockstep_probes_libraries", "", "Files with NCCL in them that have probes.")
	ProbesProcesses    = def(Agent, Gauge, "lockstep_probes_processes", "", "Processes that have such a file mapped.")
	ProbesRanks        = def(Agent, Gauge, "lockstep_probes_ranks", "", "Ranks in whose name a recorder is kept, since they keep none.")
	ProbesUnidentified = def(Agent, Gauge, "lockstep_probes_communicators_unidentified", "", "Communicators that are called on and of which it is not known which they are: they were made before the probes were there.")
	ProbesCalls        = def(Agent, Counter, "lockstep_probes_calls_total", "", "Calls of NCCL's operations seen.", LabelKind)
	ProbesUnrecorded   = def(Agent, Counter, "lockstep_probes_calls_unrecorded_total", "", "Calls of collectives that were counted and not recorded one by one: sampled (on purpose), ring_full (they came too fast), unplaced (their communicator is not followed).", LabelReason)
	ProbesLost         = def(Agent, Counter, "lockstep_probes_communicators_lost_total", "", "Communicators that cannot be followed: table_full (there are too many), unread (the unique id was not to be read).", LabelReason)

	FenceProcesses = def(Agent, Counter, "lockstep_fence_processes_total", "", "Processes of fenced attempts, by what became of them: stopped (SIGTERM), killed (SIGKILL), spared (their environment does not allow it), failed (they cannot be told to end).", LabelJob, LabelResult)
	FenceLeases    = def(Agent, Counter, "lockstep_fence_leases_expired_total", "", "Times that the agent stopped a job's ranks because it did not hear the job's master for as long as the job's environment allows.", LabelJob)

	NICInfo      = def(Agent, Gauge, "lockstep_nic_info", "", "An RDMA port of this node; always 1.", LabelDevice, LabelPort, LabelLinkLayer, LabelModel, LabelBusID, LabelFirmware)
	NICPortUp    = def(Agent, Gauge, "lockstep_nic_port_up", "", "Whether the port is active; 0 also when its device is gone.", LabelDevice, LabelPort)
	NICPortState = def(Agent, Gauge, "lockstep_nic_port_state", "", "The port's logical and physical state, as the kernel calls them; always 1.", LabelDevice, LabelPort, LabelState, LabelPhysical)
	NICPortFlaps = def(Agent, Counter, "lockstep_nic_port_flaps_total", "", "Times that the port went down while this agent ran, between two probes included where it has an interface.", LabelDevice, LabelPort)
	NICPortRate  = def(Agent, Gauge, "lockstep_nic_port_rate_bytes_per_second", "", "Rate that the port has negotiated.", LabelDevice, LabelPort)
	NICLinkUp    = def(Agent, Gauge, "lockstep_nic_link_up", "", "Whether the port's interface, or a member of it when it is a bond, has a carrier.", LabelDevice, LabelPort, LabelNetDev)
	NICLinkFlaps = def(Agent, Counter, "lockstep_nic_link_flaps_total", "", "Times that the interface lost its carrier while this agent ran.", LabelDevice, LabelPort, LabelNetDev)

	NICRetransmissions = def(Agent, Counter, "lockstep_nic_retransmissions_total", "", "Packets lost, out of order, refused or repeated on the port, by the driver's counter; one loss may count in several, on both ends.", LabelDevice, LabelPort, LabelCounter)
	NICCongestion      = def(Agent, Counter, "lockstep_nic_congestion_events_total", "", "Marks of congestion on the port, by the driver's counter: packets marked by switches, notifications (CNP) sent for them, and those that slowed this port down.", LabelDevice, LabelPort, LabelCounter)
	NICErrors          = def(Agent, Counter, "lockstep_nic_errors_total", "", "Errors of the port, by the driver's counter.", LabelDevice, LabelPort, LabelCounter)

	NICReceived           = def(Agent, Counter, "lockstep_nic_received_bytes_total", "bytes", "Bytes that the port has received.", LabelDevice, LabelPort)
	NICTransmitted        = def(Agent, Counter, "lockstep_nic_transmitted_bytes_total", "bytes", "Bytes that the port has sent.", LabelDevice, LabelPort)
	NICReceivedPackets    = def(Agent, Counter, "lockstep_nic_received_packets_total", "", "Packets that the port has received.", LabelDevice, LabelPort)
	NICTransmittedPackets = def(Agent, Counter, "lockstep_nic_transmitted_packets_total", "", "Packets that the port has sent.", LabelDevice, LabelPort)
	NICTransmitWaits      = def(Agent, Counter, "lockstep_nic_transmit_wait_ticks_total", "", "Ticks of the port's clock in which it had data to send and the other side had no room.", LabelDevice, LabelPort)

	NICReadErrors         = def(Agent, Counter, "lockstep_nic_read_errors_total", "", "Reads of the port's states and counters that failed, or gave no number, while this agent ran.", LabelDevice, LabelPort)
	NICDriverUnresponsive = def(Agent, Gauge, "lockstep_nic_driver_unresponsive", "", "Whether a read of a port's state or counters has not returned for longer than it may take.")
	NICProbeDuration      = def(Agent, Gauge, "lockstep_nic_probe_duration_seconds", "seconds", "Duration of the last probe of all ports of the node.")
	NICLinkEventsLost     = def(Agent, Counter, "lockstep_nic_link_events_lost_total", "", "Times that the kernel's announcements of changes of links came faster than they were read; what changed is seen at the next probe.")
)

// On the master: what it all means.
var (
	IncidentInfo     = def(Master, Gauge, "lockstep_incident_info", "", "An open incident; always 1. Bounded by the number of open incidents.", LabelJob, LabelIncident, LabelClass, LabelLevel, LabelCulpritKind, LabelCulprit, LabelRank, LabelPeer, LabelNode, LabelCommunicator, LabelReason, LabelAttempt, LabelTraceID)
	IncidentsOpen    = def(Master, Gauge, "lockstep_incidents_open", "", "Open incidents by class and level; present with 0.", LabelJob, LabelClass, LabelLevel)
	Incidents        = def(Master, Counter, "lockstep_incidents_total", "", "Incidents ever opened, by class.", LabelJob, LabelClass)
	IncidentConfirms = def(Master, Counter, "lockstep_incidents_confirmed_total", "", "Incidents ever confirmed, by class.", LabelJob, LabelClass)
	IncidentLatency  = def(Master, Histogram, "lockstep_incident_detection_seconds", "seconds", "Time from a fault's estimated onset to its confirmed verdict.", LabelJob, LabelClass)

	JobRanks     = def(Master, Gauge, "lockstep_job_ranks", "", "Ranks of the job by process state.", LabelJob, LabelState)
	JobWorldSize = def(Master, Gauge, "lockstep_job_world_size", "", "Ranks that the job is meant to have.", LabelJob)
	JobStep      = def(Master, Gauge, "lockstep_job_step", "", "Highest training step that any rank has marked.", LabelJob)
	JobAttempt   = def(Master, Gauge, "lockstep_job_attempt", "", "Restart count of the job, from 0.", LabelJob)

	AgentsConnected = def(Master, Gauge, "lockstep_master_agents", "", "Agents by state: connected, disconnected, lost.", LabelJob, LabelState)
	AgentLostInfo   = def(Master, Gauge, "lockstep_agent_lost_info", "", "An agent that is lost; always 1.", LabelJob, LabelNode)
	NodeClockError  = def(Master, Gauge, "lockstep_node_clock_error_seconds", "seconds", "Bound on the error of a node's times on the job's clock; the worst node.", LabelJob)

	Diagnoses        = def(Master, Counter, "lockstep_diagnoses_total", "", "Diagnosis passes.", LabelJob)
	DiagnosisSeconds = def(Master, Counter, "lockstep_diagnosis_seconds_total", "seconds", "Time spent in diagnosis passes.", LabelJob)
	MasterOverflow   = def(Master, Gauge, "lockstep_master_untracked", "", "Ranks, communicators and connections not tracked because a bound was reached.", LabelJob)
	MasterRefused    = def(Master, Counter, "lockstep_master_refused_total", "", "Entries of agents' reports that contradict what is known, late words of former attempts among them.", LabelJob)
	RecordingBytes   = def(Master, Counter, "lockstep_recording_bytes_total", "bytes", "Bytes written to the rolling recording of evidence.", LabelJob)
	RecordingSkipped = def(Master, Counter, "lockstep_recording_passes_skipped_total", "", "Diagnosis passes whose evidence was not recorded, by reason: paced (it would cost too much), busy (the disk does not keep up), failed (it refuses).", LabelJob, LabelReason)
	RecordingReach   = def(Master, Gauge, "lockstep_recording_reach_seconds", "seconds", "How far back the rolling recording of evidence goes.", LabelJob)
	MasterDenied     = def(Master, Counter, "lockstep_master_denied_total", "", "Calls that were refused because the caller's certificate does not allow them: another node's, job's or role's.", LabelJob)
	MasterHandshakes = def(Master, Counter, "lockstep_master_handshakes_refused_total", "", "Connections to the master that were refused before a call: without a certificate, of another authority or trust domain, by the owner of their socket, or since they had not said anything in time.", LabelJob)
	MasterMessages   = def(Master, Counter, "lockstep_master_messages_refused_total", "", "Messages that ended their stream unread: compressed, too long, of too many entries, or not the protocol's.", LabelJob)
	MasterForeign    = def(Master, Counter, "lockstep_master_foreign_total", "", "Entries of agents' reports, of those refused, about ranks that another node's agent, which is heard, tells of.", LabelJob)
	MasterDuplicates = def(Master, Counter, "lockstep_master_duplicate_agents_total", "", "Agents refused because another one of the same node is heard: two have one name, and with TLS one certificate.", LabelJob)
	MasterFences     = def(Master, Counter, "lockstep_master_fence_calls_total", "", "Calls that asked for an attempt to be fenced, by what was answered: proven, unproven, refused.", LabelJob, LabelResult)
	MasterFenced     = def(Master, Gauge, "lockstep_master_fenced_attempt", "", "Attempt up to which agents are told to stop what is left, -1 while there is none.", LabelJob)
	MasterDisagree   = def(Master, Gauge, "lockstep_master_disagreeing_agents", "", "Agents that say that the job is in another attempt, or of another size, than most say.", LabelJob)
	JobUnseen        = def(Master, Gauge, "lockstep_job_unseen_ranks", "", "Ranks of the job that no agent tells of now: nothing is known of them.", LabelJob)
	MasterInsecure   = def(Master, Gauge, "lockstep_master_insecure", "", "1 when anybody who reaches the master may report faults of the job (--insecure-agents).", LabelJob)
	DelayRatio       = def(Master, Gauge, "lockstep_connection_delay_ratio", "", "Delay of a connection over the median of its kind (1: normal), of the last ten seconds. source_rank and destination_rank count in the communicator, not in the world. Communicators of at most 32 ranks, capped.", LabelJob, LabelCommunicator, LabelSrc, LabelDst)
)

// ReasonNodeLost is a verdict's reason (diagnosis): no agent of the node has been heard.
const ReasonNodeLost = "node_lost"

// On the remediator: what was done about it.
var (
	Webhooks         = def(Remediator, Counter, "lockstep_webhook_requests_total", "", "Alertmanager webhooks received, by result.", LabelResult)
	Actions          = def(Remediator, Counter, "lockstep_actions_total", "", "Decisions on alerts, by action and outcome.", LabelAction, LabelOutcome, LabelClass)
	ActionDuration   = def(Remediator, Histogram, "lockstep_action_duration_seconds", "seconds", "Time from the decision in the journal to the actuator's answer.", LabelAction)
	ActionsPending   = def(Remediator, Gauge, "lockstep_actions_pending", "", "Journaled actions that are not finished.")
	BreakerOpen      = def(Remediator, Gauge, "lockstep_breaker_open", "", "Whether a breaker is open: no action is taken until a person closes it.", LabelScope)
	BreakerRemaining = def(Remediator, Gauge, "lockstep_breaker_remaining_actions", "", "Actions that a breaker still allows in its window, in all and for each job acted on; 0 while it is open.", LabelScope)
	Disbelieved      = def(Remediator, Counter, "lockstep_alerts_disbelieved_total", "", "Alerts that nothing was done about because the job's master says otherwise, by what it says.", LabelReason)
	FenceProofs      = def(Remediator, Counter, "lockstep_fence_proofs_total", "", "Times that proof was asked, before an action, that nothing of the old attempt goes on: proven, unproven (nobody can tell in time), error (nobody could be asked).", LabelResult)
	FenceDuration    = def(Remediator, Histogram, "lockstep_fence_duration_seconds", "seconds", "Time from asking for that proof to having it, or giving up.")
	RemediatorTrust  = def(Remediator, Gauge, "lockstep_remediator_insecure", "", "1 when alerts are acted on without asking the job's master (--insecure-believe-alerts).")
	DryRun           = def(Remediator, Gauge, "lockstep_remediation_dry_run", "", "1 when actions are only journaled and logged.")
	NotesDropped     = def(Remediator, Counter, "lockstep_notes_dropped_total", "", "Journal entries whose story the job's master was not told, for its status page: it did not answer, or too many waited.")
	SchedulerCalls   = def(Remediator, Counter, "lockstep_scheduler_requests_total", "", "Requests to the cluster's API server, by verb and result.", LabelVerb, LabelResult)
	NodesOut         = def(Remediator, Gauge, "lockstep_nodes_out", "", "Nodes that are taken out now: suspect (blamed) or silent (not heard).", LabelReason)
	NodesReturned    = def(Remediator, Counter, "lockstep_nodes_returned_total", "", "Nodes that were brought back, by why they were out.", LabelReason)
	SpareNodes       = def(Remediator, Gauge, "lockstep_spare_nodes", "", "Spares of a pool that could be used now.", LabelPool)
	Fences           = def(Remediator, Counter, "lockstep_fences_total", "", "Answers to whether ranks on a silent node have ended: proven, unproven (acted on by policy all the same), waiting.", LabelResult)
	ForcedDeletions  = def(Remediator, Counter, "lockstep_forced_deletions_total", "", "Pods deleted by force on nodes that are silent.")
	Leading          = def(Remediator, Gauge, "lockstep_remediator_leading", "", "1 when this remediator is the one that acts.")
)

// On a fabric's planner. Links are those of the fabric's file between leaves and spines,
// 4000 of a family at most; link is the index among parallel ones.
var (
	FabricLinkUp       = def(Planner, Gauge, "lockstep_fabric_link_up", "", "Whether a link carries anything: 0 when probes found it dead.", fabricLink...)
	FabricLinkLoss     = def(Planner, Gauge, "lockstep_fabric_link_loss_ratio", "", "Share of packets that a link loses, as inferred from the paths that lose; 0 of links that are well.", fabricLink...)
	FabricLinkRate     = def(Planner, Gauge, "lockstep_fabric_link_rate_bytes_per_second", "", "What a link can carry, by the fabric's file.", fabricLink...)
	FabricLinkPlanned  = def(Planner, Gauge, "lockstep_fabric_link_planned_bytes_per_second", "", "What the lanes that are planned onto a link would send if all jobs sent at once.", fabricLink...)
	FabricLinkMeasured = def(Planner, Gauge, "lockstep_fabric_link_measured_bytes_per_second", "", "What senders of planned lanes say that they send over a link. Others' traffic is not in it.", fabricLink...)
	FabricLinkLanes    = def(Planner, Gauge, "lockstep_fabric_link_lanes", "", "Lanes that are planned onto a link.", fabricLink...)
	FabricProbesSent   = def(Planner, Counter, "lockstep_fabric_probes_sent_total", "", "Probes whose path has a link in it. A probe counts on each of its path's links.", fabricLink...)
	FabricProbesLost   = def(Planner, Counter, "lockstep_fabric_probes_lost_total", "", "Probes of those that did not arrive. Which link lost them is inferred from many paths.", fabricLink...)
	FabricSegmentsSent = def(Planner, Counter, "lockstep_fabric_segments_sent_total", "", "TCP segments that senders of planned lanes say that they sent over a link. A segment counts on both links of its path.", fabricLink...)
	FabricSegmentsLost = def(Planner, Counter, "lockstep_fabric_segments_lost_total", "", "Those of them that they had to send again. Which of a path's links lost them they cannot tell.", fabricLink...)
	FabricSuspected    = def(Planner, Gauge, "lockstep_fabric_link_suspected", "", "1 while some job's senders lose much more over paths with this link than over others, and probes have not proven which link it is.", fabricLink...)
	PlannerMoves       = def(Planner, Counter, "lockstep_planner_moves_total", "", "Lanes that were given another path: off dead, lossy, congested or uneven links, or onto ones that returned.", LabelReason)
	PlannerJobs        = def(Planner, Gauge, "lockstep_planner_leases", "", "Jobs whose lanes have paths now.")
	PlannerStreams     = def(Planner, Gauge, "lockstep_planner_streams", "", "Processes that are connected to be planned.")
	PlannerProbers     = def(Planner, Gauge, "lockstep_planner_probers", "", "Hosts whose prober is connected.")
	PlannerRefused     = def(Planner, Counter, "lockstep_planner_refused_total", "", "What the planner refused: handshake (no certificate, another authority's, or another user's process), certificate (it does not allow what was said), request (malformed, or over a bound).", LabelReason)
)

// On each supervisor of a job of `lockstep run` on several machines that is given a page, and on its coordinator.
var (
	SupervisorHeard  = def(Supervisor, Gauge, "lockstep_supervisor_coordinator_heard", "", "Whether this host's supervisor has heard the job's coordinator within the lease; its ranks end when it has not.", LabelJob)
	SupervisorRanks  = def(Supervisor, Gauge, "lockstep_supervisor_ranks", "", "Ranks of this host by state: running, exited.", LabelJob, LabelState)
	SupervisorLeases = def(Supervisor, Counter, "lockstep_supervisor_leases_expired_total", "", "Times that this host's ranks were ended because the coordinator was not heard for a lease.", LabelJob)

	CoordinatorHosts    = def(Supervisor, Gauge, "lockstep_coordinator_hosts", "", "Hosts by what they are to the coordinator: running (heard, and of the attempt), standby (heard, and of none), silent (of the last attempt, and not heard), excluded.", LabelJob, LabelState)
	CoordinatorNeeded   = def(Supervisor, Gauge, "lockstep_coordinator_hosts_needed", "", "Hosts that an attempt of the job takes.", LabelJob)
	CoordinatorConns    = def(Supervisor, Gauge, "lockstep_coordinator_connections", "", "Connections of supervisors that have been let in.", LabelJob)
	CoordinatorJoins    = def(Supervisor, Counter, "lockstep_coordinator_joins_total", "", "Times that a host's supervisor was let in, anew after each loss of its connection.", LabelJob)
	CoordinatorAttempt  = def(Supervisor, Gauge, "lockstep_coordinator_attempt", "", "The last attempt that was begun, from 0; -1 while there is none.", LabelJob)
	CoordinatorAttempts = def(Supervisor, Counter, "lockstep_coordinator_attempts_total", "", "Attempts begun, those before a restart of the coordinator included.", LabelJob)
	CoordinatorRefused  = def(Supervisor, Counter, "lockstep_coordinator_refused_total", "", "Whom the coordinator turned away: handshake (no certificate, another authority's, or another user's process), certificate (it does not allow to speak for that node or job), name (another supervisor of the node is heard), message (not the protocol's), another_job (of another job, or told of other ranks), full (as many hosts as may be), silent (nothing was said in time).", LabelJob, LabelReason)
)

var fabricLink = []string{LabelLeaf, LabelSpine, LabelDirection, LabelLink}

// In the file that a preflight check leaves for a textfile collector: how the
// machines were when it ended. Pairs are exported of at most 32 ranks.
var (
	PreflightGood          = def(Preflight, Gauge, "lockstep_preflight_good", "", "Whether the check found nothing bad.")
	PreflightEnd           = def(Preflight, Gauge, "lockstep_preflight_end_timestamp_seconds", "seconds", "When the check ended, in Unix time.")
	PreflightDuration      = def(Preflight, Gauge, "lockstep_preflight_duration_seconds", "seconds", "How long the check took.")
	PreflightRanks         = def(Preflight, Gauge, "lockstep_preflight_ranks", "", "Ranks that took part.")
	PreflightBadEdges      = def(Preflight, Gauge, "lockstep_preflight_bad_edges", "", "Ordered pairs of ranks that are bad.")
	PreflightNodeGood      = def(Preflight, Gauge, "lockstep_preflight_node_good", "", "Whether nothing bad was found of a node.", LabelNode)
	PreflightBandwidth     = def(Preflight, Gauge, "lockstep_preflight_bandwidth_bytes_per_second", "", "Bandwidth from one rank to another, one direction by itself; 0: nothing arrived. At most 32 ranks.", LabelSrc, LabelDst)
	PreflightLatency       = def(Preflight, Gauge, "lockstep_preflight_latency_seconds", "seconds", "Half of the median round trip of a small message between two ranks. At most 32 ranks.", LabelSrc, LabelDst)
	PreflightRankBandwidth = def(Preflight, Gauge, "lockstep_preflight_rank_bandwidth_bytes_per_second", "", "Median bandwidth of the pairs that a rank is part of. At most 4096 ranks.", LabelRank, LabelNode)
	PreflightRankLatency   = def(Preflight, Gauge, "lockstep_preflight_rank_latency_seconds", "seconds", "Median latency of the pairs that a rank is part of. At most 4096 ranks.", LabelRank, LabelNode)
	PreflightRankMemory    = def(Preflight, Gauge, "lockstep_preflight_rank_memory_bytes_per_second", "", "Bytes that a rank copies within the memory of its device. At most 4096 ranks.", LabelRank, LabelNode)
	PreflightRankCompute   = def(Preflight, Gauge, "lockstep_preflight_rank_compute_operations_per_second", "", "Floating-point operations of one core of a rank's host. At most 4096 ranks.", LabelRank, LabelNode)
)

// Span attributes (OTel namespace ccl.*).
const (
	AttrCollective   = "ccl.collective"
	AttrCommunicator = "ccl.communicator.name"
	AttrCommID       = "ccl.communicator.id"
	AttrCommSize     = "ccl.communicator.size"
	AttrRank         = "ccl.rank"
	AttrWorldRank    = "ccl.world_rank"
	AttrSequence     = "ccl.sequence"
	AttrBytes        = "ccl.bytes"
	AttrDType        = "ccl.datatype"
	AttrOp           = "ccl.operator"
	AttrAlgo         = "ccl.algorithm"
	AttrProto        = "ccl.protocol"
	AttrRoot         = "ccl.root"
	AttrResult       = "ccl.result"
	AttrAttempt      = "ccl.job.attempt"
	AttrJob          = "ccl.job.name"
	AttrChannels     = "ccl.channels"
	AttrPeer         = "ccl.peer"
	AttrPeerWait     = "ccl.peer.wait"
	AttrPeerStall    = "ccl.peer.stall"
	AttrBacklog      = "ccl.window.backlog"
	AttrCause        = "ccl.window.cause"
	AttrWRs          = "ccl.window.work_requests"
	AttrBandwidth    = "ccl.window.bandwidth"
)
