// Package preflightcmd is the `lockstep preflight` command: flags, the ranks it starts on
// one machine, and what is made of a preflight.Report.
//
// In flow a command line and a launcher's environment; out flow a delay matrix on
// the terminal, as JSON and for a textfile collector, a list of good nodes, and an
// exit status that a prolog can act on.
//
// It measures and judges nothing itself: package preflight does.
package preflightcmd
