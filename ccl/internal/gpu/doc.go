// Package gpu is one GPU rank's part of a communicator whose members reach each other's memory
// over NVLink.
//
// In: operations on device memory, each with the CUDA stream that it belongs to. Out: kernels
// and copies on that stream and on streams of the package's own, ordered by events and by flags
// in peers' memory. A call returns when the driver has taken its work, and no CPU thread takes
// part after that. The GPU stamps what it did into the flight recorder.
//
// The package decides which algorithm an operation takes (kernels with flags in the data,
// kernels on symmetric windows, copy engines), by size, ranks, and whether the buffers lie in
// windows. docs/design/cuda.md says why there are these.
//
// It knows nothing of host memory, of other nodes, or of rendezvous: package ccl says who the
// peers are.
package gpu
