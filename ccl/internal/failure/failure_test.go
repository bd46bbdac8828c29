package failure

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/record"
)

// FuzzAbortReason: any bytes that another rank sends as reason decode to an error with a sentinel.
func FuzzAbortReason(f *testing.F) {
	f.Add((&Failure{2, fmt.Errorf("%w: gone", ErrPeerLost)}).Encode())
	f.Add([]byte(`{"kind":"nonsense","peer":-7}`))
	f.Add([]byte(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		got := decodeAbort(1, b)
		for _, sentinel := range reasons {
			if errors.Is(got.Err, sentinel) {
				return
			}
		}
		t.Errorf("%q became %v", b, got.Err)
	})
}

// TestAbortReason: a decoded failure has the sentinel and the peer that were encoded.
func TestAbortReason(t *testing.T) {
	for _, sentinel := range reasons {
		f := &Failure{3, fmt.Errorf("%w: because %s", sentinel, strings.Repeat("x", 5000))}
		b := f.Encode()
		if len(b) > 4096 {
			t.Errorf("%v: %d bytes", sentinel, len(b))
		}
		got := decodeAbort(1, b)
		if !errors.Is(got.Err, sentinel) || !strings.Contains(got.Err.Error(), "because") {
			t.Errorf("%v became %v", sentinel, got.Err)
		}
		if want := 3; sentinel != ErrAborted && got.Peer != want {
			t.Errorf("%v: peer %d, want %d", sentinel, got.Peer, want)
		}
	}
}

// TestAbortForAReason: an abort whose reason is another failure is only an abort. It does not blame that
// failure's peer.
func TestAbortForAReason(t *testing.T) {
	for range 20 { // the result must not depend on a map's order
		f := &Failure{-1, fmt.Errorf("%w: %w", ErrAborted, &Error{Op: "AllReduce", Comm: "other", Peer: 5, Err: ErrPeerLost})}
		if f.Result() != record.ResultAborted {
			t.Fatalf("recorded as %v", f.Result())
		}
		got := decodeAbort(1, f.Encode())
		if !errors.Is(got.Err, ErrAborted) || errors.Is(got.Err, ErrPeerLost) {
			t.Fatalf("it became %v, peer %d", got.Err, got.Peer)
		}
	}
}
