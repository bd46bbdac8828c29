package engine_test

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/engine"
)

// TestUnknownStep: a step of a kind that the engine does not run is an error. It is not done as
// another kind's, and not passed over.
func TestUnknownStep(t *testing.T) {
	const unknown = algo.Join + 1
	for _, st := range []algo.Step{
		{Act: unknown, Peer: -1, Len: 64}, {Act: unknown, Peer: 1, Len: 64}, {Act: unknown, Peer: 1, Len: 8, LL: true},
		{Act: algo.Recv, Peer: -1, Len: 64}, // from nobody
		{Act: algo.Fold, Peer: 1, Len: 64},  // what a peer has no part in
	} {
		e := engine.New(shutMesh{}, 2)
		op := engine.Op{Send: make([]byte, 64), Recv: make([]byte, 64)}
		e.Begin(&algo.Schedule{Tracks: []algo.Track{{st}, nil}}, &op)
		if _, err := e.Step(); err == nil || e.Done() {
			t.Errorf("%+v: done %v, %v", st, e.Done(), err)
		}
	}
}
