// Package executor runs one communicator's operations in the order of the calls.
//
// In: operations, which any goroutine puts in the queue (Put). Out: calls of the
// engine, which moves the bytes, and flight-recorder records of each operation.
//
// One goroutine at a time has the executor's role and runs operations. A goroutine
// that waits for an operation takes the role (Drive), and continues where the last
// one stopped. If nobody waits, the process's sweeper wakes the communicator's
// worker, which then takes the role.
//
// The parts: a queue holds operations and the role. An Order knows a stream's
// operations on all communicators. plans caches schedules by shape. A Log writes
// records. The Executor has all of these, and the communicator's failure.
//
// It checks no arguments and makes no CUDA calls; its callers do both. A Proxy
// stands for the GPU's part of an operation.
package executor
