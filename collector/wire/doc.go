// Package wire is the protocol between agents and masters: one protobuf file,
// one bidirectional gRPC stream per agent and job, and the transport
// credentials of both ends.
//
// Up goes Hello, then Reports of what changed on a node; down come acks (with
// the master's clock, so that both sides can bound the offset between their
// clocks), requests for the traces of a named collective, and resyncs. A
// report refers to nothing outside its own stream, so a master that restarts
// needs no more than its agents' next reports.
//
// The package knows neither how progress is observed (collector/agent) nor
// what it means (collector/master).
package wire

//go:generate sh generate.sh

// ProtocolVersion of Hello. A master takes agents from OldestProtocolVersion on, which is
// the version before its own; it refuses others and says which side to upgrade.
const (
	ProtocolVersion       = 1
	OldestProtocolVersion = 1 // there was none before
)

// Limits that both ends hold to, whatever the other one sends.
const (
	MaxMessage = 4 << 20 // bytes of one message on the wire
	MaxEntries = 8192    // ranks, their calls, members, connections, arrivals and traces of one report, together
	MaxName    = 63      // bytes of a job, node, communicator or connection name
)
