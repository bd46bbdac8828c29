// Package otlp exports collectives as OpenTelemetry traces: the ones worth
// keeping, as they end, and those that a master names, from memory.
//
// In flow folded collectives (collector.Tracer); out flow OTLP requests over
// gRPC or HTTP, configured by the standard OTEL_* variables. Without an
// endpoint nothing is kept and nothing is sent.
//
// A trace is one collective. Every rank derives its id, and every span's, from
// what it knows already (collector.TraceID, collector.SpanID), so the agents of
// a job meet in one trace without talking:
//
//	AllReduce dp                  rank -1: the root
//	├─ rank 0 (node0) AllReduce
//	│  ├─ wait                    until the last peer had entered
//	│  └─ transfer
//	└─ rank 1 (node0) AllReduce, …
//
// The root covers the ranks' spans: an agent sends it when its master has told how far
// they all reach (Root). Sends and receives are numbered by each rank for
// itself, so theirs have no root; nor have operations on the host of a communicator that GPUs
// stamp, of which no master hears. Abnormal transport windows and changes of paths are events of the
// rank's span, with the connection's identity. A collective that is still open when it is asked for is sent as
// a snapshot with a span id of its own, marked ccl.open, ending when it was looked at; what ends after
// that is linked to the root and no child of it.
//
// Times are the job's clock's where the agent knows it, with their error beside them (ccl.clock.*).
//
// Spans are encoded by hand (span.go), because at 50,000 collectives a second
// the SDK's 20 µs a span would cost the trainers a core. What is rare, the
// master's and the remediator's own work, goes through the SDK (Control),
// in one trace an incident (Incidents, IncidentContext).
package otlp
