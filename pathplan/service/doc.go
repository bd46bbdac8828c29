// Package service is C4P's planner as a server, one for the whole fabric and all tenants,
// and its client.
//
// A [Server] holds a pathplan.Planner. Processes of jobs say which connections they have
// and get paths; hosts' probers are told what to probe, and say what came of it; bad links
// are inferred from that, and lanes moved. A [Client] is a ccl.PathPlan: it asks the
// server for the paths of connections, finds the source ports that take them by traces of
// its own (package probe), and has the transport move when the plan changes. A [Prober] is a
// host's.
//
// Trust is that of the other parts (package collector/wire): mutual TLS, or processes of one
// user on one host. A certificate for agent/NODE/job/JOB plans connections of that job
// that begin at that node; the job is the tenant, and nobody else's connections can be named.
// Probers are agent/NODE without a job. What a tenant measures moves its own lanes only.
//
// A planner that is away costs the plan and nothing else: connections are made from ports
// that the kernel chooses, and stay as they are.
package service
