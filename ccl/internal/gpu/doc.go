// Package gpu is one GPU rank's part of a communicator whose members reach each
// other's memory over NVLink.
//
// In: operations on device memory, each with the CUDA stream that it belongs to.
// Out: kernels and copies on that stream and on streams of the package's own,
// ordered by events and by flags in peers' memory, and nothing else: a call
// returns when the driver has taken its work, no CPU thread takes part after
// that (but for large sends whose receiver has not called yet), and the GPU
// stamps what it did into the flight recorder.
//
// Which way an operation takes (kernels with flags in the data, kernels on
// symmetric windows, copy engines) is decided here, by size, ranks, and whether
// the buffers lie in windows; docs/design/cuda.md tells why there are these ways.
//
// The package knows nothing of host memory, of other nodes, or of rendezvous:
// who the peers are comes from package ccl.
package gpu
