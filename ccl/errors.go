package ccl

import "github.com/lockstep-ccl/lockstep/ccl/internal/failure"

// What callers branch on; every *Error is one of these or wraps a context's error.
var (
	ErrPeerLost = failure.ErrPeerLost
	ErrMismatch = failure.ErrMismatch
	ErrAborted  = failure.ErrAborted
	ErrTimeout  = failure.ErrTimeout
	ErrClosed   = failure.ErrClosed
	ErrInvalid  = failure.ErrInvalid
	ErrInternal = failure.ErrInternal
)

// Error says which operation of which communicator failed on which rank (Op, Comm, Seq,
// Rank), and who is to blame when one rank is: Peer, else -1. Ranks are those of the
// communicator. Err wraps one of the sentinels.
type Error = failure.Error
