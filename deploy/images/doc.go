// Command images packs what deploy/release has built as OCI images, without a daemon, a
// registry or root.
//
// In flow the archives of a release, and for the image with cgo Debian's package of the C
// library; out flow one OCI layout as a tar file, which ctr, podman, skopeo and docker
// (25 and later) read, and a list of names and digests. The same archives make the same
// digests: every time is the release's, every owner is said, every order is that of names.
//
// There are two images. NAME:VERSION holds one static program, for amd64 and arm64, and is
// for masters, the remediator, the planner, and agents of nodes without GPUs. NVML, CUDA
// and libibverbs are opened at run time, and a static program can open no library that
// wants a C library beside it: so NAME:VERSION-gpu holds the program with cgo, NCCL's
// profiler plugin, and the C library that both were built with. The driver's libraries are
// in no image: NVIDIA's container runtime mounts those of the node.
package main
