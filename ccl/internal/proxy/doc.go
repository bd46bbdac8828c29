// Package proxy runs operations on device memory between nodes. It does what NCCL's proxy thread
// does, on the communicator's executor.
//
// In: a checked call on device memory, and a CUDA stream. The stream's part is put on the stream at
// once: collectives within the node (package gpu), copies to and from bounce buffers in pinned
// memory, and waits for the network. The network's part is an Op, which goes in the communicator's
// queue. Out: results in the caller's buffers.
//
// The executor drives an Op by a few methods: Ready, Schedule, Parts, Gate, Returned. The stream and
// the executor report their progress to each other by counters in pinned memory. Neither calls the
// driver for the other.
//
// The package does not choose algorithms on the network (Config.Choose does), and records only the
// stamps of an operation's start and end.
package proxy
