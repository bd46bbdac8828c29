package failure

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

// Failure is why a communicator is over.
type Failure struct {
	Peer int // to blame, -1
	Err  error
}

// Closed is a communicator that was closed in good order.
var Closed = Failure{-1, ErrClosed}

// Member names a rank of a communicator in errors.
type Member struct {
	Name string // the communicator's
	Rank int
}

// Error is operation number seq (0: none) of this rank, ended by f.
func (m Member) Error(op string, seq uint64, f *Failure) *Error {
	return &Error{Op: op, Comm: m.Name, Seq: seq, Rank: m.Rank, Peer: f.Peer, Err: f.Err}
}

// Wrap is a call that failed on its own, for which nobody else is to blame but whom err names.
func (m Member) Wrap(op string, err error) error {
	peer, err := Translate(err)
	return m.Error(op, 0, &Failure{peer, err})
}

// Invalid is a call that cannot be right.
func (m Member) Invalid(kind record.CollKind, format string, args ...any) error {
	return m.Error(kind.String(), 0, &Failure{-1, fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))})
}

// Result is how f is recorded.
func (f *Failure) Result() record.Result {
	switch {
	case errors.Is(f.Err, ErrAborted), errors.Is(f.Err, ErrClosed): // whatever Abort's reason was
		return record.ResultAborted
	case errors.Is(f.Err, ErrPeerLost):
		return record.ResultPeerLost
	case errors.Is(f.Err, ErrMismatch):
		return record.ResultMismatch
	case errors.Is(f.Err, ErrTimeout):
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

// Encode is f as Control.Abort carries it to the others.
func (f *Failure) Encode() []byte {
	r := abortReason{Kind: "internal", Peer: f.Peer, Text: f.Err.Error()}
	for kind, sentinel := range reasons {
		if errors.Is(f.Err, sentinel) {
			r.Kind = kind
		}
	}
	if errors.Is(f.Err, ErrAborted) { // and not what its reason is
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
func decodeAbort(from int, reason []byte) *Failure {
	var r abortReason
	sentinel := ErrAborted
	if json.Unmarshal(reason, &r) != nil {
		return &Failure{from, fmt.Errorf("%w by rank %d", ErrAborted, from)}
	}
	if s, ok := reasons[r.Kind]; ok {
		sentinel = s
	}
	peer := r.Peer
	if peer < 0 {
		peer = from
	}
	if errors.Is(sentinel, ErrAborted) {
		return &Failure{from, fmt.Errorf("%w by rank %d: %s", ErrAborted, from, r.Text)}
	}
	text := strings.TrimPrefix(r.Text, sentinel.Error()+": ")
	return &Failure{peer, fmt.Errorf("%w: rank %d reports: %s", sentinel, from, text)}
}

// FromEngine translates what the engine met.
func FromEngine(err error) *Failure {
	var mismatch *engine.MismatchError
	var peer *engine.PeerError
	switch {
	case errors.As(err, &mismatch):
		return &Failure{mismatch.Peer, fmt.Errorf("%w: %w", ErrMismatch, err)}
	case errors.As(err, &peer):
		return &Failure{peer.Peer, fmt.Errorf("%w: %w", ErrPeerLost, err)}
	}
	return &Failure{-1, fmt.Errorf("%w: %w", ErrInternal, err)}
}

// Of is why a communicator did not come about.
func Of(err error) *Failure {
	peer, err := Translate(err)
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		err = fmt.Errorf("%w: %w", ErrTimeout, err)
	case errors.Is(err, context.Canceled):
		err = fmt.Errorf("%w: %w", ErrAborted, err)
	}
	return &Failure{peer, err}
}

// Translate translates the control plane's errors.
func Translate(err error) (peer int, wrapped error) {
	peer = -1
	var lost *bootstrap.LostError
	var abort *bootstrap.AbortError
	var conflict *bootstrap.ConflictError
	switch {
	case errors.As(err, &lost):
		return lost.Rank, fmt.Errorf("%w: %w", ErrPeerLost, err)
	case errors.As(err, &abort):
		f := decodeAbort(abort.Rank, abort.Reason)
		return f.Peer, f.Err
	case errors.As(err, &conflict):
		return conflict.Rank, fmt.Errorf("%w: %w", ErrMismatch, err)
	case errors.Is(err, bootstrap.ErrMissing):
		return peer, fmt.Errorf("%w: %w", ErrTimeout, err)
	case errors.Is(err, bootstrap.ErrClosed):
		return peer, fmt.Errorf("%w: %w", ErrClosed, err)
	}
	return peer, err
}
