// Package rdma connects two ranks by RDMA writes, over lanes that survive a
// dead port.
//
// In: bytes and lines to send, completions and events of queue pairs (package
// verbs), the peer's words on a control socket. Out: the same bytes at the
// peer, once and in order, read in place; what became of each path.
//
// A lane is a queue pair on a primary path and one on a backup path, of which
// one carries traffic. Who sees a fault stops its queue pair, counts what has
// arrived, and tells the other end, which does the same; both send again from
// what the other has counted, over the first path that both call alive. That is
// ICCL's retreat, driven by the receiver's count. The protocol is a state
// machine without I/O or clock (machine); Conn carries out what it decides.
//
// It does not decide that a process is dead, nor which NIC is near to whom. That a
// host is gone it finds when neither a path nor the control socket has an answer.
package rdma
