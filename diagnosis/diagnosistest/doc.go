// Package diagnosistest simulates a training job as its master sees it.
//
// A Job is a discrete-event simulation of data × tensor × pipeline parallel
// ranks on several nodes: every rank computes, calls collectives on its
// tensor- and data-parallel communicators and sends and receives along its
// pipeline, with noise; faults and pauses are injected at given times. Agents
// report each node's state with a delay and with a clock of its own, so the
// Evidence that comes out is as stale and as inconsistent as the real thing.
//
// It runs in virtual time, is deterministic for a seed, and knows nothing of
// the engine: tests of diagnosis and of the master compare verdicts with what
// was injected.
package diagnosistest
