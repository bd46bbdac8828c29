package engine_test

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl/internal/engine"
	"github.com/lockstep-ccl/lockstep/record"
)

// FuzzSignature: Decode refuses what a peer sends, or Encode and Decode return the same signature.
func FuzzSignature(f *testing.F) {
	var b [engine.SignatureSize]byte
	s := engine.Signature{Coll: record.Broadcast, DType: record.Float64, Op: record.Max, Root: 3, Seq: 1 << 40, Count: 12345}
	s.Encode(b[:])
	f.Add(b[:])
	f.Add([]byte(nil))
	f.Add(b[:20])
	f.Fuzz(func(t *testing.T, b []byte) {
		var s, again engine.Signature
		if !s.Decode(b) {
			return
		}
		_ = s.String()
		var out [engine.SignatureSize]byte
		s.Encode(out[:])
		if !again.Decode(out[:]) || again != s {
			t.Errorf("%+v became %+v", s, again)
		}
	})
}
