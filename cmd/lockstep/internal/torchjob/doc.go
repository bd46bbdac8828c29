// Package torchjob is the PyTorch job of lockstep demo --trainer torch: an unmodified program over NCCL, started by
// torchrun under lockstep attach.
//
// In: what this machine has (Look), and how the job is to run (Job). Out: command lines and their environment, and
// orders to a rank to break something, which the program reads from files. It starts nothing; what it does not
// know is Lockstep's parts.
package torchjob
