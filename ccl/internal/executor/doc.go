// Package executor runs one communicator's operations in the order of the calls.
//
// In flow operations, put in the queue by any goroutine. Out flow calls of the engine,
// which moves the bytes, and what the flight recorder keeps of each operation. Whoever
// waits does the work: Drive takes the executor's role and carries on where another
// left off, and a worker takes on what nobody waits for, sent by the process's sweeper.
//
// From the bottom up: a queue holds operations and the role; an Order is what a stream
// knows of them, across communicators; schedules are kept by shape; a Log writes records;
// the Executor has all of these and the communicator's failure; Put and Drive run it.
//
// It checks no arguments and makes no CUDA calls: its callers do. A kernel's part of an
// operation is behind the interface Proxy.
package executor
