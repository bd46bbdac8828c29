// Package preflight is the `lockstep preflight` command: it measures every
// ordered pair of ranks before a job starts, and says which connections, ranks
// and nodes to keep out of it.
//
// In flow a command line and a launcher's environment; out flow a delay matrix on
// the terminal, as JSON and for a textfile collector, a list of good nodes, and an
// exit status that a prolog can act on.
//
// Rank 0 conducts: it tells all ranks whom to measure next (plan.go), each pair
// does so on a communicator of its own (pair.go), so that one that hangs is given
// up and named without harm to the others, and reports to rank 0 (rank.go), which
// judges (verdict.go) by diagnosis.Norm and diagnosis.ExplainEdges. What looks bad
// is measured again before it is called so.
//
// It repairs nothing and knows no scheduler: who drains a node is the prolog's.
package preflight
