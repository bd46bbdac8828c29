// Package nccl holds what attaches to NCCL: in plugin the profiler plugin, in C,
// which NCCL loads into unmodified programs and which writes what their
// communicators do into a flight recorder (record/c); in driver a conformance
// driver that makes the calls that NCCL makes, for machines without GPUs.
//
// The Go side is tests only: each plays a sequence of calls and finds all of it in
// the recorder, or behind an agent and a master as a verdict. docs/design/nccl.md
// says what each event gives.
package nccl
