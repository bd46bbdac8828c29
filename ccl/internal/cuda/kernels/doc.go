// Package kernels holds the GPU kernels: their CUDA C++, the PTX made of it, and
// the structs that they share with the host.
//
// In flows nothing; out flow PTX modules for the driver (Module), the names of
// the kernels in them, and the Go side of abi.h. One module moves bytes, and one
// for each element type reduces. Every kernel has one parameter, a struct of
// abi.h, and any number of threads up to its limit; blocks of kernels that speak
// with peers must all be resident at once.
//
// PTX is made by clang alone (go generate) and committed, so that building needs
// no compiler for GPUs. Tests run the sources on the CPU, one thread for each of
// the GPU's (emulate.h), and compare the structs with the compiler's.
//
// It launches nothing and knows no driver.
package kernels
