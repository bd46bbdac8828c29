// Package pathplan is the pure part of C4P: which path each queue pair, or lane,
// of each connection takes through a leaf-spine fabric.
//
// In go a [Topology], the state of its links, which source port hashes to which
// path ([PortMap], learnt by probes), what connections need ([Request]), and what
// links and queue pairs have measured ([Planner.Observe]). Out come
// assignments ([Assignment]: a side, a path, a source port, a share of the bytes)
// and, later, moves ([Move]). [Infer] names the links that explain which probes
// were lost.
//
// Rules (C4, section on C4P): left ports talk to left ports, right to right; a
// NIC's traffic is even over both; a link's load is even over all jobs of all
// tenants; a dead link is never used. The planner gives paths to lanes as a
// balanced edge colouring gives colours: alternating chains make room, so that
// links carry the same whenever the fabric allows it.
//
// The package does no I/O, reads no clock and starts no goroutine: callers pass
// the time. The same calls give the same plan. A Planner is not safe for
// concurrent use. Sizes are bounded by [Limits]; what a client names is checked
// before memory is spent on it.
package pathplan
