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
//	                                                                                starved, computing, io, checkpoint, evaluation,
//	                                                                                compile, unknown
//	ranks end, and who gave up named whom                    noncommunication_hang  who named nobody: process_gone, process_exited
//	ranks wait for each other in a circle                    noncommunication_hang  the odd one out, else ranks: deadlock
//	the blame ends at ranks of a node whose agent is lost,   noncommunication_hang  node: node_lost
//	  or others give up and die after it fell silent
//	members mean different operations by the same number     noncommunication_hang  ranks: mismatch
//	a communicator never forms                               noncommunication_hang  ranks: not_joined
//	all entered; bytes posted, the receiver waits, nothing   communication_hang     connection, source or destination:
//	  completes                                                                     stalled
//	both ends say that every path between them is broken,    communication_hang     connection, rank or node: link_down
//	  or lost each other while both were there
//	post → completion takes far longer than before and than  communication_slow     connection, source, destination or
//	  its peers', a receiver waits for it, operations grew                           node: network
//	own time per operation far above its own history (or its noncommunication_slow  rank or node: straggler
//	  peers'), or a little above it for long and the job
//	  is slower for it; others' time inside collectives grew
//	everyone pauses, everyone is slower, the master slept    none
//
// A pass goes one way: the view takes in the evidence, detectors look at the view,
// each with a state of its own, and the tracker makes incidents of what they find.
// A new class of fault is a new detector in New's list.
//
// Reading order: engine.go (one pass), view.go and progress.go (the view, a linear scan),
// hang.go (with waits.go, stalls.go and waitgraph.go), pauses.go and away.go, mismatch.go and odd.go,
// aborts.go, deaths.go, lost.go and links.go, window.go, straggler.go, drag.go (with dragsaid.go), habit.go, slow.go (with flights.go and inside.go) and delaymatrix.go, moves.go, movesnode.go and pairs.go, transfers.go, incidents.go (the tracker);
// gpu.go and xid.go for what is said of GPUs, why.go, chain.go and whyslow.go for the sentences.
package diagnosis
