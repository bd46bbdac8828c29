package ccl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/lockstep-ccl/lockstep/ccl/internal/bootstrap"
	"github.com/lockstep-ccl/lockstep/ccl/internal/engine"
	"github.com/lockstep-ccl/lockstep/record"
)

// What callers branch on; every *Error is one of these or wraps a context's error.
var (
	ErrPeerLost = errors.New("peer lost")
	ErrMismatch = errors.New("ranks disagree")
	ErrAborted  = errors.New("communicator aborted")
	ErrTimeout  = errors.New("timed out")
	ErrClosed   = errors.New("communicator closed")
	ErrInvalid  = errors.New("invalid call")
	ErrInternal = errors.New("internal error")
)

// Error says which operation of which communicator failed on which rank, and
// who is to blame when one rank is: Peer, else -1. Ranks are those of the
// communicator. Err wraps one of the package's sentinels.
type Error struct {
	Op   string // "AllReduce", "Init", ...
	Comm string
	Seq  uint64 // of the operation on this rank, 0 for calls that have none
	Rank int
	Peer int
	Err  error
}

func (e *Error) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "rank %d: %s", e.Rank, e.Op)
	if e.Seq > 0 {
		fmt.Fprintf(&b, " (operation %d)", e.Seq)
	}
	fmt.Fprintf(&b, " on communicator %q: %v", e.Comm, e.Err)
	return b.String()
}

func (e *Error) Unwrap() error { return e.Err }

// failure is why a communicator is over.
type failure struct {
	peer int // to blame, -1
	err  error
}

func (f *failure) result() record.Result {
	switch {
	case errors.Is(f.err, ErrAborted), errors.Is(f.err, ErrClosed): // whatever Abort's reason was
		return record.ResultAborted
	case errors.Is(f.err, ErrPeerLost):
		return record.ResultPeerLost
	case errors.Is(f.err, ErrMismatch):
		return record.ResultMismatch
	case errors.Is(f.err, ErrTimeout):
		return record.ResultTimeout
	}
	return record.ResultInternal
}

// reasons are the failures that a rank can tell the others of, by the name
// under which they travel.
var reasons = map[string]error{
	"peer_lost": ErrPeerLost,
	"mismatch":  ErrMismatch,
	"aborted":   ErrAborted,
	"timeout":   ErrTimeout,
	"internal":  ErrInternal,
}

// abortReason is what Control.Abort carries.
type abortReason struct {
	Kind string `json:"kind"`
	Peer int    `json:"peer"`
	Text string `json:"text"`
}

func (f *failure) encode() []byte {
	r := abortReason{Kind: "internal", Peer: f.peer, Text: f.err.Error()}
	for kind, sentinel := range reasons {
		if errors.Is(f.err, sentinel) {
			r.Kind = kind
		}
	}
	if errors.Is(f.err, ErrAborted) { // and not what its reason is
		r.Kind = "aborted"
	}
	const room = 2048 // of the 4 KiB that an abort carries; escapes may double it
	if len(r.Text) > room {
		r.Text = r.Text[:room]
	}
	b, err := json.Marshal(r)
	if err != nil {
		return nil // a struct of strings and numbers always marshals
	}
	return b
}

// decodeAbort is the failure that another rank told of.
func decodeAbort(from int, reason []byte) *failure {
	var r abortReason
	sentinel := ErrAborted
	if json.Unmarshal(reason, &r) != nil {
		return &failure{from, fmt.Errorf("%w by rank %d", ErrAborted, from)}
	}
	if s, ok := reasons[r.Kind]; ok {
		sentinel = s
	}
	peer := r.Peer
	if peer < 0 {
		peer = from
	}
	if errors.Is(sentinel, ErrAborted) {
		return &failure{from, fmt.Errorf("%w by rank %d: %s", ErrAborted, from, r.Text)}
	}
	text := strings.TrimPrefix(r.Text, sentinel.Error()+": ")
	return &failure{peer, fmt.Errorf("%w: rank %d reports: %s", sentinel, from, text)}
}

// engineFailure translates what the engine met.
func engineFailure(err error) *failure {
	var mismatch *engine.MismatchError
	var peer *engine.PeerError
	switch {
	case errors.As(err, &mismatch):
		return &failure{mismatch.Peer, fmt.Errorf("%w: %w", ErrMismatch, err)}
	case errors.As(err, &peer):
		return &failure{peer.Peer, fmt.Errorf("%w: %w", ErrPeerLost, err)}
	}
	return &failure{-1, fmt.Errorf("%w: %w", ErrInternal, err)}
}

// failureOf is why a communicator did not come about.
func failureOf(err error) *failure {
	peer, err := sentinelOf(err)
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		err = fmt.Errorf("%w: %w", ErrTimeout, err)
	case errors.Is(err, context.Canceled):
		err = fmt.Errorf("%w: %w", ErrAborted, err)
	}
	return &failure{peer, err}
}

// sentinelOf translates the control plane's errors.
func sentinelOf(err error) (peer int, wrapped error) {
	peer = -1
	var lost *bootstrap.LostError
	var abort *bootstrap.AbortError
	var conflict *bootstrap.ConflictError
	switch {
	case errors.As(err, &lost):
		return lost.Rank, fmt.Errorf("%w: %w", ErrPeerLost, err)
	case errors.As(err, &abort):
		f := decodeAbort(abort.Rank, abort.Reason)
		return f.peer, f.err
	case errors.As(err, &conflict):
		return conflict.Rank, fmt.Errorf("%w: %w", ErrMismatch, err)
	case errors.Is(err, bootstrap.ErrMissing):
		return peer, fmt.Errorf("%w: %w", ErrTimeout, err)
	case errors.Is(err, bootstrap.ErrClosed):
		return peer, fmt.Errorf("%w: %w", ErrClosed, err)
	}
	return peer, err
}
