// Package cuda binds the part of the CUDA driver API that the GPU datapath
// uses. The library is opened at run time, so that one binary runs with and
// without it; nothing of CUDA is needed to build.
//
// In: sizes, device addresses, PTX. Out: memory, streams, events, graphs, and
// an *Error that names the call, the GPU and CUDA's own word for what failed.
//
// Goroutines move between threads and CUDA's current context belongs to a
// thread, so every call makes its device's primary context current and does
// its work within one call into C (native_cgo.go). Threads are put into the
// relaxed capture mode, so that a caller's global capture in another thread is
// not invalidated by our polling.
//
// Driver 535 (CUDA 12.2) or newer is required. Set LOCKSTEP_CUDA_LIBRARY to
// open another file than libcuda.so.1; package cudatest uses that to put a fake
// in its place. The package knows nothing of ranks, collectives or records.
package cuda
