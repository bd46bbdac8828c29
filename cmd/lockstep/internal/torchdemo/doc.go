// Package torchdemo is lockstep demo --trainer torch: an unmodified PyTorch job over NCCL, started by torchrun under
// lockstep attach, in which something breaks. It says what the job's master says of it, and when.
//
// It needs PyTorch with CUDA, two GPUs and NCCL's profiler plugin, and says what is missing. It starts no Prometheus:
// the page and the metrics are those of attach's own master and agent.
package torchdemo
