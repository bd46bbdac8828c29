// Package process supervises a job whose ranks are processes of one machine, or of
// several, and lets the remediator restart it.
//
// Supervisor is what `lockstep run` is: like torchrun it starts one process a
// rank with the environment that tells it who it is, and restarts all of them
// together, from their last checkpoint, since ranks run in lockstep. Unlike
// torchrun it can wait for a decision: with a control socket, a failed rank
// leaves the others as they are for Hold, so that the pipeline can see what
// happened and the remediator says what to do.
//
// Host is the same for one machine of several, which agree by a coordinator, one of
// them: what runs where, when an attempt is over, and that nothing of it is left
// before the next one begins (docs/design/several-machines.md).
//
// Actuator is the remediator's side of the same socket. Every request carries
// the action's id and the attempt it is about: a repeat is answered as the first
// was, and a decision about a former attempt changes nothing.
package process
