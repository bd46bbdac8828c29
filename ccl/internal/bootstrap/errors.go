package bootstrap

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Errors that callers branch on. When Join fails with one of the first five, it fails
// with the same error on every rank that has reached rank 0.
var (
	ErrVersion       = errors.New("another version of the bootstrap protocol")
	ErrSize          = errors.New("another communicator size")
	ErrRank          = errors.New("rank out of range")
	ErrDuplicateRank = errors.New("rank joined twice")
	ErrMissing       = errors.New("ranks are missing")

	ErrSecret   = errors.New("the shared secret differs, or the attempt (LOCKSTEP_FENCE_TOKEN)")
	ErrLost     = errors.New("rank lost")
	ErrAborted  = errors.New("communicator aborted")
	ErrClosed   = errors.New("control plane closed")
	ErrProtocol = errors.New("protocol violation")
)

// ConflictError names a rank whose hello contradicts rank 0. Err is ErrVersion, ErrSize,
// ErrRank or ErrDuplicateRank.
type ConflictError struct {
	Rank   int
	Err    error
	Detail string
}

func (e *ConflictError) Error() string {
	return fmt.Sprintf("rank %d: %v: %s", e.Rank, e.Err, e.Detail)
}
func (e *ConflictError) Unwrap() error { return e.Err }

// MissingError names the ranks that had not joined when time ran out. It is an
// ErrMissing, and also an ErrSecret if connections were rejected: the missing ranks may
// be those with a wrong secret.
type MissingError struct {
	Ranks    []int
	Size     int
	Rejected int    // connections that could not prove the secret
	Detail   string // the last failed connection, "" if there was none
}

func (e *MissingError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d of %d ranks are missing: %s", len(e.Ranks), e.Size, formatRanks(e.Ranks))
	if e.Rejected > 0 {
		fmt.Fprintf(&b, "; %d connections could not prove the shared secret", e.Rejected)
	}
	if e.Detail != "" {
		b.WriteString("; " + e.Detail)
	}
	return b.String()
}
func (e *MissingError) Is(target error) bool {
	return target == ErrMissing || target == ErrSecret && e.Rejected > 0
}

// LostError names a rank that died. Operations also return it for a rank that left. It is
// an ErrLost.
type LostError struct {
	Rank   int
	Reason string
}

func (e *LostError) Error() string        { return fmt.Sprintf("rank %d lost: %s", e.Rank, e.Reason) }
func (e *LostError) Is(target error) bool { return target == ErrLost }

// AbortError names the rank that aborted the communicator. Reason is its argument to Abort.
// It is an ErrAborted.
type AbortError struct {
	Rank   int
	Reason []byte
}

func (e *AbortError) Error() string        { return fmt.Sprintf("communicator aborted by rank %d", e.Rank) }
func (e *AbortError) Is(target error) bool { return target == ErrAborted }

// formatRanks formats ranks, in any order, as ranges: 0-3,7,9-12.
func formatRanks(ranks []int) string {
	ranks = slices.Sorted(slices.Values(ranks))
	var b strings.Builder
	for i := 0; i < len(ranks); {
		j := i
		for j+1 < len(ranks) && ranks[j+1] == ranks[j]+1 {
			j++
		}
		if b.Len() > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "%d", ranks[i])
		if j > i {
			fmt.Fprintf(&b, "-%d", ranks[j])
		}
		i = j + 1
	}
	return b.String()
}

// conflictCodes maps a frameConflict's code to its error. Code 0 is invalid.
var conflictCodes = []error{nil, ErrVersion, ErrSize, ErrRank, ErrDuplicateRank}
