// Package diagnosis tells who broke step: it turns what the master knows of a
// job at one moment (Evidence) into verdicts of C4D's four classes, each with a
// level, culprits and sentences an operator can check.
//
// An Engine does no I/O, reads no clock and starts nothing: Diagnose is called
// a few times a second and its answer depends on the evidence so far only. What
// it remembers between passes is small: how long each communicator's operations
// normally take, how much time each rank spends on its own work, which faults
// are open. It acts on nothing and publishes nothing; incidents belong to the
// master, actions to remediation.
//
//	what is seen                                             class                  culprit, reason
//	-------------------------------------------------------  ---------------------  ------------------------------------
//	some members never entered; the rank they all wait for   noncommunication_hang  rank: process_gone, process_stopped,
//	  waits for nobody                                                              disk_sleep, process_exited, xid_N, idle,
//	                                                                                computing, io, checkpoint, evaluation,
//	                                                                                compile, unknown
//	ranks wait for each other in a circle                    noncommunication_hang  ranks: deadlock
//	the blame ends at ranks of a node whose agent is lost,   noncommunication_hang  node: node_lost
//	  or others give up and die after it fell silent
//	members mean different operations by the same number     noncommunication_hang  ranks: mismatch
//	a communicator never forms                               noncommunication_hang  ranks: not_joined
//	all entered; bytes posted, the receiver waits, nothing   communication_hang     connection, source or destination:
//	  completes                                                                     stalled
//	both ends say that every path between them is broken     communication_hang     connection: link_down
//	post → completion takes far longer than before and than  communication_slow     connection, source, destination or
//	  its peers', a receiver waits for it, operations grew                           node: network
//	own time per operation far above its own history (or its noncommunication_slow  rank or node: straggler
//	  peers'), the others' time inside collectives grew
//	everyone pauses, everyone is slower, the master slept    none
//
// Reading order: engine.go (one pass), progress.go (the linear scan), hang.go
// (with waits.go and waitgraph.go), pauses.go, mismatch.go, deaths.go, lost.go and
// links.go, window.go, straggler.go, slow.go and delaymatrix.go, incidents.go;
// gpu.go and xid.go for what is said of GPUs.
package diagnosis
