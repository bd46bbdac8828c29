// Package nccl puts Lockstep's GPU collectives beside NCCL's, measured on the
// same machine.
//
// In flow lines of JSON: those of `lockstep perf --json` on GPU ranks, and those of
// nccl.cu, a program of this folder that measures NCCL as nccl-tests counts
// (build.sh builds it, where there is a GPU). Out flows one Markdown table a
// collective, number of GPUs and way to launch, whose ratio is our time over the
// better of NCCL's modes.
//
// It runs nothing and needs no GPU; README.md has the commands to measure with.
package nccl
