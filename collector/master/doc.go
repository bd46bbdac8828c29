// Package master is a job's one place of judgement (C4D's master): it merges
// the progress of all agents into diagnosis.Evidence, has it diagnosed ten
// times a second, and turns verdicts into incidents with a life of their own.
//
// In: one gRPC stream per agent (package wire), whose content is trusted for
// nothing: every index is checked, every table has a bound, and what finds no
// place is counted. Out: an immutable collector.MasterSnapshot for the
// exporters, and requests to the agents for the traces of the collective that
// an incident names.
//
// With a state directory it records the evidence that it judged, and keeps what
// is around incidents (package diagnosis/replay).
//
// A master may be killed at any time. Its agents send it everything again,
// and open incidents are kept in a small file, so that one fault is one
// incident. It serves no HTTP, and takes no action: alerts do that.
package master
