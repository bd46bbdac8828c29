// Package peers compares Lockstep's collectives on CPU ranks with what a user
// would pick instead: OpenMPI, over shared memory and over TCP.
//
// In flow the same cases for every Peer; a Peer runs its own processes and
// returns one Sample a size, measured alike (see mpi/mpibench.c: nccl-tests'
// sizes, warm-up, blocks of back-to-back operations, the median counts). Compare
// lets the peers run in turn, round after round, so that whatever else the
// machine does meets all of them, and takes each one's median (or least) over
// rounds. Out flows a table of ratios.
//
// It is not a test: it decides nothing, and a loaded machine makes it noisy.
package peers
