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
//	AllReduce dp                  rank -1: the root, sent by the agent of rank 0
//	├─ AllReduce dp               rank 0
//	│  ├─ wait                    until the last peer had entered
//	│  └─ transfer
//	└─ AllReduce dp               rank 1, …
//
// The root exists to give the ranks' spans a common parent; it has rank 0's
// times. When rank 0's agent is gone, backends show the others with a missing
// parent, which is the truth. Sends and receives are numbered by each rank for
// itself, so theirs have no root. Abnormal transport windows are events of the
// rank's span. A collective that is still open when it is asked for is sent as
// a snapshot with a span id of its own, marked ccl.open, ending now.
//
// Spans are encoded by hand (span.go), because at 50,000 collectives a second
// the SDK's 20 µs a span would cost the trainers a core. What is rare, the
// master's and the remediator's own work, goes through the SDK (Control),
// in one trace an incident (Incidents, IncidentContext).
package otlp
