package wire

import "time"

// What an agent and a master agree on about leases. With λ the lease that a report tells of (the
// job's own and the grace, Rank.FenceLeaseKept), and both counting from reports that the master has:
//
//	agent   SIGTERM at λ less the grace, SIGKILL at λ
//	        started again: SIGKILL at λ + LeaseRestart + LeaseComeback, at the latest
//	master  takes as proof λ + LeaseMargin(λ)
//
// The agent's moment is never the later one: it counts from when the report was sent.
const (
	// LeaseRestart is until an agent that was killed runs again. systemd waits for a second, and the
	// kubelet does not wait the first time. One that is away for longer keeps no lease.
	LeaseRestart = 2 * time.Second
	// LeaseComeback is what an agent that was started again gives the master to hear it, before it
	// stops ranks by a lease that ended meanwhile: one attempt to connect, with a SYN sent twice.
	LeaseComeback = 3 * time.Second
	// leaseTick is for the agent's own pace on a busy node: it looks at leases ten times a second, at
	// processes twenty times, and each second for what ranks have started.
	leaseTick = 2 * time.Second
	// clockDrift is by how much two nodes' clocks may differ in pace: NTP slews by 1 in 2,000.
	clockDrift = 1000
)

// LeaseMargin is how much longer than a lease a node must be silent before its ranks have ended for
// certain. The grace is in the lease, not here: ranks choose it.
func LeaseMargin(lease time.Duration) time.Duration {
	return LeaseRestart + LeaseComeback + leaseTick + lease/clockDrift
}

// FormerLeaseMargin is that of agents before FenceLeaseKept. It does not cover one that is started
// again late in its lease, nor a long grace.
const FormerLeaseMargin = 20 * time.Second
