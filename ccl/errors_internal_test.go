package ccl

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/record"
)

// FuzzAbortReason: whatever another rank gives as reason makes an error that
// callers can branch on.
func FuzzAbortReason(f *testing.F) {
	f.Add((&failure{2, fmt.Errorf("%w: gone", ErrPeerLost)}).encode())
	f.Add([]byte(`{"kind":"nonsense","peer":-7}`))
	f.Add([]byte(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		got := decodeAbort(1, b)
		for _, sentinel := range reasons {
			if errors.Is(got.err, sentinel) {
				return
			}
		}
		t.Errorf("%q became %v", b, got.err)
	})
}

// TestAbortReason: a failure reaches the others as what it is.
func TestAbortReason(t *testing.T) {
	for _, sentinel := range reasons {
		f := &failure{3, fmt.Errorf("%w: because %s", sentinel, strings.Repeat("x", 5000))}
		b := f.encode()
		if len(b) > 4096 {
			t.Errorf("%v: %d bytes", sentinel, len(b))
		}
		got := decodeAbort(1, b)
		if !errors.Is(got.err, sentinel) || !strings.Contains(got.err.Error(), "because") {
			t.Errorf("%v became %v", sentinel, got.err)
		}
		if want := 3; sentinel != ErrAborted && got.peer != want {
			t.Errorf("%v: peer %d, want %d", sentinel, got.peer, want)
		}
	}
}

// TestAbortForAReason: an abort whose reason is another failure is an abort, and blames
// nobody for that failure.
func TestAbortForAReason(t *testing.T) {
	for range 20 { // which of the two it is must not depend on a map's order
		f := &failure{-1, fmt.Errorf("%w: %w", ErrAborted, &Error{Op: "AllReduce", Comm: "other", Peer: 5, Err: ErrPeerLost})}
		if f.result() != record.ResultAborted {
			t.Fatalf("recorded as %v", f.result())
		}
		got := decodeAbort(1, f.encode())
		if !errors.Is(got.err, ErrAborted) || errors.Is(got.err, ErrPeerLost) {
			t.Fatalf("it became %v, peer %d", got.err, got.peer)
		}
	}
}
