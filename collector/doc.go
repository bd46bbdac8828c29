// Package collector has what agents and masters publish: values that exporters read, and
// nothing else.
//
// In flow finished collectives (Collective, handed to Sinks), and a few times a second what an
// agent or a master knows (AgentSnapshot, MasterSnapshot, JobView). Out flow the same values,
// unchanged: a snapshot is immutable once it is published, so readers need no lock and never
// reach into who made it. TraceID and SpanID name a collective alike on all ranks, with nothing
// exchanged.
//
// It runs nothing: package agent folds records, package master merges and judges.
package collector
