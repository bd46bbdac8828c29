// Package proxy takes operations on device memory between nodes: what NCCL's proxy
// thread does, on the communicator's executor.
//
// In flow a checked call on device memory, and a CUDA stream. The stream's part is put on
// it at once: work within the node (package gpu), copies to and from bounce buffers in
// pinned memory, and waits for the network. The network's part is an Op, which goes in the
// communicator's queue. Out flow results in the caller's buffers.
//
// The executor drives an Op by a few methods: Ready, Schedule, Parts, Gate, Returned. The
// stream and the executor tell each other by counters in pinned memory how far they are;
// neither calls the driver for the other.
//
// It chooses nothing on the network (Config.Choose does), and keeps no records but the
// stamps of an operation's begin and end.
package proxy
