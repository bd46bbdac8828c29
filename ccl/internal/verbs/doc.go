// Package verbs binds the part of libibverbs that the RDMA transport uses:
// devices, ports, GIDs, memory regions, completion queues, reliable-connected
// queue pairs that write, and asynchronous events. The library is opened at run
// time, so that one binary runs with and without it; no header is needed to
// build, abi.h declares what is used of its ABI.
//
// In: device names, addresses, queue pair attributes. Out: completions, events,
// and an *Error that names the call, the device and what failed. No policy: it
// retries nothing, chooses no device, and knows nothing of ranks or records.
//
// Posting and polling are one call into C each and allocate nothing. As in
// libibverbs, making objects, posting, polling and reading events are safe from
// many goroutines at once; a queue pair's state is one goroutine's to change.
// Close comes after every other call has returned, and children are closed
// before their parents: QP before CQ and PD, CQ before CompletionChannel, all
// before Context. A closed object answers ErrClosed. Nothing is closed by the
// garbage collector.
//
// Registered memory must not be Go's unless it is pinned for as long.
//
// Set LOCKSTEP_LIBIBVERBS to open another file than libibverbs.so.1; package
// verbstest uses that to put a fake in its place. As libibverbs does, the
// package reads SYSFS_PATH for where sysfs is mounted.
package verbs
