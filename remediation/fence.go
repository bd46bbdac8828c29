package remediation

import "context"

// Fencer makes sure that nothing of an attempt that is over goes on beside the next one:
// what a node that was cut off still runs would write into the new attempt's checkpoints.
//
// Fence asks whoever can end the ranks of a job's attempt on a node, "" for wherever they
// are, and waits until that is proven or ctx ends. It is called again with the
// same arguments when the remediator was killed or had no answer: an implementation
// answers as it did then, or asks again. Attempts below attempt are fenced with it;
// those above it are never touched.
//
// That there is no proof is an answer, not an error: whether to act without one is the
// caller's policy. An error says that nobody could be asked.
type Fencer interface {
	Fence(ctx context.Context, job string, attempt int, node string) (Proof, error)
}

// Proof is what is known of a fenced attempt's processes.
type Proof struct {
	// Proven is true when none of them runs, nor can start again, or what they write is refused.
	Proven bool
	// How says who saw it and in which way, or why it is not known; for the
	// journal and for people: at most a line.
	How string
}
