// Package preflight measures every ordered pair of ranks before a job starts, and
// says which connections, ranks and nodes to keep out of it.
//
// In flow a communicator's configuration and what to measure; out flows a Report of
// rank 0: the delay matrix, what is typical, what is bad and whose it is.
//
// Rank 0 conducts (conduct.go): it tells all ranks whom to measure next (plan.go).
// Each pair does so on a communicator of its own (pair.go), so that one that hangs is
// given up and named without harm to the others, and each rank reports to rank 0
// (rank.go), which judges (verdict.go) by diagnosis.Norm and diagnosis.ExplainEdges.
// What looks bad is measured again before it is called so.
//
// It starts no ranks and writes no files: those are the command's. It repairs nothing and
// knows no scheduler: who drains a node is the prolog's.
package preflight
