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

// Sentinels. Each *Error wraps one of them, or a context's error.
var (
	ErrPeerLost = errors.New("peer lost")
	ErrMismatch = errors.New("ranks disagree")
	ErrAborted  = errors.New("communicator aborted")
	ErrTimeout  = errors.New("timed out")
	ErrClosed   = errors.New("communicator closed")
	ErrInvalid  = errors.New("invalid call")
	ErrInternal = errors.New("internal error")
)

// Error says which operation of which communicator failed on which rank. Peer is the rank to blame, -1
// if there is none. Ranks are those of the communicator. Err wraps one of the package's sentinels.
type Error struct {
	Op   string // "AllReduce", "Init", ...
	Comm string
	Seq  uint64 // the operation's number on this rank, 0 for calls that have none
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

// Failure is why a communicator has ended.
type Failure struct {
	Peer int // rank to blame, -1 if there is none
	Err  error
}

// Closed is the Failure of a communicator that was closed in good order.
var Closed = Failure{-1, ErrClosed}

// Member names a rank of a communicator in errors.
type Member struct {
	Name string // of the communicator
	Rank int
}

// Error returns the error of this rank's operation seq, which f has ended. seq is 0 for calls that have
// none.
func (m Member) Error(op string, seq uint64, f *Failure) *Error {
	return &Error{Op: op, Comm: m.Name, Seq: seq, Rank: m.Rank, Peer: f.Peer, Err: f.Err}
}

// Wrap returns the error of a call that failed by itself. The peer to blame is the one that err names,
// if any.
func (m Member) Wrap(op string, err error) error {
	peer, err := Translate(err)
	return m.Error(op, 0, &Failure{peer, err})
}

// Invalid returns the error of a call with invalid arguments.
func (m Member) Invalid(kind record.CollKind, format string, args ...any) error {
	return m.Error(kind.String(), 0, &Failure{-1, fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))})
}

// Result returns the result for f's record.
func (f *Failure) Result() record.Result {
	switch {
	case errors.Is(f.Err, ErrAborted), errors.Is(f.Err, ErrClosed): // also if Abort's reason wraps another sentinel
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

// reasons has the sentinels that a rank can report to the others, by their names on the wire.
var reasons = map[string]error{
	"peer_lost": ErrPeerLost,
	"mismatch":  ErrMismatch,
	"aborted":   ErrAborted,
	"timeout":   ErrTimeout,
	"internal":  ErrInternal,
}

// abortReason is the reason of a Control.Abort, as JSON.
type abortReason struct {
	Kind string `json:"kind"`
	Peer int    `json:"peer"`
	Text string `json:"text"`
}

// Encode returns f as a reason for Control.Abort.
func (f *Failure) Encode() []byte {
	r := abortReason{Kind: "internal", Peer: f.Peer, Text: f.Err.Error()}
	for kind, sentinel := range reasons {
		if errors.Is(f.Err, sentinel) {
			r.Kind = kind
		}
	}
	if errors.Is(f.Err, ErrAborted) { // also if its reason wraps another sentinel
		r.Kind = "aborted"
	}
	const room = 2048 // an abort carries 4 KiB, and escapes may double the text
	if len(r.Text) > room {
		r.Text = r.Text[:room]
	}
	b, err := json.Marshal(r)
	if err != nil {
		return nil // a struct of strings and numbers always marshals
	}
	return b
}

// decodeAbort returns the failure that rank from has reported.
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

// FromEngine returns the failure that an engine's error stands for.
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

// Of returns the failure of a communicator that could not be made because of err.
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

// Translate wraps an error of the control plane in the sentinel that it stands for. peer is the rank
// to blame, -1 if there is none. Other errors are returned as they are.
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
