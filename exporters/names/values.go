package names

// Values of LabelState on lockstep_ranks and lockstep_job_ranks: what the
// agent sees of a rank's process.
const (
	StateUnknown   = "unknown"    // no agent can tell
	StateRunning   = "running"    // runnable, or asleep in the usual way
	StateStopped   = "stopped"    // SIGSTOP or a debugger
	StateDiskSleep = "disk_sleep" // uninterruptible for longer than one sample
	StateGone      = "gone"       // no such process, and it never said goodbye
	StateExited    = "exited"     // ended in good order
)

// Values of LabelState on lockstep_master_agents.
const (
	StateConnected    = "connected"
	StateDisconnected = "disconnected" // for less than the master's patience
	StateLost         = "lost"         // for longer
)

// ClockGPU is the value of LabelClock, the clock whose mapping to host time is
// bounded: the worst GPU's, where there is any.
const ClockGPU = "gpu"

// Values of LabelReason on lockstep_trace_spans_dropped_total.
const (
	DropQueueFull    = "queue_full"    // the backend is slower than the ranks
	DropEvicted      = "evicted"       // newer collectives overwrote it before it was sent
	DropOverLimit    = "over_limit"    // more spans a second than the limit allows
	DropExportFailed = "export_failed" // the backend refused it, or retries ran out
	DropRejected     = "rejected"      // partial success: the backend kept the others
	DropShutdown     = "shutdown"      // still queued when the agent had to stop
)

// Values of LabelEffect: whom an Xid ends.
const (
	EffectUnknown     = "unknown"
	EffectInfo        = "info"        // nobody
	EffectApplication = "application" // the process; the GPU is fit for use
	EffectGPU         = "gpu"         // the GPU needs a reset, or more
)

// Values of LabelKind and LabelLifetime on the memory errors of GPUs.
const (
	KindCorrected     = "corrected"
	KindUncorrected   = "uncorrected"
	LifetimeVolatile  = "volatile"
	LifetimeAggregate = "aggregate"
)

// Values of LabelReason on lockstep_gpu_throttled that a healthy GPU in a
// healthy rack never has.
const (
	ThrottleSWThermal  = "sw_thermal"
	ThrottleHWThermal  = "hw_thermal"
	ThrottlePowerBrake = "power_brake"
)

// Values of LabelListener.
const (
	ListenerWeb         = "web"
	ListenerAgents      = "agents"
	ListenerPlanner     = "planner"
	ListenerCoordinator = "coordinator"
)

// Values of LabelReason on lockstep_web_requests_refused_total.
const (
	WebAnonymous = "anonymous" // no password, where one is asked for; a browser's first request is such
	WebPassword  = "password"  // a wrong one
	WebElsewhere = "elsewhere" // the page is for this host's loopback only
	WebLimited   = "limited"   // more requests than the web configuration allows
)

// WebRefusals are all of them.
var WebRefusals = []string{WebAnonymous, WebPassword, WebElsewhere, WebLimited}
