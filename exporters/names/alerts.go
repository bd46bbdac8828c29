package names

// Alerts of package rules. Each has a page docs/runbooks/<alert>.md.
const (
	AlertCommunicationHang    = "LockstepCommunicationHang"
	AlertNoncommunicationHang = "LockstepNoncommunicationHang"
	AlertCommunicationSlow    = "LockstepCommunicationSlow"
	AlertNoncommunicationSlow = "LockstepNoncommunicationSlow"
	AlertFaultSuspected       = "LockstepFaultSuspected"

	AlertFallbackCommunicationHang    = "LockstepFallbackCommunicationHang"
	AlertFallbackNoncommunicationHang = "LockstepFallbackNoncommunicationHang"
	AlertFallbackSlow                 = "LockstepFallbackSlow"

	AlertConnectionPathDown = "LockstepConnectionPathDown"

	AlertAgentDown         = "LockstepAgentDown"
	AlertAgentLost         = "LockstepAgentLost"
	AlertAgentDisconnected = "LockstepAgentDisconnected"
	AlertReportsDropped    = "LockstepReportsDropped"
	AlertSourceDown        = "LockstepSourceDown"
	AlertRecorderLoss      = "LockstepRecorderLoss"
	AlertMasterDown        = "LockstepMasterDown"
	AlertDiagnosisStalled  = "LockstepDiagnosisStalled"
	AlertTrackingOverflow  = "LockstepTrackingOverflow"
	AlertSeriesOverflow    = "LockstepSeriesOverflow"
	AlertClockError        = "LockstepClockError"
	AlertTraceDrops        = "LockstepTraceDrops"
	AlertAccessDenied      = "LockstepAccessDenied"
	AlertInsecure          = "LockstepInsecure"
	AlertIdentityConflict  = "LockstepIdentityConflict"
	AlertRanksUnseen       = "LockstepRanksUnseen"
	AlertCertificate       = "LockstepCertificateTrouble"
	AlertStateUnwritable   = "LockstepStateUnwritable"
	AlertHostsMissing      = "LockstepHostsMissing"

	AlertGPUXidFatal           = "LockstepGPUXidFatal"
	AlertGPULost               = "LockstepGPULost"
	AlertGPUDriverUnresponsive = "LockstepGPUDriverUnresponsive"
	AlertGPUUncorrectableECC   = "LockstepGPUUncorrectableECC"
	AlertGPURowRemapFailure    = "LockstepGPURowRemapFailure"
	AlertGPUNVLinkErrors       = "LockstepGPUNVLinkErrors"
	AlertGPUThrottled          = "LockstepGPUThrottled"

	AlertNICPortDown           = "LockstepNICPortDown"
	AlertNICPortFlapping       = "LockstepNICPortFlapping"
	AlertNICRetransmissions    = "LockstepNICRetransmissions"
	AlertNICCongestion         = "LockstepNICCongestion"
	AlertNICCountersUnreadable = "LockstepNICCountersUnreadable"
	AlertNICDriverUnresponsive = "LockstepNICDriverUnresponsive"

	AlertRemediatorDown = "LockstepRemediatorDown"
	AlertBreakerOpen    = "LockstepBreakerOpen"
	AlertActionFailed   = "LockstepActionFailed"
	AlertActionStuck    = "LockstepActionStuck"
	AlertWebhookRefused = "LockstepWebhookRefused"

	AlertFabricLinkDead   = "LockstepFabricLinkDead"
	AlertFabricLinkLossy  = "LockstepFabricLinkLossy"
	AlertFabricSuspected  = "LockstepFabricLinkSuspected"
	AlertFabricUnbalanced = "LockstepFabricUnbalanced"
	AlertPlannerDown      = "LockstepPlannerDown"
)

// RunbookBase is where the pages of docs/runbooks are published.
const RunbookBase = "https://github.com/lockstep-ccl/lockstep/blob/main/docs/runbooks"

// Uids of the dashboards; alerts link to them, and they to each other.
const (
	DashboardFleet        = "lockstep-fleet"
	DashboardJob          = "lockstep-job"
	DashboardCommunicator = "lockstep-communicator"
	DashboardNode         = "lockstep-node"
	DashboardGPU          = "lockstep-gpu"
	DashboardPipeline     = "lockstep-pipeline"
	DashboardFabric       = "lockstep-fabric"
)
