// Package attachcmd is `lockstep attach`: it puts a job that knows nothing of Lockstep
// under its eyes. It finds out what job the command belongs to, and where (plan.go), sees
// that the node has an agent and the job a master (daemons.go), sets what NCCL needs, and
// becomes the command: signals, exit status, process group and terminal are the command's own.
//
// The job comes first: whatever fails is one line of warning, every wait is bounded, and
// the command runs all the same.
package attachcmd
