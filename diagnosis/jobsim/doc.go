// Package jobsim simulates training jobs on a modelled cluster, and what agents
// and a master would make of them: successive diagnosis.Evidence, with the truth
// of what was broken beside it. It is for measuring verdicts and for tests of
// whatever consumes evidence; it judges nothing itself.
//
// A Job is deterministic: the same Config gives the same evidence. Time is
// virtual and moves in ticks of 20 ms. Within a tick nothing is ordered by a
// global clock: each rank runs on until it is ahead of the tick or waits, and a
// collective's end follows from its members' starts. One collective is one event
// for each member, whatever its size, so 32,768 ranks are feasible.
//
// Reading order: config.go (what a job is), program.go (what a rank does in a
// step), job.go (construction and time), run.go (ranks and collectives), p2p.go
// (sends and receives), fabric.go (which path a connection takes), fault.go,
// death.go (how programs end), report.go and conns.go (what the master gets).
// scenario.go, tuning.go and reporting.go make seeded scenarios; judge.go says
// which verdicts are right.
package jobsim
