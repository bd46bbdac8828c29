// Package perf is `lockstep perf`: it measures collectives as nccl-tests does,
// with its options and columns, so that numbers can be read side by side.
//
// In flow a list of collectives and sizes; out flows one line a size: time,
// algorithm and bus bandwidth, and how many elements were wrong, out of place and
// in place. It starts the ranks as processes of this machine, over shared memory
// or, spread on logical nodes, over TCP; under `lockstep run` it uses the ranks
// that are there. With --recorder both it measures the same collective in turns
// with and without the flight recorder.
//
// It judges nothing; comparisons with other libraries are in bench/peers.
package perf
