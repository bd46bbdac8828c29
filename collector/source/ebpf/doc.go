// Package ebpf is the source that watches ranks which keep no recorder of their own: it puts probes
// on NCCL's functions in processes that run, whatever they are and wherever (containers too), with no
// restart, no environment variable and no change to them.
//
// In flow calls: who has called which collective on which communicator, when, and whether the call
// has returned. Out flow recorders, which this source keeps in the name of the processes (their
// header says so: record.SourceCalls), so that agent, master, diagnosis and traces read them like any
// other. Beside that: for ranks of either library, what their threads wait for when they do not run,
// and TCP segments sent again, as evidence for the why.
//
// What it sees is calls of the host, not work of the GPU. A rank that stops calling while others
// call is seen; a collective that all have called and that does not end is not, nor how long one took.
// Communicators whose making was not seen are counted and otherwise left alone: nobody knows which
// they are, nor how many calls were before.
//
// The source decides nothing and changes nothing in the processes but the probed instructions.
// Where the kernel does not let it, Update says so (ErrNotPermitted, ErrNotSupported), and the
// agent's other sources go on.
package ebpf
