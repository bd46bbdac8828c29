// Package agent watches the ranks of one node (C4's agent). It reads their
// flight recorders and asks its other sources about their processes, and
// never touches the trainer.
//
// In: records and live words, by collector/source/recorder; process states and
// the like, by the other sources. Out: every finished collective, folded from
// its records, to the Sinks (metrics, traces); progress of every rank,
// communicator and connection to each job's master; and a
// collector.AgentSnapshot of the agent itself.
//
// One goroutine does all of this, so Sinks need no locks; one more per job
// talks to its master. The agent decides nothing: verdicts are the master's.
package agent
