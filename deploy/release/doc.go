// Command release builds what is released: archives of the program for each
// architecture, their checksums, and what each program is made of (SBOM).
//
// In flows the working tree, with VERSION, and the commit's time; out flow files in a
// directory, the same bits from the same commit and Go release, wherever it is checked
// out: paths are trimmed, times are the commit's, owners nobody's, and the order of files
// is that of their names. The archives named -cgo are an exception in part: GPUs and RDMA
// take cgo, so that they depend on the C compiler and C library of the machine that builds
// them, and are made for its own architecture only.
package main
